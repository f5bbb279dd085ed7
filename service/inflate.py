"""Content-Encoding: zstd and gzip, inflated into a buffer of a bounded size.

A declared size is believed only as a reason to refuse; what is written is counted as it comes.
Beyond `limits.max_body_bytes`, or more than `limits.max_inflate_ratio` times the encoded body, is
BodyTooLarge; what is not of the encoding, is cut short, or has other bytes behind its end is
MalformedBody. Both libraries release the GIL, so the work belongs in the ingest pool.
"""

from __future__ import annotations

import zlib

import zstandard

from headrace.schemas.errors import BodyTooLarge, MalformedBody, UnsupportedMedia

__all__ = ["ENCODINGS", "inflate", "inflated_bound"]

ENCODINGS = ("zstd", "gzip")
CHUNK = 1 << 18
SMALL = 1 << 20  # below it the ratio is no matter


def inflated_bound(nbytes: int, *, most: int, ratio: int) -> int:
    """Bytes that an encoded body of `nbytes` may have once it is inflated."""
    return min(most, max(SMALL, ratio * nbytes))


def inflate(body: memoryview, encoding: str, out: memoryview) -> int:
    """Inflate into `out`, whose length is the bound; the number of bytes.

    Raises BodyTooLarge, MalformedBody or UnsupportedMedia.
    """
    if encoding == "zstd":
        return _zstd(body, out)
    if encoding == "gzip":
        return _gzip(body, out)
    raise UnsupportedMedia(
        f"Content-Encoding: got {encoding!r}, want one of {', '.join(ENCODINGS)}"
    )


def _zstd(body: memoryview, out: memoryview) -> int:
    filled = 0
    try:
        declared = zstandard.frame_content_size(body)
        if declared > len(out):
            raise _too_large(declared, len(body), len(out))
        source = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
            body, read_across_frames=True
        )
        while filled < len(out):
            read = source.readinto(out[filled : filled + CHUNK])
            if not read:
                break
            filled += read
        if filled == len(out) and source.read(1):
            raise _too_large(filled + 1, len(body), len(out))
    except zstandard.ZstdError as error:
        raise MalformedBody(f"the body is not zstd: {error}") from error
    if filled < declared:
        raise MalformedBody(f"the zstd body ends after {filled} of {declared} declared bytes")
    return filled


def _gzip(body: memoryview, out: memoryview) -> int:
    filled = 0
    rest: bytes | memoryview = body
    while True:
        member = zlib.decompressobj(wbits=31)
        try:
            while not member.eof:
                piece = member.decompress(rest, CHUNK)
                rest = member.unconsumed_tail
                if filled + len(piece) > len(out):
                    raise _too_large(filled + len(piece), len(body), len(out))
                if not piece and not rest and not member.eof:
                    raise MalformedBody("the gzip body is cut short")
                out[filled : filled + len(piece)] = piece
                filled += len(piece)
        except zlib.error as error:
            raise MalformedBody(f"the body is not gzip: {error}") from error
        rest = member.unused_data
        if not rest:
            return filled


def _too_large(nbytes: int, encoded: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body inflates from {encoded} to {nbytes} bytes or more, want at most {limit} "
        f"(limits.max_body_bytes, limits.max_inflate_ratio): send smaller posts"
    )
