"""`headrace demo` as a whole: real processes, a real folder on tmpfs, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BOUND_S = 120.0


@pytest.fixture
def queue_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="headrace-test-demo-") as name:
        yield Path(name)


class Demo:
    """A demo in a session of its own, as a terminal would start it."""

    def __init__(self, queue_dir: Path, out: Path, *flags: object) -> None:
        self.queue_dir, self.output = queue_dir, ""
        command = [sys.executable, "-m", "headrace.service", "demo", "--out", out, *flags]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | {"HEADRACE_QUEUE__DIR": str(queue_dir)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.folder = queue_dir / f"demo-{self.process.pid}"
        self.family: set[int] = set()

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def until(self, condition: Callable[[], object]) -> None:
        """Read its output, and note its children, until the condition holds."""
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, self.output
            self._read()
            self.family |= children(self.process.pid)

    def ends(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        while self._read():
            pass
        return self.process.wait()

    def left_behind(self) -> list[str]:
        """Files in the queue folder and live processes of this demo."""
        return [str(p) for p in self.queue_dir.rglob("*")] + [
            f"process {pid}" for pid in self.family if alive(pid)
        ]

    def _read(self) -> bool:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], 0.02)[0]:
            return False
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        self.output += chunk.decode()
        return bool(chunk)


def children(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return set()


def alive(pid: int) -> bool:
    """Running, not a zombie that its new parent has not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def named(demo: Demo, module: str) -> int:
    """The pid of the demo's child that runs `module`."""
    for pid in demo.family:
        if alive(pid) and module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no {module} among {demo.family}")


def test_after_kill_9_of_everything_the_next_demo_cleans_up_and_learns(
    queue_dir: Path, tmp_path: Path
) -> None:
    with Demo(queue_dir, tmp_path, "--layout", "padded") as dead:
        dead.until(lambda: "step 1/" in dead.output)
        dead.process.kill()
        dead.process.wait()
        assert len(dead.family) >= 4
        dead.until(lambda: not any(map(alive, dead.family)))
        assert dead.folder.exists()

    with Demo(queue_dir, tmp_path, "--steps", 3, "--seed", 1) as demo:
        demo.until(lambda: demo.folder.exists())
        assert not dead.folder.exists()
        assert demo.ends() == 0, demo.output
        assert demo.left_behind() == []
    assert "step 3/3" in demo.output
    assert "they balance" in demo.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("moment", ["folder", "service", "step"])
def test_ctrl_c_ends_all_and_leaves_nothing(queue_dir: Path, tmp_path: Path, moment: str) -> None:
    with Demo(queue_dir, tmp_path) as demo:
        demo.until(
            {
                "folder": lambda: demo.folder.exists(),
                "service": lambda: (demo.folder / "trainer.log").exists(),
                "step": lambda: "step 1/" in demo.output,
            }[moment]
        )
        os.killpg(demo.process.pid, signal.SIGINT)  # as the terminal does
        assert demo.ends() == 130, demo.output
        assert demo.left_behind() == []
    assert "Traceback" not in demo.output


@pytest.mark.soak
@pytest.mark.parametrize("draw", range(20))
def test_ctrl_c_at_any_moment(queue_dir: Path, tmp_path: Path, draw: int) -> None:
    with Demo(queue_dir, tmp_path, "--steps", 8) as demo:
        demo.until(lambda: demo.folder.exists())
        at = time.monotonic() + random.Random(draw).uniform(0, 15)
        demo.until(lambda: time.monotonic() > at or demo.process.poll() is not None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.process.pid, signal.SIGINT)
        assert demo.ends() in (130, 0), demo.output
        assert demo.left_behind() == []
    assert "Traceback" not in demo.output


def test_kill_9_of_the_service_ends_the_demo_with_an_error(queue_dir: Path, tmp_path: Path) -> None:
    with Demo(queue_dir, tmp_path) as demo:
        demo.until(lambda: "step 1/" in demo.output)
        os.kill(named(demo, "headrace.service"), signal.SIGKILL)
        assert demo.ends() == 1, demo.output
        assert demo.left_behind() == []
    assert "the service was killed by SIGKILL" in demo.output
