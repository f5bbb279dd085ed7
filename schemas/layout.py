"""Lay sequences out as one batch, in place: the one implementation of collation. numpy only.

`collate_datums` calls it with fresh arrays, the service's feeder with arrays that live in a ring
record, so the two cannot drift. `array_specs` says which arrays there are, `fill` writes every byte
of them, `constants` names the plain values beside them. Three sequences a, b, c of 3, 1 and 2
tokens, with targets, weights and one advantage a sample:

    input_ids      a: 10 11 12      b: 20     c: 30 31
    target_tokens  a: 11 12 13      b: 21     c: 31 32
    weights        a:  0  1  1      b:  1     c:  1  0
    advantages     a: 0.5           b: -1     c: 2

    padded, [B, T] = [3, 3]                      thd, [1, S] = [1, 6]
    input_ids        10   11   12                input_ids        10   11   12 | 20 | 30   31
                     20    0    0                labels         -100   12   13 | 21 | 31 -100
                     30   31    0                position_ids      0    1    2 |  0 |  0    1
    attention_mask    1    1    1                seq_lens          3    1    2
                      1    0    0                seq_lens_padded   3    1    2
                      1    1    0                advantages      0.5   -1    2        float32 [N]
    labels         -100   12   13                weights           0    1    1 |  1 |  1    0
                     21 -100 -100                cu_seqlens        0    3    4    6   int32 [N+1]
                     31 -100 -100
    padding_mask     not attention_mask          qkv_format "thd", max_seqlen 3
    advantages      0.5   -1    2   [B]
    weights           0    1    1
                      1    0    0
                      1    0    0

A model split over context or tensor parallel ranks wants lengths in multiples. `slots` [N] says how
many positions each sequence takes, `row` how many the row has; left out, a slot is its sequence and
a row its slots. What a sequence leaves of its slot is its own padding; what the slots leave of the
row is the tail. `slots` 4, 2, 2 and `row` 10:

                        a             b        c        tail
    input_ids        10   11   12    0 | 20    0 | 30   31 |  0    0
    labels         -100   12   13 -100 | 21 -100 | 31 -100 | -100 -100
    position_ids      0    1    2    3 |  0    1 |  0    1 |  0    1      go on in a slot
    weights           0    1    1    0 |  1    0 |  1    0 |  0    0
    thd
      seq_lens        3    1    2          seq_lens_padded   4    2    2
      cu_seqlens      0    4    6    8   10                  max_seqlen 4
    neat
      doc_ids         1    1    1    0 |  2    0 |  3    3 |  0    0
      cu_seqlens      0    3    4    5    6    8   10        max_seqlen 3

`cu_seqlens` cuts the whole row into segments, `max_seqlen` is the longest of them. In thd they are
the slots, then the tail if there is one. In neat they are the runs of equal `doc_ids`, just as
`packed_seq_params_from_doc_ids` finds them: padding is a segment of its own, and a padded last slot
makes one with the tail. So `PackedSeqParams(cu_seqlens, max_seqlen, doc_ids)` is ready for
`to_flash_attention_kwargs`, without a look at the device. Otherwise neat is thd with `doc_ids` in
place of `seq_lens`, `seq_lens_padded` and `qkv_format`. A causal model that finds sequences by
where `position_ids` restart sees slots and tail; padding stands behind its sequence, so a token
sees the same either way.

Invariants. A label whose weight is 0 is `ignore_index`; a label at a pad is -100 whatever
`ignore_index` is. Whether a weight is 0 is asked of the weight as given, not of its float32 (a
float64 of 1e-300 is not 0). Integers keep their value, any number becomes the float32 nearest to
it. Each column is one `np.concatenate` into its place: no Python object a token, no intermediate
copy; casts are "same_kind", so a float never becomes an id.

Trusts its caller: lengths, kinds and ranges have been checked (by `collate.py`, by the service's
ingest). It never allocates an output, never reads a clock, never keeps a reference to what it was
given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.fields import (
    BOUNDARIES,
    CROSS_ENTROPY_IGNORE_IDX,
    EXTRA,
    FIELDS,
    WEIGHTS,
    Layout,
)
from headrace.schemas.tensors import ArraySpec

__all__ = ["Sequences", "StreamSpec", "array_specs", "constants", "fill"]

Arrays = Sequence[NDArray[Any]]

MASK_BLOCK = 32_768  # labels masked at a time; 256 KiB, so that the three passes meet in cache

_ramp: NDArray[np.int64] = np.arange(4096)  # 0, 1, 2, ...; replaced by a longer one, never written


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The datums of one microbatch in batch order, as views: N sequences of T_i tokens."""

    lengths: NDArray[np.int64]  # [N] T_i
    input_ids: Arrays  # N arrays [T_i], any integer dtype
    targets: Arrays | None  # N arrays [T_i], any integer dtype; None: no target_tokens
    extras: Mapping[str, Arrays]  # every other key -> N arrays [T_i], or [1] or [] where per sample
    per_sample: frozenset[str] = frozenset()  # which of the extras have one value a sample
    streams: Mapping[str, Arrays] = field(default_factory=dict)  # N arrays [T_i, ...], dtype kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A named stream's dtype and the shape behind its token axis."""

    dtype: str  # as np.dtype(...).str
    trailing: tuple[int, ...] = ()


