"""collate_datums: datums in, one batch of torch tensors out. The torch face of `layout.py`.

Owns what stands between the two: reading tensors as arrays (any device, detached, bfloat16
widened), deciding which keys are per token and which per sample, and refusing what cannot be read
in one way only.

    entry of loss_fn_inputs      read as                            padded      packed
    T values in every datum      per token                          [B, T]      [1, S]
    1 value ([1] or []) in all   per sample                         [B]         [N]
    1 value and T = 1            per token, unless in `per_sample`
    named in `streams`           [T, ...], dtype kept               [B, T, ...] [1, S, ...]

A batch of one-token datums cannot tell the two kinds apart; whoever knows (the service pins it per
run) says so by `per_sample`. Refused with DatumError, which is a ValueError: no datum; other keys
in one datum than in another; an empty sequence when packing; an entry with neither T nor 1 values;
a key that is per token here and per sample there; an entry of several dimensions that is not a
named stream; a key that names an array of the batch itself.

Takes a datum by its attributes `input_ids` and `loss_fn_inputs`, changes nothing in it, and returns
fresh tensors on the CPU. Values are not judged here: ids in range and finite numbers are the
service's business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.errors import DatumError
from headrace.schemas.fields import (
    BOUNDARIES,
    CROSS_ENTROPY_IGNORE_IDX,
    FIELDS,
    TARGETS,
    WEIGHTS,
    Layout,
    reserved_names,
)
from headrace.schemas.layout import Sequences, StreamSpec, array_specs, constants, fill
from headrace.schemas.tensors import ALIGNMENT, ArraySpec, aligned

if TYPE_CHECKING:
    from headrace.schemas.datum import Datum

__all__ = ["collate_datums"]

Arrays = list[NDArray[Any]]

# floats that numpy lacks: widened where float32 is delivered, carried as integers in a stream
WIDENED: Final = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def collate_datums(
    datums: Sequence[Datum],
    *,
    packed: bool = False,
    pad_seq_len_divisible: int | None = None,
    ignore_index: int = CROSS_ENTROPY_IGNORE_IDX,
    per_sample: Collection[str] = (),
    streams: Collection[str] = (),
) -> dict[str, Any]:
    """Batch `datums` as padded rows [B, T], or packed into one row [1, S] with `qkv_format` "thd".

    `pad_seq_len_divisible`: the padded width is rounded up to a multiple of it; packing ignores it.
    `ignore_index`: the label where the weight is 0, and of every position when packing datums
    without targets. `per_sample`: keys that have one value a sample, even where T = 1. `streams`:
    keys that keep dtype and shape [T, ...].

    Two datums of 2 and 1 tokens, packed:

        input_ids [[5, 6, 7]]   position_ids [[0, 1, 0]]   seq_lens [[2, 1]]   labels [[6, 9, 8]]

    Keys, dtypes and shapes: the tables in `fields.py`. Raises DatumError for what the module's
    docstring lists.
    """
    layout: Layout = "thd" if packed else "padded"
    keys = _common_keys(datums, layout)
    _check_named("per_sample", per_sample, keys)
    _check_named("streams", streams, keys)
    if pad_seq_len_divisible is not None and pad_seq_len_divisible < 0:
        raise DatumError(f"pad_seq_len_divisible: got {pad_seq_len_divisible}, want 1 or more")

    input_ids = _ids("input_ids", [d.input_ids for d in datums])
    lengths = [len(ids) for ids in input_ids]
    if packed and 0 in lengths:
        raise DatumError(
            f"datum {lengths.index(0)}, input_ids: cannot pack an empty sequence; leave it out"
        )
    targets = None
    if TARGETS in keys:
        targets = _ids(TARGETS, [d.loss_fn_inputs[TARGETS] for d in datums])
        _check_targets(targets, lengths)

    extras: dict[str, Arrays] = {}
    samples: set[str] = set()
    streamed: dict[str, Arrays] = {}
    stream_specs: dict[str, StreamSpec] = {}
    for key in keys - {TARGETS}:
        tensors = [d.loss_fn_inputs[key] for d in datums]
        if key in streams:
            streamed[key], stream_specs[key] = _stream(key, tensors, lengths)
            continue
        extras[key] = _numbers(key, tensors)
        if _is_per_sample(key, extras[key], lengths, pinned=key in per_sample):
            samples.add(key)

    sequences = Sequences(
        lengths=np.array(lengths, dtype=np.int64),
        input_ids=input_ids,
        targets=targets,
        extras=extras,
        per_sample=frozenset(samples),
        streams=streamed,
    )
    specs = array_specs(
        sequences.lengths,
        extras,
        layout=layout,
        targets=targets is not None,
        per_sample=sequences.per_sample,
        pad_seq_len_divisible=pad_seq_len_divisible,
        streams=stream_specs,
    )
    arrays = _arrays(specs)
    fill(arrays, sequences, layout=layout, ignore_index=ignore_index)

    batch: dict[str, Any] = {}
    for name, array in arrays.items():
        if name == BOUNDARIES.name:
            continue  # a trainer's key; not one of this function's
        batch[name] = torch.from_numpy(array)
        if name in streamed:
            batch[name] = batch[name].view(datums[0].loss_fn_inputs[name].dtype)
        if packed and name == FIELDS[layout][-1].name:
            batch["qkv_format"] = constants(sequences.lengths, layout)["qkv_format"]
    return batch


def _arrays(specs: Sequence[ArraySpec]) -> dict[str, NDArray[Any]]:
    """Fresh arrays in one allocation, each on a cache line of its own.

    Page faults cost several times the copying. Allocators keep one freed block for the next batch,
    but give several back to the kernel.
    """
    block = np.empty(sum(aligned(spec.nbytes) for spec in specs) + ALIGNMENT, dtype=np.uint8)
    offset = -block.ctypes.data % ALIGNMENT
    arrays = {}
    for spec in specs:
        arrays[spec.name] = spec.view(block.data, offset)
        offset += aligned(spec.nbytes)
    return arrays


def _common_keys(datums: Sequence[Datum], layout: Layout) -> set[str]:
    if len(datums) == 0:
        raise DatumError("collate_datums: got an empty list, want at least one Datum")
    keys = set(datums[0].loss_fn_inputs)
    for index, datum in enumerate(datums):
        if datum.loss_fn_inputs.keys() != keys:
            raise DatumError(
                f"datum {index}: got keys {sorted(datum.loss_fn_inputs)}, want {sorted(keys)} as "
                "in datum 0: all datums of a batch need the same loss_fn_inputs keys, or a loss "
                "mask would be lost unseen"
            )
    if taken := keys & reserved_names(layout):
        raise DatumError(
            f"loss_fn_inputs: got {sorted(taken)}, which the {layout} batch holds itself, want "
            "other names"
        )
    return keys


def _check_named(argument: str, names: Collection[str], keys: set[str]) -> None:
    if isinstance(names, str):
        raise DatumError(f"{argument}: got the string {names!r}, want a collection of keys")
    refused = {TARGETS} if argument == "per_sample" else {TARGETS, WEIGHTS}
    if wrong := [name for name in names if name in refused or name not in keys]:
        raise DatumError(f"{argument}: got {wrong}, want keys among {sorted(keys - refused)}")


def _column(tensors: Sequence[torch.Tensor]) -> Arrays:
    """The tensors as arrays: views where they lie in plain CPU memory, otherwise copies."""
    try:
        return list(map(torch.Tensor.numpy, tensors))
    except (TypeError, RuntimeError):  # a dtype that numpy lacks; another device or a gradient
        plain = [t.detach().float() if t.dtype in WIDENED else t for t in tensors]
        return [t.numpy(force=True) for t in plain]


def _ids(field: str, tensors: Sequence[torch.Tensor]) -> Arrays:
    """N arrays [T_i] of integer dtypes."""
    arrays = _column(tensors)
    for index, array in enumerate(arrays):
        if array.ndim != 1:
            raise DatumError(
                f"datum {index}, {field}: must be 1-D [T], one id a token; got shape {array.shape}"
            )
        if array.dtype.kind == "i":
            continue
        if array.size == 0 or array.dtype.kind == "b":
            arrays[index] = array.astype(np.int64)
        elif array.dtype.kind != "u" or int(array.max()) >= 2**63:
            raise DatumError(
                f"datum {index}, {field}: got {tensors[index].dtype} up to {array.max()}, want "
                "integers in int64"
            )
    return arrays


def _numbers(key: str, tensors: Sequence[torch.Tensor]) -> Arrays:
    """N arrays [n] of real dtypes."""
    arrays = _column(tensors)
    for index, array in enumerate(arrays):
        if array.ndim > 1:
            raise DatumError(
                f"datum {index}, {key}: got shape {array.shape}, want [T], [1] or []; name the key "
                "in `streams` to keep further dimensions"
            )
        if array.dtype.kind not in "fiub":
            raise DatumError(
                f"datum {index}, {key}: got {tensors[index].dtype}, want a real number dtype"
            )
        if array.ndim == 0:
            arrays[index] = array.reshape(1)
    return arrays


def _check_targets(targets: Arrays, lengths: list[int]) -> None:
    sizes = [len(t) for t in targets]
    if sizes != lengths:
        index = next(i for i, (n, t) in enumerate(zip(sizes, lengths, strict=True)) if n != t)
        raise DatumError(
            f"datum {index}, {TARGETS}: got length {sizes[index]}, want {lengths[index]}, "
            "one target a token"
        )


def _is_per_sample(key: str, arrays: Arrays, lengths: list[int], *, pinned: bool) -> bool:
    """Whether `key` has one value a sample. All datums decide together; T = 1 decides nothing."""
    sizes = [len(a) for a in arrays]
    if sizes == lengths and not pinned:
        return False
    if all(n == 1 for n in sizes):
        return True
    for index, (n, t) in enumerate(zip(sizes, lengths, strict=True)):
        if n != 1 and (pinned or n != t):
            want = "[1] or [], since it is per sample" if pinned else f"{t} (one a token) or 1"
            raise DatumError(f"datum {index}, {key}: got length {n}, want {want}")
    token = next(i for i, n in enumerate(sizes) if n != 1)
    sample = next(i for i, (n, t) in enumerate(zip(sizes, lengths, strict=True)) if n != t)
    raise DatumError(
        f"{key}: got one value a token in datum {token} and one a sample in datum {sample}, want "
        "one kind in the whole batch; expand the single values to [T]"
    )


def _stream(key: str, tensors: list[torch.Tensor], lengths: list[int]) -> tuple[Arrays, StreamSpec]:
    """(N arrays [T, ...], their spec): all of one dtype and one trailing shape."""
    dtype, trailing = tensors[0].dtype, tuple(tensors[0].shape[1:])
    for index, (tensor, t) in enumerate(zip(tensors, lengths, strict=True)):
        if tensor.dtype != dtype or tuple(tensor.shape) != (t, *trailing):
            raise DatumError(
                f"datum {index}, {key}: got {tensor.dtype} {tuple(tensor.shape)}, want the "
                f"stream's {dtype} {(t, *trailing)}"
            )
    carrier = WIDENED.get(dtype, dtype)
    arrays: Arrays = [tensor.detach().view(carrier).numpy(force=True) for tensor in tensors]
    return arrays, StreamSpec(dtype=arrays[0].dtype.str, trailing=trailing)
