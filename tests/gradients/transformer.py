"""A small Hugging Face transformer in float64, and the loss of a step by the book.

Starcoder2, since its norms are plain LayerNorms: those of Llama and its kin compute in float32
whatever they are given. Attention is SDPA, and keeps to its sequence in four ways:

    a datum alone   [1, T]   it is causal, nothing else is there
    padded          [B, T]   the 2-D attention mask
    thd             [1, S]   position ids that restart: transformers makes the blocks of them, as
                             long as there is neither a cache nor a mask
    neat            [1, S]   a 4-D mask of the boundaries in `to_flash_attention_kwargs`
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from steps import VOCABULARY, Draw
from torch import Tensor, nn
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from headrace.client.step import Microbatch
from headrace.schemas.packed_seq import PackedSeqParams, to_flash_attention_kwargs

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, CAP = 0.2, 0.3, 1.5, 1.25


def transformer() -> Starcoder2ForCausalLM:
    """The same weights in every process; large ones, so that a token's context matters."""
    torch.manual_seed(5)
    config = Starcoder2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, sliding_window=None,
        use_cache=False, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Starcoder2ForCausalLM(config).double()


def logprobs_of(model: nn.Module, batch: Microbatch, *, blocks: bool = True) -> Tensor:
    """The logprob of each label, [B, T] or [1, S]; another token's where the label is -100.
    `blocks=False` lets packed sequences see each other, which is wrong.
    """
    ids = batch["input_ids"]
    if batch.info.layout == "padded":
        logits = model(ids, attention_mask=batch["attention_mask"]).logits
    elif not blocks:
        logits = model(ids).logits
    elif batch.info.layout == "thd":
        logits = model(ids, position_ids=batch["position_ids"]).logits
    else:
        params = PackedSeqParams(batch["cu_seqlens"], batch["max_seqlen"], batch["doc_ids"])
        edges = to_flash_attention_kwargs(params)["cu_seq_lens_q"]
        segment = torch.arange(len(edges) - 1).repeat_interleave(edges.diff())
        mask = (segment[:, None] == segment).tril()[None, None]
        position_ids = batch["position_ids"]
        logits = model(ids, position_ids=position_ids, attention_mask=mask).logits
    labels = batch["labels"].clamp(min=0)
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def alone(model: nn.Module, draw: Draw) -> list[Tensor]:
    """The logprobs [T] of each datum, one forward pass a datum."""
    made = []
    for ids, targets in zip(draw.columns["input_ids"], draw.columns["target_tokens"], strict=True):
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        made.append(
            logits.log_softmax(-1)[torch.arange(len(ids)), torch.from_numpy(targets).long()]
        )
    return made


def by_the_book(draw: Draw, logprobs: list[Tensor], loss: str, aggregate: str) -> Tensor:
    """The loss of the whole step from each datum's logprobs [T], as the definitions read."""
    sums: dict[object, Tensor | float] = defaultdict(float)
    counts: dict[object, int] = defaultdict(int)
    for at, logp in enumerate(logprobs):
        weights = torch.from_numpy(draw.weights(at))
        old = torch.from_numpy(draw.columns["logprobs"][at]).double()
        advantage = torch.from_numpy(draw.columns["advantages"][at]).double()
        key = {
            "token_mean": "the step",
            "sum": "the step",
            "sequence_mean": at,
            "rollout_mean": int(draw.rollouts[at]),
            "group_mean": int(draw.groups[at]),
        }[aggregate]
        sums[key] = sums[key] + (weights * position_losses(loss, logp, old, advantage)).sum()
        counts[key] += int((weights != 0).sum())
    if aggregate == "sum":
        return sums["the step"]
    means = [sums[key] / counts[key] for key in sums if counts[key] > 0]
    return sum(means) / len(means)


def position_losses(loss: str, logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logp - old).exp()
    if loss == "cross_entropy":
        return -logp
    if loss == "policy_gradient":
        return -advantage * logp
    if loss == "importance":
        return -torch.where(ratio > CAP, CAP, ratio).detach() * advantage * logp
    surrogate = -ratio * advantage
    held = -torch.where(ratio < 1 - CLIP_LOW, 1 - CLIP_LOW, ratio)
    held = torch.where(ratio > 1 + CLIP_HIGH, -(1 + CLIP_HIGH), held) * advantage
    worse = torch.where(surrogate >= held, surrogate, held)
    if loss == "ppo_clip":
        return worse
    bound = -DUAL_CLIP * advantage + 0 * ratio
    return torch.where((advantage < 0) & (worse > bound), bound, worse)


def flat(gradients) -> Tensor:
    return torch.cat([g.detach().flatten() for g in gradients])
