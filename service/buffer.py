"""Groups: which datums belong together, what state they are in, and the books.

    COLLECTING ──► COMPLETE ──► PLANNED ──► DELIVERED ──► COMMITTED
     members        all there    in a step   published      in a checkpoint
     missing                     written     to every rank
                                 down

A group has a name (`group_id`) and a size, or is complete when the post that opened it ends. A
datum without `group_id` is a group of one. The names of finished groups are remembered for
`memory_s` after their commit, so that a member too many is refused and not taken for a new group.
COMPLETE groups stand in the order in which they became complete.

Holds numpy rows of small fields, never payload. The event loop reserves and adds, the pump takes,
delivers and commits; one lock covers both. `books()` is what is true of every datum: accepted =
buffered + planned + delivered + committed + dropped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import BacklogFull
from headrace.service.findings import Findings
from headrace.service.records import Draft, Headers, datum_numbers

__all__ = ["Buffer", "Group", "GroupState", "Reservation"]


class GroupState(Enum):
    COLLECTING = "collecting"
    COMPLETE = "complete"
    PLANNED = "planned"
    DELIVERED = "delivered"
    COMMITTED = "committed"


@dataclass(slots=True, eq=False)
class Group:
    """One group. `parts` are (datum numbers, DATUM_META rows), one a post, until the group is
    planned.
    """

    number: int
    name: str | None
    size: int
    token: str  # the name of the token that opened it
    promised: int = 0  # members of posts that are being recorded
    present: int = 0  # members recorded
    loss_tokens: int = 0
    nbytes: int = 0
    state: GroupState = GroupState.COLLECTING
    parts: list[tuple[NDArray[np.uint64], NDArray[Any]]] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """Datums, tokens and bytes in one place of the books."""

    datums: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, meta: NDArray[Any], sign: int = 1) -> None:
        self.datums += sign * len(meta)
        self.tokens += sign * int(meta["length"].sum(dtype=np.int64))
        self.bytes += sign * int(meta["bytes"].sum(dtype=np.int64))

    def move(self, other: Tally, whole: Tally) -> None:
        """`whole` leaves this place for `other`."""
        for name in ("datums", "tokens", "bytes"):
            amount = getattr(whole, name)
            setattr(self, name, getattr(self, name) - amount)
            setattr(other, name, getattr(other, name) + amount)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places in groups that a post may fill. Ends in `Buffer.add` or `Buffer.cancel`."""

    groups: NDArray[np.uint64]  # [N] the group's number, by datum
    opened: Sequence[Group] = ()
    members: Sequence[tuple[Group, int]] = ()
    short: Sequence[tuple[Group, int]] = ()  # by how many members a group ends smaller


@dataclass(slots=True)
class StepGroups:
    groups: list[Group]
    whole: Tally


