"""layout.py: the example of its docstring, arrays in a larger buffer, no byte left unwritten."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from headrace.schemas.fields import EXTRA, FIELDS, INPUTS, LAYOUTS, Layout, reserved_names
from headrace.schemas.layout import Sequences, array_specs, constants, fill
from headrace.schemas.tensors import aligned

LENGTHS = np.array([3, 1, 2])
SLOTS = np.array([4, 2, 2])  # LENGTHS in multiples of 2


def example(*, targets: bool = True) -> Sequences:
    return Sequences(
        lengths=LENGTHS,
        input_ids=[np.array(a, dtype=np.int32) for a in ([10, 11, 12], [20], [30, 31])],
        targets=[np.array(a, dtype=np.int32) for a in ([11, 12, 13], [21], [31, 32])]
        if targets
        else None,
        extras={
            "weights": [np.array(a, dtype=np.uint8) for a in ([0, 1, 1], [1], [1, 0])],
            "advantages": [np.array(a) for a in (0.5, [-1.0], 2)],
        },
        per_sample=frozenset({"advantages"}),
    )


def specs_of(sequences: Sequences, layout: Layout, **keywords: Any) -> Any:
    return array_specs(
        sequences.lengths,
        sequences.extras,
        layout=layout,
        targets=sequences.targets is not None,
        per_sample=sequences.per_sample,
        **keywords,
    )


def laid_out(
    sequences: Sequences,
    layout: Layout,
    *,
    stain: int = 0xAA,
    ignore_index: int = -100,
    **keywords: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Filled arrays that lie behind one another in one stained buffer, as in a ring record."""
    specs = specs_of(sequences, layout, **keywords)
    buffer = bytearray([stain]) * (64 + sum(aligned(s.nbytes) for s in specs))
    out, offset = {}, 64
    for spec in specs:
        out[spec.name] = spec.view(buffer, offset)
        offset += aligned(spec.nbytes)
    slots = keywords.get("slots")
    fill(out, sequences, layout=layout, ignore_index=ignore_index, slots=slots)
    used = {
        64 + sum(aligned(s.nbytes) for s in specs[:i]) + n
        for i, spec in enumerate(specs)
        for n in range(spec.nbytes)
    }
    assert all(buffer[i] == stain for i in range(len(buffer)) if i not in used)
    return out


