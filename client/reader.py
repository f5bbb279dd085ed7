"""The reading end of the shared-memory queue: attach, take records in order, give them back.

Owns one reader lock and the words of one reader line; writes nothing else in the file. Trainer
calls it, one thread at a time.

    released ≤ cursor ≤ published      released: everything below may be overwritten
                                       cursor: what `next` hands out; starts at released

Invariants:
1. A record's bytes are valid from `next` until `release` passes its sequence; nothing here copies
   them.
2. `released` and the step and version words never decrease; the message stands before the version
   that announces it.
3. Records left unreleased, by a crash or on purpose, come again in the same order after the next
   attach.
4. A word or descriptor that cannot be raises RingCorrupt; nothing is skipped over.
5. `close` leaves the mapping where a view of it lives. A forked child holds no lock and may not
   write.

Waiting is a brief spin, then a futex on the low half of `published`, at most 250 ms at a time: a
writer that died before its wake delays a record by that and no more.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.schemas import futex
from headrace.schemas.errors import (
    RingBusy,
    RingCorrupt,
    RingError,
    ServiceGone,
    TopologyMismatch,
)
from headrace.schemas.locks import RangeLock
from headrace.schemas.ring import (
    ATTACH_EPOCH,
    COMMITTED,
    FINISHED,
    GENERATION,
    GENERATION_SEEN,
    HEADER_COMMITTED,
    MESSAGE_SEQ,
    NOTICE,
    NOTICE_BYTES,
    NOTICE_SEQ,
    PUBLISHED,
    READER_PID,
    RELEASED,
    STATE,
    VERSION,
    Descriptor,
    GuardedArea,
    Kind,
    State,
    fence,
    from_word,
    release_mapping,
    to_word,
)
from headrace.schemas.ring_files import (
    WRITER_LOCK,
    holders,
    is_named,
    open_directory,
    open_ring,
    ring_name,
)
from headrace.schemas.ring_header import MESSAGE, MESSAGE_BYTES, Geometry

__all__ = ["Record", "RingReader"]

WAIT_CAP_S = 0.25
SPIN_S = 0.0001
_ATTACH_POLL_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record, valid until it is released. `payload` is its bytes in the ring."""

    sequence: int
    kind: Kind
    generation: int
    step: int | None
    index: int  # 0 .. count-1
    count: int  # records of this step in this ring
    meta_offset: int  # bytes
    checksum: int  # 0 where the ring has none
    payload: memoryview


