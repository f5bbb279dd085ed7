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
    fill(out, sequences, layout=layout, ignore_index=ignore_index)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize("multiple", [None, 8])
def test_every_byte_is_written(
    layout: Layout, targets: bool, ignore_index: int, multiple: int | None
) -> None:
    keywords: Any = {"ignore_index": ignore_index, "pad_seq_len_divisible": multiple}
    dark = laid_out(example(targets=targets), layout, stain=0x00, **keywords)
    light = laid_out(example(targets=targets), layout, stain=0xFF, **keywords)
    assert {k: v.tobytes() for k, v in dark.items()} == {k: v.tobytes() for k, v in light.items()}


def test_pads_are_minus_100_whatever_ignore_index_is() -> None:
    out = laid_out(example(), "padded", ignore_index=7)
    assert out["labels"].tolist() == [[7, 12, 13], [21, -100, -100], [31, 7, -100]]


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
