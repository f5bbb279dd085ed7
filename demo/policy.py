"""The policy that learns: the task, the model, sampling, advantages and the loss. Pure functions.

The task: `3 1 4 1 5 >` is to be continued by `5 1 4 1 3`. The reward is the share of right
positions: 0.1 by chance, 1.0 when it is learnt.

    tokens   0..9 digits, 10 `>`        prompt [6]  five digits and `>`        response [5]

The model is a small causal transformer. It takes both layouts; only attention sees a difference:

    padded   input_ids [B, T]                      rows attend as they are
    thd      input_ids [1, S], cu_seqlens [N + 1]  the row is scattered to [N, longest] by
                                                   cu_seqlens, attends, and is gathered back

Padding stands at the right and attention is causal, so no real token sees it, and no other mask is
needed. Nothing here knows of the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "DIGITS",
    "GROUP_SIZE",
    "PROMPT_LENGTH",
    "Policy",
    "advantages_of",
    "prompts",
    "rewards_of",
    "sample",
    "token_losses",
]

DIGITS = 5
SEPARATOR = 10
VOCABULARY = 11
PROMPT_LENGTH = DIGITS + 1
CONTEXT = 2 * DIGITS  # tokens the model ever reads: the last response token is only ever a target
GROUP_SIZE = 16  # samples of one prompt, compared with one another
CLIP = 0.2  # how far the importance ratio moves a token's loss


class Slots(NamedTuple):
    """Where each token of a THD row lies in the matrix [N, longest] that attention works on."""

    row: Tensor  # int64 [S]
    column: Tensor  # int64 [S]; also the token's position in its sequence
    shape: tuple[int, int]  # N, longest

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Slots:
        """`cu_seqlens` int32 [N + 1]: 0, 3, 5 -> row 0 0 0 1 1, column 0 1 2 0 1, shape (2, 3)."""
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        column = torch.arange(len(row)) - starts[row]
        return cls(row, column, (len(lengths), int(lengths.max())))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor, slots: Slots | None) -> Tensor:
        """x [B, T, width] or [1, S, width] -> the same."""
        qkv = self.qkv(x)
        if slots is not None:
            matrix = qkv.new_zeros(*slots.shape, qkv.shape[-1])
            qkv = matrix.index_put((slots.row, slots.column), qkv[0])
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        if slots is not None:
            y = y[slots.row, slots.column][None]
        attended: Tensor = self.out(y)
        return attended

    def forward(self, x: Tensor, slots: Slots | None) -> Tensor:
        x = x + self.attend(self.norm1(x), slots)
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class Policy(nn.Module):
    """input_ids [B, T], or [1, S] with cu_seqlens -> logits [B, T, 11] or [1, S, 11], float32."""

    def __init__(self, *, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        slots = None if cu_seqlens is None else Slots.of(cu_seqlens)
        position = torch.arange(input_ids.shape[1]) if slots is None else slots.column
        x = self.tokens(input_ids) + self.positions(position)
        for block in self.blocks:
            x = block(x, slots)
        logits: Tensor = self.head(self.norm(x))
        return logits


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """int64 [count, 6]: five random digits and the separator."""
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), SEPARATOR)], dim=1)


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Continue each prompt by five tokens at temperature 1.

    Returns tokens int64 [N, 11] and the response's logprobs [N, 5] under the sampling policy.
    """
    tokens, logprobs = prompts, []
    for _ in range(DIGITS):
        distribution = policy(tokens)[:, -1].log_softmax(-1)
        token = distribution.exp().multinomial(1, generator=generator)
        tokens = torch.cat([tokens, token], dim=1)
        logprobs.append(distribution.gather(1, token))
    return tokens, torch.cat(logprobs, dim=1)


def rewards_of(tokens: Tensor) -> Tensor:
    """tokens [N, 11] -> float32 [N], the share of right positions, 0..1."""
    return (tokens[:, PROMPT_LENGTH:] == tokens[:, :DIGITS].flip(1)).float().mean(1)


def advantages_of(rewards: Tensor) -> Tensor:
    """rewards [N], groups of 16 one after another -> [N], normalised within each group (GRPO)."""
    groups = rewards.view(-1, GROUP_SIZE)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def token_losses(policy: Policy, batch: Mapping[str, Any]) -> Tensor:
    """The clipped importance-weighted loss of each position, 0 where `weights` is; as `labels`.

    `advantages` are per sample, [N]; `logprobs` the sampling policy's, which may be some steps old.
    """
    cu_seqlens = batch.get("cu_seqlens")
    logits = policy(batch["input_ids"], cu_seqlens)
    labels = batch["labels"].clamp(min=0)  # -100 has weight 0
    logprobs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    if cu_seqlens is None:
        advantages = batch["advantages"][:, None]  # [B, 1] against [B, T]
    else:
        advantages = batch["advantages"].repeat_interleave(cu_seqlens.diff().long())[None]  # [1, S]
    ratio = (logprobs - batch["logprobs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    losses: Tensor = -gain * batch["weights"]
    return losses