def array_specs(
    lengths: NDArray[np.int64],
    extras: Iterable[str],
    *,
    layout: Layout,
    targets: bool,
    per_sample: frozenset[str] = frozenset(),
    pad_seq_len_divisible: int | None = None,
    streams: Mapping[str, StreamSpec] | None = None,
    slots: NDArray[np.int64] | None = None,
    row: int | None = None,
) -> tuple[ArraySpec, ...]:
    """The arrays of a batch of N sequences of `lengths`, in key order; packed ends with cu_seqlens.

    `slots` [N]: positions that a sequence takes, at least its length. `row`: positions of the row;
    at least the slots' sum when packing; padded, where each row is a slot, the width, and at least
    the longest slot. `pad_seq_len_divisible` rounds the padded width up; packing ignores it. Raises
    ValueError where a sequence does not fit its slot, or the slots the row.
    """
    count = len(lengths)
    slots = lengths if slots is None else slots
    rows = _rows(lengths, slots, row, layout, pad_seq_len_divisible)
    shapes = {"token": rows, "sequence": (1, count)}
    specs = [
        ArraySpec(name=f.name, dtype=f.dtype, shape=shapes[f.axis])
        for f in FIELDS[layout]
        if targets or not f.needs_targets
    ]
    streams = streams or {}
    for name in sorted({*extras, *streams}):
        if name in streams:
            stream = streams[name]
            specs.append(ArraySpec(name=name, dtype=stream.dtype, shape=(*rows, *stream.trailing)))
        else:
            shape = (count,) if name in per_sample else rows
            specs.append(ArraySpec(name=name, dtype=EXTRA.dtype, shape=shape))
    if layout != "padded":
        boundaries = (len(_segments(lengths, slots, rows[1], layout)) + 1,)
        specs.append(ArraySpec(name=BOUNDARIES.name, dtype=BOUNDARIES.dtype, shape=boundaries))
    return tuple(specs)


def constants(
    lengths: NDArray[np.int64],
    layout: Layout,
    *,
    slots: NDArray[np.int64] | None = None,
    row: int | None = None,
) -> dict[str, Any]:
    """The batch's plain values: `max_seqlen`, positions of the longest segment, and for thd
    `qkv_format`. `slots` and `row` as given to `array_specs`.
    """
    if layout == "padded":
        return {}
    slots = lengths if slots is None else slots
    width = int(slots.sum()) if row is None else row
    longest = {"max_seqlen": int(_segments(lengths, slots, width, layout).max())}
    return {"qkv_format": "thd", **longest} if layout == "thd" else longest


