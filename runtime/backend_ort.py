"""ONNX Runtime backend: every stage a session, all sessions on one thread pool, all tensors bound once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from eexport.runtime.backend import Array
from eexport.runtime.device import default_threads
from eexport.runtime.errors import BundleError, DeviceError
from eexport.runtime.manifest import StageSpec

_ALIGNMENT = 64  # a cache line: AVX-512 loads that straddle two lines cost double

_pool_threads: int | None = None


class OrtBuffer:
    """A numpy array and the OrtValue that borrows it; both are kept, or the session would read freed memory."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.array: Array = _aligned(tuple(shape), np.dtype(dtype))
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape


class OrtStage:
    """A session and its bound runs."""

    def __init__(self, session: ort.InferenceSession, run_options: ort.RunOptions) -> None:
        self._session = session
        self._run_options = run_options
        self._inputs = [i.name for i in session.get_inputs()]
        self._outputs = [o.name for o in session.get_outputs()]

    def bind(self, buffers: Mapping[str, OrtBuffer]) -> Callable[[], None]:
        """See ``backend.Stage.bind``."""
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_ortvalue_input(name, buffers[name].value)
        for name in self._outputs:
            if name in buffers:
                binding.bind_ortvalue_output(name, buffers[name].value)
        held = dict(buffers)  # the binding holds raw pointers: the memory must live as long as it
        # The C-level call skips the Python wrapper's argument checks: some 3 µs a stage, six stages a token.
        call, io, options = self._session._sess.run_with_iobinding, binding._iobinding, self._run_options

        def run(_held: dict[str, OrtBuffer] = held) -> None:
            call(io, options)

        return run


class OrtBackend:
    """Stages on ONNX Runtime's CPU provider."""

    name = "onnxruntime"
    device = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or _pool_threads or default_threads()
        _start_pool(self.threads)
        self._options = _session_options()
        self._run_options = ort.RunOptions()

    def allocate(self, shape: Sequence[int], dtype: str) -> OrtBuffer:
        """See ``backend.Backend.allocate``."""
        return OrtBuffer(shape, dtype)

    def load(self, graph: Path, stage: StageSpec) -> OrtStage:
        """See ``backend.Backend.load``."""
        try:
            session = ort.InferenceSession(str(graph), self._options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ORT raises a class of its own per status code, with no common base
            reason = str(error).splitlines()[0]
            raise BundleError(
                f"{graph}: onnxruntime {ort.__version__} cannot load it ({reason}): build the bundle again, or install "
                "the onnxruntime it was built for"
            ) from None
        return OrtStage(session, self._run_options)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _start_pool(threads: int) -> None:
    """One thread pool for all sessions: a pool each made seven sessions on two cores five times slower."""
    global _pool_threads
    if _pool_threads is None:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool_threads = threads
    elif _pool_threads != threads:
        raise DeviceError(
            f"this process already runs onnxruntime with {_pool_threads} threads, not {threads}: all engines "
            "of a process share one pool, so use the same number or a process each"
        )


def _session_options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    # Row counts vary from call to call: a memory plan per shape would be kept for each (onnxruntime#22297).
    options.enable_mem_pattern = False
    # The standard dialect's DequantizeLinear + MatMul becomes MatMulNBits, with int8 activations for speed.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    # Its embedding gathers int8 between Quantize- and DequantizeLinear, a pair that is dropped only with this.
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    return options
