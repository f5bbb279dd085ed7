"""One lock and its news, waited for by threads and by asyncio tasks alike.

What waits is written once, as steps: a generator that runs under the lock and yields whenever it
has to wait, with the seconds until it looks again by itself (None: not before there is news).

    def steps():                          with monitor: ... monitor.notify()
        while not ready():
            yield None                    monitor.run(steps())              in a thread
        return value                      await monitor.run_async(steps())  in a task

Invariants: steps never run without the lock, and never hold it while they wait; news between a look
and the wait is not missed; steps that are left early (an exception, a cancelled task) are closed
under the lock, so that their `finally` may put things right. `run_async` never waits for the lock
longer than another holder's few lines take. Owned by Outbox. Knows nothing of datums.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import suppress
from types import TracebackType
from typing import TypeAlias, TypeVar

__all__ = ["Monitor", "Steps"]

T = TypeVar("T")
Steps: TypeAlias = Generator[float | None, None, T]

FOREVER_S = 1e6  # as long as any wait: threading takes no infinity


class Monitor:
    """See the module's contract. A context manager that holds the lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._changed.release()

    def notify(self) -> None:
        """Wake everything that waits; call it under the lock."""
        self._changed.notify_all()
        for loop, woken in self._tasks:
            with suppress(RuntimeError):  # that loop was closed, and its task with it
                loop.call_soon_threadsafe(woken.set)

    def run(self, steps: Steps[T]) -> T:
        """The value of `steps`, waiting in this thread."""
        with self._changed:
            try:
                while True:
                    wait = next(steps)
                    self._changed.wait(None if wait is None else min(wait, FOREVER_S))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                steps.close()

    async def run_async(self, steps: Steps[T]) -> T:
        """The value of `steps`, waiting in this task."""
        me = (asyncio.get_running_loop(), asyncio.Event())
        try:
            while True:
                with self._changed:
                    me[1].clear()
                    wait = next(steps)
                    self._tasks.add(me)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await me[1].wait()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            with self._changed:
                self._tasks.discard(me)
                steps.close()
