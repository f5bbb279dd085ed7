"""The demo's child processes: they never outlive the demo, and they never die unseen.

- Each is in a process group of its own: Ctrl-C reaches the demo alone, which then ends them.
- Each asks the kernel to be killed when the demo dies, so `kill -9` of the demo ends them too.
- Each holds the demo's lock through an inherited descriptor (workplace.py).
- stderr goes to `{folder}/{name}.log`; its end is part of the error when a process dies.

All waiting is in ticks, and `on_tick` is called at each: that is where the demo looks for signals
and keeps its clock going. There are no threads. Called by `demo.main` alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.schemas.errors import HeadraceError

__all__ = ["Child", "Crew", "DemoError"]

TICK_S = 0.1
STOP_S = 30.0  # for an orderly end; the service may take 20 for open posts
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class DemoError(HeadraceError):
    """The demo cannot go on; the message is for people."""

    code = "demo"


class Child:
    """One process, its name, and where its stderr goes."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "".join(f"\n    {line}" for line in lines)

    def look(self) -> None:
        """DemoError if it has ended in error."""
        status = self.process.poll()
        if status:
            killed = status < 0
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if killed
                else f"ended with {status}"
            )
            raise DemoError(f"the {self.name} {how}{self.last_words()}")


class Crew:
    """All of them. Leaving the block kills whoever still runs, and waits until they are gone."""

    def __init__(self, folder: Path, lock: int, on_tick: Callable[[], None]) -> None:
        self._folder, self._lock, self._on_tick = folder, lock, on_tick
        self._children: list[Child] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()

    def start(self, name: str, module: str, *arguments: object) -> Child:
        """`python -m module arguments...`, one thread for arithmetic, no HEADRACE_ settings."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        log = self._folder / f"{name}.log"
        parent = os.getpid()

        def in_child() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=self._folder,  # no headrace.toml of the user's is found here
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=(self._lock,),
                process_group=0,
                preexec_fn=in_child,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def look(self) -> None:
        """DemoError if one of them has ended in error; the first that was started is named."""
        for child in self._children:
            child.look()

    def lines(self, child: Child, within_s: float) -> Iterator[str]:
        """The lines of its stdout, to the end. DemoError if a child dies or none comes in time."""
        assert child.process.stdout is not None
        pipe, rest = child.process.stdout.fileno(), b""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            self._tick()
            if not select.select([pipe], [], [], TICK_S)[0]:
                continue
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode()
                deadline = time.monotonic() + within_s
        raise DemoError(f"the {child.name} said nothing for {within_s:.0f} s{child.last_words()}")

    def finish(self, *children: Child) -> None:
        """Wait until they have ended with status 0. DemoError for another status, or after 30 s."""
        deadline = time.monotonic() + STOP_S
        for child in children:
            while child.process.poll() is None:
                if time.monotonic() > deadline:
                    raise DemoError(f"the {child.name} did not end within {STOP_S:.0f} s")
                self._tick()
                time.sleep(TICK_S / 4)
            child.look()

    def stop(self, *children: Child) -> None:
        """SIGTERM, then `finish`."""
        for child in children:
            child.process.terminate()
        self.finish(*children)

    def _tick(self) -> None:
        self._on_tick()
        self.look()
