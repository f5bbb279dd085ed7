"""The benchmark's figures, on plans that are counted by hand; its rivals keep the cap."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from headrace.bench import plan

LENGTHS = np.array([plan.CAP // 2] * 3 + [plan.CAP // 4])


def test_figures_by_hand():
    assert doctest.testmod(plan).failed == 0
    half, quarter = plan.CAP / 2, plan.CAP / 4
    cost = {n: n + n * n / plan.QUADRATIC_CROSSOVER for n in (half, quarter)}
    made = plan.figures(LENGTHS, [[0, 1], [2], [3]], 2, padded=False)
    # Index 0: two halves against one; index 1: the quarter and a filler that copies it.
    slowest = 2 * cost[half] + cost[quarter]
    mean = (3 * cost[half] + 2 * cost[quarter]) / 2
    assert (made["microbatches_per_rank"], made["lower_bound"]) == (2, 1)
    assert made["imbalance"] == pytest.approx(slowest / mean, abs=1e-5)
    assert made["fill"] == pytest.approx(1.75 / 4, abs=1e-4)
    # Padded, a quarter beside a half is as dear as a half.
    wide = plan.figures(LENGTHS, [[0, 3]], 1, padded=True)
    tight = plan.figures(LENGTHS, [[0, 1]], 1, padded=False)
    assert wide["step_cost"] == tight["step_cost"]


def test_rivals_keep_the_cap_and_every_sequence():
    lengths = plan.cases()["up to the cap"][:300]
    rivals = [plan.arrival]
    knapsack = plan.automodel_knapsack()
    if knapsack is not None:
        rivals.append(knapsack)
    for rival in rivals:
        bins = rival(lengths.tolist(), plan.CAP)
        assert sorted(at for members in bins for at in members) == list(range(300))
        assert max(int(lengths[members].sum()) for members in bins) <= plan.CAP
