"""Losses whose sum over microbatches and ranks is the loss of the whole step in one batch. torch.

    logits = model(batch["input_ids"], ...)                                     # [..., vocabulary]
    nll = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    loss = ppo_clip_loss(-nll.view_as(batch["labels"]), batch, aggregate="token_mean")
    (loss * batch.info.loss_scale("ddp")).backward()                              # every microbatch

`logprobs` has the shape of `batch["labels"]`, [B, T] or [1, S]: the logprob under the model of each
label; what stands where a label is -100 is never read and gets gradient 0, NaN and inf included.
A scalar comes back, never divided by anything that belongs to one microbatch. A filler's is 0, with
a graph behind it, so that DDP and FSDP find every parameter.

With l the loss of a position and w its weight (1 where the datums have no `weights`), one batch of
the whole step has the loss

    aggregate        value                                                     divided by
    token_mean       sum of w l                                                n(step)
    sequence_mean    mean over datums    of  (sum of w l in the datum)       / n(datum)
    rollout_mean     mean over rollouts  of  (sum of w l in the rollout)     / n(rollout)
    group_mean       mean over groups    of  (sum of w l in the group)       / n(group)
    sum              sum of w l                                                1

n counts positions with w != 0. The outer means are over the datums, rollouts and groups that have
such a position. So a weight multiplies its position's loss and, unless it is 0, does not change
what is divided by; the mean weighted by w is "sum" over `info.step_loss_weight`. By hand, three
datums of one rollout each, the first two in one group, all weights 1:

    l     1 3 | 5 | 7 7 7 7      token_mean 37 / 7      sequence_mean (2 + 5 + 7) / 3
    group 0     0   1            group_mean (3 + 7) / 2

Which paper means which: DAPO averages over a group's tokens (arXiv:2503.14476), which is
"group_mean" as written and "token_mean" as most trainers have it; GRPO averages over each output
first (arXiv:2402.03300), "sequence_mean", or "rollout_mean" where an output is several datums;
Dr. GRPO divides by a constant (arXiv:2503.20783), "sum" over that constant.

Never reads the clock, never talks to other ranks, keeps nothing between calls.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.client.step import Microbatch
from headrace.schemas.fields import CROSS_ENTROPY_IGNORE_IDX, WEIGHTS

__all__ = [
    "Aggregate",
    "aggregate_loss",
    "cross_entropy_loss",
    "per_token",
    "policy_gradient_loss",
    "ppo_clip_loss",
]

Aggregate = Literal["token_mean", "sequence_mean", "rollout_mean", "group_mean", "sum"]


def policy_gradient_loss(
    logprobs: Tensor,
    batch: Microbatch,
    *,
    aggregate: Aggregate = "token_mean",
    importance_cap: float | None = None,
) -> Tensor:
    """REINFORCE: l = -A log p, with A of `batch["advantages"]` (Williams 1992).

    `importance_cap` c corrects for a policy that is not the one that sampled: l = -min(r, c) A log
    p, where r = p / exp(batch["logprobs"]) carries no gradient (truncated importance sampling, as
    in IMPALA, arXiv:1802.01561).
    """
    live, logprobs = _live("logprobs", logprobs, batch)
    advantages = _values("advantages", batch).to(logprobs.dtype)
    if importance_cap is not None:
        old = _values("logprobs", batch)
        ratio = (logprobs.detach() - old).masked_fill(~live, 0.0).exp()
        advantages = advantages * ratio.clamp(max=importance_cap)
    return aggregate_loss(-advantages * logprobs, batch, aggregate)


def ppo_clip_loss(
    logprobs: Tensor,
    batch: Microbatch,
    *,
    aggregate: Aggregate = "token_mean",
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """The clipped surrogate of PPO: l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with the
    ratio r = p / p_old (arXiv:1707.06347, eq. 7; GRPO's, arXiv:2402.03300, eq. 3, without its KL
    term).

    `clip_high`: `clip_low` where None; larger in DAPO (arXiv:2503.14476). `dual_clip` c > 1: where
    A < 0, l is at most -c A, however large the ratio (arXiv:1912.09729). log p_old is
    `batch["logprobs"]`, the sampling policy's, or `old_logprobs`, shaped as `logprobs`, where a
    pass over the step has made them anew.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip: got {dual_clip}, want more than 1, or None for no second clip"
        )
    high = clip_low if clip_high is None else clip_high
    if not 0 <= clip_low <= 1 or not high >= 0:
        raise ValueError(
            f"clip_low, clip_high: got {clip_low}, {high}, want 0 <= clip_low <= 1 and "
            "clip_high >= 0: the ratio is held between 1 - clip_low and 1 + clip_high"
        )
    live, logprobs = _live("logprobs", logprobs, batch)
    if old_logprobs is None:
        old = _values("logprobs", batch)
    else:
        _, old = _live("old_logprobs", old_logprobs.detach(), batch)
    advantages = _values("advantages", batch).to(logprobs.dtype)
    ratio = (logprobs - old).masked_fill(~live, 0.0).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return aggregate_loss(-gain, batch, aggregate)


