"""The bound of docs/adr/0001-pacing.md: admitted groups do not come to exceed the lag."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.service.pacing import Pacing


class Run:
    """Groups as (version when started); steps of `a_step` groups; one version a step."""

    def __init__(self, lag: int, a_step: int, *, extra: int = 0) -> None:
        self.lag, self.a_step, self.extra = lag, a_step, extra
        self.started: deque[int] = deque()
        self.complete: deque[int] = deque()
        self.version = self.in_step = 0
        self.worst = 0
        self.now = 0.0
        self.pacing = Pacing(
            max_lag=lag, lease_s=10, outstanding=self.outstanding, a_step=lambda: a_step,
            clock=lambda: self.now,
        )  # fmt: skip

    def outstanding(self) -> int:
        return len(self.started) + len(self.complete) + self.in_step - self.extra

    def start(self) -> None:
        if self.pacing.reserve(1, "a"):
            self.pacing.opened(1, "a")
            self.started.append(self.version)

    def finish_group(self) -> None:
        if self.started:
            self.complete.append(self.started.popleft())

    def consume(self) -> None:
        if len(self.complete) >= self.a_step:
            taken = [self.complete.popleft() for _ in range(self.a_step)]
            self.worst = max(self.worst, *(self.version - version for version in taken))
            self.version += 1


schedules = st.lists(st.sampled_from("sssfffc"), max_size=300)


def play(run, schedule):
    for move in schedule:
        {"s": run.start, "f": run.finish_group, "c": run.consume}[move]()
    return run.worst


@given(st.integers(0, 4), st.integers(1, 5), schedules)
@settings(max_examples=150, deadline=None)
def test_no_admitted_group_exceeds_the_lag(lag, a_step, schedule):
    assert play(Run(lag, a_step), schedule) <= lag


@pytest.mark.soak
@given(st.integers(0, 8), st.integers(1, 8), st.lists(st.sampled_from("sssfffc"), max_size=3000))
@settings(max_examples=5000, deadline=None)
def test_no_admitted_group_exceeds_the_lag_long(lag, a_step, schedule):
    assert play(Run(lag, a_step), schedule) <= lag


@pytest.mark.parametrize(("lag", "a_step"), [(0, 1), (2, 3), (3, 1)])
def test_the_bound_is_tight_and_one_credit_more_breaks_it(lag, a_step):
    window = (lag + 1) * a_step
    steps = "c" * (lag + 2)
    assert play(Run(lag, a_step), "s" * 50 + "f" * 50 + steps) == lag
    late = "s" * 50 + "f" * 50 + steps + ("s" * a_step + "f" * a_step + "c") * 2
    assert play(Run(lag, a_step, extra=a_step), late) > lag
    assert Run(lag, a_step).pacing.credits() == window


def test_reservations_are_used_and_expire():
    run = Run(1, 2)
    assert run.pacing.reserve(3, "a")
    assert not run.pacing.reserve(2, "b")
    assert run.pacing.reserve(1, "b")
    run.pacing.opened(2, "a")
    assert (run.pacing.reserved, run.pacing.credits()) == (2, 2)
    run.pacing.opened(5, "c")  # without a reservation there is none to use
    assert run.pacing.reserved == 2
    run.now = 10.0
    assert (run.pacing.credits(), run.pacing.reserved) == (4, 0)


def test_without_a_lag_there_is_no_bound():
    pacing = Pacing(max_lag=None, lease_s=1, outstanding=lambda: 10**9, a_step=lambda: 1)
    assert pacing.credits() is None
    assert pacing.reserve(10**6, "a")
    assert pacing.reserved == 0
