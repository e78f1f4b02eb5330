"""Weights on huge pages: decoding streams all of them for every token, and 4 KB pages make that 10-15% slower.

Most systems give huge pages only to memory that asks (``transparent_hugepage`` = madvise), which onnxruntime does not.
Here glibc is made to take what is allocated during loading from one stretch of heap that did ask. Where that does not
work (another libc, another thread, huge pages off) everything is as without it.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MADV_HUGEPAGE = 14
_HUGE = 2 << 20
# glibc adapts both thresholds until one is set; these are what it would come to in a process of this kind.
_MMAP_AFTER, _TRIM_AFTER = 1 << 20, 16 << 20


@contextmanager
def huge_page_heap(size: int) -> Iterator[None]:
    """Large allocations of this thread inside the block come from ``size`` bytes of heap on huge pages."""
    libc = _glibc()
    if libc is None or size < _HUGE:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * size)
    # Grow the heap, ask for huge pages before any of it is touched, and leave it free for what comes.
    if (start := libc.malloc(size)) is not None:
        first = -(-start // _HUGE) * _HUGE
        libc.madvise(first, (start + size - first) // _HUGE * _HUGE, _MADV_HUGEPAGE)
        libc.free(start)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_AFTER)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_AFTER)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
