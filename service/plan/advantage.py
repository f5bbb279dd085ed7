"""Advantages from rewards, where members of a group come from different actors.

    group_mean       a_i = r_i - mean(r)                          Dr. GRPO, arXiv 2503.20783
    group_mean_std   a_i = (r_i - mean(r)) / (std(r) + 1e-6)      GRPO, arXiv 2402.03300
    rloo             a_i = r_i - mean of the others' rewards      RLOO, arXiv 2402.14740

Over the rollouts of a group: datums with the same rollout are one, with the reward of its first
datum, and get the same advantage. `std` is of a sample (n - 1). A group of one rollout has 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["AdvantageKind", "advantages_of"]

AdvantageKind = Literal["group_mean", "group_mean_std", "rloo"]
EPSILON = 1e-6


def advantages_of(
    kind: AdvantageKind,
    rewards: NDArray[np.float64],
    groups: NDArray[np.int64],
    rollouts: NDArray[np.int64],
) -> NDArray[np.float32]:
    """`[N]` advantages of datums with `rewards` [N], 0-based `groups` [N] and `rollouts` [N].

    >>> advantages_of("rloo", np.array([1.0, 0, 0]), np.zeros(3, int), np.arange(3)).tolist()
    [1.0, -0.5, -0.5]
    """
    _, first, of_datum = np.unique(rollouts, return_index=True, return_inverse=True)
    reward, group = rewards[first], groups[first]
    count = np.bincount(group)[group]
    total = np.bincount(group, weights=reward)[group]
    centred = reward - total / count
    if kind == "rloo":
        others = np.maximum(count - 1, 1)
        advantage = np.where(count > 1, reward - (total - reward) / others, 0.0)
    elif kind == "group_mean_std":
        squares = np.bincount(group, weights=centred**2)[group]
        std = np.sqrt(squares / np.maximum(count - 1, 1))
        advantage = centred / (std + EPSILON)
    else:
        advantage = centred
    return advantage[of_datum.reshape(-1)].astype(np.float32)
