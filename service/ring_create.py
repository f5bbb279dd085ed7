"""Making a ring file so that nobody ever sees half of one.

    unnamed file in the folder ─► all pages taken ─► writer lock ─► header ─► name

`O_TMPFILE`, `posix_fallocate`, a lock through a descriptor of its own, the header, and `linkat` as
the last step. Of several creators exactly one gets the name; the others learn who holds it. What
dies earlier leaves no trace. Called by RingWriter.create only; it removes nothing.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import LeftoverFound, RingBusy, RingError, RingNoSpace
from headrace.schemas.locks import RangeLock
from headrace.schemas.ring import PUBLISHED, RELEASED, WRITER_PID
from headrace.schemas.ring_files import WRITER_LOCK, find_leftovers, prepare_directory, ring_name
from headrace.schemas.ring_header import Geometry

__all__ = ["RingFile", "make_ring_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingFile:
    """A ring that this process has just made: named, mapped, its writer lock held."""

    path: Path
    directory: int  # descriptor of the folder
    mapping: mmap.mmap
    lock: RangeLock


def make_ring_file(
    directory: Path, geometry: Geometry, *, mode: int, prefault: bool, first_sequence: int
) -> RingFile:
    """RingNoSpace; RingBusy: a live process has this ring; LeftoverFound: a dead one left it."""
    header = geometry.pack()
    folder = prepare_directory(directory)
    path = directory / ring_name(geometry.run, geometry.dp_rank)
    descriptor, lock = -1, None
    try:
        descriptor = _unnamed(folder, directory, mode)
        _allocate(descriptor, geometry.file_bytes, directory)
        lock = RangeLock.beside(descriptor)
        if not lock.try_lock(WRITER_LOCK):
            raise RingBusy(f"{path}: the lock of a file that has no name yet is held")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
        mapping = mmap.mmap(descriptor, geometry.file_bytes, flags=flags)
        mapping[: len(header)] = header
        with memoryview(mapping) as raw, raw.cast("Q") as words:
            words[PUBLISHED], words[WRITER_PID] = first_sequence, os.getpid()
            for replica in range(geometry.replicas):
                words[geometry.line(replica) // 8 + RELEASED] = first_sequence
        _name(descriptor, path, folder, geometry)
    except BaseException:
        if lock is not None:
            lock.close()
        os.close(folder)
        raise
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return RingFile(path=path, directory=folder, mapping=mapping, lock=lock)


def _unnamed(folder: int, directory: Path, mode: int) -> int:
    try:
        descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        raise RingError(
            f"queue.dir {directory}: {error.strerror}: want a tmpfs that holds unnamed files"
        ) from error
    os.fchmod(descriptor, mode)
    return descriptor


def _allocate(descriptor: int, nbytes: int, directory: Path) -> None:
    """Take every page now: a full tmpfs is otherwise a SIGBUS at the first touch."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        found = os.fstatvfs(descriptor)
        free = found.f_bavail * found.f_frsize
        raise RingNoSpace(
            f"queue.bytes: need {_mib(nbytes)}, free {_mib(free)} in {directory} "
            f"({error.strerror}): lower queue.bytes or enlarge the tmpfs; in Docker raise "
            "--shm-size; the memory limit must hold the rings too"
        ) from error


def _name(descriptor: int, path: Path, folder: int, geometry: Geometry) -> None:
    try:
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        found = next(
            (f for f in find_leftovers(path.parent, geometry.run) if f.path.name == path.name),
            None,
        )
        if found is not None and found.held:
            raise RingBusy(
                f"{path}: held by {', '.join(found.holders)}: end it, or choose another run.name"
            ) from None
        raise LeftoverFound(
            f"{path}: left by an earlier process and held by none: start with --discard"
        ) from None


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
