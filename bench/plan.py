"""Packing of a step: how full, how even, how fast, beside what loops do by hand.

4,096 sequences with lognormal lengths (median 1,500, sigma 1.0, at most 16,384) under a cap of
32,768 tokens a microbatch, for 64, 8 and 1 ranks; 65,536 of them; and draws made to be hard: all
equal, half at the cap, two lengths of which no two fit, lengths up to the cap. Contenders of a case
take turns in one process:

    ours         pack_step, layout thd
    ours padded  pack_step, layout padded: B x longest under the same cap
    arrival      in the order given, a microbatch is closed when the next sequence does not fit
    automodel    greedy_knapsack of NeMo AutoModel 0.7.0, its bins dealt in their order; absent
                 where that is not installed

A row gives microbatches a rank (arrival and automodel: rounded up with fillers), the bound
ceil(ceil(total / cap) / ranks); imbalance: the slowest rank's cost summed over the indices, over
the mean rank's, by cost n + n²/24,576; step_cost, that sum over the total cost a rank of the
sequences, unpadded: what a step takes, the least possible being 1; fill: tokens over cap x
microbatches; and the median of the milliseconds of one core's time, which does not count what else
the machine runs.

Called by `headrace bench plan`.
"""

from __future__ import annotations

import ast
import heapq
import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.service.plan.pack import QUADRATIC_CROSSOVER, pack_step

__all__ = ["figures", "run"]

CAP = 32768  # tokens a microbatch
ROUNDS = 7
SEED = 1

Lengths = NDArray[np.int64]
Bins = list[list[int]]
Knapsack = Callable[[list[int], int], Bins]


def run() -> list[dict[str, Any]]:
    """One row a case, number of ranks and contender."""
    knapsack = automodel_knapsack()
    rows = []
    for case, lengths in cases().items():
        for ranks in (64, 8, 1) if case == "lognormal" else (64, 1):
            rows += _rows(case, lengths, ranks, knapsack)
    return rows


def cases() -> dict[str, Lengths]:
    """[N] tokens of each draw."""
    even = np.arange(4096) % 2 == 0
    short = np.random.default_rng(SEED).integers(1, CAP // 2, 4096)
    drawn = {
        "lognormal": _lognormal(4096),
        "lognormal, 65,536": _lognormal(65536),
        "all equal": np.full(4096, 1500),
        "all just over a third": np.full(4096, CAP // 3 + 1),
        "half at the cap": np.where(even, CAP, short),
        "two that do not fit": np.where(even, CAP // 2, CAP // 2 + 1),
        "up to the cap": _lognormal(4096, middle=3000, sigma=1.3, longest=CAP),
    }
    return {name: lengths.astype(np.int64) for name, lengths in drawn.items()}


def figures(lengths: Lengths, bins: Bins, ranks: int, *, padded: bool) -> dict[str, Any]:
    """What dealing `bins` to ranks in their order, index by index, amounts to; fillers are copies
    of the shortest sequence.

    >>> f = figures(np.array([4, 4, 2]), [[0], [1], [2]], 2, padded=False)
    >>> f["microbatches_per_rank"], f["lower_bound"], round(f["imbalance"], 3)
    (2, 1, 1.0)
    """
    count = -(-len(bins) // ranks)
    full = -(-int(lengths.sum()) // CAP)
    costs, shortest = [], int(np.argmin(lengths))
    for members in bins + [[]] * (count * ranks - len(bins)):
        taken = lengths[members or [shortest]].astype(np.float64)
        if padded:
            taken[:] = taken.max()
        costs.append(float((taken + taken * taken / QUADRATIC_CROSSOVER).sum()))
    table = np.array(costs).reshape(count, ranks)
    slowest = table.max(axis=1).sum()
    real = lengths + lengths * lengths / QUADRATIC_CROSSOVER
    return {
        "microbatches_per_rank": count,
        "lower_bound": -(-full // ranks),
        "imbalance": round(float(slowest * ranks / table.sum()), 5),
        "step_cost": round(float(slowest * ranks / real.sum()), 4),
        "fill": round(float(lengths.sum() / (count * ranks * CAP)), 4),
    }


def arrival(lengths: list[int], cap: int) -> Bins:
    """In the order given, a bin closed when the next sequence does not fit."""
    bins: Bins = []
    room = -1
    for at, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = cap
        bins[-1].append(at)
        room -= length
    return bins


def automodel_knapsack() -> Knapsack | None:
    """The installed `greedy_knapsack`, compiled from its file: its package does not import without
    the `datasets` library, which the function has no use for.
    """
    spec = find_spec("nemo_automodel")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "components/datasets/llm/neat_packing.py"
    if not file.exists():
        return None
    tree = ast.parse(file.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "greedy_knapsack"
    ]
    names: dict[str, Any] = {"heapq": heapq, "time": time, "logger": logging.getLogger("automodel")}
    exec(compile(tree, str(file), "exec"), names)
    found: Knapsack | None = names.get("greedy_knapsack")
    return found


def _lognormal(
    count: int, middle: int = 1500, sigma: float = 1.0, longest: int = 16384
) -> NDArray[Any]:
    drawn = np.random.default_rng(SEED).lognormal(np.log(middle), sigma, count)
    return np.clip(np.rint(drawn), 1, longest)


def _rows(
    case: str, lengths: Lengths, ranks: int, knapsack: Knapsack | None
) -> list[dict[str, Any]]:
    plain: list[int] = lengths.tolist()

    def ours(layout: str) -> Bins:
        edges, items = pack_step(lengths, layout=layout, dp_size=ranks, microbatch_tokens=CAP)
        cuts: list[int] = edges.tolist()
        flat: list[int] = items.tolist()
        return [flat[a:b] for a, b in pairwise(cuts)]

    contenders: dict[str, Callable[[], Bins]] = {
        "ours": lambda: ours("thd"),
        "ours padded": lambda: ours("padded"),
        "arrival": lambda: arrival(plain, CAP),
    }
    if knapsack is not None:
        contenders["automodel"] = lambda: knapsack(plain, CAP)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    bins: dict[str, Bins] = {}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            start = time.thread_time()
            bins[name] = call()
            times[name].append((time.thread_time() - start) * 1e3)
    return [
        {"case": case, "ranks": ranks, "method": name}
        | figures(lengths, bins[name], ranks, padded=name == "ours padded")
        | {"ms": round(median(times[name]), 2)}
        for name in contenders
    ]
