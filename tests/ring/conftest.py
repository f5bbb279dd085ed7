"""A folder on tmpfs, rings in it, and forked children that are gone when the test is."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.service.ring import Kind, RingWriter, State

BOUND_S = 20.0  # no wait of these tests is longer


class Child:
    """A forked process. `body(say)` runs in it; `say(text)` sends what `line()` reads here."""

    def __init__(self, body: Callable[[Callable[[str], None]], None]) -> None:
        self._inbox, outbox = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._inbox)
            try:
                body(lambda text: os.write(outbox, f"{text}\n".encode()) and None)
            except BaseException:
                traceback.print_exc(file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        os.close(outbox)
        self._text = b""
        self._status: int | None = None

    def line(self) -> str:
        limit = time.monotonic() + BOUND_S
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._inbox], [], [], max(0.0, limit - time.monotonic()))
            more = os.read(self._inbox, 65536) if ready else b""
            assert more, f"child {self.pid} said nothing more; so far {self._text!r}"
            self._text += more
        first, _, self._text = self._text.partition(b"\n")
        return first.decode()

    def wait(self) -> int:
        """Its exit status; minus the signal's number where one ended it."""
        if self._status is None:
            limit = time.monotonic() + BOUND_S
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    break
                assert time.monotonic() < limit, f"child {self.pid} still runs"
                select.select([], [], [], 0.002)
            self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def close(self) -> None:
        if self._status is None:
            self.kill()
        os.close(self._inbox)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[Callable[[str], None]], None]], Child]]:
    made: list[Child] = []

    def start(body: Callable[[Callable[[str], None]], None]) -> Child:
        made.append(Child(body))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def ring(folder: Path) -> Iterator[Callable[..., RingWriter]]:
    """Makes writers in `folder`, in state SERVING."""
    made: list[RingWriter] = []

    def make(cls: type[RingWriter] = RingWriter, **changes: Any) -> RingWriter:
        settings: dict[str, Any] = {
            "run": "run", "dp_rank": 0, "dp_size": 1, "replicas": 1, "layout": "thd",
            "data_bytes": 4096, "records": 8,
        }  # fmt: skip
        writer = cls.create(folder, **(settings | changes))
        writer.set_state(State.SERVING)
        made.append(writer)
        return writer

    yield make
    for writer in made:
        writer.close(unlink=True)


@pytest.fixture
def put() -> Callable[..., int | None]:
    """Publishes `content` as one step of one microbatch; None where there is no room."""

    def publish(
        writer: RingWriter, content: bytes, step: int = 0, index: int = 0, count: int = 1
    ) -> int | None:
        record = writer.reserve(len(content))
        if record is None:
            return None
        record[:] = content
        return writer.publish(
            kind=Kind.DATA, step=step, index=index, count=count, length=len(content), meta_offset=0
        )

    return publish
