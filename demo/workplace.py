"""The demo's own folder on tmpfs, and the promise that nothing of it stays.

    {queue.dir}/            made with mode 0700 if missing; removed by the demo that leaves it empty
        demo-{pid}/
            lock            held by the demo and, by an inherited descriptor, by its processes
            demo.0.ring     the service's ring and spool
            demo.spool/
            weights/        the trainer's files
            *.log           what each process says on stderr

The lock is free when every process of that demo has ended, however it ended: then, and only then,
another demo may remove the folder. Leftovers are looked for and a folder is made under a lock on
the queue folder itself, so no demo sees another's folder between its creation and its lock.

`workplace` is called by `demo.main` alone. It touches nothing that is not named `demo-{digits}`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.schemas.errors import SettingsError

__all__ = ["default_queue_dir", "workplace"]


def default_queue_dir() -> Path:
    """The folder that service and trainers use where nobody says otherwise."""
    return Path(os.environ.get("HEADRACE_QUEUE__DIR") or f"/dev/shm/headrace-{os.getuid()}")


@contextlib.contextmanager
def workplace(queue_dir: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, descriptor of its lock, for children to inherit), and remove the folder.

    The children must have ended by then. Leftovers of dead demos are removed first.
    """
    queue_dir = queue_dir.absolute()
    ours = not queue_dir.exists() or queue_dir == default_queue_dir()
    with _locked(queue_dir):
        for entry in queue_dir.iterdir():
            if re.fullmatch(r"demo-\d+", entry.name):
                _remove_if_free(entry)
        folder = queue_dir / f"demo-{os.getpid()}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError as error:
            raise SettingsError(
                f"{folder} belongs to a demo that still runs, in another pid namespace: "
                "set HEADRACE_QUEUE__DIR to another folder"
            ) from error
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder, lock
    finally:
        shutil.rmtree(folder)
        os.close(lock)
        if ours:
            with contextlib.suppress(OSError), _locked(queue_dir):
                queue_dir.rmdir()  # refused where it is not empty


@contextlib.contextmanager
def _locked(queue_dir: Path) -> Iterator[None]:
    """Hold the queue folder's lock; made if missing, refused where others can write to it."""
    descriptor = _open_folder(queue_dir)
    try:
        there = os.fstat(descriptor)
        if there.st_uid != os.getuid() or there.st_mode & 0o002:
            raise SettingsError(
                f"{queue_dir}: got uid {there.st_uid} and mode {there.st_mode & 0o777:o}, "
                f"want uid {os.getuid()} and no write for others: set HEADRACE_QUEUE__DIR"
            )
        yield
    finally:
        os.close(descriptor)


def _open_folder(queue_dir: Path) -> int:
    """Its descriptor, locked. Made again where a demo that left it empty removes it meanwhile."""
    while True:
        queue_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(queue_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0:
            return descriptor
        os.close(descriptor)


def _remove_if_free(folder: Path) -> None:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # its demo died before it made one
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
