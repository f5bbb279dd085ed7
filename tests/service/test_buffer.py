"""Groups and books, without a service: reservations, states, order, forgetting."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.schemas.errors import InvalidDatums
from headrace.service.buffer import Buffer
from headrace.service.findings import Findings
from headrace.service.records import DATUM_META, Headers


@dataclass
class Small:
    """What `Buffer.reserve` looks at of a draft."""

    group_ids: list[str | None]
    sizes: list[int]
    splits: list[str | None] | None = None
    group_sizes: np.ndarray = field(init=False)
    origin: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.group_sizes = np.array(self.sizes)
        self.origin = np.arange(len(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)


def post(buffer, number, names, sizes):
    findings = Findings(10)
    reservation = buffer.reserve(Small(names, sizes), findings)
    findings.settle()
    if reservation.late:
        return "late"
    meta = np.zeros(len(names), DATUM_META)
    meta["group"] = reservation.groups
    meta["length"] = meta["loss_tokens"] = 3
    meta["bytes"] = 10
    return buffer.add(reservation, Headers(post=number, meta=meta))


def sizes(buffer):
    return [(group.datums, group.loss_tokens) for group in buffer.complete()]


def test_groups_become_complete_in_order_and_move_through_the_books():
    buffer = Buffer(memory_s=100)
    assert post(buffer, 1, ["a", "b"], [2, 1]) == 1
    assert post(buffer, 2, ["a", None], [2, 0]) == 2
    assert sizes(buffer) == [(1, 3), (2, 6), (1, 3)]
    numbers, meta = buffer.plan([0, 2])
    assert numbers.tolist() == [(1 << 16) + 1, (2 << 16) + 1]
    buffer.planned(0, [0, 2], meta)
    assert sizes(buffer) == [(2, 6)]
    assert buffer.backlog().bytes == 40
    buffer.delivered(0)
    assert (buffer.backlog().bytes, buffer.retained_bytes) == (20, 20)
    buffer.committed(0)
    assert buffer.books() == {
        "accepted": 4, "buffered": 2, "planned": 0, "delivered": 0, "committed": 2, "dropped": {},
    }  # fmt: skip


def test_a_cancelled_post_leaves_no_trace():
    buffer = Buffer(memory_s=100)
    post(buffer, 1, ["a"], [2])
    findings = Findings(10)
    cancelled = buffer.reserve(Small(["a", "new", None], [2, 4, 0]), findings)
    with pytest.raises(InvalidDatums, match="group_full"):
        post(buffer, 2, ["a"], [2])
    buffer.cancel(cancelled)
    assert buffer.group_counts()["collecting"] == 1
    assert post(buffer, 3, ["a"], [2]) == 1
    # "new" was opened with four members by the cancelled post only.
    assert post(buffer, 4, ["new"], [1]) == 1


def test_names_are_remembered_and_then_forgotten():
    now = [0.0]
    buffer = Buffer(memory_s=10, clock=lambda: now[0])
    post(buffer, 1, ["a"], [1])
    buffer.planned(0, [0], buffer.plan([0])[1])
    buffer.delivered(0)
    buffer.committed(0)
    assert buffer.forget() == []
    assert post(buffer, 2, ["a"], [1]) == "late"
    now[0] = 10.0
    assert buffer.forget() == [1]
    assert post(buffer, 3, ["a"], [1]) == 1


class Machine(RuleBasedStateMachine):
    """Posts, plans, deliveries and commits in any order, against a plain account of datums."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer(memory_s=1e9)
        self.posts = self.accepted = 0
        self.steps: list[int] = []
        self.delivered = self.committed = 0

    @rule(names=st.lists(st.sampled_from([*"abcdef", None]), min_size=1, max_size=5))
    def post(self, names):
        try:
            if post(self.buffer, self.posts + 1, names, [3 if n else 0 for n in names]) == "late":
                return
        except InvalidDatums:
            return
        self.posts += 1
        self.accepted += len(names)

    @precondition(lambda self: self.buffer.group_counts()["complete"])
    @rule(data=st.data())
    def plan(self, data):
        count = self.buffer.group_counts()["complete"]
        chosen = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4)))
        there = [size for size, _ in sizes(self.buffer)]
        _, meta = self.buffer.plan(chosen)
        assert len(meta) == sum(there[at] for at in chosen)
        self.buffer.planned(len(self.steps), chosen, meta)
        assert [s for s, _ in sizes(self.buffer)] == [
            size for at, size in enumerate(there) if at not in chosen
        ]
        self.steps.append(len(meta))

    @precondition(lambda self: self.delivered < len(self.steps))
    @rule()
    def deliver(self):
        self.buffer.delivered(self.delivered)
        self.delivered += 1

    @precondition(lambda self: self.committed < self.delivered)
    @rule()
    def commit(self):
        self.buffer.committed(self.committed)
        self.committed += 1

    @invariant()
    def balance(self):
        books = self.buffer.books()
        assert books["accepted"] == self.accepted
        assert books["committed"] == sum(self.steps[: self.committed])
        assert books["delivered"] == sum(self.steps[self.committed : self.delivered])
        assert books["planned"] == sum(self.steps[self.delivered :])
        assert books["buffered"] == self.accepted - sum(self.steps)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