class Buffer:
    """All groups of the run that are not forgotten yet."""

    def __init__(
        self,
        *,
        memory_s: float,
        max_open: int = 100_000,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._max_open, self._shared = max_open, shared
        self._dropped: Counter[str] = Counter()
        self._held_by: Counter[str] = Counter()  # backlog bytes by token
        self._memory_s = memory_s
        self._clock = clock
        self._groups: dict[int, Group] = {}
        self._by_name: dict[str, Group] = {}
        self._complete: deque[Group] = deque()
        self._steps: dict[int, StepGroups] = {}
        self._forgettable: deque[tuple[float, Group]] = deque()
        self._next_number = 1
        self._collecting = self._complete_datums = 0
        self._accepted = 0
        self._buffered, self._planned, self._delivered, self._committed = (
            Tally(),
            Tally(),
            Tally(),
            Tally(),
        )

    def reserve(
        self,
        draft: Draft,
        findings: Findings,
        *,
        token: str = "",
        left_out: Sequence[tuple[str, int]] = (),
    ) -> Reservation:
        """Places for a post's datums. Where `findings` are added, nothing was reserved.

        `left_out`: (group_id, group_size or 0) of datums that the post had and that were skipped:
        their groups end smaller.
        """
        names = draft.group_ids or [None] * len(draft)
        sizes = draft.group_sizes.tolist()
        before = len(findings.errors)
        short = Counter(name for name, _ in left_out)
        with self._lock:
            wanted: dict[str, int] = {}
            counts = Counter(name for name in names if name is not None)
            for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
                index = int(draft.origin[at])
                if name is None:
                    if size > 1:
                        got = f"group_size {size}"
                        findings.add(index, "group_id", "group_id_missing", got, "a group_id")
                    continue
                known = self._by_name.get(name)
                if known is not None and known.token != token and not self._shared:
                    findings.add(
                        index, "group_id", "group_foreign", repr(name), "a group of this token"
                    )
                fresh = size or counts[name] + short[name]
                want = wanted.setdefault(name, known.size if known else fresh)
                if size and size != want:
                    text = f"{want}, as the group has it"
                    findings.add(index, "group_size", "group_size_differs", size, text)
            for name, count in counts.items():
                known = self._by_name.get(name)
                there = known.present + known.promised if known else 0
                room = max(wanted[name] - there - short[name], 0)
                if count <= room:
                    continue
                got = f"{name!r} with {there} members and {count + short[name]} more"
                place = [at for at, of in enumerate(names) if of == name]
                for at in place[room:]:
                    index, text = int(draft.origin[at]), f"{wanted[name]} members"
                    findings.add(index, "group_id", "group_full", got, text)
            if len(findings.errors) > before:
                return Reservation(np.zeros(0, np.uint64))
            opens = sum(name not in self._by_name for name in wanted)
            if self._collecting + opens > self._max_open:
                raise BacklogFull(
                    f"{self._collecting} groups collect members, groups.max_open is "
                    f"{self._max_open}: complete or end some"
                )
            return self._reserve(names, wanted, counts, token, left_out)

    def _reserve(
        self,
        names: Sequence[str | None],
        sizes: dict[str, int],
        counts: Counter[str],
        token: str,
        left_out: Sequence[tuple[str, int]],
    ) -> Reservation:
        opened: list[Group] = []
        members: list[tuple[Group, int]] = []
        for name, count in counts.items():
            group = self._by_name.get(name)
            if group is None:
                group = self._open(name, sizes[name], token)
                opened.append(group)
            group.promised += count
            members.append((group, count))
        short: dict[int, tuple[Group, int]] = {}
        for name, size in left_out:
            group = self._by_name.get(name)
            if group is None and size > 1:
                group = self._open(name, size, token)
                opened.append(group)
            if group is not None and group.state is GroupState.COLLECTING:
                short[group.number] = (group, short.get(group.number, (group, 0))[1] + 1)
        numbers = np.empty(len(names), np.uint64)
        for index, of in enumerate(names):
            if of is None:
                alone = self._open(None, 1, token)
                alone.promised = 1
                opened.append(alone)
                members.append((alone, 1))
                numbers[index] = alone.number
            else:
                numbers[index] = self._by_name[of].number
        return Reservation(numbers, opened, members, list(short.values()))

    def _open(self, name: str | None, size: int, token: str) -> Group:
        group = Group(self._next_number, name, size, token)
        self._next_number += 1
        self._groups[group.number] = group
        self._collecting += 1
        if name is not None:
            self._by_name[name] = group
        return group

    def cancel(self, reservation: Reservation) -> None:
        """The post was not recorded: its places are free again, and groups only it had are gone."""
        with self._lock:
            for group, count in reservation.members:
                group.promised -= count
            touched = {
                g.number: g for g in (*reservation.opened, *(g for g, _ in reservation.members))
            }
            for group in touched.values():
                if not group.promised and not group.present:
                    self._collecting -= 1
                    self._forget(group)

    def add(self, reservation: Reservation, headers: Headers) -> int:
        """The post is recorded. Returns how many groups became complete."""
        meta = headers.meta
        numbers = datum_numbers(headers.post, len(meta))
        order = np.argsort(meta["group"], kind="stable")
        cuts = np.flatnonzero(np.diff(meta["group"][order])) + 1
        became = 0
        with self._lock:
            self._accepted += len(meta)
            self._buffered.add(meta)
            parts = {int(meta["group"][r[0]]): r for r in np.split(order, cuts) if len(r)}
            for group, count in reservation.members:
                rows = parts[group.number]
                group.promised -= count
                group.present += count
                group.parts.append((numbers[rows], meta[rows]))
                group.loss_tokens += int(meta["loss_tokens"][rows].sum(dtype=np.int64))
                group.nbytes += int(meta["bytes"][rows].sum(dtype=np.int64))
                self._held_by[group.token] += int(meta["bytes"][rows].sum(dtype=np.int64))
            for group, count in reservation.short:
                group.size -= count
            touched = {g.number: g for g, _ in (*reservation.members, *reservation.short)}
            for group in touched.values():
                became += self._settle(group)
        return became

    def _settle(self, group: Group) -> int:
        if group.size <= 0 and not group.promised:
            self._collecting -= 1
            self._forget(group)
        elif group.present and group.present == group.size:
            group.state = GroupState.COMPLETE
            self._collecting -= 1
            self._complete.append(group)
            self._complete_datums += group.size
            return 1
        return 0

    def drop(self, reason: str, datums: int) -> None:
        """Datums that were taken and not kept."""
        with self._lock:
            self._accepted += datums
            self._dropped[reason] += datums

    def opens_group(self, draft: Draft) -> bool:
        """Whether any datum of the post is not of a group that is collecting already."""
        with self._lock:
            for name in draft.group_ids or [None]:
                group = None if name is None else self._by_name.get(name)
                if group is None or group.state is not GroupState.COLLECTING:
                    return True
        return False

    def backlog_of(self, token: str) -> int:
        """Bytes accepted and not yet delivered, of groups that `token` opened."""
        return self._held_by[token]

    def complete(self) -> Iterator[tuple[int, int]]:
        """(datums, loss tokens) of the complete groups, oldest first. For the pump, which alone
        takes them.
        """
        for at in range(len(self._complete)):
            group = self._complete[at]
            yield group.size, group.loss_tokens

    def plan(self, chosen: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        """(numbers [N], DATUM_META rows [N]) of the chosen complete groups (places in `complete()`,
        ascending).
        """
        parts = [part for at in chosen for part in self._complete[at].parts]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def planned(self, step: int, chosen: Sequence[int], meta: NDArray[Any]) -> None:
        """The chosen groups are in the written plan of `step`."""
        with self._lock:
            taken = set(chosen)
            groups = [self._complete[at] for at in chosen]
            most = max(chosen) + 1
            front = [self._complete.popleft() for _ in range(most)]
            self._complete.extendleft(
                reversed([group for at, group in enumerate(front) if at not in taken])
            )
            whole = Tally()
            whole.add(meta)
            for group in groups:
                group.state = GroupState.PLANNED
                group.parts.clear()
                self._complete_datums -= group.size
            self._steps[step] = StepGroups(groups, whole)
            self._buffered.move(self._planned, whole)

    def delivered(self, step: int) -> int:
        """Step `step` is published whole in every rank's ring. Its bytes."""
        with self._lock:
            held = self._steps[step]
            for group in held.groups:
                group.state = GroupState.DELIVERED
                self._held_by[group.token] -= group.nbytes
                if not self._held_by[group.token]:
                    del self._held_by[group.token]
            self._planned.move(self._delivered, held.whole)
            return held.whole.bytes

    def committed(self, step: int) -> None:
        """Step `step` is in a checkpoint; its groups' names are remembered for a while."""
        now = self._clock()
        with self._lock:
            held = self._steps.pop(step)
            for group in held.groups:
                group.state = GroupState.COMMITTED
                self._forgettable.append((now, group))
            self._delivered.move(self._committed, held.whole)

    def forget(self) -> list[int]:
        """Forget groups whose memory is over; their numbers."""
        oldest = self._clock() - self._memory_s
        forgotten: list[int] = []
        with self._lock:
            while self._forgettable and self._forgettable[0][0] <= oldest:
                group = self._forgettable.popleft()[1]
                self._forget(group)
                forgotten.append(group.number)
        return forgotten

    def _forget(self, group: Group) -> None:
        del self._groups[group.number]
        if group.name is not None:
            del self._by_name[group.name]

    def books(self) -> dict[str, Any]:
        """Datums by where they are; `accepted` is the sum of the others."""
        with self._lock:
            return {
                "accepted": self._accepted,
                "buffered": self._buffered.datums,
                "planned": self._planned.datums,
                "delivered": self._delivered.datums,
                "committed": self._committed.datums,
                "dropped": dict(self._dropped),
            }

    def backlog(self) -> Tally:
        """Accepted and not yet delivered."""
        with self._lock:
            b, p = self._buffered, self._planned
            return Tally(b.datums + p.datums, b.tokens + p.tokens, b.bytes + p.bytes)

    @property
    def retained_bytes(self) -> int:
        """Delivered and not yet committed."""
        return self._delivered.bytes

    def group_counts(self) -> dict[str, int]:
        """Groups that collect, groups that are complete, and the datums of the latter."""
        with self._lock:
            return {
                "collecting": self._collecting,
                "complete": len(self._complete),
                "complete_datums": self._complete_datums,
            }
