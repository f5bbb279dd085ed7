"""packed_seq.py: the example that its docstring draws, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from headrace.schemas import (
    DatumError,
    PackedSeqParams,
    packed_seq_params_from_doc_ids,
    to_flash_attention_kwargs,
)


def test_the_drawn_example() -> None:
    doc_ids = torch.tensor([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3]])
    params = packed_seq_params_from_doc_ids(doc_ids)
    assert params.cu_seqlens.tolist() == [0, 2, 5, 6, 12]
    assert params.cu_seqlens.dtype == torch.int32
    assert params.max_seqlen == 6
    assert params.doc_ids is doc_ids


def test_a_document_that_fills_its_row_ends_with_it() -> None:
    params = packed_seq_params_from_doc_ids(torch.ones(3, 4, dtype=torch.int32))
    assert params.cu_seqlens.tolist() == [0, 4, 8, 12]


def test_flash_attention_keywords_are_those_of_transformers() -> None:
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    got = to_flash_attention_kwargs(PackedSeqParams(cu_seqlens, 2, torch.ones(1, 2)))
    assert got.keys() == FlashAttentionKwargs.__annotations__.keys()
    assert got["cu_seq_lens_q"] is got["cu_seq_lens_k"] is cu_seqlens
    assert got["max_length_q"] == got["max_length_k"] == 2


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3), (0, 4), (4, 0)])
def test_another_rank_or_no_position_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DatumError, match=r"doc_ids must be 2D \[batch, sequence\]"):
        packed_seq_params_from_doc_ids(torch.zeros(shape, dtype=torch.long))
