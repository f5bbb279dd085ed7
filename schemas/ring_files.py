"""Where rings live: the folder, the names, and who holds which byte.

    {queue.dir}/{run}.{dp_rank}.ring
                             byte 0: the writer's lock; first byte of line r: the lock of reader r

The uid is the trust boundary: the folder is a real one of our uid that others cannot write to,
opened once and used by its descriptor; a ring is a regular file of our uid, opened without
following links. What fails that is refused with RingForeign, never repaired.

Writer and reader call this; it makes the folder and removes leftovers, and writes to no ring.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import RingBusy, RingForeign
from headrace.schemas.locks import RangeLock
from headrace.schemas.ring import READER_PID, WRITER_PID
from headrace.schemas.ring_header import HEADER_BYTES, Geometry

__all__ = [
    "Leftover",
    "find_leftovers",
    "open_directory",
    "open_ring",
    "prepare_directory",
    "remove_leftover",
    "ring_name",
]

WRITER_LOCK = 0  # byte


def ring_name(run: str, dp_rank: int) -> str:
    return f"{run}.{dp_rank}.ring"


def prepare_directory(path: Path) -> int:
    """A descriptor of the folder `path`, made 0700 with its parents where it is missing."""
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            os.close(prepare_directory(path.parent))
            os.mkdir(path, 0o700)
    return open_directory(path)


def open_directory(path: Path) -> int:
    """A descriptor of the folder. FileNotFoundError: there is none; RingForeign: it is not ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RingForeign(
            f"queue.dir {path}: {error.strerror}: want a real folder, no link, of uid "
            f"{os.geteuid()}: remove it or name another folder"
        ) from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        os.close(descriptor)
        raise RingForeign(
            f"queue.dir {path}: got uid {found.st_uid} and mode {stat.filemode(found.st_mode)}, "
            f"want uid {os.geteuid()} and no write permission for others: service and trainer "
            "run as one user and share one folder"
        )
    return descriptor


def open_ring(name: str, directory: int) -> tuple[int, Geometry]:
    """(descriptor, geometry) of a ring of ours, else FileNotFoundError or RingForeign."""
    try:
        descriptor = os.open(
            name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory
        )
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RingForeign(
            f"{name}: {error.strerror}: want a regular file of uid {os.geteuid()}, no link"
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise RingForeign(
                f"{name}: got {stat.filemode(found.st_mode)} of uid {found.st_uid}, want a regular "
                f"file of uid {os.geteuid()}"
            )
        header = os.pread(descriptor, HEADER_BYTES, 0)
        return descriptor, Geometry.parse(header, file_bytes=found.st_size, name=name)
    except BaseException:
        os.close(descriptor)
        raise


def is_named(descriptor: int, name: str, directory: int) -> bool:
    """Whether `name` is still the file that `descriptor` has open."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def holders(lock: RangeLock, geometry: Geometry) -> tuple[str, ...]:
    """Who else holds a lock on the ring: "writer (pid 12)", "reader 0 (pid 13)"."""

    def pid(offset: int) -> str:
        return f"(pid {int.from_bytes(os.pread(lock.fileno(), 8, offset), 'little')})"

    found = [f"writer {pid(8 * WRITER_PID)}"] if lock.held_elsewhere(WRITER_LOCK) else []
    lines = ((r, geometry.line(r)) for r in range(geometry.replicas))
    return (
        *found,
        *(f"reader {r} {pid(at + 8 * READER_PID)}" for r, at in lines if lock.held_elsewhere(at)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file that carries the name of one of a run's rings, of this process or another."""

    path: Path
    dp_rank: int
    held: bool  # a live process, writer or reader, holds a lock on it
    holders: tuple[str, ...]  # empty where it is not held, or not a ring


def find_leftovers(directory: Path, run: str) -> list[Leftover]:
    """The run's ring files in `directory`, by rank; none where the folder does not exist."""
    try:
        descriptor = open_directory(directory)
    except FileNotFoundError:
        return []
    try:
        return sorted(_leftovers(directory, descriptor, run), key=lambda found: found.dp_rank)
    finally:
        os.close(descriptor)


def _leftovers(directory: Path, descriptor: int, run: str) -> Iterator[Leftover]:
    pattern = re.compile(re.escape(run) + r"\.(\d+)\.ring")
    for name in os.listdir(descriptor):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        held, who = False, tuple[str, ...]()
        with contextlib.suppress(OSError):  # a link or a folder: nobody's lock
            lock = RangeLock.open(name, dir_fd=descriptor)
            held = lock.held_elsewhere(0, 0)
            with contextlib.suppress(RingForeign, FileNotFoundError):
                ring, geometry = open_ring(name, descriptor)
                os.close(ring)
                who = holders(lock, geometry)
            lock.close()
        yield Leftover(path=directory / name, dp_rank=int(match[1]), held=held, holders=who)


def remove_leftover(leftover: Leftover) -> None:
    """Unlink it, under a lock on the whole file. RingBusy where somebody holds a part of it."""
    directory = open_directory(leftover.path.parent)
    name = leftover.path.name
    try:
        lock = RangeLock.open(name, dir_fd=directory)
    except FileNotFoundError:
        os.close(directory)
        return
    except OSError:  # a link: the link goes, not what it names
        os.unlink(name, dir_fd=directory)
        os.close(directory)
        return
    try:
        if not lock.try_lock(0, 0):
            who = ", ".join(leftover.holders) or "a live process"
            raise RingBusy(f"{leftover.path}: held by {who}: end it first")
        if is_named(lock.fileno(), name, directory):
            os.unlink(name, dir_fd=directory)
    finally:
        lock.close()
        os.close(directory)
