"""Body bytes -> a post: what msgspec lets through, and nothing looked at yet.

Count limits stand in the decoder's types, so they act while decoding. Tensors stay views into the
body. What is not msgpack (or JSON) at all raises MalformedBody (400); what is, and is not a post,
raises InvalidDatums (422) with the place. JSON, for a post typed by hand, has lists where msgpack
has tensors.

msgpack lets a map repeat a key, and each repetition is decoded: counts do not bound that work. A
body over 1 MiB whose fields account for less than half of its bytes is refused as `padding`.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headrace.schemas.errors import FieldError, InvalidDatums, MalformedBody, PaddedBody

__all__ = [
    "MAX_ID_CHARS",
    "MAX_KEYS",
    "JsonPost",
    "MsgpackPost",
    "Tensor",
    "Values",
    "WireDatum",
    "check_padding",
    "decode_body",
]

MAX_KEYS, MAX_ID_CHARS = 16, 128
PADDING_BYTES = 1 << 20
ACTOR = r"^[a-z0-9][a-z0-9_.-]{0,62}$"

Name = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**62)]
Names = Annotated[list[Name | None], Meta(max_length=16384)] | None


class Tensor(Struct, forbid_unknown_fields=True):
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=4)]
    data: memoryview


class Metadata(Struct):
    """What a datum may carry beside its tensors."""

    id: Name | None = None
    rollout_id: Name | None = None
    group_id: Name | None = None
    group_size: Count | None = None
    policy_version: Version | None = None
    reward: float | None = None
    source: Name | None = None
    split: Name | None = None


class WireDatum(Metadata, forbid_unknown_fields=True, kw_only=True):
    input_ids: Tensor
    loss_fn_inputs: Annotated[dict[Name, Tensor], Meta(max_length=MAX_KEYS)] = {}


class Header(Struct):
    version: int
    policy_version: Version | None = None
    actor: Annotated[str, Meta(pattern=ACTOR)] | None = None


class MsgpackPost(Header, forbid_unknown_fields=True, kw_only=True):
    """Both msgpack forms; exactly one of `datums` and `columns` is set."""

    datums: Annotated[list[WireDatum], Meta(max_length=1024)] | None = None
    lengths: Tensor | None = None
    columns: Annotated[dict[Name, Tensor], Meta(max_length=MAX_KEYS + 1)] | None = None
    targets: str | None = None
    last_targets: Tensor | None = None
    ids: Names = None
    rollout_ids: Names = None
    group_ids: Names = None
    sources: Names = None
    splits: Names = None
    group_sizes: Annotated[list[Count | None], Meta(max_length=16384)] | None = None
    policy_versions: Annotated[list[Version | None], Meta(max_length=16384)] | None = None
    rewards: Tensor | None = None


Values = list[bool | int | float] | bool | int | float


class JsonDatum(Metadata, forbid_unknown_fields=True, kw_only=True):
    input_ids: list[int]
    loss_fn_inputs: Annotated[dict[Name, Values], Meta(max_length=MAX_KEYS)] = {}


class JsonPost(Header, forbid_unknown_fields=True, kw_only=True):
    datums: Annotated[list[JsonDatum], Meta(max_length=1024)]


MSGPACK = msgspec.msgpack.Decoder(MsgpackPost)
JSON = msgspec.json.Decoder(JsonPost)


def decode_body(
    body: bytes | bytearray | memoryview, *, json: bool = False
) -> MsgpackPost | JsonPost:
    """The post in `body`. Raises MalformedBody or InvalidDatums."""
    try:
        if json:
            return JSON.decode(body)
        return MSGPACK.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidDatums([_finding(str(error))]) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        form = "JSON" if json else "msgpack"
        raise MalformedBody(
            f"the body is not one {form} value: {error}; want the form of POST /v1/datums"
        ) from error


def check_padding(body: MsgpackPost, nbytes: int, payload: int) -> None:
    """Raises PaddedBody where a body of `nbytes` is mostly bytes that no field needs.

    `payload`: bytes of its tensors, which alone settle it for an ordinary post.
    """
    if nbytes <= PADDING_BYTES or 2 * payload >= nbytes:
        return
    accounted = _accounted(body)
    if 2 * accounted < nbytes:
        raise PaddedBody(
            f"{nbytes} bytes, and the post's fields account for {accounted}: repeated keys or "
            f"the like; send each key once"
        )


def _accounted(body: MsgpackPost) -> int:
    """About how many bytes the fields of a post need: payload, names, and 64 a tensor or datum."""
    total = 1024
    for datum in body.datums or ():
        total += 256 + datum.input_ids.data.nbytes
        total += sum(64 + len(k) + t.data.nbytes for k, t in datum.loss_fn_inputs.items())
    tensors = [body.lengths, body.rewards, body.last_targets, *(body.columns or {}).values()]
    total += sum(64 + t.data.nbytes for t in tensors if t is not None)
    for names in (body.ids, body.rollout_ids, body.group_ids, body.sources, body.splits):
        total += sum(5 + len(name or "") for name in names or ())
    for numbers in (body.group_sizes, body.policy_versions):
        total += 9 * len(numbers or ())
    return total


def _finding(message: str) -> FieldError:
    text, _, path = message.partition(" - at `")
    path = path.rstrip("`").removeprefix("$").lstrip(".")
    where = re.match(r"datums\[(\d+)\]\.?", path)
    return FieldError(
        index=int(where.group(1)) if where else None,
        field=(path[where.end() :] if where else path)[:200] or "body",
        code="schema",
        got=text[:200],
        want="the form of POST /v1/datums",
    )
