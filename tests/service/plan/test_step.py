"""A step's plan and denominators, against sums made by hand."""

from __future__ import annotations

import numpy as np

from headrace.service.plan.step import StepCounts, microbatch_info, plan_step
from headrace.service.records import DATUM_META, Placing, Plan, datum_numbers


def meta_of(rows):
    """DATUM_META of (length, loss tokens, group, rollout)."""
    meta = np.zeros(len(rows), DATUM_META)
    for name, column in zip(
        ("length", "loss_tokens", "group", "rollout"), zip(*rows, strict=True), strict=True
    ):
        meta[name] = column
    meta["loss_weight"] = meta["loss_tokens"] * 0.5
    meta["policy_version"] = np.arange(len(rows))
    meta["bytes"] = meta["length"] * 12
    return meta


ROWS = [
    # length, loss tokens, group, rollout
    (5, 3, 11, 900),
    (7, 2, 11, 900),
    (4, 4, 11, 0),
    (6, 0, 22, 0),
    (3, 1, 33, 700),
]


def plan(dp_size=2, cap=12):
    return plan_step(
        8, datum_numbers(3, len(ROWS)), meta_of(ROWS), layout="thd", dp_size=dp_size,
        placing=Placing(microbatch_tokens=cap),
    )  # fmt: skip


def test_denominators_count_the_step_not_the_microbatch():
    made = plan()
    counts = StepCounts.of(made)
    ids = ["a", None, "c", None, "e"]
    seen = []
    for index in range(made.count):
        for rank in range(2):
            members, info = microbatch_info(made, counts, index, rank, ids)
            assert (info.step, info.index, info.dp_rank, info.count) == (8, index, rank, made.count)
            assert info.step_loss_tokens == 10
            assert info.step_loss_weight == 5.0
            # The fourth datum has no loss token: it counts as no datum, rollout or group.
            assert (info.step_datums, info.step_rollouts, info.step_groups) == (4, 3, 2)
            for at, member in enumerate(members.tolist()):
                length, loss, *_ = ROWS[member]
                assert info.datum_loss_tokens[at] == loss
                assert info.rollout_loss_tokens[at] == [5, 5, 4, 0, 1][member]
                assert info.group_loss_tokens[at] == [9, 9, 9, 0, 1][member]
                assert info.group_rollouts[at] == [2, 2, 2, 1, 1][member]
                assert info.group_index[at] == [0, 0, 0, 1, 2][member]
                assert info.datum_numbers[at] == (3 << 16) + member
                assert info.datum_ids[at] == ids[member]
                assert made.lengths[member] == length
            assert info.policy_version_min == min(members)
            assert info.policy_version_max == max(members)
            seen += [] if info.is_filler else members.tolist()
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_filler_is_the_shortest_datum():
    made = plan(dp_size=6, cap=12)
    counts = StepCounts.of(made)
    infos = [microbatch_info(made, counts, 0, rank, [None] * 5) for rank in range(6)]
    assert [info.is_filler for _, info in infos] == [False] * 5 + [True]
    assert infos[5][0].tolist() == [4]


def test_one_rollout_in_two_groups_is_one_rollout():
    rows = [(2, 1, 1, 5), (2, 1, 2, 5)]
    made = plan_step(
        0,
        datum_numbers(1, 2),
        meta_of(rows),
        layout="padded",
        dp_size=1,
        placing=Placing(microbatch_tokens=8),
    )
    assert StepCounts.of(made).info.step_rollouts == 1


def test_a_plan_survives_packing():
    made = plan()
    again = Plan.unpack(made.pack())
    for name in made.__slots__:
        assert np.array_equal(getattr(made, name), getattr(again, name)), name
