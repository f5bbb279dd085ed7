"""The byte layout of the shared-memory queue: a file a rank, one writer, `replicas` readers.

    header (4 KiB) | reader lines (4 KiB each) | descriptors (records x 128 B) | data, page-aligned

    header        0  magic, sizes, the run: fixed at creation (headrace.schemas.ring_header)
               1536  published
               1600  generation, state, committed_step, notice_seq, writer_pid
               2048  notice: length (u64), JSON
    line          0  released
                 64  finished_step, committed_step, policy_version, attach_epoch, resume_request,
                     generation_seen, message_seq, reader_pid
               1024  message: length (u64), JSON
    descriptor       seq+1, offset, length, kind, generation, step, index, count, meta_offset,
                     checksum, six zero words

Every word is a little-endian u64 at a multiple of 8 and has one writing process: the header's
belong to the holder of the writer lock, those of line r to the holder of reader lock r. A word is
loaded and stored by one aligned move (`memoryview.cast("Q")`; `struct.pack_into` tears). Step and
version words, the descriptor's step too, hold value + 1; 0 is unset. Pids are for messages only:
liveness is a lock (headrace.schemas.locks).

A record's `offset` is virtual and only grows; its place in the data is `offset % data_bytes`, and
it never wraps: where it would, the tail is skipped. `published` is the commit point: record s may
be read where `released <= s < published`.

Notice and message are written under a sequence that is odd while they change. `fence()` goes before
every store of `published`, `released` or an announcing word, and after loading one that has
changed.

Both sides call this; it opens no file, takes no lock, waits for nothing. Readers take every size
and offset from the header. Another major version is refused; another minor one may have words that
this one does not know.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from headrace.schemas.errors import RingCorrupt
from headrace.schemas.ring_header import Geometry
from headrace.schemas.tensors import ALIGNMENT

__all__ = [
    "Descriptor",
    "Geometry",
    "GuardedArea",
    "Kind",
    "State",
    "fence",
    "from_word",
    "release_mapping",
    "to_word",
]

NOTICE, NOTICE_BYTES = 2048, 2048

# word indices in the header
PUBLISHED = 1536 // 8
GENERATION, STATE, HEADER_COMMITTED, NOTICE_SEQ, WRITER_PID = range(1600 // 8, 1600 // 8 + 5)
# word indices in a reader line
RELEASED = 0
(
    FINISHED, COMMITTED, VERSION, ATTACH_EPOCH,
    RESUME_REQUEST, GENERATION_SEEN, MESSAGE_SEQ, READER_PID,
) = range(8, 16)  # fmt: skip


class Kind(IntEnum):
    """What a record is. 0 is a slot that was never written."""

    DATA = 1
    FILLER = 2  # a microbatch without loss, so that every rank has equally many
    RESET = 3  # a new generation starts after it
    END = 4  # nothing comes after it


class State(IntEnum):
    """What the writer is doing.

    STARTING -> SERVING -> DRAINING -> ENDED, SERVING <-> OVERDUE -> DRAINING,
    STARTING or SERVING -> REFUSED -> STARTING, any -> ENDED. Only a new writer leaves ENDED.
    """

    STARTING = 0
    SERVING = 1
    DRAINING = 2
    REFUSED = 3  # what the readers need cannot be had; the notice says why
    OVERDUE = 4  # delivered, uncommitted steps fill the retain budget
    ENDED = 5  # what is published is all there will be

    def may_become(self, other: State) -> bool:
        return other is self or other in _EDGES[self]


_EDGES = {
    State.STARTING: {State.SERVING, State.REFUSED, State.ENDED},
    State.SERVING: {State.DRAINING, State.OVERDUE, State.REFUSED, State.ENDED},
    State.OVERDUE: {State.SERVING, State.DRAINING, State.ENDED},
    State.DRAINING: {State.ENDED},
    State.REFUSED: {State.STARTING, State.ENDED},
    State.ENDED: set[State](),
}


def fence() -> None:
    """Order the loads and stores before it against those after it, on any CPU.

    Release and then acquire of a held lock: `with lock: pass` is no fence by the model of aarch64.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def to_word(value: int | None) -> int:
    return 0 if value is None else value + 1


