"""Body bytes -> Draft: the two msgpack forms, checked for form, without copying payload.

Count limits stand in the decoder's types, so they act while decoding. Tensors stay views into the
body. What is not msgpack at all raises MalformedBody (400); what is msgpack and not a post, or has
a tensor that contradicts itself, raises InvalidDatums (422) with one finding a fault. Nothing here
knows the run; see ingest.py for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from headrace.schemas.errors import FieldError, InvalidDatums, MalformedBody
from headrace.schemas.fields import reserved_names
from headrace.schemas.tensors import WIRE_DTYPES
from headrace.schemas.wire import WIRE_VERSION
from headrace.service.records import Axis, Draft, DraftColumn
from headrace.service.settings import Limits

__all__ = ["Decoder"]

MAX_KEYS, MAX_ID_CHARS = 16, 128
Name = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**62)]


class Tensor(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=4)]
    data: memoryview


class WireDatum(Struct, forbid_unknown_fields=True):
    input_ids: Tensor
    loss_fn_inputs: Annotated[dict[str, Tensor], Meta(max_length=MAX_KEYS)] = {}
    id: Name | None = None
    rollout_id: Name | None = None
    group_id: Name | None = None
    group_size: Count | None = None
    policy_version: Version | None = None
    reward: float | None = None
    source: Name | None = None
    split: Name | None = None


Names = Annotated[list[Name | None], Meta(max_length=16384)] | None


class Body(Struct, forbid_unknown_fields=True):
    """Both forms; exactly one of `datums` and `columns` is set."""

    version: int
    policy_version: Version | None = None
    actor: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")] | None = None
    datums: Annotated[list[WireDatum], Meta(max_length=1024)] | None = None
    lengths: Tensor | None = None
    columns: Annotated[dict[str, Tensor], Meta(max_length=MAX_KEYS + 1)] | None = None
    ids: Names = None
    rollout_ids: Names = None
    group_ids: Names = None
    sources: Names = None
    splits: Names = None
    group_sizes: Annotated[list[Count | None], Meta(max_length=16384)] | None = None
    policy_versions: Annotated[list[Version | None], Meta(max_length=16384)] | None = None
    rewards: Tensor | None = None


RESERVED = reserved_names("padded") | reserved_names("thd")

PER_DATUM_LISTS = (
    "ids", "rollout_ids", "group_ids", "sources", "splits", "group_sizes", "policy_versions",
)  # fmt: skip


class Decoder:
    """Turns bodies into Drafts; holds the msgspec decoder and the run-independent limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decoder = msgspec.msgpack.Decoder(Body)

    def __call__(self, body: bytes | bytearray | memoryview) -> Draft:
        """The draft in `body`. Raises MalformedBody or InvalidDatums."""
        try:
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise InvalidDatums([_schema_finding(str(error))]) from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedBody(
                f"the body is not one msgpack value: {error}; want the form of POST /v1/datums"
            ) from error
        findings = Findings(self._limits.max_errors)
        if decoded.version != WIRE_VERSION:
            findings.add(None, "version", "version", decoded.version, WIRE_VERSION)
        if (decoded.datums is None) == (decoded.columns is None):
            got = "neither" if decoded.datums is None else "both"
            findings.add(None, "datums", "form", got, "exactly one of datums and columns")
        for key in sorted(RESERVED & _loss_keys(decoded)):
            findings.add(None, key, "reserved", key, "a name that a batch does not have already")
        findings.raise_any()
        draft = (
            _from_datums(decoded, decoded.datums, findings, self._limits)
            if decoded.datums is not None
            else _from_columns(decoded, findings, self._limits)
        )
        findings.raise_any()
        assert draft is not None
        return draft


