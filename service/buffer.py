"""What was accepted and is not in a checkpoint: groups in their states, and the books.

Groups (groups.py) collect members, become complete in some order, and stand in that order until the
pump takes them. The names of finished groups are remembered for `memory_s`, so that a member that
comes after all is counted `late` and not taken for a new group; one member too many is refused.

Holds numpy rows of small fields, never payload. The event loop reserves and adds, the pump takes,
delivers, drops and commits; one lock covers both. `books()` is what is true of every datum:
accepted = buffered + planned + delivered + committed + dropped. Data of the split "eval" is kept
and counted as buffered, and never planned.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import BacklogFull, GroupLarger, GroupUnknown
from headrace.service.findings import Findings
from headrace.service.groups import (
    Group,
    GroupState,
    Reservation,
    Tally,
    parts_of,
    rows_of,
    singles_of,
)
from headrace.service.plan.choose import Candidate
from headrace.service.records import Draft, Headers, datum_numbers

__all__ = ["Buffer"]

DROP_EMPTY_SIGNAL = "zero_advantage"


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
        drop_zero_advantage: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._max_open, self._shared = max_open, shared
        self._drop_zero_advantage = drop_zero_advantage
        self._memory_s, self._clock = memory_s, clock
        self._groups: dict[int, Group] = {}
        self._by_name: dict[str, Group] = {}
        self._open: deque[Group] = deque()  # named groups in the order in which they were opened
        self._complete: deque[Group] = deque()
        self._gone: list[tuple[Group, str]] = []  # dropped, and the spool does not know yet
        self._steps: dict[int, StepGroups] = {}
        self._forgettable: deque[tuple[float, Group]] = deque()
        self._next_number = 1
        self._collecting = self._complete_datums = self._largest = 0
        self._accepted = 0
        self._dropped: Counter[str] = Counter()
        self._held_by: Counter[str] = Counter()  # backlog bytes by token
        self._buffered, self._planned = Tally(), Tally()
        self._delivered, self._committed, self._eval = Tally(), Tally(), Tally()

    # posts

    def reserve(
        self,
        draft: Draft,
        findings: Findings,
        *,
        token: str = "",
        left_out: Sequence[tuple[str, int]] = (),
    ) -> Reservation:
        """Places for a post's datums. Where `findings` are added or some are late, none.

        `left_out`: (group_id, group_size or 0) of datums that the post had and that were not kept:
        their groups end smaller. Raises BacklogFull where too many groups are open.
        """
        if draft.group_ids is None and not left_out and not (draft.group_sizes > 1).any():
            with self._lock:
                first, self._next_number = self._next_number, self._next_number + len(draft)
                self._largest = max(self._largest, 1)
            numbers = np.arange(first, first + len(draft), dtype=np.uint64)
            return Reservation(numbers, singles=token)
        names = draft.group_ids or [None] * len(draft)
        before = len(findings.errors)
        short = Counter(name for name, _ in left_out)
        counts = Counter(name for name in names if name is not None)
        with self._lock:
            late = [
                at
                for at, name in enumerate(names)
                if name is not None
                and (group := self._by_name.get(name)) is not None
                and group.takes_no_more
            ]
            if late:
                return Reservation(np.zeros(0, np.uint64), late=late)
            sizes = self._check_members(draft, names, counts, short, token, findings)
            self._check_room(draft, names, counts, short, sizes, findings)
            if len(findings.errors) > before:
                return Reservation(np.zeros(0, np.uint64))
            opens = sum(name not in self._by_name for name in counts)
            if self._collecting + opens > self._max_open:
                raise BacklogFull(
                    f"{self._collecting} groups collect members, groups.max_open is "
                    f"{self._max_open}: complete or close some"
                )
            return self._reserve(names, sizes, counts, token, left_out)

    def _check_members(
        self,
        draft: Draft,
        names: Sequence[str | None],
        counts: Counter[str],
        short: Counter[str],
        token: str,
        findings: Findings,
    ) -> dict[str, int]:
        """The size that each group was or is now promised, by name."""
        declared: dict[str, int] = {}
        evals: dict[str, bool] = {}
        splits = draft.splits or [None] * len(draft)
        origin = draft.origin.tolist()
        for at, (name, size) in enumerate(zip(names, draft.group_sizes.tolist(), strict=True)):
            if name is None:
                if size > 1:
                    got = f"group_size {size}"
                    findings.add(origin[at], "group_id", "group_id_missing", got, "a group_id")
                continue
            known = self._by_name.get(name)
            if known is not None and known.token != token and not self._shared:
                want = "a group of this token"
                findings.add(origin[at], "group_id", "group_foreign", repr(name), want)
            is_eval = splits[at] == "eval"
            of_group = known.is_eval if known is not None and known.parts else is_eval
            if evals.setdefault(name, of_group) != is_eval:
                want = "one split for all members of a group"
                findings.add(origin[at], "split", "split_differs", repr(splits[at]), want)
            fresh = size or counts[name] + short[name]
            want_size = declared.setdefault(name, known.declared if known else fresh)
            if size and size != want_size:
                text = f"{want_size}, as the group has it"
                findings.add(origin[at], "group_size", "group_size_differs", size, text)
        return declared

    def _check_room(
        self,
        draft: Draft,
        names: Sequence[str | None],
        counts: Counter[str],
        short: Counter[str],
        sizes: dict[str, int],
        findings: Findings,
    ) -> None:
        for name, count in counts.items():
            known = self._by_name.get(name)
            there = known.present + known.promised if known else 0
            size = known.size if known else sizes[name]
            room = max(size - there - short[name], 0)
            if count <= room:
                continue
            got = f"{name!r} with {there} members and {count + short[name]} more"
            for at in [at for at, of in enumerate(names) if of == name][room:]:
                index = int(draft.origin[at])
                findings.add(index, "group_id", "group_full", got, f"{size} members")

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
                group = self._new(name, sizes[name], token)
                opened.append(group)
            group.promised += count
            members.append((group, count))
        short: Counter[int] = Counter()
        for name, size in left_out:
            group = self._by_name.get(name)
            if group is None and size > 1:
                group = self._new(name, size, token)
                opened.append(group)
            if group is not None and group.state is GroupState.COLLECTING:
                short[group.number] += 1
        numbers = np.empty(len(names), np.uint64)
        for index, of in enumerate(names):
            if of is None:
                alone = self._new(None, 1, token)
                alone.promised = 1
                opened.append(alone)
                members.append((alone, 1))
                numbers[index] = alone.number
            else:
                numbers[index] = self._by_name[of].number
        shorter = [(self._groups[number], count) for number, count in short.items()]
        return Reservation(numbers, opened=opened, members=members, short=shorter)

    def _new(self, name: str | None, size: int, token: str) -> Group:
        group = Group(self._next_number, name, size, size, token, self._clock())
        self._next_number += 1
        self._groups[group.number] = group
        self._collecting += 1
        self._largest = max(self._largest, size)
        if name is not None:
            self._by_name[name] = group
            self._open.append(group)
        return group

    def cancel(self, reservation: Reservation) -> None:
        """The post was not recorded: its places are free again, and groups only it had are gone."""
        with self._lock:
            for group, count in reservation.members:
                group.promised -= count
            groups = (*reservation.opened, *(group for group, _ in reservation.members))
            for group in {group.number: group for group in groups}.values():
                if not group.promised and not group.present:
                    self._collecting -= 1
                    self._forget(group)

    def add(self, reservation: Reservation, headers: Headers) -> int:
        """The post is recorded. Returns how many groups became complete."""
        meta = headers.meta
        numbers = datum_numbers(headers.post, len(meta))
        if reservation.singles is not None:
            return self._add_singles(numbers, meta, reservation.singles)
        parts = parts_of(numbers, meta)
        became = 0
        with self._lock:
            self._accepted += len(meta)
            self._buffered.add(Tally.of(meta))
            for group, count in reservation.members:
                part = parts[group.number]
                group.promised -= count
                group.take(part)
                if group.is_eval:
                    self._eval.add(Tally.of(part.meta))
                else:
                    self._held_by[group.token] += part.nbytes
            for group, count in reservation.short:
                group.size -= count
                group.ended_early = True
            touched = (*reservation.members, *reservation.short)
            for group in {g.number: g for g, _ in touched}.values():
                became += self._settle(group)
        return became

    def _add_singles(self, numbers: NDArray[np.uint64], meta: NDArray[Any], token: str) -> int:
        groups = singles_of(numbers, meta, token, self._clock())
        with self._lock:
            self._accepted += len(meta)
            self._buffered.add(Tally.of(meta))
            trained = [group for group in groups if not group.is_eval]
            if len(trained) < len(groups):
                self._eval.add(Tally.of(rows_of([g.meta for g in groups if g.is_eval])))
            self._held_by[token] += sum(group.nbytes for group in trained)
            return sum(self._enqueue(group) for group in trained)

    def _settle(self, group: Group) -> int:
        """Take the group to the state that its members say; 1 where it became plannable."""
        if group.state is not GroupState.COLLECTING or group.promised:
            return 0
        if not group.present and group.size <= 0:
            self._collecting -= 1
            self._forget(group)
            return 0
        if not group.present or group.present < group.size:
            return 0
        self._collecting -= 1
        group.completed_at = self._clock()
        group.state = GroupState.COMPLETE
        return 0 if group.is_eval else self._enqueue(group)

    def _enqueue(self, group: Group) -> int:
        """A complete group waits for its step; 0 where it teaches nothing and is dropped."""
        self._complete.append(group)
        self._complete_datums += group.present
        if self._drop_zero_advantage and not group.has_signal:
            self._drop(group, DROP_EMPTY_SIGNAL)
            return 0
        return 1

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

    # groups that end otherwise than by their last member

    def close(self, name: str, size: int, token: str) -> GroupState:
        """The group ends with `size` members: a rollout failed.

        Raises GroupUnknown (another token's groups are unknown too) or GroupLarger.
        """
        with self._lock:
            group = self._by_name.get(name)
            if group is None or (group.token != token and not self._shared):
                raise GroupUnknown(f"group_id: got {name!r}, want a group that this token opened")
            there = group.present + group.promised
            if group.state is GroupState.COLLECTING and size < there:
                raise GroupLarger(f"size: got {size}, want at least the {there} members it has")
            if group.state is GroupState.COLLECTING and size < group.size:
                group.size, group.ended_early = size, True
                self._settle(group)
            return group.state

    def expire(self, timeout_s: float, policy: str) -> int:
        """End the groups that have collected for `timeout_s`; how many. `policy`: drop or ship."""
        now, ended = self._clock(), 0
        with self._lock:
            waiting: list[Group] = []
            while self._open:
                group = self._open[0]
                if group.state is not GroupState.COLLECTING:
                    self._open.popleft()
                    continue
                if now - group.opened_at < timeout_s:
                    break
                self._open.popleft()
                if group.promised or group.is_eval:
                    waiting.append(group)  # a member is being recorded: looked at again
                    continue
                ended += 1
                group.ended_early = True
                if policy == "ship" and group.present:
                    group.size = group.present
                    self._settle(group)
                else:
                    self._drop(group, "timeout")
            self._open.extendleft(reversed(waiting))
        return ended

    def drop_stale(self, oldest_version: int) -> int:
        """Drop complete groups with a datum older than `oldest_version`; how many."""
        with self._lock:
            stale = [g for g in self._complete if g.oldest_version < oldest_version]
            for group in stale:
                self._drop(group, "stale")
            return len(stale)

    def _drop(self, group: Group, reason: str) -> None:
        if group.state is GroupState.COLLECTING:
            self._collecting -= 1
        elif group.state is GroupState.COMPLETE:
            self._complete.remove(group)
            self._complete_datums -= group.present
        group.state = GroupState.DROPPED
        self._forgettable.append((self._clock(), group))
        if group.parts:
            self._buffered.add(Tally.of(group.meta), -1)
            self._dropped[reason] += group.present
            self._unhold(group)
            self._gone.append((group, reason))

    def take_dropped(self) -> list[tuple[NDArray[np.uint64], str]]:
        """(datum numbers, reason) of groups dropped since the last call, for the spool."""
        with self._lock:
            gone = [(group.numbers, reason) for group, reason in self._gone]
            for group, _ in self._gone:
                group.parts.clear()
            self._gone.clear()
            return gone

    # steps

    def complete(self) -> Iterator[Candidate]:
        """The complete groups, oldest first. For the pump, which alone takes them."""
        for at in range(len(self._complete)):
            group = self._complete[at]
            yield Candidate(group.present, group.loss_tokens, group.source)

    @property
    def oldest_complete_at(self) -> float | None:
        """When the oldest complete group became complete, by the buffer's clock."""
        with self._lock:
            return self._complete[0].completed_at if self._complete else None

    def plan(self, chosen: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        """(numbers [N], DATUM_META rows [N]) of the chosen places in `complete()`, ascending."""
        parts = [part for at in chosen for part in self._complete[at].parts]
        numbers = np.concatenate([numbers for numbers, _ in parts])
        return numbers, rows_of([meta for _, meta in parts])

    def planned(self, step: int, chosen: Sequence[int], meta: NDArray[Any]) -> None:
        """The chosen groups are in the written plan of `step`."""
        with self._lock:
            taken = set(chosen)
            groups = [self._complete[at] for at in chosen]
            front = [self._complete.popleft() for _ in range(max(chosen) + 1)]
            left = [group for at, group in enumerate(front) if at not in taken]
            self._complete.extendleft(reversed(left))
            whole = Tally.of(meta)
            for group in groups:
                group.state = GroupState.PLANNED
                group.parts.clear()
                self._complete_datums -= group.present
            self._steps[step] = StepGroups(groups, whole)
            self._buffered.move(self._planned, whole)

    def delivered(self, step: int) -> int:
        """Step `step` is published whole in every rank's ring. Its bytes."""
        with self._lock:
            held = self._steps[step]
            for group in held.groups:
                group.state = GroupState.DELIVERED
                self._unhold(group)
            self._planned.move(self._delivered, held.whole)
            return held.whole.bytes

    def committed(self, step: int) -> None:
        """Step `step` is in a checkpoint; its groups' names are remembered for a while."""
        now = self._clock()
        with self._lock:
            held = self._steps.pop(step)
            for group in held.groups:
                group.state = GroupState.COMMITTED
                if group.name is None:
                    self._groups.pop(group.number, None)  # nothing can name it again
                else:
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
        self._groups.pop(group.number, None)
        if group.name is not None:
            del self._by_name[group.name]

    def _unhold(self, group: Group) -> None:
        self._held_by[group.token] -= group.nbytes
        if not self._held_by[group.token]:
            del self._held_by[group.token]

    # what others ask

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
        """Accepted and not yet delivered, without the split "eval"."""
        with self._lock:
            tally = Tally()
            tally.add(self._buffered)
            tally.add(self._planned)
            tally.add(self._eval, -1)
            return tally

    def backlog_of(self, token: str) -> int:
        """Bytes accepted and not yet delivered, of groups that `token` opened."""
        return self._held_by[token]

    @property
    def eval_bytes(self) -> int:
        return self._eval.bytes

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

    def groups_in_steps(self) -> dict[str, int]:
        """Groups that are planned and groups that are delivered."""
        with self._lock:
            inside = Counter(g.state for held in self._steps.values() for g in held.groups)
            return {s.value: inside[s] for s in (GroupState.PLANNED, GroupState.DELIVERED)}

    def unfinished_groups(self, finished_step: int) -> int:
        """Groups that were opened and are not in a step up to `finished_step`."""
        with self._lock:
            steps = (held for step, held in self._steps.items() if step > finished_step)
            in_steps = sum(len(held.groups) for held in steps)
            return self._collecting + len(self._complete) + in_steps

    @property
    def largest_group(self) -> int:
        """Members of the largest group so far."""
        return self._largest
