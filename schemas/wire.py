"""Requests: datums to msgpack bytes and back, per-datum and columnar. msgpack and numpy only.

Owns `WIRE_VERSION`, the tensor map `A`, both body forms, and the record between them, `WireDatum`.

    A = {"dtype": "int32", "shape": [T], "data": <bin, little-endian, C order>}

    per-datum  {"version": 1, "policy_version"?, "actor"?,
                "datums": [{"input_ids": A, "loss_fn_inputs": {key: A},
                            "group_id"?, "group_size"?, "reward"?, ...}]}

    columnar   {"version": 1, "policy_version"?, "actor"?,
                "lengths": A int32 [N],
                "columns": {"input_ids": A [sum T], key: A [sum T] or [N], ...},
                "ids"?, "rollout_ids"?, "group_ids"?, "sources"?, "splits"?: [str or nil],
                "group_sizes"?, "policy_versions"?: [int or nil],
                "rewards"?: A float64 [N], NaN = absent}

Three sequences 5 6 | 7 | 8 9 with a per-sample advantage have `lengths` 2 1 2, `input_ids`
5 6 7 8 9 and `advantages` [3]. Where N = sum T the two kinds are one shape, and the run's pinned
kind decides.

Invariants: the same records give the same bytes (keys in a fixed order, columns sorted, absent
optionals left out); ids (`input_ids`, `target_tokens`) are int32 on the wire after a range check; a
column of mixed dtypes is sent in `np.result_type` of them; packing copies payload once; `unpack`
views each tensor in the bytes that msgpack made.

Called by the client (pack), by tests and other tools (both ways); the service has its own typed
decoder. Never shifts, pads or repairs, and looks at no values but ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import DatumError, MalformedBody
from headrace.schemas.tensors import WIRE_DTYPES

__all__ = [
    "WIRE_VERSION",
    "WireDatum",
    "WirePost",
    "kinds_of",
    "merge_kinds",
    "pack_columnar",
    "pack_per_datum",
    "unpack",
]

WIRE_VERSION = 1

ID_KEYS = frozenset({"input_ids", "target_tokens"})
INT32 = np.iinfo(np.int32)
LITTLE_ENDIAN = {
    **{dtype.newbyteorder(">"): dtype for dtype in WIRE_DTYPES.values()},
    **{dtype.newbyteorder("<"): dtype for dtype in WIRE_DTYPES.values()},
}

# singular (per-datum) -> plural (columnar), in the order of the bytes
METADATA = {
    "id": "ids",
    "rollout_id": "rollout_ids",
    "group_id": "group_ids",
    "group_size": "group_sizes",
    "policy_version": "policy_versions",
    "reward": "rewards",
    "source": "sources",
    "split": "splits",
}
STRINGS = ("id", "rollout_id", "group_id", "source", "split")

Kind = Literal["token", "sample", "either"]  # "either": T = 1, where both are one shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WireDatum:
    """One datum as it travels. Raises DatumError where it cannot.

    Arrays are C-contiguous, little-endian, of a dtype in WIRE_DTYPES; a scalar becomes `[1]`. An
    array that is so already is kept, not copied.
    """

    input_ids: NDArray[np.int32]  # [T], T >= 1; any integer dtype is taken
    loss_fn_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # key -> [T] or [1]
    id: str | None = None
    rollout_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None  # >= 1
    policy_version: int | None = None  # >= 0; None: the post's
    reward: float | None = None  # finite
    source: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        ids = _on_wire("input_ids", self.input_ids)
        if ids.ndim != 1 or ids.size == 0:
            want = "want 1-D [T] with at least one token"
            raise DatumError(f"input_ids: got shape {list(ids.shape)}, {want}")
        entries = {k: _entry(k, v, ids.size) for k, v in self.loss_fn_inputs.items()}
        _check_metadata(self)
        object.__setattr__(self, "input_ids", ids)
        object.__setattr__(self, "loss_fn_inputs", entries)

    @property
    def nbytes(self) -> int:
        """Bytes of payload, metadata left out."""
        return int(self.input_ids.nbytes + sum(a.nbytes for a in self.loss_fn_inputs.values()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WirePost:
    """A decoded body. A datum's own `policy_version` overrides the post's."""

    policy_version: int | None
    actor: str | None
    datums: tuple[WireDatum, ...]


def kinds_of(datum: WireDatum) -> dict[str, Kind]:
    """Whether each loss key is per token or per sample; at T = 1 it is "either"."""
    tokens = datum.input_ids.size
    if tokens == 1:
        return dict.fromkeys(datum.loss_fn_inputs, "either")
    return {
        key: "token" if array.size == tokens else "sample"
        for key, array in datum.loss_fn_inputs.items()
    }


def merge_kinds(first: Mapping[str, Kind], second: Mapping[str, Kind]) -> dict[str, Kind]:
    """The kinds of a body that holds both; DatumError where one body cannot."""
    if first.keys() != second.keys():
        raise DatumError(
            f"datums of one post need the same loss_fn_inputs keys: got {sorted(first)} and "
            f"{sorted(second)}; give every datum all of them"
        )
    if first == second:
        return dict(first)
    merged: dict[str, Kind] = {}
    for key, kind in first.items():
        other = second[key]
        if kind != other and "either" not in (kind, other):
            raise DatumError(
                f"loss_fn_inputs[{key!r}]: per token in some datums and per sample in others; "
                "send one kind in the whole run"
            )
        merged[key] = other if kind == "either" else kind
    return merged


def pack_per_datum(
    datums: Sequence[WireDatum], *, policy_version: int | None = None, actor: str | None = None
) -> bytes:
    """The friendly form: what `msgpack.packb` gives for plain dicts."""
    entries = []
    for datum in datums:
        losses = {k: _tensor(datum.loss_fn_inputs[k]) for k in sorted(datum.loss_fn_inputs)}
        metadata = {k: v for k in METADATA if (v := getattr(datum, k)) is not None}
        entries.append({"input_ids": _tensor(datum.input_ids), "loss_fn_inputs": losses} | metadata)
    body: bytes = msgpack.Packer().pack(_head(policy_version, actor) | {"datums": entries})
    return body


def pack_columnar(
    datums: Sequence[WireDatum], *, policy_version: int | None = None, actor: str | None = None
) -> bytes:
    """The fast form. DatumError for no datums, differing keys, or a key of both kinds."""
    if not datums:
        raise DatumError("a columnar body needs at least one datum")
    kinds = kinds_of(datums[0])
    for datum in datums[1:]:
        kinds = merge_kinds(kinds, kinds_of(datum))
    extras: dict[str, list[Any]] = {}
    for name, plural in METADATA.items():
        values = [getattr(d, name) for d in datums]
        if any(v is not None for v in values):
            extras[plural] = values

    packer = msgpack.Packer()
    head = _head(policy_version, actor)
    lengths = np.array([d.input_ids.size for d in datums], np.int32)
    parts: list[Any] = [packer.pack_map_header(len(head) + 2 + len(extras))]
    for key, value in head.items():
        parts += [packer.pack(key), packer.pack(value)]
    parts += [packer.pack("lengths"), *_column(packer, [lengths])]
    parts += [
        packer.pack("columns"),
        packer.pack_map_header(1 + len(kinds)),
        packer.pack("input_ids"),
    ]
    parts += _column(packer, [d.input_ids for d in datums])
    for key in sorted(kinds):
        parts += [packer.pack(key), *_column(packer, [d.loss_fn_inputs[key] for d in datums])]
    for plural, values in extras.items():
        parts.append(packer.pack(plural))
        if plural == "rewards":
            parts += _column(
                packer, [np.array([np.nan if v is None else v for v in values], "<f8")]
            )
        else:
            parts.append(packer.pack(values))
    return b"".join(parts)


def unpack(body: bytes | bytearray | memoryview) -> WirePost:
    """Either form. MalformedBody where it is not one, DatumError where a datum in it cannot be."""
    try:
        root = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedBody(
            f"body of {len(body)} bytes is not one msgpack value: {error!r}"
        ) from error
    head = {"version", "policy_version", "actor"}
    if not isinstance(root, dict) or ("datums" in root) == ("columns" in root):
        raise MalformedBody('body: want a map with exactly one of "datums" and "columns"')
    if root.get("version") != WIRE_VERSION:
        raise MalformedBody(f"version: got {root.get('version')!r}, want {WIRE_VERSION}")
    version, actor = root.get("policy_version"), root.get("actor")
    if type(version) not in (int, type(None)) or not isinstance(actor, str | None):
        raise MalformedBody("body: want policy_version an integer and actor a string, or neither")
    columnar = "columns" in root
    form = {"columns", "lengths", *METADATA.values()} if columnar else {"datums"}
    _check_keys("body", root, head | form)
    datums = _from_columns(root) if columnar else _from_datums(root["datums"])
    return WirePost(policy_version=version, actor=actor, datums=tuple(datums))


def _on_wire(key: str, array: NDArray[Any]) -> NDArray[Any]:
    dtype = LITTLE_ENDIAN.get(array.dtype)
    if dtype is None:
        want = f"want one of {', '.join(WIRE_DTYPES)}"
        raise DatumError(f"{key}: got dtype {array.dtype}, {want}; cast it before it is sent")
    if key in ID_KEYS and dtype is not WIRE_DTYPES["int32"]:
        if array.dtype.kind not in "iu":
            raise DatumError(f"{key}: got dtype {array.dtype}, want integers")
        if array.size:
            low, high = int(array.min()), int(array.max())
            if low < INT32.min or high > INT32.max:
                raise DatumError(f"{key}: got ids {low} .. {high}, want ids that fit int32")
        dtype = WIRE_DTYPES["int32"]
    return np.asarray(array, dtype=dtype, order="C")


def _entry(key: str, array: NDArray[Any], tokens: int) -> NDArray[Any]:
    if not isinstance(key, str) or key == "input_ids":
        raise DatumError(f'loss_fn_inputs: got key {key!r}, want a string other than "input_ids"')
    if array.ndim > 1 or array.size not in (1, tokens):
        got = f"got shape {list(array.shape)} beside {tokens} input_ids"
        raise DatumError(
            f"loss_fn_inputs[{key!r}]: {got}, want 1-D [{tokens}] (per token) or [1] (per sample)"
        )
    return _on_wire(key, array.reshape(-1))


def _check_metadata(datum: WireDatum) -> None:
    for name in STRINGS:
        value = getattr(datum, name)
        if value is not None and not isinstance(value, str):
            raise DatumError(f"{name}: got {value!r}, want a string")
    for name, least in (("group_size", 1), ("policy_version", 0)):
        value = getattr(datum, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise DatumError(f"{name}: got {value!r}, want an integer of at least {least}")
    if datum.group_size is not None and datum.group_id is None:
        raise DatumError(f"group_size: got {datum.group_size} without a group_id; give both")
    if datum.reward is not None and not (
        isinstance(datum.reward, int | float) and math.isfinite(datum.reward)
    ):
        raise DatumError(f"reward: got {datum.reward!r}, want a finite number, or leave it out")


def _head(policy_version: int | None, actor: str | None) -> dict[str, Any]:
    head = {"version": WIRE_VERSION, "policy_version": policy_version, "actor": actor}
    return {k: v for k, v in head.items() if v is not None}


def _tensor(array: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def _column(packer: msgpack.Packer, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """The bytes of one tensor map, as parts to be joined: its data is `arrays` end to end."""
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) > 1:
        widest = np.result_type(*dtypes)
        arrays = [a.astype(widest, copy=False) for a in arrays]
    dtype, count = arrays[0].dtype, sum(a.size for a in arrays)
    nbytes = count * dtype.itemsize
    if nbytes < 1 << 8:
        size = b"\xc4" + nbytes.to_bytes(1, "big")
    elif nbytes < 1 << 16:
        size = b"\xc5" + nbytes.to_bytes(2, "big")
    elif nbytes < 1 << 32:
        size = b"\xc6" + nbytes.to_bytes(4, "big")
    else:
        raise DatumError(
            f"a column of {nbytes} bytes: msgpack carries less than 4 GiB; send fewer datums a post"
        )
    head = [packer.pack_map_header(3), packer.pack("dtype"), packer.pack(dtype.name)]
    head += [packer.pack("shape"), packer.pack([count]), packer.pack("data"), size]
    return head + [a.view(np.uint8) for a in arrays]


def _check_keys(where: str, got: Any, want: Iterable[str]) -> None:
    if not isinstance(got, dict):
        raise MalformedBody(f"{where}: got {type(got).__name__}, want a map")
    if unknown := sorted(str(k) for k in got.keys() - set(want)):
        raise MalformedBody(f"{where}: unknown keys {unknown}; known are {sorted(want)}")


def _array(where: str, tensor: Any) -> NDArray[Any]:
    _check_keys(where, tensor, ("dtype", "shape", "data"))
    name, shape, data = (tensor.get(k) for k in ("dtype", "shape", "data"))
    if not isinstance(name, str) or not isinstance(data, bytes) or not isinstance(shape, list):
        raise MalformedBody(f"{where}: want dtype (str), shape (list) and data (bin)")
    if len(shape) > 4 or any(type(n) is not int or n < 0 for n in shape):
        raise MalformedBody(
            f"{where}: got shape {shape!r}, want up to four integers, none negative"
        )
    if name not in WIRE_DTYPES:
        raise DatumError(f"{where}: got dtype {name!r}, want one of {', '.join(WIRE_DTYPES)}")
    dtype = WIRE_DTYPES[name]
    want = math.prod(shape) * dtype.itemsize
    if want != len(data):
        raise DatumError(f"{where}: got {len(data)} bytes, want {want} for {name} {shape}")
    return np.frombuffer(data, dtype).reshape(shape)


def _from_datums(entries: Any) -> list[WireDatum]:
    if not isinstance(entries, list):
        raise MalformedBody(f"datums: got {type(entries).__name__}, want a list")
    datums = []
    for i, entry in enumerate(entries):
        where = f"datums[{i}]"
        _check_keys(where, entry, {"input_ids", "loss_fn_inputs", *METADATA})
        losses = entry.get("loss_fn_inputs", {})
        if not isinstance(losses, dict):
            raise MalformedBody(f"{where}.loss_fn_inputs: got {type(losses).__name__}, want a map")
        arrays = {k: _array(f"{where}.loss_fn_inputs.{k}", v) for k, v in losses.items()}
        metadata = {k: entry.get(k) for k in METADATA}
        ids = _array(f"{where}.input_ids", entry.get("input_ids"))
        datums.append(WireDatum(input_ids=ids, loss_fn_inputs=arrays, **metadata))
    return datums


def _from_columns(root: dict[str, Any]) -> list[WireDatum]:
    lengths = _array("lengths", root.get("lengths"))
    if (
        lengths.ndim != 1
        or lengths.dtype.kind not in "iu"
        or lengths.size == 0
        or lengths.min() < 1
    ):
        raise DatumError("lengths: want 1-D integers, at least one, each at least 1")
    if not isinstance(root["columns"], dict) or "input_ids" not in root["columns"]:
        raise MalformedBody('columns: want a map that holds "input_ids"')
    count, total = lengths.size, int(lengths.sum(dtype=np.int64))
    cuts = np.cumsum(lengths[:-1], dtype=np.int64)
    columns: dict[str, list[NDArray[Any]]] = {}
    for key, tensor in root["columns"].items():
        array = _array(f"columns.{key}", tensor)
        per_sample = key != "input_ids" and array.shape == (count,) != (total,)
        if array.shape != (total,) and not per_sample:
            want = f"[{total}] (per token) or [{count}] (per sample)"
            raise DatumError(f"columns.{key}: got shape {list(array.shape)}, want {want}")
        columns[key] = np.split(array, count if per_sample else cuts)
    ids = columns.pop("input_ids")
    metadata = {
        name: _metadata(root.get(plural), plural, count) for name, plural in METADATA.items()
    }
    return [
        WireDatum(
            input_ids=ids[i],
            loss_fn_inputs={k: arrays[i] for k, arrays in columns.items()},
            **{name: values[i] for name, values in metadata.items()},
        )
        for i in range(count)
    ]


def _metadata(values: Any, plural: str, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    if plural == "rewards":
        values = [None if math.isnan(r) else r for r in _array(plural, values).tolist()]
    if not isinstance(values, list) or len(values) != count:
        raise DatumError(f"{plural}: want a list of {count}, one a datum")
    return values
