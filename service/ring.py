"""The writing end of the shared-memory queue: allocates, publishes, and reads what the readers say.

Owns one ring file, its writer lock and the words of the header. The feeder fills a reserved record
in place and publishes it; the pump reads `readers()`. One thread at a time.

    reserve(n) ──► fill ──► publish()          head: virtual offset of the next record, only grows
                                               tail: virtual offset of the oldest record not
                                               released by all
    data   |▒▒▒ record 7 ▒▒▒|   free   |▒▒▒ record 5 ▒▒▒|▒▒▒ record 6 ▒▒▒| skipped |
                            head       tail

Invariants:
1. `published` is stored last, by one aligned move behind a fence: what dies before it was never
   there.
2. A byte is written only when every declared replica, attached or not, has released it.
3. Nothing here waits: `reserve` answers None, and the caller turns to its other work.
4. What readers wrote is checked each time it is read; RingCorrupt says which word, and the caller
   gives up that ring.
5. The file keeps its size; `close` unlinks it only under its own lock and when all reader locks are
   free.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.schemas import futex
from headrace.schemas.errors import RecordTooLarge, RingCorrupt, RingError
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
    RELEASED,
    RESUME_REQUEST,
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
    Leftover,
    find_leftovers,
    is_named,
    prepare_directory,
    remove_leftover,
)
from headrace.schemas.ring_header import MESSAGE, MESSAGE_BYTES, Geometry
from headrace.schemas.tensors import aligned
from headrace.service.ring_create import RingFile, make_ring_file

__all__ = [
    "Kind",
    "Leftover",
    "ReaderWords",
    "RingWriter",
    "State",
    "find_leftovers",
    "prepare_directory",
    "remove_leftover",
]

POISON = b"\xa5"  # what released bytes become under queue.debug
MESSAGE_TRIES = 3  # a message that changes each time is read at the next look
_VERSION_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderWords:
    """What reader `replica` says, checked. A step or version is None until it has said one."""

    replica: int
    attached: bool  # a live process holds its lock
    released: int  # every record below this may be overwritten
    finished_step: int | None
    committed_step: int | None
    policy_version: int | None
    attach_epoch: int  # how often this line was taken
    resume_request: int  # as stored: 0 nothing, k + 2, all ones "committed"
    generation_seen: int
    message: dict[str, Any] | None  # the last one that could be read whole


class RingWriter:
    """Made by `create`. `capacity` is the size of the data region in bytes."""

    def __init__(self, made: RingFile, geometry: Geometry) -> None:
        self._directory, self._mapping, self._lock = made.directory, made.mapping, made.lock
        self.path, self.geometry, self.capacity = made.path, geometry, geometry.data_bytes
        self._bytes = memoryview(made.mapping)
        self._words = self._bytes.cast("Q")
        self._data = self._bytes[geometry.data_offset : geometry.data_offset + geometry.data_bytes]
        self._address = futex.address_of(made.mapping, 8 * PUBLISHED)
        self._notice = self._area(8 * NOTICE_SEQ, NOTICE, NOTICE_BYTES)
        self._lines = [geometry.line(r) // 8 for r in range(geometry.replicas)]
        self._messages = [
            self._area(8 * (at + MESSAGE_SEQ), 8 * at + MESSAGE, MESSAGE_BYTES)
            for at in self._lines
        ]
        self._heard: list[dict[str, Any] | None] = [None] * geometry.replicas
        self._seen = [self._words[at + RELEASED] for at in self._lines]
        self._said: list[tuple[int, int, int]] = [(0, 0, 0)] * geometry.replicas
        self._published: int = self._words[PUBLISHED]
        self._freed = self._published
        self._starts: deque[tuple[int, int]] = deque()  # virtual offset, bytes; not yet freed
        self._head = self._tail = 0
        self._last_step: int | None = None
        self._reserved: tuple[int, int] | None = None  # virtual offset, bytes
        self._bytes_published = 0

    def _area(self, sequence: int, offset: int, size: int) -> GuardedArea:
        return GuardedArea(
            self._bytes, self._words, sequence=sequence // 8, offset=offset, size=size
        )

    @classmethod
    def create(
        cls, directory: Path, *, run: str, dp_rank: int, dp_size: int, replicas: int,
        layout: str, release: str = "step", data_bytes: int, records: int, mode: int = 0o600,
        prefault: bool = True, debug: bool = False, first_sequence: int = 0,
    ) -> RingWriter:  # fmt: skip
        """Make the ring, whole and locked before it has a name. State STARTING.

        `data_bytes` is rounded up to pages. `first_sequence`: the number of the first record.
        Raises RingNoSpace, RingBusy (a live process has this ring), LeftoverFound (a dead one left
        it).
        """
        geometry = Geometry.plan(
            replicas=replicas, records=records, data_bytes=data_bytes, dp_rank=dp_rank,
            dp_size=dp_size, debug=int(debug), kinds={}, streams={},
            run=run, layout=layout, release=release,
        )  # fmt: skip
        made = make_ring_file(
            directory, geometry, mode=mode, prefault=prefault, first_sequence=first_sequence
        )
        return cls(made, geometry)

    # room

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether records of these many bytes, in this order, all fit now, slots and skips too."""
        self._free()
        if len(self._starts) + len(lengths) > self.geometry.records:
            return False
        head, tail = self._head, self._starts[0][0] if self._starts else None
        for nbytes in lengths:
            start = self._place(head, nbytes)
            tail = start if tail is None else tail
            head = start + aligned(nbytes)
            if head - tail > self.capacity:
                return False
        return True

    def can_ever_fit(self, lengths: Sequence[int]) -> bool:
        """Whether they fit together in an empty ring, wherever its head stands.

        At worst the longest record after the first misses the end of the data by 64 bytes and skips
        all but those.
        """
        sizes = [aligned(nbytes) for nbytes in lengths]
        skipped = max((size - aligned(1) for size in sizes[1:] if size), default=0)
        return len(sizes) <= self.geometry.records and sum(sizes) + skipped <= self.capacity

    def reserve(self, nbytes: int) -> memoryview | None:
        """The bytes of the next record, or None: no room yet. A second call before `publish`
        replaces the first.

        Raises RecordTooLarge where no ring of this size can hold it.
        """
        if aligned(nbytes) > self.capacity:
            raise RecordTooLarge(
                f"{self.path.name}: a record of {nbytes} bytes, want at most {self.capacity}: "
                "raise queue.bytes, or lower planner.microbatch_tokens"
            )
        if not self.fits([nbytes]):
            return None
        start = self._place(self._head, nbytes)
        self._reserved = (start, nbytes)
        at = start % self.capacity
        return self._data[at : at + nbytes]

    def publish(
        self, *, kind: Kind, step: int | None, index: int, count: int, length: int, meta_offset: int
    ) -> int:
        """Hand the reserved record to the readers; its sequence. RingError: none is reserved."""
        if self._reserved is None or length > self._reserved[1]:
            have = "nothing" if self._reserved is None else f"{self._reserved[1]} bytes"
            raise RingError(f"{self.path.name}: publish of {length} bytes, {have} reserved")
        if not self._lock.alive:
            raise RingError(
                f"{self.path.name}: no writer lock here: it is closed, or this is a forked child"
            )
        (start, _), self._reserved = self._reserved, None
        at = start % self.capacity
        checksum = zlib.crc32(self._data[at : at + length]) if self.geometry.debug else 0
        sequence = self._published
        self._write_descriptor(
            Descriptor(
                sequence=sequence, offset=start, length=length, kind=kind,
                generation=self._words[GENERATION], step=step, index=index, count=count,
                meta_offset=meta_offset, checksum=checksum,
            )
        )  # fmt: skip
        self._store_published(sequence + 1)
        self._wake()
        self._tail = self._tail if self._starts else start
        self._starts.append((start, length))
        self._head = start + aligned(length)
        self._last_step = self._last_step if step is None else step
        self._bytes_published += length
        return sequence

    def _write_descriptor(self, descriptor: Descriptor) -> None:
        descriptor.write(self._words, self.geometry)

    def _store_published(self, published: int) -> None:
        fence()
        self._words[PUBLISHED] = published
        self._published = published

    def _wake(self) -> None:
        futex.wake(self._address)

    def _place(self, head: int, nbytes: int) -> int:
        """Where a record goes that may not wrap."""
        left = self.capacity - head % self.capacity
        return head + left if aligned(nbytes) > left else head

    def _free(self) -> None:
        """Forget the records that every reader has released."""
        least = min(self._released(replica) for replica in range(self.geometry.replicas))
        while self._freed < least:
            start, length = self._starts.popleft()
            self._freed += 1
            if self.geometry.debug:
                at = start % self.capacity
                self._data[at : at + length] = POISON * length
        self._tail = self._starts[0][0] if self._starts else self._head

    # what readers say

    def readers(self) -> tuple[ReaderWords, ...]:
        """One entry a declared replica. Raises RingCorrupt naming the word that cannot be."""
        found = tuple(self._reader(replica) for replica in range(self.geometry.replicas))
        self._free()
        return found

    def _released(self, replica: int) -> int:
        released: int = self._words[self._lines[replica] + RELEASED]
        before = self._seen[replica]
        if released != before:
            fence()
            if not before <= released <= self._published:
                raise RingCorrupt(
                    f"{self.path.name}, reader {replica}, released: got {released}, "
                    f"want {before} .. {self._published}"
                )
            self._seen[replica] = released
        return released

    def _reader(self, replica: int) -> ReaderWords:
        at = self._lines[replica]
        released = self._released(replica)
        words = (self._words[at + FINISHED], self._words[at + COMMITTED], self._words[at + VERSION])
        fence()
        limits = (to_word(self._last_step), to_word(self._last_step), _VERSION_LIMIT)
        names = ("finished_step", "committed_step", "policy_version")
        for name, word, before, limit in zip(
            names, words, self._said[replica], limits, strict=True
        ):
            if not before <= word <= max(limit, before):
                raise RingCorrupt(
                    f"{self.path.name}, reader {replica}, {name}: got {from_word(word)}, "
                    f"want {from_word(before)} .. {from_word(limit)}"
                )
        self._said[replica] = words
        for _ in range(MESSAGE_TRIES):
            _, message = self._messages[replica].read()
            if message is not None:
                self._heard[replica] = message
                break
        return ReaderWords(
            replica=replica,
            attached=self._lock.held_elsewhere(8 * at),
            released=released,
            finished_step=from_word(words[0]),
            committed_step=from_word(words[1]),
            policy_version=from_word(words[2]),
            attach_epoch=self._words[at + ATTACH_EPOCH],
            resume_request=self._words[at + RESUME_REQUEST],
            generation_seen=self._words[at + GENERATION_SEEN],
            message=self._heard[replica],
        )

    # what the writer says

    def set_state(self, state: State) -> None:
        """Go along one arrow of State; ValueError where there is none. Wakes the readers."""
        now = State(self._words[STATE])
        if not now.may_become(state):
            raise ValueError(f"{self.path.name}, state: {now.name} cannot become {state.name}")
        fence()
        self._words[STATE] = state
        self._wake()

    def set_committed(self, step: int | None) -> None:
        """The least step that every rank has committed."""
        self._words[HEADER_COMMITTED] = to_word(step)

    def notify(self, fields: Mapping[str, Any]) -> None:
        """Leave `code` and fields of an error for the readers. ValueError over 2,040 bytes."""
        self._notice.write(fields)
        self._wake()

    def statistics(self) -> dict[str, Any]:
        """Counts of records and bytes, from any thread; `used_bytes` includes skipped tails."""
        return {
            "published": self._published,
            "released": self._freed,
            "held_records": self._published - self._freed,
            "records": self.geometry.records,
            "used_bytes": self._head - self._tail,
            "capacity_bytes": self.capacity,
            "bytes_published": self._bytes_published,
            "state": State(self._words[STATE]).name,
        }

    def close(self, *, unlink: bool) -> bool:
        """Give the ring up. True: the file is gone; else a reader holds it or it was to stay."""
        if not self._lock.alive:
            return False
        lines = self.geometry.replicas * self.geometry.line_bytes
        gone = (
            unlink
            and self._lock.try_lock(self.geometry.lines_offset, lines)
            and is_named(self._lock.fileno(), self.path.name, self._directory)
        )
        if gone:
            os.unlink(self.path.name, dir_fd=self._directory)
        self._lock.close()
        os.close(self._directory)
        release_mapping(self._mapping, self._data, self._words, self._bytes)
        return gone
