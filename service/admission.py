"""Budgets: how much may be held, and the 429 beyond it.

`backlog_bytes` bounds what is accepted and not delivered, `retain_bytes` what is delivered and not
committed. Under durability "memory" both are shares of the tmpfs that is free once the rings are
made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import BacklogFull, SettingsError
from headrace.service.settings import Settings

__all__ = ["Budgets"]


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
                "the spool's budgets "
                f"(spool.backlog_bytes + retain_bytes, at least two segments) = {need} do not fit. "
                "Lower them, or give "
                f"the tmpfs more room (in Docker: --shm-size)"
            )
        return cls(backlog_bytes=backlog, retain_bytes=retain)

    def admit(self, *, held_bytes: int, post_bytes: int) -> None:
        """Raises BacklogFull where a post of `post_bytes` would exceed the budget."""
        if held_bytes + post_bytes > self.backlog_bytes:
            raise BacklogFull(
                f"the backlog holds {held_bytes} bytes and spool.backlog_bytes is "
                f"{self.backlog_bytes}: no room for a "
                f"post of {post_bytes} bytes until the trainer takes steps; send it again later"
            )
