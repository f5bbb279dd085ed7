"""Datum: one token sequence and what the loss needs to know about it. torch.

    input_ids        int [T], T >= 1
    loss_fn_inputs   dict of tensors:

    key             accepted               delivered       meaning
    target_tokens   int [T]                int64 `labels`  already shifted: position i is trained
                                                           to predict target_tokens[i]
    weights         number >= 0, [T], [1]  float32         loss weight; 0 disables the position and
                                                           makes its label ignore_index
    logprobs        float [T]              float32         the behaviour policy's logprob of
                                                           target_tokens[i]
    advantages      float [T], [1], []     float32         one a token, or one a sample
    any other       number [T], [1], []    float32         reference logprobs, values, ...

Alignment is "predict": entry i speaks about the token that follows input_ids[i]. Samplers and most
trainers speak "token" alignment, where entry i speaks about token i itself; `Datum.from_tokens`
translates, one sequence at a time and before anything is packed. Tokens 7 8 | 9 5 (a prompt of two,
a response of two), logprobs of the response:

    tokens           7    8    9    5
    token-aligned    -    -  -.1  -.2            response-aligned   -.1  -.2
    input_ids        7    8    9
    target_tokens    8    9    5
    weights          0    1    1
    logprobs         0  -.1  -.2

Users make datums, `collate_datums` and `RolloutClient` read them by their attributes. A Datum is
mutable, keeps the tensors that it was given (no copy, any device, grad or not) and checks only what
its type says; the rest is checked where datums meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.schemas.collate import collate_datums
from headrace.schemas.errors import DatumError
from headrace.schemas.fields import CROSS_ENTROPY_IGNORE_IDX, TARGETS, WEIGHTS

__all__ = ["CROSS_ENTROPY_IGNORE_IDX", "Datum", "collate_datums"]

Numbers = Sequence[Any] | np.ndarray[Any, Any] | torch.Tensor


@dataclass
class Datum:
    """One training example. Lists and arrays become tensors; `input_ids` not [T] is a DatumError.

    What follows the two fields is keyword-only and travels to the service beside them;
    `collate_datums` and `==` ignore it. `id`: unique in the run. `rollout_id`: datums that are
    parts of one rollout share it. `group_id`, `group_size`: the rollouts of one prompt, and how
    many there are. `policy_version`: of the weights that sampled it. `source`: the task or data
    set. `split`: "eval" is kept and never trained on.
    """

    input_ids: torch.Tensor  # int [T]
    loss_fn_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    _: KW_ONLY
    id: str | None = None
    rollout_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy_version: int | None = None
    reward: float | None = None
    source: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.input_ids, torch.Tensor):
            self.input_ids = _tensor(self.input_ids, torch.long)
        if self.input_ids.dim() != 1:
            raise DatumError(
                f"Datum.input_ids: must be 1-D [T]; got shape {tuple(self.input_ids.shape)}; "
                "make one Datum a sequence"
            )
        for key, value in self.loss_fn_inputs.items():
            if not isinstance(value, torch.Tensor):
                self.loss_fn_inputs[key] = _tensor(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Datum):
            return NotImplemented
        mine, theirs = self.loss_fn_inputs, other.loss_fn_inputs
        return (
            _same(self.input_ids, other.input_ids)
            and mine.keys() == theirs.keys()
            and all(_same(mine[key], theirs[key]) for key in mine)
        )

    @property
    def seq_len(self) -> int:
        """T, the number of tokens."""
        return int(self.input_ids.shape[0])

    def to_features(self, *, ignore_index: int = CROSS_ENTROPY_IGNORE_IDX) -> dict[str, list[int]]:
        """`input_ids`, `attention_mask` (all 1) and, with targets, masked `labels`: lists of [T].

        For code that feeds list-based collaters. `collate_datums` does not go through it.
        """
        features = {"input_ids": self.input_ids.tolist(), "attention_mask": [1] * self.seq_len}
        targets = self.loss_fn_inputs.get(TARGETS)
        if targets is not None:
            labels = targets.detach().to(torch.long)
            weights = self.loss_fn_inputs.get(WEIGHTS)
            if weights is not None:
                labels = labels.masked_fill(weights == 0, ignore_index)
            features["labels"] = labels.tolist()
        return features

    @classmethod
    def from_tokens(
        cls,
        tokens: Numbers,
        *,
        logprobs: Numbers | None = None,
        mask: Numbers | None = None,
        advantages: Numbers | float | None = None,
        prompt_len: int | None = None,
        id: str | None = None,  # noqa: A002
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        policy_version: int | None = None,
        reward: float | None = None,
        source: str | None = None,
        split: str | None = None,
    ) -> Datum:
        """A datum of T = L - 1 positions from a sampled sequence of L tokens, L >= 2.

        `logprobs`, `mask` and `advantages` are each aligned by their length: L is one entry a
        token, of which the first is dropped, since nothing predicts it; L - prompt_len is one entry
        a response token. A bare number for `advantages` is one value a sample. `mask` becomes
        `weights`; without it, prompt_len makes 0 for the prompt and 1 for the response; without
        both there are no weights. `prompt_len` is 1 .. L - 1.

        A missing logprob (None, or a prompt's in a response-aligned list) or a non-finite one
        becomes 0.0 where the mask is 0 and raises where it is not. Raises DatumError also for a
        token-aligned mask whose first entry is not 0, a negative or non-finite mask, and a
        non-finite advantage.
        """
        ids = _vector("tokens", _tensor(tokens))
        length = len(ids)
        if ids.is_floating_point() or length < 2:
            raise DatumError(
                f"tokens: got {length} of {ids.dtype}, want at least two integers: each position "
                "predicts the next"
            )
        if prompt_len is not None and not 1 <= prompt_len < length:
            raise DatumError(
                f"prompt_len: got {prompt_len}, want 1 .. {length - 1}: a token on either side"
            )
        ids = ids.to(torch.long)
        inputs = {TARGETS: ids[1:]}

        weights = None
        if mask is not None:
            aligned = _floats("mask", mask, ids)
            if len(aligned) == length and aligned[0] != 0:
                raise DatumError(
                    f"mask[0]: got {aligned[0].item()}, want 0: nothing predicts the first token"
                )
            weights = _shift("mask", aligned, length, prompt_len, fill=0.0)
        elif prompt_len is not None:
            weights = _shift("mask", ids.new_ones(length - prompt_len), length, prompt_len, fill=0)
            weights = weights.to(torch.float32)
        if weights is not None:
            _refuse("mask", weights, ~weights.isfinite() | (weights < 0), "a finite weight >= 0")
            inputs[WEIGHTS] = weights

        if logprobs is not None:
            aligned = _floats("logprobs", logprobs, ids)
            values = _shift("logprobs", aligned, length, prompt_len, fill=float("nan"))
            missing = ~values.isfinite()
            trained = missing if weights is None else missing & (weights != 0)
            _refuse("logprobs", values, trained, "a finite logprob, or mask 0 there")
            inputs["logprobs"] = values.masked_fill(missing, 0.0)

        if advantages is not None:
            values = _floats("advantages", advantages, ids)
            if values.dim() == 0:
                values = values.reshape(1)
            else:
                values = _shift("advantages", values, length, prompt_len, fill=0.0)
            _refuse("advantages", values, ~values.isfinite(), "a finite advantage")
            inputs["advantages"] = values

        return cls(
            ids[:-1],
            inputs,
            id=id,
            rollout_id=rollout_id,
            group_id=group_id,
            group_size=group_size,
            policy_version=policy_version,
            reward=reward,
            source=source,
            split=split,
        )


def _tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
        if not value.flags.writeable or any(stride < 0 for stride in value.strides):
            value = value.copy()  # torch cannot express either
    return torch.as_tensor(value, dtype=dtype)


def _vector(field: str, values: torch.Tensor) -> torch.Tensor:
    if values.dim() != 1:
        raise DatumError(f"{field}: must be 1-D, got shape {tuple(values.shape)}")
    return values


def _floats(field: str, values: Any, like: torch.Tensor) -> torch.Tensor:
    """float32 on `like`'s device; None among the values is NaN."""
    if isinstance(values, list | tuple):
        values = [float("nan") if value is None else value for value in values]
    result = _tensor(values).to(device=like.device, dtype=torch.float32)
    return result if field == "advantages" and result.dim() == 0 else _vector(field, result)


def _shift(
    field: str, values: torch.Tensor, length: int, prompt_len: int | None, fill: float
) -> torch.Tensor:
    """[L] or [L - prompt_len] -> [L - 1], entry i about token i + 1; `fill` where there is none."""
    if len(values) == length:
        return values[1:]
    if prompt_len is None:
        raise DatumError(
            f"{field}: got length {len(values)}, want {length}, one a token; for one a response "
            "token give prompt_len; for one a sample a bare number (advantages only)"
        )
    if len(values) != length - prompt_len:
        raise DatumError(
            f"{field}: got length {len(values)}, want {length} (one a token) or "
            f"{length - prompt_len} (one a response token)"
        )
    return torch.cat([values.new_full((prompt_len - 1,), fill), values])


def _refuse(field: str, values: torch.Tensor, wrong: torch.Tensor, want: str) -> None:
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise DatumError(f"{field}: got {values[index].item()} for token {index + 1}, want {want}")


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine is theirs:
        return True
    return (
        mine.shape == theirs.shape and mine.device == theirs.device and bool((mine == theirs).all())
    )
