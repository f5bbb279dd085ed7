"""From a document map to what varlen flash attention reads: PackedSeqParams. torch.

A neat-packed row says for each position which document it belongs to, from 1; 0 is padding.
Attention must not look across documents, so the kernel wants the boundaries instead, over all rows
laid end to end. A segment is a run of one index inside one row: a row's start always opens a new
one, and padding is a segment of its own, since the kernel walks the padding too.

    doc_ids [B, S] = [2, 6]        1 1 2 2 2 0
                                   3 3 3 3 3 3
    cu_seqlens int32 [5]           0 2 5 6 12        max_seqlen 6

`doc_ids` is handed on as it is, for losses and context parallelism. The boundaries live on its
device; reading `max_seqlen` waits for that device once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.schemas.errors import DatumError

__all__ = ["PackedSeqParams", "packed_seq_params_from_doc_ids", "to_flash_attention_kwargs"]


@dataclass
class PackedSeqParams:
    """The segments of a packed batch. A plain dataclass, as users of this type know it.

    `cu_seqlens` int32 [segments + 1]: starts at 0, ends at B * S; segment k is [cu_seqlens[k],
    cu_seqlens[k + 1]). `max_seqlen` tokens of the longest segment. `doc_ids` int [B, S], 1-based, 0
    = padding.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    doc_ids: torch.Tensor


def packed_seq_params_from_doc_ids(doc_ids: torch.Tensor) -> PackedSeqParams:
    """The segments of a document map [B, S]. Raises DatumError for another rank or no position."""
    if doc_ids.dim() != 2 or doc_ids.numel() == 0:
        raise DatumError(
            f"doc_ids must be 2D [batch, sequence] with at least one position, "
            f"got shape {tuple(doc_ids.shape)}"
        )
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    torch.ne(doc_ids[:, 1:], doc_ids[:, :-1], out=starts[:, 1:])
    first = starts.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([first, first.new_tensor([doc_ids.numel()])]).to(torch.int32)
    return PackedSeqParams(
        cu_seqlens=cu_seqlens, max_seqlen=int(cu_seqlens.diff().max()), doc_ids=doc_ids
    )


def to_flash_attention_kwargs(params: PackedSeqParams) -> dict[str, torch.Tensor | int]:
    """The keywords of transformers' `FlashAttentionKwargs`; query and key share one layout."""
    return {
        "cu_seq_lens_q": params.cu_seqlens,
        "cu_seq_lens_k": params.cu_seqlens,
        "max_length_q": params.max_seqlen,
        "max_length_k": params.max_seqlen,
    }
