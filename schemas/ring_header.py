"""The fixed part of a ring's header: version, sizes and offsets, and what the run is.

      0  magic "HEADRACE"
      8  fourteen little-endian u64 words, the fields of Geometry from `major` to `debug`, in that
      order
    256  JSON, padded with zero bytes: run, layout, release, kinds, streams

The writer packs it once, before the file has a name; readers parse it and take every size and
offset from it, never from a constant. It is refused whole where it is not ours (RingForeign):
another magic or major version, sizes that contradict each other or the file. Another minor version
is read: it may have words that this one does not know.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.schemas.errors import RingForeign
from headrace.schemas.tensors import ALIGNMENT

__all__ = ["Geometry"]

MAGIC = b"HEADRACE"
MAJOR, MINOR = 1, 0
HEADER_BYTES = 4096
ABOUT, ABOUT_BYTES = 256, 1280
MESSAGE, MESSAGE_BYTES = 1024, 3072  # from the start of a reader line

_FIXED = (
    "major", "minor", "file_bytes", "lines_offset", "line_bytes", "replicas",
    "descriptors_offset", "descriptor_bytes", "records",
    "data_offset", "data_bytes", "dp_rank", "dp_size", "debug",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The fixed part of a header. Sizes and offsets in bytes, from the start of the file."""

    major: int = MAJOR
    minor: int = MINOR
    file_bytes: int
    lines_offset: int = HEADER_BYTES
    line_bytes: int = 4096
    replicas: int
    descriptors_offset: int
    descriptor_bytes: int = 128
    records: int  # descriptor slots
    data_offset: int
    data_bytes: int
    dp_rank: int
    dp_size: int
    debug: int  # 1: records carry a checksum
    run: str
    layout: str  # "padded" | "thd"
    release: str  # "step" | "microbatch"
    kinds: Mapping[str, str]  # key -> "token" | "sample", where pinned by settings
    streams: Mapping[str, Any]

    @classmethod
    def plan(cls, *, replicas: int, records: int, data_bytes: int, **rest: Any) -> Geometry:
        """The geometry of a new ring; `data_bytes` is rounded up to pages; `rest` as they are."""
        if min(replicas, records, data_bytes) < 1:
            raise ValueError(f"ring: {replicas=}, {records=}, {data_bytes=}: want each at least 1")
        page = max(4096, mmap.PAGESIZE)
        descriptors = HEADER_BYTES + replicas * 4096
        data = -(-(descriptors + records * 128) // page) * page
        data_bytes = -(-data_bytes // page) * page
        return cls(
            file_bytes=data + data_bytes, replicas=replicas, records=records,
            descriptors_offset=descriptors,
            data_offset=data, data_bytes=data_bytes, **rest,
        )  # fmt: skip

    def pack(self) -> bytes:
        """The first bytes of the file. ValueError where kinds and streams are too long."""
        words = b"".join(int(getattr(self, name)).to_bytes(8, "little") for name in _FIXED)
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FIXED}
        text = json.dumps(about, separators=(",", ":")).encode()
        if len(text) > ABOUT_BYTES:
            raise ValueError(
                f"ring header: kinds and streams take {len(text)} bytes, want at most {ABOUT_BYTES}"
            )
        return (MAGIC + words).ljust(ABOUT, b"\0") + text.ljust(ABOUT_BYTES, b"\0")

    @classmethod
    def parse(cls, header: bytes, *, file_bytes: int, name: str) -> Geometry:
        """What the first 4 KiB of a file of `file_bytes` say. RingForeign where it is not ours."""
        if len(header) < HEADER_BYTES or header[:8] != MAGIC:
            raise RingForeign(
                f"{name}: not a ring: {len(header)} bytes that begin {header[:8]!r}, want {MAGIC!r}"
            )
        values = [
            int.from_bytes(header[8 + 8 * i : 16 + 8 * i], "little") for i in range(len(_FIXED))
        ]
        numbers: dict[str, Any] = dict(zip(_FIXED, values, strict=True))
        if numbers["major"] != MAJOR:
            raise RingForeign(
                f"{name}: ring version {numbers['major']}.{numbers['minor']}, want {MAJOR}.x: "
                "service and trainer come from different releases of headrace; install one in both"
            )
        try:
            about = json.loads(header[ABOUT : ABOUT + ABOUT_BYTES].rstrip(b"\0"))
            words = {key: about[key] for key in ("run", "layout", "release", "kinds", "streams")}
        except (ValueError, KeyError, TypeError) as error:
            raise RingForeign(
                f"{name}: unreadable description of the run in the header: {error!r}"
            ) from error
        found = cls(**numbers, **words)
        found._check(file_bytes, name)
        return found

    def _check(self, file_bytes: int, name: str) -> None:
        lines_end = self.lines_offset + self.replicas * self.line_bytes
        descriptors_end = self.descriptors_offset + self.records * self.descriptor_bytes
        sound = (
            self.replicas >= 1
            and self.records >= 1
            and self.data_bytes >= 1
            and self.line_bytes >= MESSAGE + MESSAGE_BYTES
            and self.descriptor_bytes >= 128
            and not (self.lines_offset % 8 or self.line_bytes % 8 or self.descriptors_offset % 8)
            and not (
                self.descriptor_bytes % 8
                or self.data_offset % ALIGNMENT
                or self.data_bytes % ALIGNMENT
            )
            and self.lines_offset >= HEADER_BYTES
            and lines_end <= self.descriptors_offset
            and descriptors_end <= self.data_offset
            and self.data_offset + self.data_bytes == self.file_bytes
            and self.dp_rank < self.dp_size
        )
        if not sound:
            raise RingForeign(f"{name}: sizes in the header contradict each other: {self}")
        if file_bytes != self.file_bytes:
            raise RingForeign(
                f"{name}: got {file_bytes} bytes, want {self.file_bytes} by its header: truncated?"
            )

    def line(self, replica: int) -> int:
        """Byte offset of reader line `replica`; also the byte of its lock."""
        return self.lines_offset + replica * self.line_bytes