def cross_entropy_loss(
    logprobs: Tensor, batch: Microbatch, *, aggregate: Aggregate = "token_mean"
) -> Tensor:
    """The negative log likelihood of the labels: l = -log p."""
    _, logprobs = _live("logprobs", logprobs, batch)
    return aggregate_loss(-logprobs, batch, aggregate)


def aggregate_loss(
    losses: Tensor, batch: Microbatch, aggregate: Aggregate = "token_mean"
) -> Tensor:
    """This microbatch's part of the step's loss, from l of each position, shaped as the labels.

    For losses of your own; those of this module end with it.
    """
    _, losses = _live("losses", losses, batch)
    if WEIGHTS in batch:
        losses = losses * _values(WEIGHTS, batch)
    factors = torch.from_numpy(_factors(batch, aggregate)).to(
        losses.device, losses.dtype, non_blocking=True
    )
    return (losses * per_token(factors, batch)).sum()


def per_token(values: Tensor, batch: Microbatch) -> Tensor:
    """`values` with the shape of the labels: [N] is spread over the datums' slots, what has the
    shape already is returned as it is. No datum's positions (a tail, or 0 in `doc_ids`) get 0.

    Two datums of 2 and 1 tokens in a thd row with a tail of 1: [5., 7.] -> [[5., 5., 7., 0.]].
    Waits for no device.
    """
    labels, count = _read("labels", batch), batch.info.num_datums
    if values.shape == labels.shape:
        return values
    if values.shape != (count,):
        raise ValueError(
            f"values: got shape {tuple(values.shape)}, want {(count,)}, one a datum, or "
            f"{tuple(labels.shape)}, one a position as in batch['labels']"
        )
    if batch.info.layout == "padded":
        return values[:, None].expand(labels.shape)
    if batch.info.layout == "neat":
        owner = batch["doc_ids"] - 1  # [1, S]; -1 is nobody
    else:
        ends = batch["seq_lens_padded"].reshape(-1).cumsum(0)  # [N]
        places = torch.arange(labels.shape[1], device=labels.device)
        owner = torch.bucketize(places, ends, right=True)[None]  # [1, S]; N is nobody
    return torch.cat([values, values.new_zeros(1)])[owner]


def _factors(batch: Microbatch, aggregate: Aggregate) -> NDArray[np.float64]:
    """[N]: what each datum's positions are multiplied by."""
    info = batch.info
    counts = {
        "token_mean": (1, np.full(info.num_datums, info.step_loss_tokens)),
        "sequence_mean": (info.step_datums, info.datum_loss_tokens),
        "rollout_mean": (info.step_rollouts, info.rollout_loss_tokens),
        "group_mean": (info.step_groups, info.group_loss_tokens),
        "sum": (1, np.ones(info.num_datums)),
    }
    if aggregate not in counts:
        raise ValueError(f"aggregate: got {aggregate!r}, want one of {list(get_args(Aggregate))}")
    outer, inner = counts[aggregate]
    # A datum, rollout or group without a loss token has nothing to divide: all its weights are 0.
    divisors: NDArray[np.float64] = outer * np.maximum(inner, 1).astype(np.float64)
    return np.reciprocal(divisors)


def _live(name: str, values: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
    """(bool: where there is a label, `values` in float32 or wider with 0 elsewhere)."""
    labels = _read("labels", batch)
    if values.shape != labels.shape:
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, want {tuple(labels.shape)}, one a position "
            "as in batch['labels']: gather the labels' logprobs from the logits first"
        )
    live = labels != CROSS_ENTROPY_IGNORE_IDX
    wide = torch.promote_types(values.dtype, torch.float32)
    return live, values.to(wide).masked_fill(~live, 0.0)


def _values(key: str, batch: Microbatch) -> Tensor:
    """The key's values, one a position."""
    return per_token(_read(key, batch), batch)


def _read(key: str, batch: Microbatch) -> Tensor:
    if key not in batch:
        raise ValueError(
            f"batch[{key!r}]: got a batch of {list(batch)}, want the key, which this loss reads: "
            "every datum must carry it; labels come of target_tokens"
        )
    values: Tensor = batch[key]
    return values
