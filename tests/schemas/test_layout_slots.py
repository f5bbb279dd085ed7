"""Packed rows with slots and tails against a reference that walks them in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.schemas.fields import Layout
from headrace.schemas.layout import Sequences, StreamSpec, array_specs, constants, fill

SHORT = settings(max_examples=60, deadline=None)
LONG = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))

PER_SAMPLE = frozenset({"advantages"})
STREAM = StreamSpec(dtype="<i2", trailing=(2,))


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[Sequences, Layout, dict[str, Any], int]:
    """(sequences, layout, slots and row, ignore_index). The shape is drawn, the numbers are not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    longest = draw(st.sampled_from([1, 3, 12, 80]))
    lengths = rng.integers(1, longest + 1, draw(st.integers(1, 6)))
    places: dict[str, Any] = {}
    multiple = draw(st.sampled_from([None, 1, 2, 8, 0]))
    if multiple is not None:
        spare = rng.integers(0, 4, len(lengths)) if multiple == 0 else -lengths % multiple
        places["slots"] = lengths + spare
    used = int(places.get("slots", lengths).sum())
    tail = draw(st.sampled_from([None, 0, 1, 7, 100]))
    if tail is not None:
        places["row"] = used + tail

    def column(low: int, high: int, dtype: Any) -> list[np.ndarray[Any, Any]]:
        return [rng.integers(low, high, n).astype(dtype) for n in lengths]

    extras: dict[str, Any] = {
        "logprobs": [-rng.random(n, dtype=np.float32) for n in lengths],
        "advantages": [np.array(rng.normal()) for _ in lengths],
    }
    per_sample = PER_SAMPLE
    weights = draw(st.sampled_from(["none", "sample", "u1", "f4", "f8"]))
    if weights == "sample":
        extras["weights"] = [rng.integers(0, 2, 1).astype(np.float32) for _ in lengths]
        per_sample = PER_SAMPLE | {"weights"}
    elif weights != "none":
        extras["weights"] = column(0, 2, weights)
    if weights == "f8":
        extras["weights"] = [w * 1e-300 for w in extras["weights"]]
    sequences = Sequences(
        lengths=lengths,
        input_ids=column(0, 50_000, np.int32),
        targets=column(0, 50_000, np.int32) if draw(st.booleans()) else None,
        extras=extras,
        per_sample=per_sample,
        streams={"routes": [rng.integers(-9, 9, (n, 2)).astype(np.int16) for n in lengths]},
    )
    layout: Layout = draw(st.sampled_from(["thd", "neat"]))
    return sequences, layout, places, draw(st.sampled_from([-100, -1, 7]))


def filled(
    sequences: Sequences, layout: Layout, places: dict[str, Any], ignore_index: int
) -> dict[str, np.ndarray[Any, Any]]:
    specs = array_specs(
        sequences.lengths,
        sequences.extras,
        layout=layout,
        targets=sequences.targets is not None,
        per_sample=sequences.per_sample,
        streams=dict.fromkeys(sequences.streams, STREAM),
        **places,
    )
    out = {spec.name: np.full_like(spec.empty(), 85) for spec in specs}
    fill(out, sequences, layout=layout, ignore_index=ignore_index, slots=places.get("slots"))
    return out


def reference(
    sequences: Sequences, layout: Layout, places: dict[str, Any], ignore_index: int
) -> dict[str, Any]:
    """The same as lists, position by position."""
    lengths = [int(n) for n in sequences.lengths]
    slots = [int(n) for n in places.get("slots", lengths)]
    row = places.get("row", sum(slots))
    token_keys = sorted(sequences.extras.keys() - sequences.per_sample)
    names = ["input_ids", "labels", "position_ids", *token_keys, "routes"]
    lists: dict[str, list[Any]] = {name: [] for name in names}
    owners: list[int] = []  # a position's sequence, from 1; 0: a pad
    places_of: list[int] = []  # a position's slot, from 1; 0: the tail

    def put(at: int, **values: Any) -> None:
        pads = {"input_ids": 0, "labels": -100, "routes": [0, 0]}
        for name in names:
            lists[name].append(values.get(name, pads.get(name, 0.0)))
        lists["position_ids"][-1] = at

    for number, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        for at in range(slot):
            owners.append(number + 1 if at < length else 0)
            places_of.append(number + 1)
            if at >= length:
                put(at)
                continue
            label = ignore_index
            if sequences.targets is not None:
                weight = 1.0
                if "weights" in sequences.extras:
                    weights = sequences.extras["weights"][number]
                    weight = float(weights[0 if "weights" in sequences.per_sample else at])
                if weight != 0:
                    label = int(sequences.targets[number][at])
            values = {
                key: float(np.float32(sequences.extras[key][number][at])) for key in token_keys
            }
            ids = int(sequences.input_ids[number][at])
            routes = sequences.streams["routes"][number][at].tolist()
            put(at, input_ids=ids, labels=label, routes=routes, **values)
    for at in range(row - sum(slots)):
        owners.append(0)
        places_of.append(0)
        put(at)

    want: dict[str, Any] = {name: [values] for name, values in lists.items()}
    for key in sequences.per_sample:
        want[key] = [float(np.float32(v.reshape(-1)[0])) for v in sequences.extras[key]]
    segment_of = places_of if layout == "thd" else owners
    starts = [i for i in range(row) if i == 0 or segment_of[i] != segment_of[i - 1]]
    want["cu_seqlens"] = [*starts, row]
    want["max_seqlen"] = max(
        b - a for a, b in zip(want["cu_seqlens"], [*starts[1:], row], strict=False)
    )
    if layout == "thd":
        want |= {"seq_lens": [lengths], "seq_lens_padded": [slots], "qkv_format": "thd"}
    else:
        want["doc_ids"] = [owners]
    return want


def check(row: tuple[Sequences, Layout, dict[str, Any], int]) -> None:
    sequences, layout, places, _ = row
    got: dict[str, Any] = {name: array.tolist() for name, array in filled(*row).items()}
    got |= constants(sequences.lengths, layout, **places)
    assert got == reference(*row)


@SHORT
@given(row=packed_rows())
def test_packed_rows_are_what_a_walk_over_them_gives(row: Any) -> None:
    check(row)


@pytest.mark.soak
@LONG
@given(row=packed_rows())
def test_packed_rows_are_what_a_walk_over_them_gives_long(row: Any) -> None:
    check(row)


@SHORT
@given(row=packed_rows())
def test_position_ids_restart_where_thd_segments_start(row: Any) -> None:
    sequences, _, places, ignore_index = row
    out = filled(sequences, "thd", places, ignore_index)
    restarts = np.flatnonzero(np.diff(out["position_ids"][0], prepend=-2) != 1)
    assert [*restarts, out["position_ids"].size] == out["cu_seqlens"].tolist()


@SHORT
@given(row=packed_rows())
def test_slots_and_a_row_that_say_nothing_change_nothing(row: Any) -> None:
    sequences, layout, _, ignore_index = row
    said = {"slots": sequences.lengths.copy(), "row": int(sequences.lengths.sum())}
    plain, same = (filled(sequences, layout, places, ignore_index) for places in ({}, said))
    assert {k: v.tobytes() for k, v in plain.items()} == {k: v.tobytes() for k, v in same.items()}
    assert constants(sequences.lengths, layout) == constants(sequences.lengths, layout, **said)
