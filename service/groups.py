"""One group of datums, its states, and the tallies it is counted in.

    COLLECTING ──► COMPLETE ──► PLANNED ──► DELIVERED ──► COMMITTED
        │ members     │ all there   │ in a step   │ published     │ in a checkpoint
        │ missing     │ (or shipped,│ written     │ to every rank │
        │             │  or closed) │ down        │               │
        └─────────────┴──► DROPPED: timeout, closed, stale, zero_advantage

A group has a name (`group_id`) and a size, or is complete when the post that opened it ends. A
datum without `group_id` is a group of one. A group that ended with fewer members than were promised
(skipped, shipped, closed) is `ended_early`: a member that comes after all is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.service.records import DATUM_META, SIGNAL_BY_REWARD, SIGNAL_SOME, SPLIT_EVAL

__all__ = [
    "Group",
    "GroupState",
    "Part",
    "Reservation",
    "Tally",
    "parts_of",
    "rows_of",
    "singles_of",
]

ROW = np.dtype((np.void, DATUM_META.itemsize))

NO_VERSION = 1 << 62


class GroupState(Enum):
    COLLECTING = "collecting"
    COMPLETE = "complete"
    PLANNED = "planned"
    DELIVERED = "delivered"
    COMMITTED = "committed"
    DROPPED = "dropped"


FINISHED = frozenset(
    (GroupState.PLANNED, GroupState.DELIVERED, GroupState.COMMITTED, GroupState.DROPPED)
)


@dataclass(slots=True, eq=False)
class Group:
    """One group. `parts` are (datum numbers, DATUM_META rows), one a post, until it is planned."""

    number: int
    name: str | None
    declared: int  # members that were promised
    size: int  # members it ends with
    token: str  # the name of the token that opened it
    opened_at: float  # seconds of the buffer's clock
    completed_at: float = 0.0
    promised: int = 0  # members of posts that are being recorded
    present: int = 0  # members recorded
    loss_tokens: int = 0
    nbytes: int = 0
    oldest_version: int = NO_VERSION
    source: int = 0  # of its first member
    has_signal: bool = False  # an advantage that is not 0
    reward: float | None = None  # of its first member, where advantages come from rewards
    is_eval: bool = False
    ended_early: bool = False
    state: GroupState = GroupState.COLLECTING
    parts: list[tuple[NDArray[np.uint64], NDArray[Any]]] = field(default_factory=list)

    def take(self, part: Part) -> None:
        """These datums are recorded members."""
        if not self.parts:
            self.source, self.is_eval = part.source, part.is_eval
        self.parts.append((part.numbers, part.meta))
        self.present += len(part.meta)
        self.loss_tokens += part.loss_tokens
        self.nbytes += part.nbytes
        self.oldest_version = min(self.oldest_version, part.oldest_version)
        # Where advantages come from rewards and all rewards are equal, all advantages are 0.
        by_reward = part.signal == SIGNAL_BY_REWARD
        if by_reward and self.reward is None:
            self.reward = part.rewards[0]
        differs = by_reward and part.rewards != (self.reward, self.reward)
        self.has_signal = self.has_signal or part.signal == SIGNAL_SOME or differs

    @property
    def meta(self) -> NDArray[Any]:
        return rows_of([meta for _, meta in self.parts])

    @property
    def numbers(self) -> NDArray[np.uint64]:
        return np.concatenate([numbers for numbers, _ in self.parts])

    @property
    def takes_no_more(self) -> bool:
        """Whether a member that comes now is late, and not one too many."""
        return self.state in FINISHED or (self.ended_early and self.state is GroupState.COMPLETE)


@dataclass(slots=True)
class Part:
    """One group's members in one post, and what is summed over them."""

    numbers: NDArray[np.uint64]
    meta: NDArray[Any]
    loss_tokens: int
    nbytes: int
    oldest_version: int
    rewards: tuple[float, float]  # least and greatest
    signal: int  # the greatest
    source: int  # of the first
    is_eval: bool


def singles_of(
    numbers: NDArray[np.uint64], meta: NDArray[Any], token: str, now: float
) -> list[Group]:
    """A complete group for each datum, of a post in which none has a group_id."""
    columns = zip(
        meta["group"].tolist(),
        meta["loss_tokens"].tolist(),
        meta["bytes"].tolist(),
        meta["policy_version"].tolist(),
        meta["source"].tolist(),
        (meta["signal"] == SIGNAL_SOME).tolist(),
        (meta["split"] == SPLIT_EVAL).tolist(),
        strict=True,
    )
    return [
        Group(
            number, None, 1, 1, token, now, now, 0, 1, loss, nbytes, version, source, signal, None,
            is_eval, False, GroupState.COMPLETE, [(numbers[at : at + 1], meta[at : at + 1])],
        )
        for at, (number, loss, nbytes, version, source, signal, is_eval) in enumerate(columns)
    ]  # fmt: skip


def parts_of(numbers: NDArray[np.uint64], meta: NDArray[Any]) -> dict[int, Part]:
    """group number -> its part of a post: one sort and one pass a sum, however many groups."""
    if not len(meta):
        return {}
    order = np.argsort(meta["group"], kind="stable")
    numbers, meta = numbers[order], meta[order]
    groups, starts = np.unique(meta["group"], return_index=True)
    firsts = meta[starts]
    columns = zip(
        groups.tolist(),
        starts.tolist(),
        [*starts[1:].tolist(), len(meta)],
        np.add.reduceat(meta["loss_tokens"], starts, dtype=np.int64).tolist(),
        np.add.reduceat(meta["bytes"], starts, dtype=np.int64).tolist(),
        np.minimum.reduceat(meta["policy_version"], starts).tolist(),
        np.minimum.reduceat(meta["reward"], starts).tolist(),
        np.maximum.reduceat(meta["reward"], starts).tolist(),
        np.maximum.reduceat(meta["signal"], starts).tolist(),
        firsts["source"].tolist(),
        (firsts["split"] == SPLIT_EVAL).tolist(),
        strict=True,
    )
    return {
        group: Part(numbers[a:b], meta[a:b], tokens, nbytes, oldest, (low, high), signal, *rest)
        for group, a, b, tokens, nbytes, oldest, low, high, signal, *rest in columns
    }


def rows_of(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """DATUM_META rows, one after another; as opaque ones, since numpy compares all fields else."""
    return np.concatenate([part.view(ROW) for part in parts]).view(DATUM_META)


@dataclass(slots=True)
class Tally:
    """Datums, tokens and bytes in one place of the books."""

    datums: int = 0
    tokens: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, meta: NDArray[Any]) -> Tally:
        tokens = int(meta["length"].sum(dtype=np.int64))
        return cls(len(meta), tokens, int(meta["bytes"].sum(dtype=np.int64)))

    def add(self, other: Tally, sign: int = 1) -> None:
        self.datums += sign * other.datums
        self.tokens += sign * other.tokens
        self.bytes += sign * other.bytes

    def move(self, target: Tally, whole: Tally) -> None:
        """`whole` leaves this place for `target`."""
        self.add(whole, -1)
        target.add(whole)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places in groups that a post may fill. Ends in `Buffer.add` or `Buffer.cancel`.

    Where `late` names datums, nothing was reserved: their groups take no more members.
    """

    groups: NDArray[np.uint64]  # [N] the group's number, by datum
    singles: str | None = None  # no datum has a group_id: the token that posts them
    opened: Sequence[Group] = ()
    members: Sequence[tuple[Group, int]] = ()
    short: Sequence[tuple[Group, int]] = ()  # by how many members a group ends smaller
    late: Sequence[int] = ()
