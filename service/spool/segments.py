"""Segment files: where payload bytes lie.

    000001.seg  | post | post | ... | free |    fixed size, fallocated, mapped once, kept mapped
                0                   fill   segment_bytes

A segment is *filling* (one at a time), *full* or *spare*. A region is live from `allocate` until
`free`; a full segment without live regions becomes spare, a filling one starts again at 0. Spares
beyond `pool` are unlinked. Bytes of a spare are never read: only rows of the database say what is
valid.

Pages are reserved by `posix_fallocate` and populated when a segment is made, so that a full disk is
an answer and not a SIGBUS, and `reserve_spare` makes one ahead of need, outside of any request. All
methods may be called from any thread.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections import deque
from pathlib import Path

from headrace.schemas.errors import SpoolFull
from headrace.schemas.tensors import aligned

__all__ = ["Segments"]


class Segments:
    """Allocates regions in segment files of `segment_bytes` bytes each under `directory`."""

    def __init__(self, directory: Path, *, segment_bytes: int, pool: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._pool = pool
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._live: dict[int, int] = {}  # regions in use, by segment
        self._spare: deque[int] = deque()
        self._filling: int | None = None
        self._fill = 0
        self._numbers = itertools.count(1)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """(segment, offset) of a fresh 64-byte-aligned region. Raises SpoolFull."""
        if nbytes > self._segment_bytes:
            raise SpoolFull(
                f"a post needs {nbytes} bytes and spool.segment_bytes is {self._segment_bytes}: "
                "raise it"
            )
        with self._lock:
            if self._filling is None or self._fill + nbytes > self._segment_bytes:
                fresh = self._spare.popleft() if self._spare else self._make()
                self._retire_filling()
                self._filling, self._fill = fresh, 0
            segment, offset = self._filling, self._fill
            self._fill += aligned(nbytes)
            self._live[segment] += 1
            return segment, offset

    def free(self, segment: int) -> None:
        """One region of `segment` is dead."""
        with self._lock:
            self._live[segment] -= 1
            if self._live[segment]:
                return
            if segment == self._filling:
                self._fill = 0
            else:
                self._recycle(segment)

    def view(self, segment: int) -> memoryview:
        """The whole segment, writable."""
        return memoryview(self._maps[segment])

    def reserve_spare(self) -> None:
        """Make one spare segment if there is none; a full disk is left for `allocate` to report."""
        with self._lock:
            if self._spare:
                return
        try:
            segment = self._make()
        except SpoolFull:
            return
        with self._lock:
            self._spare.append(segment)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "segments": len(self._maps),
                "spare_segments": len(self._spare),
                "segment_bytes": self._segment_bytes,
                "live_regions": sum(self._live.values()),
            }

    def _make(self) -> int:
        segment = next(self._numbers)
        path = self._path(segment)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._segment_bytes)
            self._maps[segment] = mmap.mmap(
                fd, self._segment_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
        except OSError as error:
            path.unlink()
            raise SpoolFull(
                f"a segment of {self._segment_bytes} bytes cannot be made in {self._directory}: "
                f"{error.strerror}; "
                f"commit steps, lower spool.backlog_bytes or give the folder more room"
            ) from error
        finally:
            os.close(fd)
        self._live[segment] = 0
        return segment

    def _retire_filling(self) -> None:
        if self._filling is not None and not self._live[self._filling]:
            self._recycle(self._filling)

    def _recycle(self, segment: int) -> None:
        if len(self._spare) < self._pool:
            self._spare.append(segment)
            return
        # The mapping closes itself when the last view of it goes.
        del self._maps[segment], self._live[segment]
        self._path(segment).unlink()

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:06d}.seg"