def from_word(word: int) -> int | None:
    return None if word == 0 else word - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One record's entry. `offset` is virtual; `checksum` 0 where the ring is not in debug mode."""

    sequence: int
    offset: int
    length: int  # bytes
    kind: Kind
    generation: int
    step: int | None
    index: int  # 0 .. count-1 within the step of this rank
    count: int
    meta_offset: int  # bytes from the record's start
    checksum: int = 0

    def write(self, words: memoryview, geometry: Geometry) -> None:
        """Fill slot `sequence % records`; it is for readers only once `published` passes it."""
        at = _slot(geometry, self.sequence)
        values = (
            self.sequence + 1, self.offset, self.length, self.kind, self.generation,
            to_word(self.step), self.index, self.count, self.meta_offset, self.checksum,
        )  # fmt: skip
        for i, value in enumerate(values):
            words[at + i] = value
        for i in range(len(values), 16):
            words[at + i] = 0

    @classmethod
    def read(cls, words: memoryview, geometry: Geometry, sequence: int) -> Descriptor:
        """The entry of `sequence`. RingCorrupt where it is another's or points elsewhere."""
        at = _slot(geometry, sequence)
        seq, offset, length, kind, generation, step, index, count, meta, checksum = words[
            at : at + 10
        ]
        where = f"descriptor {sequence} of {geometry.run!r}"
        if seq != sequence + 1:
            raise RingCorrupt(f"{where}: got sequence {seq - 1}, want {sequence}")
        known = kind in Kind.__members__.values()
        if (
            not known
            or offset % ALIGNMENT
            or offset % geometry.data_bytes + length > geometry.data_bytes
        ):
            raise RingCorrupt(
                f"{where}: got kind {kind}, offset {offset}, length {length}, "
                f"want a known kind inside {geometry.data_bytes} bytes"
            )
        if meta > length or (kind in (Kind.DATA, Kind.FILLER) and (step == 0 or index >= count)):
            raise RingCorrupt(
                f"{where}: got step {from_word(step)}, index {index} of {count}, head at "
                f"byte {meta} of {length}, want a step, index below count, the head inside"
            )
        return cls(
            sequence=sequence, offset=offset, length=length, kind=Kind(kind), generation=generation,
            step=from_word(step), index=index, count=count, meta_offset=meta, checksum=checksum,
        )  # fmt: skip


def _slot(geometry: Geometry, sequence: int) -> int:
    return (
        geometry.descriptors_offset + sequence % geometry.records * geometry.descriptor_bytes
    ) // 8


class GuardedArea:
    """A JSON object that one process writes and another copies, under a sequence that is odd while
    it changes.

    `data` and `words` are the mapping as bytes and as u64; `offset` is the area's length word in
    bytes.
    """

    def __init__(
        self, data: memoryview, words: memoryview, *, sequence: int, offset: int, size: int
    ) -> None:
        self._data, self._words, self._sequence, self._offset = data, words, sequence, offset
        self.capacity = size - 8  # bytes of JSON

    def write(self, content: Mapping[str, Any]) -> None:
        """For the owner of the area. ValueError where it does not fit; the old content stays."""
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > self.capacity:
            raise ValueError(
                f"{sorted(content)}: {len(text)} bytes of JSON, want at most {self.capacity}"
            )
        odd = self._words[self._sequence] | 1  # odd already where a writer died halfway
        self._words[self._sequence] = odd
        fence()
        self._words[self._offset // 8] = len(text)
        self._data[self._offset + 8 : self._offset + 8 + len(text)] = text
        fence()
        self._words[self._sequence] = odd + 1

    def read(self) -> tuple[int, dict[str, Any] | None]:
        """(sequence, content): content is None where nothing was said or it is changing; ask again
        then.

        Raises RingCorrupt where a settled area holds no JSON object.
        """
        before = self._words[self._sequence]
        if before == 0 or before % 2:
            return before, None
        fence()
        length = min(self._words[self._offset // 8], self.capacity)
        text = bytes(self._data[self._offset + 8 : self._offset + 8 + length])
        fence()
        if self._words[self._sequence] != before:
            return before, None
        try:
            content = json.loads(text)
        except ValueError as error:
            raise RingCorrupt(
                f"guarded area at byte {self._offset}: got {text[:40]!r}, want JSON"
            ) from error
        if not isinstance(content, dict):
            raise RingCorrupt(
                f"guarded area at byte {self._offset}: got {text[:40]!r}, want a JSON object"
            )
        return before, content


def release_mapping(mapping: mmap.mmap, *views: memoryview) -> None:
    """Unmap, unless something still looks into the mapping: then it stays until that is gone."""
    for view in views:
        view.release()
    try:
        mapping.close()
    except BufferError:
        return
