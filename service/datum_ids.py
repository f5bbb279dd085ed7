"""Which datum ids the run has seen: an id, where a client gives one, is taken once.

An id is remembered while its post is held and at least `window_s` after it was accepted. A datum
whose id is known is left out of its post and counted (`duplicate_id`); it never sinks the others.
Reserved on the loop before the post is recorded, so that two posts under way cannot both bring the
same id. Event loop only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["DatumIds"]


class DatumIds:
    """`held(post)`: whether the spool still holds a datum of that post."""

    def __init__(
        self,
        *,
        window_s: float,
        held: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s, self._held, self._clock = window_s, held, clock
        self._known: set[str] = set()
        self._accepted: deque[tuple[float, int, Sequence[str]]] = deque()

    def reserve(self, ids: Sequence[str | None]) -> tuple[list[str], list[int]]:
        """(ids that are now this post's, places whose id is known or came earlier in the post)."""
        self._forget()
        mine: list[str] = []
        known: list[int] = []
        for place, name in enumerate(ids):
            if name is None:
                continue
            if name in self._known:
                known.append(place)
            else:
                self._known.add(name)
                mine.append(name)
        return mine, known

    def cancel(self, mine: Sequence[str]) -> None:
        """The post was not recorded."""
        self._known.difference_update(mine)

    def confirm(self, post: int, mine: Sequence[str]) -> None:
        """The post is recorded."""
        if mine:
            self._accepted.append((self._clock(), post, mine))

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while self._accepted and self._accepted[0][0] < oldest:
            if self._held(self._accepted[0][1]):
                # Posts are held in about the order they came: those behind it wait with it.
                return
            self._known.difference_update(self._accepted.popleft()[2])

    def __len__(self) -> int:
        return len(self._known)
