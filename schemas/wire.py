"""Requests: datums to msgpack bytes and back, per-datum and columnar. msgpack and numpy only.

Owns `WIRE_VERSION`, the tensor map `A` and the body forms; the record between them, `WireDatum`, is
wire_datum.py's.

    A = {"dtype": "int32", "shape": [T], "data": <bin, little-endian, C order>}

    per-datum  {"version": 1, "policy_version"?, "actor"?,
                "datums": [{"input_ids": A, "loss_fn_inputs": {key: A},
                            "group_id"?, "group_size"?, "reward"?, ...}]}

    columnar   {"version": 1, "policy_version"?, "actor"?,
                "lengths": A int32 [N],
                "columns": {"input_ids": A [sum T], key: A [sum T] or [N] or [rows, ...], ...},
                "ids"?, "rollout_ids"?, "group_ids"?, "sources"?, "splits"?: [str or nil],
                "group_sizes"?, "policy_versions"?: [int or nil],
                "rewards"?: A float64 [N], NaN = absent}

    slim       columnar, with "targets": "implied" and "last_targets": A int32 [N] instead of the
               column target_tokens, weights as uint8, logprobs as float16 (see slim.py)

Three sequences 5 6 | 7 | 8 9 with a per-sample advantage have `lengths` 2 1 2, `input_ids`
5 6 7 8 9 and `advantages` [3]. Where N = sum T the two kinds are one shape, and the run's pinned
kind decides.

Invariants: the same records give the same bytes (keys in a fixed order, columns sorted, absent
optionals left out); ids (`input_ids`, `target_tokens`) are int32 on the wire after a range check; a
column of mixed dtypes is sent in `np.result_type` of them; packing copies payload once; `unpack`
views each tensor in the bytes that msgpack made; implied targets it writes out. `last_targets` may
be left out of a body where the last weight of every datum is 0; packing always writes them.

Called by the client (pack), by tests and other tools (both ways); the service has its own typed
decoder. Never shifts, pads or repairs, and looks at no values but ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import DatumError, MalformedBody
from headrace.schemas.slim import (
    half_precision,
    implied_targets,
    last_targets,
    small_whole_numbers,
)
from headrace.schemas.tensors import WIRE_DTYPES
from headrace.schemas.wire_datum import METADATA, Kind, WireDatum, kinds_of, merge_kinds, on_wire

__all__ = [
    "METADATA",
    "WIRE_VERSION",
    "Kind",
    "WireDatum",
    "WirePost",
    "kinds_of",
    "merge_kinds",
    "pack_columnar",
    "pack_per_datum",
    "unpack",
]

WIRE_VERSION = 1
IMPLIED = "implied"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WirePost:
    """A decoded body. A datum's own `policy_version` overrides the post's."""

    policy_version: int | None
    actor: str | None
    datums: tuple[WireDatum, ...]


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
    datums: Sequence[WireDatum],
    *,
    policy_version: int | None = None,
    actor: str | None = None,
    slim: bool = False,
    float16_logprobs: bool = False,
) -> bytes:
    """The fast form. DatumError for no datums, differing keys, or a key of both kinds.

    `slim` leaves out targets that the ids imply and narrows weights, where nothing is lost by it;
    `float16_logprobs` rounds logprobs to float16 where they stay finite.
    """
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

    input_ids = [d.input_ids for d in datums]
    columns = {key: [d.loss_fn_inputs[key] for d in datums] for key in sorted(kinds)}
    last: NDArray[np.int32] | None = None
    if slim and "target_tokens" in columns:
        last = last_targets(input_ids, columns["target_tokens"])
        if last is not None:
            del columns["target_tokens"]
    if slim and "weights" in columns:
        columns["weights"] = small_whole_numbers(columns["weights"]) or columns["weights"]
    if float16_logprobs and "logprobs" in columns:
        columns["logprobs"] = half_precision(columns["logprobs"]) or columns["logprobs"]

    packer = msgpack.Packer()
    head = _head(policy_version, actor)
    lengths = np.array([ids.size for ids in input_ids], np.int32)
    keys = len(head) + 2 + len(extras) + (0 if last is None else 2)
    parts: list[Any] = [packer.pack_map_header(keys)]
    for key, value in head.items():
        parts += [packer.pack(key), packer.pack(value)]
    parts += [packer.pack("lengths"), *_column(packer, [lengths])]
    if last is not None:
        parts += [packer.pack("targets"), packer.pack(IMPLIED)]
        parts += [packer.pack("last_targets"), *_column(packer, [last])]
    parts += [packer.pack("columns"), packer.pack_map_header(1 + len(columns))]
    for key, arrays in ({"input_ids": input_ids} | columns).items():
        parts += [packer.pack(key), *_column(packer, arrays)]
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
    slim = {"targets", "last_targets"}
    form = {"columns", "lengths", *slim, *METADATA.values()} if columnar else {"datums"}
    _check_keys("body", root, head | form)
    datums = _from_columns(root) if columnar else _from_datums(root["datums"])
    return WirePost(policy_version=version, actor=actor, datums=tuple(datums))


def _head(policy_version: int | None, actor: str | None) -> dict[str, Any]:
    head = {"version": WIRE_VERSION, "policy_version": policy_version, "actor": actor}
    return {k: v for k, v in head.items() if v is not None}


def _tensor(array: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def _column(packer: msgpack.Packer, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """The bytes of one tensor map, as parts to be joined: its data is `arrays` end to end."""
    dtypes, trailing = {a.dtype for a in arrays}, arrays[0].shape[1:]
    if len(dtypes) > 1:
        widest = np.result_type(*dtypes)
        arrays = [a.astype(widest, copy=False) for a in arrays]
    dtype, rows = arrays[0].dtype, sum(len(a) for a in arrays)
    nbytes = rows * math.prod(trailing) * dtype.itemsize
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
    head += [packer.pack("shape"), packer.pack([rows, *trailing]), packer.pack("data"), size]
    return head + [a.reshape(-1).view(np.uint8) for a in arrays]


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
    given = {key: _array(f"columns.{key}", tensor) for key, tensor in root["columns"].items()}
    if "targets" in root or "last_targets" in root:
        given["target_tokens"] = _implied(root, given, lengths)
    columns: dict[str, list[NDArray[Any]]] = {}
    for key, array in given.items():
        per_sample = key != "input_ids" and array.shape == (count,) != (total,)
        stream = key != "input_ids" and array.ndim > 1
        if stream and len(array) == total - count:  # streams of T-1 rows
            columns[key] = np.split(array, cuts - np.arange(1, count))
            continue
        if (not per_sample and array.shape[:1] != (total,)) or (array.ndim > 1 and not stream):
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


def _implied(
    root: dict[str, Any], columns: Mapping[str, NDArray[Any]], lengths: NDArray[Any]
) -> NDArray[np.int32]:
    """The column target_tokens of a slim body."""
    if root.get("targets") != IMPLIED:
        raise MalformedBody(f"targets: got {root.get('targets')!r}, want {IMPLIED!r}, or neither")
    if "target_tokens" in columns:
        raise MalformedBody('columns.target_tokens: got it beside "targets"; send one of them')
    ids = on_wire("columns.input_ids", columns["input_ids"])
    count, total = lengths.size, int(lengths.sum(dtype=np.int64))
    if ids.shape != (total,) or ids.dtype.kind not in "iu":
        raise DatumError(f"columns.input_ids: got {list(ids.shape)}, want integers [{total}]")
    if "last_targets" in root:
        last = on_wire("target_tokens", _array("last_targets", root["last_targets"]))
        if last.shape != (count,):
            raise DatumError(f"last_targets: got shape {list(last.shape)}, want [{count}]")
        return implied_targets(ids, lengths, last)
    weights = columns.get("weights", np.ones(count))
    ends = np.cumsum(lengths, dtype=np.int64) - 1
    lasts = weights if weights.shape == (count,) else weights[ends] if weights.size == total else 1
    if np.any(lasts):
        raise DatumError("last_targets: got none, want int32 [N]: a datum's last weight is not 0")
    return implied_targets(ids, lengths, np.zeros(count, np.int32))


def _metadata(values: Any, plural: str, count: int) -> list[Any]:
    if values is None:
        return [None] * count
    if plural == "rewards":
        values = [None if math.isnan(r) else r for r in _array(plural, values).tolist()]
    if not isinstance(values, list) or len(values) != count:
        raise DatumError(f"{plural}: want a list of {count}, one a datum")
    return values
