"""Budgets: how much may be held, and the 429 beyond it.

    0 ............ 0.9 x backlog_bytes ............ backlog_bytes
    every post     posts of open groups only        none

`backlog_bytes` bounds what is accepted and not delivered, `retain_bytes` what is delivered and not
committed. Under durability "memory" both are shares of the tmpfs that is free once the rings are
made. Above the soft limit a post gets in if every datum of it belongs to a group that is open
already, so that groups can complete and the backlog can drain. A token may fill at most
`auth.per_token_share` of the budget.

Retry-After comes from the rate at which steps took bytes out of the backlog lately. The event loop
asks, the pump's thread notes what drains.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import BacklogFull, SettingsError
from headrace.service.settings import Settings

__all__ = ["Admission", "Budgets"]

SOFT = 0.9
EVAL = 0.1  # of the budget, for data that is kept and never trained
LOOK_BACK_S = 30.0
UNKNOWN_S = 5  # to wait where nothing has drained lately
LONGEST_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of payload."""

    backlog_bytes: int
    retain_bytes: int

    @classmethod
    def of(cls, settings: Settings, directory: Path) -> Budgets:
        """The settings' budgets, or 25 % and 50 % of what is free beside the rings.

        Raises SettingsError where rings and budgets do not fit the folder.
        """
        stat = os.statvfs(directory)
        free = stat.f_bavail * stat.f_frsize
        rings = settings.planner.dp_size * settings.queue.bytes
        left = free - rings
        spool = settings.spool
        backlog = left // 4 if spool.backlog_bytes is None else int(spool.backlog_bytes)
        retain = left // 2 if spool.retain_bytes is None else int(spool.retain_bytes)
        need = max(backlog + retain, 2 * spool.segment_bytes)
        if left < need:
            raise SettingsError(
                f"{directory} has {free} bytes free; queue.bytes x planner.dp_size = {rings} and "
                f"the spool's budgets (spool.backlog_bytes + retain_bytes, at least two segments) "
                f"= {need} do not fit. Lower them, or give the tmpfs more room (in Docker: "
                f"--shm-size)"
            )
        return cls(backlog_bytes=backlog, retain_bytes=retain)


class Admission:
    """Says no while there is no room; `held` is the backlog in bytes now."""

    def __init__(
        self,
        budgets: Budgets,
        *,
        share: float,
        held: Callable[[], int],
        held_by: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = budgets.backlog_bytes
        self._share_bytes = int(share * budgets.backlog_bytes)
        self._held, self._held_by, self._clock = held, held_by, clock
        self._drained: deque[tuple[float, int]] = deque(maxlen=256)

    def before_body(self, nbytes: int) -> None:
        """Raises BacklogFull where a body of `nbytes` can only exceed the budget."""
        self._within(self._held(), nbytes, self._budget, "spool.backlog_bytes")

    def of_post(self, nbytes: int, *, token: str, opens_group: bool) -> None:
        """Raises BacklogFull where a post of `nbytes` payload has no room."""
        held = self._held()
        self._within(held, nbytes, self._budget, "spool.backlog_bytes")
        if opens_group and held + nbytes > SOFT * self._budget:
            raise BacklogFull(
                f"the backlog holds {held} bytes, over {SOFT:.0%} of spool.backlog_bytes = "
                f"{self._budget}: until the trainer takes steps, only posts whose every datum "
                f"belongs to an open group get in",
                self._retry_after(held + nbytes - int(SOFT * self._budget)),
            )
        if self._share_bytes < self._budget:
            name = "auth.per_token_share of spool.backlog_bytes"
            self._within(self._held_by(token), nbytes, self._share_bytes, name)

    def of_eval(self, held: int, nbytes: int) -> None:
        """Raises BacklogFull where data of the split "eval" would exceed its part."""
        limit = int(EVAL * self._budget)
        if held + nbytes > limit:
            raise BacklogFull(
                f"{held} bytes of the split 'eval' are held and {EVAL:.0%} of spool.backlog_bytes "
                f"are {limit}: post fewer, or raise the setting",
                LONGEST_S,
            )

    def drained(self, nbytes: int) -> None:
        """A step took `nbytes` out of the backlog."""
        self._drained.append((self._clock(), nbytes))

    def _within(self, held: int, nbytes: int, limit: int, name: str) -> None:
        if held + nbytes > limit:
            raise BacklogFull(
                f"the backlog holds {held} bytes and {name} is {limit}: no room for a post of "
                f"{nbytes} bytes until the trainer takes steps; send it again later",
                self._retry_after(held + nbytes - limit),
            )

    def _retry_after(self, excess: int) -> int:
        """Whole seconds, 1 to 30, until `excess` bytes have drained at the rate of late."""
        now = self._clock()
        recent = [(at, nbytes) for at, nbytes in list(self._drained) if now - at < LOOK_BACK_S]
        if not recent:
            return UNKNOWN_S
        span = max(now - recent[0][0], 1.0)
        rate = sum(nbytes for _, nbytes in recent) / span
        return max(1, min(LONGEST_S, math.ceil(excess / rate)))
