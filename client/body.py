"""Datums -> the bytes of one request: slim columnar msgpack, compressed where asked.

    datums -> pack_columnar(slim) -> [zstd | gzip] -> Body(content, headers, nbytes)

Invariants: the same datums give the same bytes; slimming loses nothing but where float16_logprobs
says so; a body that compression does not make smaller, or makes smaller than the service's
max_inflate_ratio believes, goes as it is. Called by the sender's threads. Sends nothing.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, TypeAlias

from headrace.schemas.errors import SettingsError
from headrace.schemas.wire import WireDatum, pack_columnar

__all__ = ["Body", "Compress", "Encoder"]

Compress: TypeAlias = Literal["zstd", "gzip"] | None
SMALL_BYTES = 1024  # below it a header costs more than compression saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What is posted, the same for every try."""

    content: bytes
    headers: dict[str, str]
    nbytes: int  # before compression


class Encoder:
    """Raises SettingsError for an encoding that is unknown or not installed."""

    def __init__(self, *, actor: str, compress: Compress, float16_logprobs: bool) -> None:
        self._actor, self._float16_logprobs = actor, float16_logprobs
        self._name = compress
        self._squeeze = _compressor(compress)

    def __call__(self, datums: Sequence[WireDatum], *, max_inflate_ratio: int) -> Body:
        packed = pack_columnar(
            datums, actor=self._actor, slim=True, float16_logprobs=self._float16_logprobs
        )
        headers = {"Content-Type": "application/msgpack"}
        if self._squeeze is not None and len(packed) >= SMALL_BYTES:
            content = self._squeeze(packed)
            if len(packed) / max_inflate_ratio < len(content) < len(packed):
                headers["Content-Encoding"] = str(self._name)
                return Body(content=content, headers=headers, nbytes=len(packed))
        return Body(content=packed, headers=headers, nbytes=len(packed))


def _compressor(name: Compress) -> Callable[[bytes], bytes] | None:
    if name is None:
        return None
    if name == "gzip":
        return lambda data: gzip.compress(data, compresslevel=1, mtime=0)
    if name != "zstd":
        raise SettingsError(f'compress: got {name!r}, want "zstd", "gzip" or None')
    try:
        zstandard = import_module("zstandard")
    except ModuleNotFoundError as error:
        raise SettingsError(
            'compress="zstd": the package zstandard is not installed: pip install zstandard, or '
            'use compress="gzip"'
        ) from error

    def squeeze(data: bytes) -> bytes:
        # One a call: a compressor must not be used by two threads at once.
        content: bytes = zstandard.ZstdCompressor(level=1).compress(data)
        return content

    return squeeze