def test_the_drawn_example_padded() -> None:
    out = laid_out(example(), "padded")
    assert {name: array.tolist() for name, array in out.items()} == {
        "input_ids": [[10, 11, 12], [20, 0, 0], [30, 31, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0], [1, 1, 0]],
        "labels": [[-100, 12, 13], [21, -100, -100], [31, -100, -100]],
        "padding_mask": [[False, False, False], [False, True, True], [False, False, True]],
        "advantages": [0.5, -1.0, 2.0],
        "weights": [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
    }
    assert list(out) == [
        "input_ids",
        "attention_mask",
        "labels",
        "padding_mask",
        "advantages",
        "weights",
    ]
    assert constants(LENGTHS, "padded") == {}


def test_the_drawn_example_thd() -> None:
    out = laid_out(example(), "thd")
    assert {name: array.tolist() for name, array in out.items()} == {
        "input_ids": [[10, 11, 12, 20, 30, 31]],
        "labels": [[-100, 12, 13, 21, 31, -100]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "seq_lens": [[3, 1, 2]],
        "seq_lens_padded": [[3, 1, 2]],
        "advantages": [0.5, -1.0, 2.0],
        "weights": [[0.0, 1.0, 1.0, 1.0, 1.0, 0.0]],
        "cu_seqlens": [0, 3, 4, 6],
    }
    assert list(out)[-1] == "cu_seqlens"
    assert out["cu_seqlens"].dtype == np.int32
    assert constants(LENGTHS, "thd") == {"qkv_format": "thd", "max_seqlen": 3}


PACKED_10 = {  # what the drawing shows for slots 4, 2, 2 and a row of 10, in both packed layouts
    "input_ids": [[10, 11, 12, 0, 20, 0, 30, 31, 0, 0]],
    "labels": [[-100, 12, 13, -100, 21, -100, 31, -100, -100, -100]],
    "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1, 0, 1]],
    "advantages": [0.5, -1.0, 2.0],
    "weights": [[0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
}


def test_the_drawn_example_thd_with_slots_and_a_tail() -> None:
    out = laid_out(example(), "thd", slots=SLOTS, row=10)
    assert {name: array.tolist() for name, array in out.items()} == PACKED_10 | {
        "seq_lens": [[3, 1, 2]],
        "seq_lens_padded": [[4, 2, 2]],
        "cu_seqlens": [0, 4, 6, 8, 10],
    }
    assert constants(LENGTHS, "thd", slots=SLOTS, row=10) == {"qkv_format": "thd", "max_seqlen": 4}


def test_the_drawn_example_neat() -> None:
    out = laid_out(example(), "neat", slots=SLOTS, row=10)
    assert {name: array.tolist() for name, array in out.items()} == PACKED_10 | {
        "doc_ids": [[1, 1, 1, 0, 2, 0, 3, 3, 0, 0]],
        "cu_seqlens": [0, 3, 4, 5, 6, 8, 10],
    }
    assert list(out) == [
        "input_ids",
        "labels",
        "position_ids",
        "doc_ids",
        "advantages",
        "weights",
        "cu_seqlens",
    ]
    assert {n: a.dtype.str for n, a in out.items() if a.dtype.kind == "i"} == {
        "input_ids": "<i8",
        "labels": "<i8",
        "position_ids": "<i8",
        "doc_ids": "<i8",
        "cu_seqlens": "<i4",
    }
    assert constants(LENGTHS, "neat", slots=SLOTS, row=10) == {"max_seqlen": 3}


def test_slots_that_fill_the_row_leave_no_tail() -> None:
    out = laid_out(example(), "thd", slots=SLOTS, row=8)
    assert out["cu_seqlens"].tolist() == [0, 4, 6, 8]
    assert constants(LENGTHS, "thd", slots=SLOTS) == {"qkv_format": "thd", "max_seqlen": 4}


def test_the_tail_may_be_the_longest_segment() -> None:
    out = laid_out(example(), "thd", row=11)
    assert out["cu_seqlens"].tolist() == [0, 3, 4, 6, 11]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4]]
    assert constants(LENGTHS, "thd", row=11)["max_seqlen"] == 5


def test_neat_makes_one_segment_of_a_padded_last_slot_and_the_tail() -> None:
    slots = np.array([3, 1, 4])
    out = laid_out(example(), "neat", slots=slots, row=12)
    assert out["doc_ids"].tolist() == [[1, 1, 1, 2, 3, 3, 0, 0, 0, 0, 0, 0]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert out["cu_seqlens"].tolist() == [0, 3, 4, 6, 12]
    assert constants(LENGTHS, "neat", slots=slots, row=12) == {"max_seqlen": 6}


def test_padded_rows_are_as_wide_as_the_longest_slot_or_as_they_are_told() -> None:
    plain = {spec.name: spec.shape for spec in specs_of(example(), "padded")}
    assert plain["input_ids"] == (3, 3)
    slotted = {spec.name: spec.shape for spec in specs_of(example(), "padded", slots=SLOTS)}
    assert slotted["input_ids"] == slotted["weights"] == (3, 4)
    told = laid_out(example(), "padded", slots=SLOTS, row=5)
    divided = laid_out(example(), "padded", pad_seq_len_divisible=5)
    assert {k: v.tolist() for k, v in told.items()} == {k: v.tolist() for k, v in divided.items()}
    assert constants(LENGTHS, "padded", slots=SLOTS, row=5) == {}


@pytest.mark.parametrize(("layout", "need"), [("padded", 4), ("thd", 8), ("neat", 8)])
def test_what_does_not_fit_is_refused(layout: Layout, need: int) -> None:
    with pytest.raises(ValueError, match="slots: sequence 1 has 1 tokens, its slot 0"):
        specs_of(example(), layout, slots=np.array([4, 0, 1]))
    with pytest.raises(
        ValueError, match=f"row: got {need - 1} positions, want at least the {need}"
    ):
        specs_of(example(), layout, slots=SLOTS, row=need - 1)
    assert specs_of(example(), layout, slots=SLOTS, row=need)[0].shape[1] == need


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize(
    "places",
    [{}, {"pad_seq_len_divisible": 8}, {"slots": SLOTS}, {"row": 9}, {"slots": SLOTS, "row": 16}],
)
def test_every_byte_is_written(
    layout: Layout, targets: bool, ignore_index: int, places: dict[str, Any]
) -> None:
    keywords: Any = {"ignore_index": ignore_index, **places}
    dark = laid_out(example(targets=targets), layout, stain=0x00, **keywords)
    light = laid_out(example(targets=targets), layout, stain=0xFF, **keywords)
    assert {k: v.tobytes() for k, v in dark.items()} == {k: v.tobytes() for k, v in light.items()}


def test_pads_are_minus_100_whatever_ignore_index_is() -> None:
    out = laid_out(example(), "padded", ignore_index=7)
    assert out["labels"].tolist() == [[7, 12, 13], [21, -100, -100], [31, 7, -100]]


@pytest.mark.parametrize("layout", ["thd", "neat"])
def test_packed_pads_are_minus_100_whatever_ignore_index_is(layout: Layout) -> None:
    places: Any = {"slots": SLOTS, "row": 10, "ignore_index": 7}
    masked = laid_out(example(), layout, **places)["labels"]
    assert masked.tolist() == [[7, 12, 13, -100, 21, -100, 31, 7, -100, -100]]
    bare = laid_out(example(targets=False), layout, **places)["labels"]
    assert bare.tolist() == [[7, 7, 7, -100, 7, -100, 7, 7, -100, -100]]


def test_without_targets_padded_has_no_labels_and_thd_ignores_all() -> None:
    assert "labels" not in laid_out(example(targets=False), "padded")
    assert laid_out(example(targets=False), "thd", ignore_index=7)["labels"].tolist() == [[7] * 6]


def test_a_long_sequence_grows_the_position_ramp() -> None:
    length = 10_000
    sequences = Sequences(
        lengths=np.array([length, 2]),
        input_ids=[np.zeros(length, np.int64), np.zeros(2, np.int64)],
        targets=None,
        extras={},
    )
    out = {spec.name: spec.empty() for spec in specs_of(sequences, "thd")}
    fill(out, sequences, layout="thd")
    assert out["position_ids"][0, [0, length - 1, length, length + 1]].tolist() == [
        0,
        length - 1,
        0,
        1,
    ]


def test_a_long_tail_grows_the_position_ramp() -> None:
    sequences = Sequences(
        lengths=np.array([2]), input_ids=[np.zeros(2, np.int64)], targets=None, extras={}
    )
    out = {spec.name: spec.empty() for spec in specs_of(sequences, "thd", row=70_000)}
    fill(out, sequences, layout="thd")
    assert out["position_ids"][0, [0, 1, 2, 3, -1]].tolist() == [0, 1, 0, 1, 69_997]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_float_never_becomes_an_id(layout: Layout) -> None:
    sequences = Sequences(
        lengths=np.array([1]), input_ids=[np.array([1.5])], targets=None, extras={}
    )
    out = {spec.name: spec.empty() for spec in specs_of(sequences, layout)}
    with pytest.raises(TypeError, match="same_kind"):
        fill(out, sequences, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_field_table_and_the_arrays_agree(layout: Layout) -> None:
    specs = {spec.name: spec for spec in specs_of(example(), layout)}
    assert [f.name for f in FIELDS[layout]] == list(specs)[: len(FIELDS[layout])]
    for field in FIELDS[layout]:
        assert specs[field.name].dtype == field.dtype
    assert specs["weights"].dtype == EXTRA.dtype
    assert reserved_names(layout) >= specs.keys() - {"weights", "advantages"}


def test_the_field_table_and_the_contract_table_agree() -> None:
    import headrace.schemas.datum as datum

    for key in INPUTS:
        assert f"    {key.name} " in str(datum.__doc__)


def test_numpy_is_all_that_it_needs() -> None:
    code = "import sys, headrace.schemas.layout; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
