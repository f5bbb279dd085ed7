"""The demo's folder: made, held, removed, swept after a death. Other demos are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.demo.workplace import workplace
from headrace.schemas.errors import SettingsError

HOLD = """
import sys
from pathlib import Path
from headrace.demo.workplace import workplace
with workplace(Path(sys.argv[1])) as (folder, lock):
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(queue_dir: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process with a folder of its own, until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(queue_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def test_it_is_there_and_then_gone(tmp_path: Path) -> None:
    queue_dir = tmp_path / "queue"
    with workplace(queue_dir) as (folder, _):
        assert folder == queue_dir / f"demo-{os.getpid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert queue_dir.stat().st_mode & 0o777 == 0o700
        (folder / "weights").mkdir()
        (folder / "weights" / "0.safetensors").touch()
    assert not queue_dir.exists()


def test_a_folder_of_the_user_stays(tmp_path: Path) -> None:
    with workplace(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), workplace(tmp_path) as (folder, _):
        raise KeyError
    assert not folder.exists()


def test_a_dead_demo_is_swept_and_a_live_one_is_not(tmp_path: Path) -> None:
    dead, dead_folder = holder(tmp_path)
    live, live_folder = holder(tmp_path)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait(10)
        assert dead_folder.exists()
        with workplace(tmp_path):
            assert not dead_folder.exists()
            assert live_folder.exists()
    finally:
        end(dead)
        end(live)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_lock_is_of_a_dead_demo(tmp_path: Path) -> None:
    (tmp_path / "demo-1").mkdir()
    with workplace(tmp_path):
        assert not (tmp_path / "demo-1").exists()


def test_the_lock_is_held_while_a_child_of_the_demo_lives(tmp_path: Path) -> None:
    script = HOLD.replace(
        "    sys.stdin.read()",
        "    import os, subprocess\n"
        "    subprocess.Popen(['sleep', '60'], pass_fds=(lock,), stdin=0, stdout=2).pid\n"
        "    os.kill(os.getpid(), 9)",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.wait(10)
    try:
        with workplace(tmp_path):
            assert folder.exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_names_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["demo-1.0.ring", "demo-1.spool", "demo-x", "default.0.ring"]
    for name in others:
        (tmp_path / name).mkdir()
    with workplace(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="no write for others"), workplace(tmp_path):
        pass
