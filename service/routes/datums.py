"""`POST /v1/datums`: head, body, answer. A plain Starlette route: no models, no dependencies.

Who, what type, what length and whether there is room are asked of the head, before a byte of the
body is read; an answer that leaves a body unread closes the connection. The body goes into one
pooled buffer of its announced length, which the door gives back.
"""

from __future__ import annotations

import re
from functools import partial

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.schemas.errors import (
    BodyTooLarge,
    FieldError,
    InvalidDatums,
    LengthMissing,
    MalformedBody,
    Refused,
    UnsupportedMedia,
)
from headrace.service.bodies import Body
from headrace.service.door import Head
from headrace.service.inflate import ENCODINGS
from headrace.service.pipeline import Pipeline
from headrace.service.protocol import READ_INTO
from headrace.service.refusals import shown
from headrace.service.routes.guarded import admit, refuse
from headrace.service.settings import Limits

__all__ = ["post_datums"]

MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
JSON = "application/json"
KEY_PATTERN = re.compile(r"[!-~]{1,128}")


async def post_datums(request: Request) -> Response:
    """202 when the post is recorded; else a problem document of errors.py."""
    pipeline: Pipeline = request.app.state.pipeline
    body_read = False
    try:
        identity = admit(request, "rollout", changes_state=True)
        head = _head(request, pipeline.settings.limits, identity.name)
        pipeline.admit(head)
        body = await _read(request, pipeline, head)
        body_read = True
        answer = msgspec.json.encode(await pipeline.accept(body, head))
        return Response(answer, status_code=202, media_type="application/json")
    except Refused as refused:
        return refuse(request, refused, close=not body_read)


def _head(request: Request, limits: Limits, token: str) -> Head:
    """The request's head, if its body is one that will be read."""
    headers = request.headers
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != JSON and media not in MSGPACK:
        raise UnsupportedMedia(f"Content-Type: got {shown(media)}, want {MSGPACK[0]}")
    encoding: str | None = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        encoding = None
    elif encoding not in ENCODINGS:
        want = ", ".join(ENCODINGS)
        raise UnsupportedMedia(
            f"Content-Encoding: got {shown(encoding or '')}, want {want} or none"
        )
    length = headers.get("content-length")
    if length is None or not length.isdecimal():
        raise LengthMissing("Content-Length: got none, want the body's length in bytes")
    most = limits.max_json_bytes if media == JSON else limits.max_body_bytes
    if len(length) > 18 or int(length) > most:
        name = "max_json_bytes" if media == JSON else "max_body_bytes"
        raise BodyTooLarge(
            f"Content-Length: got {length[:32]}, want at most limits.{name} = {most}: send smaller "
            f"posts"
        )
    key = headers.get("idempotency-key")
    if key is not None and KEY_PATTERN.fullmatch(key) is None:
        raise MalformedBody(
            f"Idempotency-Key: got {len(key)} characters, want 1 to 128 visible ASCII ones"
        )
    return Head(
        nbytes=int(length),
        json=media == JSON,
        encoding=encoding,
        key=key,
        skip=_skip(request),
        token=token,
    )


def _skip(request: Request) -> bool:
    on_invalid = request.query_params.get("on_invalid", "refuse")
    if on_invalid not in ("refuse", "skip"):
        want = "'refuse' or 'skip'"
        got = shown(on_invalid)
        raise InvalidDatums(
            [FieldError(index=None, field="on_invalid", code="query", got=got, want=want)]
        )
    return on_invalid == "skip"


async def _read(request: Request, pipeline: Pipeline, head: Head) -> Body:
    body = pipeline.bodies.lease(head.nbytes)
    extensions = request.scope.get("extensions") or {}
    read_into = extensions.get(READ_INTO) or partial(_copy_into, request)
    try:
        at, whole = await read_into(body.buffer)
        if not whole:
            raise MalformedBody(f"the client left after {at} of {head.nbytes} bytes")
        if at != head.nbytes:
            raise MalformedBody(f"the body has {at} bytes, Content-Length says {head.nbytes}")
    except BaseException:
        body.release()
        raise
    return body


async def _copy_into(request: Request, buffer: memoryview) -> tuple[int, bool]:
    """What protocol.py's `read_into` does, where it is not to be had."""
    at = 0
    try:
        async for chunk in request.stream():
            buffer[at : at + len(chunk)] = chunk
            at += len(chunk)
    except ClientDisconnect:
        return at, False
    return at, True