class RingReader:
    """Made by `attach`. `geometry` is what the header says."""

    def __init__(
        self, *, path: Path, mapping: mmap.mmap, lock: RangeLock, geometry: Geometry, replica: int
    ) -> None:
        self.path, self.geometry, self.replica = path, geometry, replica
        self._mapping, self._lock = mapping, lock
        self._bytes = memoryview(mapping)
        self._words = self._bytes.cast("Q")
        self._data = self._bytes[geometry.data_offset : geometry.data_offset + geometry.data_bytes]
        self._address = futex.address_of(mapping, 8 * PUBLISHED)
        self._poll = False
        at = geometry.line(replica)
        self._line = at // 8
        self._message = self._area(self._line + MESSAGE_SEQ, at + MESSAGE, MESSAGE_BYTES)
        self._notice = self._area(NOTICE_SEQ, NOTICE, NOTICE_BYTES)
        self._held: dict[int, Record] = {}
        self.damaged = 0  # records whose bytes changed while they were leased (queue.debug)
        self.released: int = self._words[self._line + RELEASED]
        self.cursor = self.released
        self._published = self.released
        self._load_published()
        self._words[self._line + READER_PID] = os.getpid()
        self._words[self._line + ATTACH_EPOCH] += 1
        self._words[self._line + GENERATION_SEEN] = self._words[GENERATION]

    def _area(self, sequence: int, offset: int, size: int) -> GuardedArea:
        return GuardedArea(self._bytes, self._words, sequence=sequence, offset=offset, size=size)

    @classmethod
    def attach(
        cls,
        directory: Path,
        run: str,
        dp_rank: int,
        replica: int = 0,
        *,
        dp_size: int | None = None,
        replicas: int | None = None,
        timeout_s: float = 600.0,
    ) -> RingReader:
        """Take line `replica` of the ring, waiting up to `timeout_s` for the ring to appear.

        Raises ServiceGone where none appears, RingBusy where another process reads this line,
        TopologyMismatch where `dp_size` or `replicas` are given and the ring has others,
        RingForeign where the file is not a ring of ours.
        """
        limit = time.monotonic() + timeout_s
        while True:
            found = cls._try_attach(directory, run, dp_rank, replica, dp_size, replicas)
            if found is not None:
                return found
            left = limit - time.monotonic()
            if left <= 0:
                raise ServiceGone(
                    f"no ring {directory / ring_name(run, dp_rank)} within {timeout_s:g} s: start "
                    "`headrace serve` with this run.name and queue.dir, or name its folder by "
                    "HEADRACE_QUEUE__DIR"
                )
            time.sleep(min(left, _ATTACH_POLL_S))

    @classmethod
    def _try_attach(
        cls,
        directory: Path,
        run: str,
        dp_rank: int,
        replica: int,
        dp_size: int | None,
        replicas: int | None,
    ) -> RingReader | None:
        try:
            folder = open_directory(directory)
        except FileNotFoundError:
            return None
        descriptor, lock = -1, None
        name = ring_name(run, dp_rank)
        try:
            descriptor, geometry = open_ring(name, folder)
            _check_topology(geometry, dp_rank, replica, dp_size, replicas)
            lock = RangeLock.beside(descriptor)
            if not lock.try_lock(geometry.line(replica)):
                who = ", ".join(holders(lock, geometry))
                raise RingBusy(f"{directory / name}: reader {replica} is taken; on it: {who}")
            if not is_named(descriptor, name, folder):  # removed between open and lock
                lock.close()
                return None
            mapping = mmap.mmap(
                descriptor, geometry.file_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
            return cls(
                path=directory / name,
                mapping=mapping,
                lock=lock,
                geometry=geometry,
                replica=replica,
            )
        except FileNotFoundError:
            _check_siblings(folder, run, dp_rank, dp_size)
            return None
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            os.close(folder)

    # records

    def next(self, timeout_s: float = 0.0) -> Record | None:
        """The next record, waiting up to `timeout_s`; None where none came; at once when ENDED."""
        limit = time.monotonic() + timeout_s
        while True:
            ended = self.state is State.ENDED  # before `published`: nothing comes after it
            if self.cursor < self._load_published():
                break
            left = limit - time.monotonic()
            if ended or left <= 0:
                return None
            self._wait(min(left, WAIT_CAP_S))
        descriptor = Descriptor.read(self._words, self.geometry, self.cursor)
        at = descriptor.offset % self.geometry.data_bytes
        payload = self._data[at : at + descriptor.length]
        if descriptor.checksum and zlib.crc32(payload) != descriptor.checksum:
            raise RingCorrupt(
                f"{self.path.name}, record {self.cursor}: checksum differs from the one published: "
                "written to in place by a reader, or by another process"
            )
        record = Record(
            sequence=descriptor.sequence,
            kind=descriptor.kind,
            generation=descriptor.generation,
            step=descriptor.step,
            index=descriptor.index,
            count=descriptor.count,
            meta_offset=descriptor.meta_offset,
            checksum=descriptor.checksum,
            payload=payload,
        )
        if descriptor.checksum:
            self._held[self.cursor] = record
        self.cursor += 1
        return record

    def release(self, upto: int) -> None:
        """Give back every record below `upto`: their bytes may change at once. Never goes back."""
        if upto <= self.released:
            return
        if upto > self.cursor:
            raise RingError(
                f"{self.path.name}: release up to {upto}, want at most {self.cursor}: not yet read"
            )
        self._may_write()
        for sequence in [s for s in self._held if s < upto]:
            self._verify(self._held.pop(sequence))
        fence()
        self._words[self._line + RELEASED] = upto
        self.released = upto

    def _verify(self, record: Record) -> None:
        if zlib.crc32(record.payload) != record.checksum:
            self.damaged += 1
            log.error(
                "%s, record %d (step %s, microbatch %d): written to in place while it was leased; "
                "others read what was written: clone a tensor before changing it",
                self.path.name, record.sequence, record.step, record.index,
            )  # fmt: skip

    def _load_published(self) -> int:
        published: int = self._words[PUBLISHED]
        if published != self._published:
            fence()
            if not self._published <= published <= self.released + self.geometry.records:
                raise RingCorrupt(
                    f"{self.path.name}, published: got {published}, want {self._published} .. "
                    f"{self.released + self.geometry.records}"
                )
            self._published = published
        return published

    def _wait(self, timeout_s: float) -> None:
        spin = time.perf_counter() + SPIN_S
        while time.perf_counter() < spin:
            if self._words[PUBLISHED] != self._published:
                return
        futex.wait(self._address, self._published, timeout_s, poll=self._poll)

    # words

    @property
    def published(self) -> int:
        """The sequence that the next published record will have."""
        return self._load_published()

    @property
    def state(self) -> State:
        word = self._words[STATE]
        if word not in State.__members__.values():
            raise RingCorrupt(f"{self.path.name}, state: got {word}, want 0 .. {max(State)}")
        return State(word)

    @property
    def notice(self) -> dict[str, Any] | None:
        """What the writer last had to say, where it can be read whole."""
        return self._notice.read()[1]

    @property
    def committed_overall(self) -> int | None:
        """The least step that every rank has committed, by the writer."""
        return from_word(self._words[HEADER_COMMITTED])

    @property
    def finished_step(self) -> int | None:
        return from_word(self._words[self._line + FINISHED])

    @property
    def committed_step(self) -> int | None:
        return from_word(self._words[self._line + COMMITTED])

    @property
    def policy_version(self) -> int | None:
        return from_word(self._words[self._line + VERSION])

    @property
    def attach_epoch(self) -> int:
        """1 for the first process that ever took this line."""
        epoch: int = self._words[self._line + ATTACH_EPOCH]
        return epoch

    def finish(self, step: int) -> None:
        """This and every earlier step has been trained on."""
        self._raise_word(FINISHED, step)

    def commit(self, step: int) -> None:
        """This and every earlier step is in a checkpoint that survives."""
        self._raise_word(COMMITTED, step)

    def publish_policy_version(self, version: int, message: Mapping[str, Any]) -> None:
        """Leave `message`, then announce `version`. The same version again replaces its message.

        Raises ValueError where the version is below the one announced or the JSON exceeds 3,064
        bytes.
        """
        before = self.policy_version
        if version < 0 or (before is not None and version < before):
            raise ValueError(
                f"policy_version: got {version}, want {before or 0} or more: it never decreases"
            )
        self._may_write()
        self._message.write(message)
        fence()
        self._words[self._line + VERSION] = to_word(version)

    def _raise_word(self, word: int, step: int) -> None:
        self._may_write()
        if to_word(step) > self._words[self._line + word]:
            fence()
            self._words[self._line + word] = to_word(step)

    def _may_write(self) -> None:
        if not self._lock.alive:
            raise RingError(
                f"{self.path.name}: no lock of reader {self.replica} here: closed, or this is "
                "a forked child: attach in the process that trains"
            )

    def writer_alive(self) -> bool:
        """Whether a process holds the writer lock."""
        self._may_write()
        return self._lock.held_elsewhere(WRITER_LOCK)

    @property
    def attached(self) -> bool:
        return self._lock.alive

    def close(self) -> None:
        """Give up the line as it stands. Safe to call again; views stay readable."""
        if self._lock.alive:
            self._lock.close()
            self._held.clear()
            release_mapping(self._mapping, self._data, self._words, self._bytes)


def _check_topology(
    geometry: Geometry, dp_rank: int, replica: int, dp_size: int | None, replicas: int | None
) -> None:
    wanted = {
        "dp_rank": dp_rank,
        "dp_size": geometry.dp_size if dp_size is None else dp_size,
        "replicas": geometry.replicas if replicas is None else replicas,
    }
    for name, want in wanted.items():
        got = getattr(geometry, name)
        if got != want:
            raise TopologyMismatch(
                f"{name}: this trainer says {want}, the ring of run {geometry.run!r} {got}: "
                "start service and trainers with the same planner.dp_size and queue.replicas"
            )
    if not 0 <= replica < geometry.replicas:
        raise TopologyMismatch(
            f"replica: got {replica}, want 0 .. {geometry.replicas - 1}: raise queue.replicas"
        )


def _check_siblings(folder: int, run: str, dp_rank: int, dp_size: int | None) -> None:
    """Where rank 0's ring is there and knows no such rank, waiting for this one is in vain."""
    try:
        descriptor, geometry = open_ring(ring_name(run, 0), folder)
    except FileNotFoundError:
        return
    os.close(descriptor)
    if dp_rank >= geometry.dp_size or dp_size not in (None, geometry.dp_size):
        raise TopologyMismatch(
            f"dp_rank {dp_rank} of dp_size {dp_size}: run {run!r} has {geometry.dp_size} ranks: "
            "start service and trainers with the same planner.dp_size"
        )
