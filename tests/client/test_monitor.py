"""One wait, driven by a thread and by a task: no news is missed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from headrace.client.monitor import Monitor, Steps

BOUND_S = 20.0


class Counter:
    """Counts up; whoever waits for a number gets it."""

    def __init__(self) -> None:
        self.monitor = Monitor()
        self.count = 0
        self.left: list[str] = []

    def up(self) -> None:
        with self.monitor:
            self.count += 1
            self.monitor.notify()

    def reached(self, number: int, wait: float | None = None) -> Steps[int]:
        try:
            while self.count < number:
                yield wait
            return self.count
        finally:
            self.left.append("left")

    def reached_within(self, number: int, seconds: float) -> Steps[bool]:
        end = time.monotonic() + seconds
        while self.count < number and time.monotonic() < end:
            yield end - time.monotonic()
        return self.count >= number


def test_threads_and_tasks_wait_for_the_same_news() -> None:
    """In lockstep: each number comes when all four have seen the one before."""
    counter, seen, rounds = Counter(), Counter(), 100

    def thread() -> None:
        for number in range(1, rounds + 1):
            assert counter.monitor.run(counter.reached(number)) == number
            seen.up()

    async def task() -> None:
        for number in range(1, rounds + 1):
            assert await counter.monitor.run_async(counter.reached(number)) == number
            seen.up()

    def count() -> None:
        for number in range(1, rounds + 1):
            counter.up()
            assert seen.monitor.run(seen.reached_within(4 * number, BOUND_S))

    async def all_of_them() -> None:
        async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(task())
            await asyncio.to_thread(count)

    waiting = threading.Thread(target=thread, daemon=True)
    waiting.start()
    asyncio.run(all_of_them())
    waiting.join(BOUND_S)
    assert (counter.count, seen.count) == (rounds, 4 * rounds)


def test_a_wait_looks_again_by_itself() -> None:
    """As for a linger: time passes without news."""
    counter = Counter()

    def steps() -> Steps[str]:
        for _ in range(3):
            yield 0.001
        return "done"

    assert counter.monitor.run(steps()) == "done"
    assert asyncio.run(counter.monitor.run_async(steps())) == "done"


def test_what_is_left_early_is_closed_at_once() -> None:
    counter = Counter()

    async def cancelled() -> None:
        task = asyncio.create_task(counter.monitor.run_async(counter.reached(1)))
        await asyncio.sleep(0)
        assert counter.left == []
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counter.left == ["left"]

    asyncio.run(cancelled())

    def failing() -> Steps[Any]:
        yield 0.0
        raise KeyError

    with pytest.raises(KeyError):
        counter.monitor.run(failing())
    counter.up()  # the lock is free


def test_news_for_a_loop_that_is_gone_is_no_error() -> None:
    counter = Counter()
    loop = asyncio.new_event_loop()
    task = loop.create_task(counter.monitor.run_async(counter.reached(1)))
    loop.run_until_complete(asyncio.sleep(0, loop))
    loop.close()
    counter.up()
    assert counter.monitor.run(counter.reached(1)) == 1
    task._log_destroy_pending = False  # left behind on purpose
