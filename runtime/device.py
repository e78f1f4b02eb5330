"""What this machine offers: CPUs, memory, and the backend for a device by name."""

import os
from pathlib import Path

from eexport.runtime.backend import Backend
from eexport.runtime.errors import DeviceError

DEVICES = ("auto", "cpu", "cuda")


def open_backend(device: str = "auto", threads: int | None = None) -> Backend:
    """The backend for ``device``. Raises DeviceError when it is not usable here; there is no silent fallback."""
    import onnxruntime as ort

    from eexport.runtime.backend_ort import OrtBackend

    if device not in DEVICES:
        raise DeviceError(f"--device {device}: not a device of eexport; give one of {', '.join(DEVICES)}")
    if device == "cuda":
        providers = ", ".join(ort.get_available_providers())
        raise DeviceError(
            f"--device cuda: no CUDA backend is usable here (onnxruntime {ort.__version__} offers {providers}); "
            "use --device cpu, and see `eexport doctor`"
        )
    return OrtBackend(threads)


def default_threads() -> int:
    """Threads to use by default: the CPUs this process may run on, within its cgroup quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2 here, or "max": no quota
        pass
    return allowed


def available_memory() -> int | None:
    """Bytes that can still be allocated, within the cgroup's limit; None where the system does not tell."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, max(0, limit - used))
    except (OSError, ValueError):  # no cgroup v2 here, or "max": no limit
        pass
    return available
