"""What works on this machine: every claim about a backend is the outcome of trying it."""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from eexport.runtime.console import size
from eexport.runtime.errors import EexportError

# y = Swish(x) in opset 24 and IR version 11, the newest that a bundle uses: what runs it is new enough.
_GRAPH = (
    "080b3a340a0d0a0178120179220553776973681201675a0f0a0178120a0a08080112040a020802"
    "620f0a0179120a0a08080112040a02080242040a001018"
)
_TRIAL = """
import json, sys
import numpy, onnxruntime
graph, source = bytes.fromhex(sys.argv[1]), numpy.array([0, 1], "float32")
(found,) = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"x": source})
assert numpy.allclose(found, [0, 0.7310586]), f"a graph of one node gives {found.tolist()}, not 0 and 0.731"
print(json.dumps([onnxruntime.__version__, onnxruntime.get_available_providers()]))
"""
_ONNXRUNTIMES = ("onnxruntime", "onnxruntime-gpu")
_GPU_MEND = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime-gpu>=1.32'"
_EXPORT_MODULES = ("torch", "onnx", "gguf", "huggingface_hub")
_PACKAGES = {
    **{name: (name,) for name in ("eexport", *_ONNXRUNTIMES, "numpy", "tokenizers")},
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings", "tensorrt-rtx"),
    "torch": ("torch",),
    "onnx": ("onnx",),
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that may work here: ``detail`` says how, or why not; ``mend`` what to do about it."""

    name: str
    works: bool
    detail: str
    mend: str | None = None


def diagnose() -> dict[str, Any]:
    """This machine and what works on it, ready for JSON; ``ok`` is whether a bundle can run at all."""
    packages = {name: _version(*names) for name, names in _PACKAGES.items()}
    cpu, providers = _check_cpu()
    backends = [
        cpu,
        _check_cuda(packages, providers),
        _check_tensorrt(packages, "tensorrt"),
        _check_tensorrt(packages, "tensorrt-rtx"),
    ]
    return {
        "ok": cpu.works,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        "packages": packages,
        "providers": providers,
        "backends": [dataclasses.asdict(check) for check in backends],
        "export": dataclasses.asdict(_check_export()),
        "problems": _problems(packages),
    }


def headlines(found: dict[str, Any]) -> dict[str, str]:
    """The machine's part of ``diagnose`` as labelled lines."""
    cpu, available = found["cpu"], found["memory"]["available_bytes"]
    quota = "" if cpu["quota"] is None else f", quota of {cpu['quota']:g}"
    return {
        "python": f"{found['python']} on {found['platform']}",
        "cpu": f"{cpu['name']}: {cpu['allowed'] or cpu['count']} of {cpu['count']} allowed{quota}, "
        f"{cpu['default_threads']} threads by default",
        "memory": "unknown" if available is None else f"{size(available)} available",
        "packages": ", ".join(f"{name} {version or '-'}" for name, version in found["packages"].items()),
        "providers": ", ".join(found["providers"]) or "none",
    }


def _check_cpu() -> tuple[Check, list[str]]:
    """Whether onnxruntime runs a graph, and its providers; tried in another process, as it may crash that."""
    name, mend = "cpu (ONNX Runtime)", "pip install --force-reinstall 'onnxruntime>=1.32'"
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _TRIAL, _GRAPH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, False, f"a test graph cannot be run: {error}", mend), []
    if trial.returncode < 0:
        return Check(name, False, f"onnxruntime crashed (signal {-trial.returncode})", mend), []
    if trial.returncode:
        reason = (trial.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check(name, False, f"onnxruntime fails: {reason}", mend), []
    version, providers = json.loads(trial.stdout)
    return Check(name, True, f"onnxruntime {version} ran a test graph of opset 24"), providers


def _check_cuda(packages: dict[str, str | None], providers: list[str]) -> Check:
    name = "cuda (ONNX Runtime)"
    if not _has_nvidia_driver():
        return Check(name, False, "no NVIDIA driver here (libcuda cannot be loaded)", "use --device cpu")
    if "CUDAExecutionProvider" not in providers:
        have = "onnxruntime" if packages["onnxruntime"] else "what is installed"
        return Check(name, False, f"{have} has no CUDA provider", _GPU_MEND)
    from eexport.runtime.device import open_backend

    try:
        backend = open_backend("cuda")
    except EexportError as error:
        return Check(name, False, str(error).removeprefix("--device cuda: "), "use --device cpu")
    return Check(name, True, f"{backend.name} on {backend.device}")


def _check_tensorrt(packages: dict[str, str | None], name: str) -> Check:
    version = packages[name]
    have = "is not installed" if version is None else f"{version} is installed"
    return Check(name, False, f"{name} {have}, but this eexport has no backend for it yet", "use --device cpu")


def _check_export() -> Check:
    missing = [module for module in _EXPORT_MODULES if not _is_installed(module)]
    if missing:
        return Check("eexport build", False, f"lacks {', '.join(missing)}", "pip install 'eexport[export]'")
    return Check("eexport build", True, "what it needs is installed")


def _problems(packages: dict[str, str | None]) -> list[str]:
    if all(packages[name] for name in _ONNXRUNTIMES):
        return [
            "onnxruntime and onnxruntime-gpu are both installed: they write the same files, so it is chance "
            f"which of them is used; {_GPU_MEND} (or onnxruntime alone, for CPUs)"
        ]
    return []


def _cpu() -> dict[str, Any]:
    from eexport.runtime.device import default_threads

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "name": _cpu_name(),
        "count": os.cpu_count(),
        "allowed": allowed,
        "quota": _cpu_quota(),
        "default_threads": default_threads(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the cgroup may use; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> dict[str, int | None]:
    from eexport.runtime.device import available_memory

    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        total = None
    return {"total_bytes": total, "available_bytes": available_memory()}


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
