"""glibc's allocator, told at start that large buffers come back: bodies stop costing page faults.

By default glibc takes every allocation above 128 KiB fresh from the kernel and gives it back when
it is freed, so each body of a few MiB pays for thousands of page faults. With these values blocks
up to 32 MiB (the most that glibc allows here) come from the heap, the heap grows in steps of 64 MiB
and is given back only when 1 GiB of it is free. Elsewhere than on glibc nothing happens.

Called once, by server.py, before the first large allocation.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["tune_malloc"]

# mallopt(3): parameter -> bytes
VALUES = {
    -3: 32 << 20,  # M_MMAP_THRESHOLD; setting it also ends its moving by itself
    -1: 1 << 30,  # M_TRIM_THRESHOLD
    -2: 64 << 20,  # M_TOP_PAD
}


def tune_malloc() -> bool:
    """Whether the allocator is glibc's and took every value."""
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    taken = sum(mallopt(parameter, value) for parameter, value in VALUES.items())
    return int(taken) == len(VALUES)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False