def fill(
    out: Mapping[str, NDArray[Any]],
    sequences: Sequences,
    *,
    layout: Layout,
    ignore_index: int = CROSS_ENTROPY_IGNORE_IDX,
    slots: NDArray[np.int64] | None = None,
) -> None:
    """Write every byte of every array of `out`: C-contiguous arrays as `array_specs` says.

    `slots` [N] as given to `array_specs`; the row is as long as the arrays are.
    """
    lengths = sequences.lengths
    slots = lengths if slots is None else slots
    width = out["input_ids"].shape[1]
    tail = 0 if layout == "padded" else width - int(slots.sum())
    gaps = _gaps(lengths, slots, width, layout)
    pads = {f.name: f.pad for f in FIELDS[layout]}

    _lay(out["input_ids"], sequences.input_ids, gaps, pads["input_ids"])
    with np.errstate(over="ignore", invalid="ignore"):  # float64 beyond float32 is inf, as in torch
        for name, arrays in sequences.extras.items():
            if name in sequences.per_sample:
                np.concatenate(_flat(arrays), out=out[name], casting="same_kind")
            else:
                _lay(out[name], arrays, gaps, EXTRA.pad)
    for name, arrays in sequences.streams.items():
        _lay(out[name], arrays, gaps, EXTRA.pad)

    if "labels" in out:
        _lay_labels(out, sequences, gaps, pads["labels"], ignore_index)

    if layout == "padded":
        real = _ramp_of(width)[:width] < lengths[:, None]
        out["attention_mask"][...] = real
        np.logical_not(real, out=out["padding_mask"])
        return
    pieces = slots.tolist()
    ramp = _ramp_of(max(*pieces, tail))
    np.concatenate([ramp[:n] for n in (*pieces, tail)], out=out["position_ids"].reshape(-1))
    if layout == "thd":
        out["seq_lens"][0], out["seq_lens_padded"][0] = lengths, slots
    else:
        out["doc_ids"][0] = _doc_ids(lengths, gaps)
    out["cu_seqlens"][0] = 0
    np.cumsum(_segments(lengths, slots, width, layout), out=out["cu_seqlens"][1:])


def _rows(
    lengths: NDArray[np.int64],
    slots: NDArray[np.int64],
    row: int | None,
    layout: Layout,
    pad_seq_len_divisible: int | None,
) -> tuple[int, int]:
    if slots is not lengths and (slots < lengths).any():
        at = int((slots < lengths).argmax())
        raise ValueError(f"slots: sequence {at} has {lengths[at]} tokens, its slot {slots[at]}")
    if layout == "padded":
        count, need, multiple = len(lengths), int(slots.max()), pad_seq_len_divisible or 1
    else:
        count, need, multiple = 1, int(slots.sum()), 1
    width = (need + multiple - 1) // multiple * multiple if row is None else row
    if width < need:
        raise ValueError(f"row: got {width} positions, want at least the {need} of its slots")
    return count, width


def _segments(
    lengths: NDArray[np.int64], slots: NDArray[np.int64], width: int, layout: Layout
) -> NDArray[np.int64]:
    """Positions of each segment of a packed row, in order; together `width`. N, or more for pads.

    thd: slots and tail. neat: sequences and the pads behind them.
    """
    tail = width - int(slots.sum())
    if layout == "thd":
        return np.append(slots, tail) if tail else slots
    runs = np.stack((lengths, slots - lengths), axis=1).reshape(-1)
    runs[-1] += tail
    return runs[runs > 0]


def _gaps(
    lengths: NDArray[np.int64], slots: NDArray[np.int64], width: int, layout: Layout
) -> list[int] | None:
    """How many pads follow each sequence [N], the tail among the last one's. None: no pads."""
    if layout == "padded":
        gaps = width - lengths
    else:
        gaps = slots - lengths
        gaps[-1] += width - slots.sum()
    return gaps.tolist() if gaps.any() else None


