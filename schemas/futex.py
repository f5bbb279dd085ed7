"""Sleeping until a word in shared memory changes, woken by the process that changed it.

`wait(address, expected)` sleeps while the u32 at `address` is `expected`; `wake(address)` ends
every such sleep, in any process that maps the same file. Between them nothing is lost: the kernel
compares the word and sleeps in one step.

A waker that dies between its store and its wake leaves sleepers behind, so a caller bounds every
wait (the ring: 250 ms) and looks at the word again. Where the system call is not to be had (another
CPU, a seccomp filter) `wait` is a short sleep and the caller's loop is a poll. Signals end a wait
early. The GIL is released while it sleeps.

Addresses are those of a live mapping that the caller keeps; a stale one is an early return, never a
crash.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import sys
import time

__all__ = ["POLL_S", "address_of", "available", "wait", "wake"]

POLL_S = 0.0005  # seconds; the sleep that stands in for a wait

_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_number = (
    _NUMBERS.get(platform.machine()) if sys.maxsize > 2**32 and sys.byteorder == "little" else None
)


def available() -> bool:
    """Whether this process can make the call at all."""
    if _number is None:
        return False
    word = ctypes.c_uint32(1)
    return _call(ctypes.addressof(word), _WAIT, 0, None) == errno.EAGAIN


def address_of(mapping: mmap.mmap, offset: int) -> int:
    """The address of a byte of `mapping`, good as long as the mapping lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping, offset))


def wait(address: int, expected: int, timeout_s: float, *, poll: bool = False) -> None:
    """Sleep at most `timeout_s` while the u32 at `address` is the low half of `expected`."""
    if timeout_s <= 0:
        return
    if poll or not _USABLE:
        time.sleep(min(timeout_s, POLL_S))
        return
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _call(address, _WAIT, expected & 0xFFFFFFFF, limit)


def wake(address: int) -> None:
    """End every wait on `address`."""
    if _USABLE:
        _call(address, _WAKE, 0x7FFFFFFF, None)


def _call(address: int, operation: int, value: int, limit: _Timespec | None) -> int:
    """The errno of the call, 0 where it went well."""
    result = _libc.syscall(
        ctypes.c_long(_number or 0),
        ctypes.c_void_p(address),
        ctypes.c_long(operation),
        ctypes.c_long(value),
        ctypes.byref(limit) if limit is not None else None,
        None,
        ctypes.c_long(0),
    )
    return ctypes.get_errno() if result == -1 else 0


_USABLE = available()
