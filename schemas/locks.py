"""Locks that say who is alive: byte-range locks on an open file description.

A process that ends in any way, `kill -9` included, loses its locks; pids and start times lie across
a pid namespace. Such a lock belongs to the *open file description*, so

- each `RangeLock` opens its own descriptor, and two of them conflict even in one process;
- the descriptor is never the one that is mapped: `mmap.mmap(fd)` keeps a duplicate, and with it the
  lock;
- a forked child closes its copy at once, so that a child which lives on holds nothing up. The
  parent keeps the lock.

Locks are advisory, non-blocking and exclusive; a range may lie past the end of the file. Both ends
of the ring, the start of the service and the demo's work folder use them. Nothing here waits or
retries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import weakref

__all__ = ["RangeLock"]

_FLOCK = "@hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid


class RangeLock:
    """One open file description and the byte ranges that it holds."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _open.add(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        dir_fd: int | None = None,
        create: bool = False,
        mode: int = 0o600,
    ) -> RangeLock:
        """Open the file `path`; `create`: make it with `mode`. OSError for a symbolic link."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return cls(os.open(path, flags, mode, dir_fd=dir_fd))

    @classmethod
    def beside(cls, descriptor: int) -> RangeLock:
        """A new open file description of the file that `descriptor` has open, named or not."""
        return cls(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    @property
    def alive(self) -> bool:
        """False once closed, and in every forked child."""
        return self._descriptor >= 0

    def fileno(self) -> int:
        return self._descriptor

    def try_lock(self, start: int, length: int = 1) -> bool:
        """Take `length` bytes from `start` (0: all that follow). False where another holds one."""
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, start: int, length: int = 1) -> None:
        request = struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, start, length, 0)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)

    def held_elsewhere(self, start: int, length: int = 1) -> bool:
        """Whether another open file description holds any byte of the range."""
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give up every range. Safe to call again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()


_open: weakref.WeakSet[RangeLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
