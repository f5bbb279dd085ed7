"""neat: its boundaries are those of its document map; attention over them stays in a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.schemas import (
    PackedSeqParams,
    packed_seq_params_from_doc_ids,
    to_flash_attention_kwargs,
)
from headrace.schemas.layout import Sequences, array_specs, constants, fill

SHORT = settings(max_examples=100, deadline=None)
LONG = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def placings(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """(lengths, slots, row) of one row."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    slots = [n + -n % multiple for n in lengths]
    return lengths, slots, sum(slots) + draw(st.sampled_from([0, 0, 1, 3, 40]))


def neat(lengths: list[int], slots: list[int], row: int) -> dict[str, Any]:
    """The batch as a trainer gets it: tensors and plain values. Ids 1, 2, ... in order."""
    ends = np.cumsum(lengths)
    ids = np.split(np.arange(1, ends[-1] + 1), ends[:-1])
    sequences = Sequences(lengths=np.array(lengths), input_ids=ids, targets=ids, extras={})
    places: dict[str, Any] = {"slots": np.array(slots), "row": row}
    specs = array_specs(sequences.lengths, (), layout="neat", targets=True, **places)
    out = {spec.name: np.full_like(spec.empty(), 85) for spec in specs}
    fill(out, sequences, layout="neat", slots=places["slots"])
    batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in out.items()}
    return batch | constants(sequences.lengths, "neat", **places)


def check_boundaries(placing: tuple[list[int], list[int], int]) -> None:
    batch = neat(*placing)
    want = packed_seq_params_from_doc_ids(batch["doc_ids"])
    assert torch.equal(batch["cu_seqlens"], want.cu_seqlens)
    assert batch["cu_seqlens"].dtype == want.cu_seqlens.dtype == torch.int32
    assert batch["max_seqlen"] == want.max_seqlen
    assert type(batch["max_seqlen"]) is int
    lengths = placing[0]
    counts = torch.bincount(batch["doc_ids"].flatten(), minlength=len(lengths) + 1)
    assert counts[1:].tolist() == lengths
    assert torch.equal(batch["doc_ids"] != 0, batch["input_ids"] != 0)


@SHORT
@given(placing=placings())
def test_boundaries_are_those_of_the_document_map(placing: Any) -> None:
    check_boundaries(placing)


@pytest.mark.soak
@LONG
@given(placing=placings())
def test_boundaries_are_those_of_the_document_map_long(placing: Any) -> None:
    check_boundaries(placing)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("tail", [0, 5])
def test_attention_over_its_boundaries_sees_each_sequence_alone(multiple: int, tail: int) -> None:
    lengths = [5, 1, 8, 3]
    slots = [n + -n % multiple for n in lengths]
    batch = neat(lengths, slots, sum(slots) + tail)
    params = PackedSeqParams(batch["cu_seqlens"], batch["max_seqlen"], batch["doc_ids"])
    keywords = to_flash_attention_kwargs(params)

    rows = torch.randn(batch["input_ids"].numel(), 4, dtype=torch.float64)
    got = _varlen(rows, keywords["cu_seq_lens_q"], keywords["max_length_q"])
    for number in range(1, len(lengths) + 1):
        mine = batch["doc_ids"][0] == number
        alone = rows[mine]
        assert torch.allclose(got[mine], _causal(alone), rtol=0, atol=1e-12)
    assert got.isfinite().all()


def _varlen(rows: torch.Tensor, cu_seqlens: Any, max_seqlen: Any) -> torch.Tensor:
    """What the varlen kernel computes: causal attention inside each segment, of bounded length."""
    pieces = torch.split(rows, torch.diff(cu_seqlens).tolist())
    assert max(map(len, pieces)) <= max_seqlen
    return torch.cat([_causal(piece) for piece in pieces])


def _causal(rows: torch.Tensor) -> torch.Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(rows[None], rows[None], rows[None], is_causal=True)[0]