def _lay(out: NDArray[Any], arrays: Arrays, gaps: list[int] | None, pad: int) -> None:
    """One column in one pass, `gaps` of `pad` between the sequences."""
    flat = out.reshape(-1, *out.shape[2:])  # [B * T, ...]
    if gaps is None:
        np.concatenate(arrays, out=flat, casting="same_kind")
        return
    blank = np.full((max(gaps), *out.shape[2:]), pad, dtype=out.dtype)
    pieces: list[NDArray[Any]] = [blank] * (2 * len(gaps))
    pieces[::2] = arrays
    blanks = {gap: blank[:gap] for gap in set(gaps)}
    pieces[1::2] = [blanks[gap] for gap in gaps]
    np.concatenate(pieces, out=flat, casting="same_kind")


def _lay_labels(
    out: Mapping[str, NDArray[Any]],
    sequences: Sequences,
    gaps: list[int] | None,
    pad: int,
    ignore_index: int,
) -> None:
    """Targets, `ignore_index` where the weight is 0 or there are none, `pad` between sequences."""
    labels = out["labels"].reshape(-1)
    if sequences.targets is None:
        labels.fill(ignore_index)
    else:
        _lay(out["labels"], sequences.targets, gaps, pad)
        keep = _kept(out, sequences, gaps)
        if keep is None:
            return
        _mask(labels, keep, ignore_index)  # the pads too
    if gaps is not None and ignore_index != pad:
        at = 0
        for length, gap in zip(sequences.lengths.tolist(), gaps, strict=True):
            at += length + gap
            labels[at - gap : at] = pad


def _kept(
    out: Mapping[str, NDArray[Any]], sequences: Sequences, gaps: list[int] | None
) -> NDArray[Any] | None:
    """Flat over the positions of `labels`, 0 where the weight is 0. None: there are no weights."""
    if WEIGHTS in sequences.per_sample:
        ones = [w.reshape(-1) != 0 for w in sequences.extras[WEIGHTS]]
        weights = np.repeat(np.concatenate(ones), sequences.lengths)
    elif WEIGHTS not in sequences.extras:
        return None
    elif any(w.dtype.itemsize > 4 and w.dtype.kind == "f" for w in sequences.extras[WEIGHTS]):
        weights = np.concatenate([w != 0 for w in sequences.extras[WEIGHTS]])
    else:
        return out[WEIGHTS].reshape(-1)  # already laid out, and no other dtype rounds to 0
    if gaps is None:
        return weights
    rows = np.zeros(out["labels"].shape, dtype=np.bool_)
    pieces = np.split(weights, np.cumsum(sequences.lengths)[:-1])
    _lay(rows, pieces, gaps, 0)
    return rows.reshape(-1)


def _mask(labels: NDArray[np.int64], keep: NDArray[Any], ignore_index: int) -> None:
    """`ignore_index` where `keep` is 0. No branch; exact for any int64, since the sums wrap."""
    for start in range(0, len(labels), MASK_BLOCK):
        block = labels[start : start + MASK_BLOCK]
        np.subtract(block, ignore_index, out=block)
        np.multiply(block, keep[start : start + MASK_BLOCK] != 0, out=block)
        np.add(block, ignore_index, out=block)


def _doc_ids(lengths: NDArray[np.int64], gaps: list[int] | None) -> NDArray[np.int64]:
    """[S] each token's sequence, from 1; 0 at a pad."""
    numbers = np.arange(1, len(lengths) + 1)
    if gaps is None:
        return np.repeat(numbers, lengths)
    return np.repeat(
        np.stack((numbers, np.zeros_like(numbers)), axis=1).reshape(-1),
        np.stack((lengths, gaps), axis=1).reshape(-1),
    )


def _flat(arrays: Arrays) -> list[NDArray[Any]]:
    return [a.reshape(1) for a in arrays]


def _ramp_of(length: int) -> NDArray[np.int64]:
    global _ramp
    ramp = _ramp
    if len(ramp) < length:
        ramp = _ramp = np.arange(1 << (length - 1).bit_length())
    return ramp
