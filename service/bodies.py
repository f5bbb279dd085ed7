"""Buffers that request bodies are read into: leased within a budget, reused within another.

    lease(nbytes) ──► Body ── read into, decoded, copied to the spool ──► release() ──► pool

`budget_bytes` bounds what is in flight, by the announced length, before a byte is read; beyond it
the answer is 429. `pool_bytes` bounds what is kept for reuse, classes that were asked for longest
ago making room first. Sizes are classes of a quarter of a power of two (1, 1.25, 1.5, 1.75, 2, ...
times 64 KiB), so a buffer is at most a quarter larger than its body; bodies below 32 KiB get a
buffer of their own size, which is not kept.

A fresh buffer is not touched: memory is taken as the body arrives, not as it is announced.

A buffer is reused only when nothing views it any more. A view that outlives `release` (msgspec and
numpy keep them) costs a reuse, never another body's bytes.

Used on the event loop only, by routes/datums.py. Never waits.
"""

from __future__ import annotations

import sys
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import BacklogFull

__all__ = ["Bodies", "Body"]

SMALLEST_CLASS = 64 << 10
SMALLEST_POOLED = SMALLEST_CLASS // 2  # bytes of a body; below it malloc is as fast
REFERENCES = 2  # to an array that nothing views: the Body's and getrefcount's own argument


class Body:
    """One leased buffer. `release` it when nothing looks at the body any more, or use `with`."""

    __slots__ = ("_array", "_bodies", "buffer", "nbytes")

    def __init__(self, bodies: Bodies, array: NDArray[np.uint8], nbytes: int) -> None:
        self._bodies = bodies
        self._array: NDArray[np.uint8] | None = array
        self.nbytes = nbytes
        self.buffer = array.data[:nbytes]  # writable, exactly `nbytes` long

    def release(self) -> None:
        """Give the buffer back; safe to call again."""
        if self._array is None:
            return
        try:
            self.buffer.release()
            viewed = sys.getrefcount(self._array) > REFERENCES
        except BufferError:
            viewed = True
        array, self._array = self._array, None
        self._bodies._take_back(array, self.nbytes, viewed=viewed)

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Bodies:
    """All buffers of one service."""

    def __init__(self, budget_bytes: int, pool_bytes: int) -> None:
        self._budget_bytes, self._pool_bytes = budget_bytes, pool_bytes
        # class -> free buffers; classes in the order in which they were last asked for
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._in_flight = self._in_flight_bytes = self._pooled_bytes = 0
        self._made = self._reused = self._refused = self._viewed = 0

    def lease(self, nbytes: int) -> Body:
        """A buffer for a body of `nbytes`. Raises BacklogFull where the budget is in flight."""
        if self._in_flight_bytes + nbytes > self._budget_bytes:
            self._refused += 1
            raise BacklogFull(
                f"{self._in_flight} bodies of {self._in_flight_bytes} bytes are being read and "
                f"limits.inflight_body_bytes is {self._budget_bytes}: no room for {nbytes} more "
                "until they are done; send it again later"
            )
        self._in_flight += 1
        self._in_flight_bytes += nbytes
        return Body(self, self._buffer(nbytes), nbytes)

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if nbytes < SMALLEST_POOLED:
            return np.empty(nbytes, np.uint8)
        size = _size_class(nbytes)
        free = self._free.pop(size, [])
        self._free[size] = free  # now the one asked for last
        if not free:
            self._made += 1
            return np.empty(size, np.uint8)
        self._reused += 1
        self._pooled_bytes -= size
        return free.pop()

    def _take_back(self, array: NDArray[np.uint8], nbytes: int, *, viewed: bool) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= nbytes
        size = array.nbytes
        if nbytes < SMALLEST_POOLED or size > self._pool_bytes:
            return
        if viewed:
            self._viewed += 1
            return
        self._make_room(size)
        self._free.setdefault(size, []).append(array)
        self._pooled_bytes += size

    def _make_room(self, size: int) -> None:
        """Let go of pooled buffers, oldest class first, until `size` more bytes fit."""
        for oldest in list(self._free):
            free = self._free[oldest]
            while free and self._pooled_bytes + size > self._pool_bytes:
                free.pop()
                self._pooled_bytes -= oldest
            if self._pooled_bytes + size <= self._pool_bytes:
                return
            del self._free[oldest]

    def statistics(self) -> dict[str, int]:
        """Bodies and bytes in flight and in the pool; how often a buffer was made, reused, or left
        to its viewers; leases refused.
        """
        return {
            "in_flight": self._in_flight,
            "in_flight_bytes": self._in_flight_bytes,
            "budget_bytes": self._budget_bytes,
            "pooled_bytes": self._pooled_bytes,
            "made": self._made,
            "reused": self._reused,
            "viewed": self._viewed,
            "refused": self._refused,
        }


def _size_class(nbytes: int) -> int:
    """The smallest of 64 KiB x (1, 1.25, 1.5, 1.75) x 2^k that holds `nbytes`."""
    if nbytes <= SMALLEST_CLASS:
        return SMALLEST_CLASS
    quarter = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // quarter) * quarter
