"""What a microbatch costs, which bin goes to which rank and index, and how bins are split.

    cost of a slot of n tokens = n + n²/crossover     kept as the integer n * crossover + n²
    cost of a bin              = the sum over its slots (padded: rows x that of the widest)
    cost of a step             = sum over the indices of the costliest bin of that index

All ranks wait at each index for the slowest, so bins are sorted by cost and dealt index by index:
no other dealing of the same bins has a lower step cost, and it is at most the mean of the ranks
plus the heaviest bin less the lightest. Within an index the heavier bin goes to the rank with less
so far. An empty bin becomes a filler, a copy of the step's shortest datum, and is counted as that.

Called by pack.py, rows.py and padded.py. Integers throughout: the same input gives the same plan on
any machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["deal", "slot_costs", "split_costliest", "step_cost", "up_to_multiple"]

Members = TypeVar("Members", bound=Sequence[int])


def up_to_multiple(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def slot_costs(slots: NDArray[np.int64], crossover: int) -> NDArray[np.int64]:
    """[N] cost of slots [N], in units of 1/crossover tokens.

    >>> slot_costs(np.array([1, 10, 20]), 10).tolist()
    [11, 200, 600]
    """
    return slots * crossover + slots * slots


def step_cost(bin_costs: NDArray[np.int64], ranks: int) -> int:
    """Of bins [M * ranks], dealt as `deal` deals them.

    >>> step_cost(np.array([9, 2, 8, 3]), 2)
    12
    """
    return int(np.sort(bin_costs)[::-1][::ranks].sum())


def deal(bin_costs: NDArray[np.int64], empty: NDArray[np.bool_], ranks: int) -> NDArray[np.int64]:
    """[M * ranks] the place of each bin, index * ranks + rank: heavy first, empty bins last.

    >>> deal(np.array([5, 9, 8, 7]), np.zeros(4, bool), 2).tolist()
    [2, 0, 1, 3]
    """
    heavy_first = np.lexsort((empty, -bin_costs))
    rows = heavy_first.reshape(-1, ranks)
    places = np.empty(len(bin_costs), np.int64)
    if ranks == 1:
        places[heavy_first] = np.arange(len(bin_costs))
        return places
    so_far = np.zeros(ranks, np.int64)
    for index, row in enumerate(rows):
        to = np.argsort(so_far, kind="stable")
        places[row] = index * ranks + to
        so_far[to] += bin_costs[row]
    return places


def split_costliest(
    bins: list[Members],
    wanted: int,
    *,
    cost: Callable[[Members], int],
    cut: Callable[[Members], tuple[Members, Members]],
) -> list[Members]:
    """`bins` split until there are `wanted`, the costliest first, or each has one member."""
    bins = [*bins]
    heap = [(-cost(members), at) for at, members in enumerate(bins) if len(members) > 1]
    heapq.heapify(heap)
    while len(bins) < wanted and heap:
        _, at = heapq.heappop(heap)
        bins[at], rest = cut(bins[at])
        bins.append(rest)
        for part in (at, len(bins) - 1):
            if len(bins[part]) > 1:
                heapq.heappush(heap, (-cost(bins[part]), part))
    return bins
