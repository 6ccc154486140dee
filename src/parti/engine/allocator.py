"""glibc's allocator in a living process: keep large freed blocks instead of returning them.

By default a block of more than a few MB goes back to the kernel when it is freed, and the next step
faults every page of it in again: 4,455 page faults in a step of a small CNN, a third of its time.
Two thresholds have to be raised together; each alone left 2,700 to 8,900 faults. Setting them by
`mallopt` after torch was imported leaves none, as the environment does before a process starts.
`MALLOC_TOP_PAD_` added nothing to the two.

The price is that the process keeps its largest extent: between steps it holds what only a step
needs. `kept_bytes` tells how much that is.
"""

from __future__ import annotations

import ctypes
from functools import cache

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1
_LARGEST_KEPT_BYTES = 1 << 30
"""Blocks above this still get pages of their own, and give them back."""


def keep_freed_blocks() -> bool:
    """Raise both thresholds for this process; False where the allocator is not glibc's."""
    library = _glibc()
    if library is None:
        return False
    mapped = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    trimmed = library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(mapped and trimmed)


def kept_bytes() -> int | None:
    """Bytes that the process holds and nobody uses; None where glibc cannot say (before 2.33)."""
    library = _glibc()
    if library is None or not hasattr(library, "mallinfo2"):
        return None
    return int(library.mallinfo2().fordblks)


class _Information(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return None
    library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    library.mallopt.restype = ctypes.c_int
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.argtypes = []
        library.mallinfo2.restype = _Information
    return library