class Findings:
    """The faults of one post, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.errors: list[FieldError] = []

    def add(self, index: int | None, field: str, code: str, got: object, want: object) -> None:
        if len(self.errors) < self._most:
            got_text, want_text = str(got)[:200], str(want)[:200]
            self.errors.append(
                FieldError(index=index, field=field[:200], code=code, got=got_text, want=want_text)
            )

    def raise_any(self) -> None:
        if self.errors:
            raise InvalidDatums(self.errors)


def _schema_finding(message: str) -> FieldError:
    text, _, path = message.partition(" - at `")
    path = path.rstrip("`").removeprefix("$").lstrip(".")
    where = re.match(r"datums\[(\d+)\]\.?", path)
    index = int(where.group(1)) if where else None
    field = path[where.end() :] if where else path
    return FieldError(
        index=index,
        field=field or "body",
        code="schema",
        got=text[:200],
        want="the form of POST /v1/datums",
    )


def _array(
    tensor: Tensor, index: int | None, field: str, findings: Findings, wanted: str = "number"
) -> NDArray[Any] | None:
    """The tensor as an array over the body's bytes; None after a finding."""
    dtype = WIRE_DTYPES.get(tensor.dtype)
    if dtype is None or (wanted == "integer" and dtype.kind not in "iu"):
        want = [n for n, d in WIRE_DTYPES.items() if wanted != "integer" or d.kind in "iu"]
        findings.add(index, field, "dtype", repr(tensor.dtype), ", ".join(want))
        return None
    count = 1
    for size in tensor.shape:
        count *= size
    if count * dtype.itemsize != tensor.data.nbytes:
        want_text = f"{count * dtype.itemsize} ({tensor.dtype} {tensor.shape})"
        findings.add(index, field, "byte_length", f"{tensor.data.nbytes} bytes", want_text)
        return None
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def _loss_keys(body: Body) -> set[str]:
    if body.columns is not None:
        return set(body.columns) - {"input_ids"}
    return set(body.datums[0].loss_fn_inputs) if body.datums else set()


def _from_datums(
    body: Body, datums: list[WireDatum], findings: Findings, limits: Limits
) -> Draft | None:
    if not 0 < len(datums) <= limits.max_datums_per_post:
        findings.add(None, "datums", "count", len(datums), f"1 to {limits.max_datums_per_post}")
        return None
    for name in ("lengths", "rewards", *PER_DATUM_LISTS):
        if getattr(body, name) is not None:
            findings.add(None, name, "form", "present", "only with columns; each datum has its own")
    keys = sorted(datums[0].loss_fn_inputs)
    wanted = datums[0].loss_fn_inputs.keys()
    views: dict[str, list[NDArray[Any]]] = {key: [] for key in ("input_ids", *keys)}
    axes: dict[str, Axis] = dict.fromkeys(keys, "either")
    lengths = np.zeros(len(datums), np.int64)
    for index, datum in enumerate(datums):
        ids = _array(datum.input_ids, index, "input_ids", findings, "integer")
        if ids is None:
            continue
        if ids.ndim != 1 or not len(ids):
            findings.add(index, "input_ids", "shape", list(ids.shape), "[T] with T >= 1")
            continue
        lengths[index] = len(ids)
        views["input_ids"].append(ids)
        if datum.loss_fn_inputs.keys() != wanted:
            findings.add(index, "loss_fn_inputs", "keys_differ", sorted(datum.loss_fn_inputs), keys)
            continue
        for key, tensor in datum.loss_fn_inputs.items():
            kind = "integer" if key == "target_tokens" else "number"
            array = _array(tensor, index, key, findings, kind)
            if array is None:
                continue
            axis = _axis(array, len(ids), key)
            if axis is None:
                want = f"[{len(ids)}]" if key == "target_tokens" else f"[{len(ids)}], [1] or []"
                findings.add(index, key, "length", list(array.shape), want)
            elif "either" not in (axis, axes[key]) and axis != axes[key]:
                findings.add(
                    index, key, "kind_differs", f"per {axis}", f"per {axes[key]} as before"
                )
            else:
                axes[key] = axes[key] if axis == "either" else axis
                views[key].append(array.reshape(-1))
    if findings.errors:
        return None
    default = -1 if body.policy_version is None else body.policy_version
    versions = [default if d.policy_version is None else d.policy_version for d in datums]
    axes_of: dict[str, Axis] = {"input_ids": "token", **axes}
    return Draft(
        actor=body.actor,
        columnar=False,
        lengths=lengths,
        columns={key: _column(key, axes_of[key], views[key]) for key in views},
        policy_versions=np.array(versions, np.int64),
        rewards=np.array([np.nan if d.reward is None else d.reward for d in datums], np.float64),
        group_sizes=np.array([d.group_size or 0 for d in datums], np.int64),
        ids=_names(datums, lambda d: d.id),
        rollout_ids=_names(datums, lambda d: d.rollout_id),
        group_ids=_names(datums, lambda d: d.group_id),
        sources=_names(datums, lambda d: d.source),
        splits=_names(datums, lambda d: d.split),
    )


