"""`POST /v1/datums`: headers, body, answer. A plain Starlette route: no models, no dependency
injection.

Length, type and budget are checked on the headers, before a byte of the body is read; an answer
that leaves a body unread closes the connection. The body goes into one buffer of its announced
length.
"""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headrace.schemas.errors import (
    BodyTooLarge,
    LengthMissing,
    MalformedBody,
    Refused,
    UnsupportedMedia,
)
from headrace.service.pipeline import Pipeline
from headrace.service.routes.problems import problem

__all__ = ["post_datums"]

MEDIA = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
KEY_PATTERN = re.compile(r"[!-~]{1,128}")


async def post_datums(request: Request) -> Response:
    """202 when the post is recorded; else a problem document of errors.py."""
    pipeline: Pipeline = request.app.state.pipeline
    body_read = False
    try:
        nbytes = _announced(request, pipeline.settings.limits.max_body_bytes)
        key = _key(request)
        pipeline.admit(nbytes)
        body = await _read(request, nbytes)
        body_read = True
        return JSONResponse(await pipeline.accept(body, key), status_code=202)
    except Refused as refused:
        return problem(refused, close=not body_read)


def _announced(request: Request, most: int) -> int:
    """The body's length in bytes, if it is one that will be read."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media not in MEDIA:
        raise UnsupportedMedia(f"Content-Type: got {media or 'none'!r}, want {MEDIA[0]}")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"Content-Encoding: got {encoding!r}, want none")
    length = request.headers.get("content-length")
    if length is None or not length.isdecimal():
        raise LengthMissing("Content-Length: got none, want the body's length in bytes")
    if int(length) > most:
        raise BodyTooLarge(
            f"Content-Length: got {length}, want at most limits.max_body_bytes = {most}: send "
            "smaller posts"
        )
    return int(length)


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and KEY_PATTERN.fullmatch(key) is None:
        raise MalformedBody(
            f"Idempotency-Key: got {len(key)} characters, want 1 to 128 visible ASCII ones"
        )
    return key


async def _read(request: Request, nbytes: int) -> bytearray:
    body = bytearray(nbytes)
    at = 0
    try:
        async for chunk in request.stream():
            body[at : at + len(chunk)] = chunk
            at += len(chunk)
    except ClientDisconnect as error:
        raise MalformedBody(f"the client left after {at} of {nbytes} bytes") from error
    if at != nbytes:
        raise MalformedBody(f"the body has {at} bytes, Content-Length says {nbytes}")
    return body
