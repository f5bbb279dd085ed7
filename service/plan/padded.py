"""Padded microbatches: runs of the lengths in descending order, so that little of a row is padding.

A microbatch is B rows of T, T the longest of them rounded up to `sequence_multiple`: under a cap,
B * T <= cap, or B <= rows. Sorted lengths are cut into runs, which buckets them by length:

    lengths 9 8 8 | 5 5 4 4 3 | 2 2 2 1 1 1 1 1      cap 27

The least number of bins is that of the longest runs the cap allows, rounded up to ranks x multiple.
The room that leaves goes into balance, an index at a time: its runs end at the lowest cost at which
the rest still fits the bins behind it. Runs that are wanting are made by halving the costliest. The
longest runs, halved likewise, are taken where the step costs less with them.

Called by pack.py.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.service.plan.balance import (
    slot_costs,
    split_costliest,
    step_cost,
    up_to_multiple,
)

__all__ = ["pack_padded"]

LEVELS = 8  # how often a step's limit on cost is sought anew
CLOSE = 512  # a limit is sought to within 1/512 of itself


def pack_padded(
    slots: NDArray[np.int64],
    order: NDArray[np.int64],
    *,
    cap: int | None,
    rows: int | None,
    ranks: int,
    multiple: int,
    crossover: int,
) -> tuple[NDArray[np.int64], int]:
    """(the bin of each slot [N], number of bins), bins as runs of `slots[order]`, none empty unless
    every other has one row.

    `order` [N] sorts descending. One of `cap` (slots, B * T) and `rows` is set. The number of bins
    is a multiple of `ranks * multiple`.

    >>> slots = np.array([9, 8, 8, 5, 5, 4, 4, 3, 2, 2, 2, 1, 1, 1, 1, 1])
    >>> pack_padded(
    ...     slots, np.arange(16), cap=27, rows=None, ranks=1, multiple=1, crossover=24576
    ... )[0].tolist()
    [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    wide = slots[order]
    most = np.full(len(wide), rows, np.int64) if cap is None else cap // wide
    step = ranks * multiple
    starts = _runs(most.tolist())
    bins = up_to_multiple(len(starts), step)
    costs = slot_costs(wide, crossover)
    found = [starts, _level(most, costs, starts, bins, ranks)]
    edges = min(
        (_split(each, len(wide), costs, bins) for each in found),
        key=lambda e: step_cost(np.pad(np.diff(e) * costs[e[:-1]], (0, bins + 1 - len(e))), ranks),
    )
    owner = np.empty(len(wide), np.int64)
    owner[order] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    return owner, bins


def _split(starts: list[int], count: int, costs: NDArray[np.int64], bins: int) -> NDArray[np.int64]:
    """The edges of the runs that begin at `starts`, halved until there are `bins` or each is one
    row."""
    runs = split_costliest(
        [range(a, b) for a, b in pairwise([*starts, count])],
        bins,
        cost=lambda run: len(run) * int(costs[run[0]]),
        cut=lambda run: (run[: (len(run) + 1) // 2], run[(len(run) + 1) // 2 :]),
    )
    return np.array([*sorted(run[0] for run in runs), count], np.int64)


def _runs(most: list[int], start: int = 0, limit: int | None = None) -> list[int]:
    """Where the runs begin that are each as long as `most` [N] says of their first; at most `limit`
    of them."""
    starts: list[int] = []
    at, end = start, len(most)
    while at < end and len(starts) != limit:
        starts.append(at)
        at += most[at]
    return starts


def _level(
    most: NDArray[np.int64],
    costs: NDArray[np.int64],
    starts: list[int],
    bins: int,
    ranks: int,
) -> list[int]:
    """Starts of at most `bins` runs, an index at a time under the least cost that leaves enough."""
    lengths = np.diff([*starts, len(most)])
    limit = int((lengths * costs[starts]).max())  # what the cap alone comes to
    made: list[int] = []
    at, indices = 0, bins // ranks
    every = -(-indices // LEVELS)
    allowed: list[int] = []
    for index in range(indices):
        if at == len(most):
            break
        if index % every == 0:
            limit = _least(most, costs, at, bins - index * ranks, limit)
            allowed = np.minimum(most, np.maximum(1, limit // costs)).tolist()
        row = _runs(allowed, at, ranks)
        made += row
        at = min(len(most), row[-1] + allowed[row[-1]])
    return made


def _least(
    most: NDArray[np.int64], costs: NDArray[np.int64], at: int, bins: int, enough: int
) -> int:
    """The least cost of a run at which the rows from `at` on make at most `bins` runs. `enough` is
    known to do.
    """
    # A run is never cheaper than its first row, nor the dearest run than the mean.
    low, high = max(int(costs[at]), -(-int(costs[at:].sum()) // bins)) - 1, enough
    while high - low > max(1, high // CLOSE):
        middle = (low + high) // 2
        allowed = np.minimum(most[at:], np.maximum(1, middle // costs[at:])).tolist()
        if len(_runs(allowed, 0, bins + 1)) <= bins:
            high = middle
        else:
            low = middle
    return high