def _from_columns(body: Body, findings: Findings, limits: Limits) -> Draft | None:
    assert body.columns is not None
    if body.lengths is None or "input_ids" not in body.columns:
        missing = "lengths" if body.lengths is None else "columns.input_ids"
        findings.add(None, missing, "missing", "nothing", "an integer tensor")
        return None
    lengths = _array(body.lengths, None, "lengths", findings, "integer")
    if lengths is None:
        return None
    if lengths.ndim != 1 or not 0 < len(lengths) <= limits.max_datums_columnar:
        findings.add(
            None, "lengths", "count", lengths.shape, f"[N], N 1 to {limits.max_datums_columnar}"
        )
        return None
    most = np.iinfo(np.int32).max
    bad = np.flatnonzero((lengths < 1) | (lengths > most))
    for index in bad[: limits.max_errors].tolist():
        findings.add(index, "input_ids", "shape", [int(lengths[index])], "[T] with T >= 1")
    lengths = lengths.astype(np.int64)
    count, total = len(lengths), int(lengths.sum()) if not len(bad) else 0
    if len(bad):
        return None
    columns: dict[str, DraftColumn] = {}
    for key in ("input_ids", *sorted(body.columns.keys() - {"input_ids"})):
        kind = "integer" if key in ("input_ids", "target_tokens") else "number"
        array = _array(body.columns[key], None, key, findings, kind)
        if array is None:
            continue
        per_token_only = key in ("input_ids", "target_tokens")
        if array.ndim != 1 or (len(array) != total and (per_token_only or len(array) != count)):
            want = f"[{total}]" if per_token_only else f"[{total}] or [{count}]"
            findings.add(None, key, "length", list(array.shape), want)
            continue
        axis: Axis = "token" if len(array) == total else "sample"
        if total == count and not per_token_only:
            axis = "either"
        columns[key] = _column(key, axis, [array])
    for name in PER_DATUM_LISTS:
        values = getattr(body, name)
        if values is not None and len(values) != count:
            findings.add(None, name, "length", len(values), count)
    rewards = np.full(count, np.nan)
    if body.rewards is not None:
        array = _array(body.rewards, None, "rewards", findings)
        if array is not None and array.shape != (count,):
            findings.add(None, "rewards", "length", list(array.shape), [count])
        elif array is not None:
            rewards = array.astype(np.float64)
    if findings.errors:
        return None
    default = -1 if body.policy_version is None else body.policy_version
    versions = body.policy_versions or [None] * count
    return Draft(
        actor=body.actor,
        columnar=True,
        lengths=lengths,
        columns=columns,
        policy_versions=np.array([default if v is None else v for v in versions], np.int64),
        rewards=rewards,
        group_sizes=np.array([s or 0 for s in body.group_sizes or [0] * count], np.int64),
        ids=body.ids,
        rollout_ids=body.rollout_ids,
        group_ids=body.group_ids,
        sources=body.sources,
        splits=body.splits,
    )


def _axis(array: NDArray[Any], tokens: int, key: str) -> Axis | None:
    """How a datum's entry lies; None where it is neither [T] nor one value."""
    if key == "target_tokens":
        return "token" if array.shape == (tokens,) else None
    if array.ndim > 1 or (array.size not in (1, tokens)):
        return None
    if tokens == 1:
        return "either"
    return "sample" if array.size == 1 else "token"


def _column(key: str, axis: Axis, views: Sequence[NDArray[Any]]) -> DraftColumn:
    dtypes = {view.dtype for view in views}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes, views[0].dtype)
    return DraftColumn(key=key, axis=axis, dtype=dtype, views=views)


def _names(
    datums: list[WireDatum], of: Callable[[WireDatum], str | None]
) -> list[str | None] | None:
    names = [of(datum) for datum in datums]
    return names if any(name is not None for name in names) else None
