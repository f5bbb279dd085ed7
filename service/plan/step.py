"""One step as a `records.Plan`, and the denominators that go with each of its microbatches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.step import MicrobatchInfo, StepInfo
from headrace.service.plan.advantage import AdvantageKind, advantages_of
from headrace.service.plan.pack import pack_step
from headrace.service.records import Placing, Plan

__all__ = ["StepCounts", "microbatch_info", "plan_step"]


def plan_step(
    step: int,
    numbers: NDArray[np.uint64],
    meta: NDArray[Any],
    *,
    layout: str,
    dp_size: int,
    placing: Placing,
    advantage: AdvantageKind | None = None,
) -> Plan:
    """The plan of `step` over the datums `numbers` [N] with their DATUM_META rows [N], in plan
    order.

    Datums with the same rollout id are one rollout; a datum without one is a rollout of its own.
    """
    lengths = meta["length"].astype(np.int64)
    bins, items = pack_step(lengths, layout=layout, dp_size=dp_size, **asdict(placing))
    alone = meta["rollout"] == 0
    rollouts = np.zeros(len(meta), [("id", "u8"), ("alone", "u8")])
    rollouts["id"] = np.where(alone, numbers, meta["rollout"])
    rollouts["alone"] = alone
    of_rollout, of_group = _in_order(rollouts), _in_order(meta["group"])
    advantages = np.zeros(0, np.float32)
    if advantage is not None:
        advantages = advantages_of(advantage, meta["reward"], of_group, of_rollout)
    return Plan(
        step=step,
        dp_size=dp_size,
        layout=layout,
        placing=placing,
        numbers=numbers,
        lengths=lengths,
        loss_tokens=meta["loss_tokens"].astype(np.int64),
        loss_weights=meta["loss_weight"].astype(np.float64),
        rollouts=of_rollout,
        groups=of_group,
        policy_versions=meta["policy_version"].astype(np.int64),
        advantages=advantages,
        nbytes=int(meta["bytes"].sum(dtype=np.int64)),
        bins=bins,
        items=items,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Loss tokens of a step by rollout and by group, computed once a step."""

    by_rollout: NDArray[np.int64]  # [rollouts of the step]
    by_group: NDArray[np.int64]  # [groups of the step]
    group_rollouts: NDArray[np.int64]  # [groups of the step] rollouts in it
    info: StepInfo

    @classmethod
    def of(cls, plan: Plan) -> StepCounts:
        by_rollout = np.bincount(plan.rollouts, weights=plan.loss_tokens).astype(np.int64)
        by_group = np.bincount(plan.groups, weights=plan.loss_tokens).astype(np.int64)
        pairs = np.unique(np.stack([plan.groups, plan.rollouts]), axis=1)
        return cls(
            by_rollout=by_rollout,
            by_group=by_group,
            group_rollouts=np.bincount(pairs[0], minlength=len(by_group)).astype(np.int64),
            info=StepInfo(
                step=plan.step,
                count=plan.count,
                dp_size=plan.dp_size,
                layout=plan.layout,
                step_loss_tokens=int(plan.loss_tokens.sum()),
                step_loss_weight=float(plan.loss_weights.sum()),
                step_datums=int((plan.loss_tokens > 0).sum()),
                step_rollouts=int((by_rollout > 0).sum()),
                step_groups=int((by_group > 0).sum()),
            ),
        )


def microbatch_info(
    plan: Plan, counts: StepCounts, index: int, rank: int, ids: list[str | None]
) -> tuple[NDArray[np.int64], MicrobatchInfo]:
    """(members [N], info) of one microbatch. A filler's member is the step's shortest datum.

    `ids`: the clients' datum ids of the whole step, in plan order.
    """
    members = plan.members(index, rank)
    filler = not len(members)
    if filler:
        members = np.array([int(np.argmin(plan.lengths))], np.int64)
    groups, rollouts = plan.groups[members], plan.rollouts[members]
    versions = plan.policy_versions[members]
    return members, MicrobatchInfo(
        **asdict(counts.info),
        index=index,
        dp_rank=rank,
        num_datums=len(members),
        is_filler=filler,
        policy_version_min=int(versions.min()),
        policy_version_max=int(versions.max()),
        datum_ids=[ids[at] for at in members.tolist()],
        datum_numbers=plan.numbers[members],
        datum_loss_tokens=plan.loss_tokens[members],
        rollout_loss_tokens=counts.by_rollout[rollouts],
        group_loss_tokens=counts.by_group[groups],
        group_rollouts=counts.group_rollouts[groups],
        group_index=groups,
    )


def _in_order(keys: NDArray[Any]) -> NDArray[np.int64]:
    """0-based numbers of equal keys, in the order of their first appearance."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[inverse.reshape(-1)]
