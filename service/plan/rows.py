"""Packed rows (thd, neat): slots into bins under a strict cap, the bins as equal in cost as can be.

Bins are added last. At the least number that could do, a multiple of ranks x multiple, these are
tried in turn; where all fail, again at the number that the last two need, which cannot fail:

    longest first   the longest slot left goes to the cheapest bin with room for it. Bins come out
                    within the cost of a small datum of each other
    stepped         where that is uneven, as bins of short slots are full before they cost enough:
                    the longest slots, one a bin, make the indices by descending length, and an
                    index of longer ones may cost more, by a part of their quadratic cost
    heavy indices   where single datums cost more than the mean bin, those set the pace of their
                    index whatever is done: the other bins of that index are filled up to the same
                    cost, and the indices behind it get lighter. The cheapest step of these is taken
    long, then fit  longest first for slots above 1/16 of the cap, or above 1/4, then best fit: the
                    long slots carry the quadratic cost, the short ones fill every gap
    best fit        the longest slot left goes to the fullest bin with room for it; bins are split
                    until there are enough
    next fit        the order given, cut where a bin is full: so there are never more microbatches
                    than without any method

With one rank and no multiple nothing needs balance, and best fit goes first.

Called by pack.py. 4,096 slots take about 5 ms a method.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from functools import cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from headrace.service.plan.balance import (
    slot_costs,
    split_costliest,
    step_cost,
    up_to_multiple,
)
from headrace.service.plan.fits import Owner, best_fit, fill_gaps, longest_first, next_fit

__all__ = ["fewest_bins", "pack_rows"]

FIT_BELOW = (16, 4)  # longest first for slots above cap/16, best fit below; then cap/4
STEPS = ((1, 2), (3, 4))  # parts of the quadratic cost that stepped indices forgive
EVEN = 1.002  # of the least step cost: nothing dearer than longest first is tried below it
# More slots make so many indices that an uneven one hardly counts, and heavy indices, with list
# pops of O(N), would take long.
EVENED_SLOTS = 16_384


def pack_rows(
    slots: NDArray[np.int64], *, cap: int, ranks: int, multiple: int, crossover: int
) -> tuple[NDArray[np.int64], int]:
    """(the bin of each slot [N], number of bins): no bin over `cap` slots, none empty unless every
    other has one slot.

    `slots`: each at least 1 and at most `cap`. The number of bins is a multiple of
    `ranks * multiple`.

    >>> pack_rows(np.array([2, 4, 3, 3]), cap=6, ranks=1, multiple=1, crossover=24576)
    (array([0, 0, 1, 1]), 2)
    """
    order = np.argsort(-slots, kind="stable")
    task = _Task(slots, order, cap, ranks, crossover)
    step = ranks * multiple
    bins = up_to_multiple(fewest_bins(slots[order], cap), step)
    if step == 1:
        made = task.fitted(bins) or task.balanced(bins)
    else:
        made = task.balanced(bins) or task.fitted(bins)
    if made is None:
        enough = min(count for _, count in task.fits)
        bins = up_to_multiple(enough, step)
        made = None if step == 1 else task.balanced(bins)
        made = made or task.fitted(bins)
        assert made is not None  # one of `fits` is no more than that
    owner = np.empty(len(slots), np.int64)
    owner[order] = made
    return owner, bins


def fewest_bins(descending: NDArray[np.int64], cap: int) -> int:
    """A number of bins below which no packing of `descending` [N] under `cap` exists.

    The greatest of three bounds: the sum; for each length the slots at least so long, of which only
    so many fit one bin; and, for each t <= cap/2, slots above cap - t, which share a bin with none
    of t or more, then those above cap/2, one a bin, whose gaps the rest must fit (Martello, Toth).

    >>> fewest_bins(np.array([4, 4, 4]), 6), fewest_bins(np.array([5, 3, 2, 2]), 6)
    (3, 3)
    """
    count = len(descending)
    total = np.concatenate([[0], np.cumsum(descending)])  # [N+1]
    bound = max(1, -(-int(total[-1]) // cap))
    at_least = np.arange(1, count + 1)
    bound = max(bound, int((-(-at_least // (cap // descending))).max()))
    ascending = descending[::-1]

    def longer(than: NDArray[np.int64]) -> NDArray[np.int64]:
        return count - np.searchsorted(ascending, than, side="right")

    thresholds = np.unique(descending[descending <= cap // 2])
    if len(thresholds):
        alone = longer(cap - thresholds)
        halves = longer(np.array([cap // 2]))
        small = longer(thresholds - 1)
        gaps = (halves - alone) * cap - (total[halves] - total[alone])
        over = np.maximum(0, total[small] - total[halves] - gaps)
        bound = max(bound, int((halves + -(-over // cap)).max()))
    return bound


class _Task:
    """One step's slots in descending order, and the methods tried on them. An Owner here is of that
    order.
    """

    def __init__(
        self,
        slots: NDArray[np.int64],
        order: NDArray[np.int64],
        cap: int,
        ranks: int,
        crossover: int,
    ) -> None:
        self.cap, self.ranks, self.crossover = cap, ranks, crossover
        self.given: list[int] = slots.tolist()
        self.order = order
        descending = slots[order]
        self.costs_array = slot_costs(descending, crossover)
        self.slots: list[int] = descending.tolist()
        self.costs: list[int] = self.costs_array.tolist()
        # How many slots are above cap/16 and above cap/4.
        self.marks = [int((descending > cap // part).sum()) for part in FIT_BELOW]

    @cached_property
    def fits(self) -> list[tuple[Owner, int]]:
        """(owner, bins) of the two methods that cannot fail: best fit and next fit."""
        in_order, bins = next_fit(self.given, self.cap)
        return [
            best_fit(self.slots, self.cap),
            (np.array(in_order)[self.order].tolist(), bins),
        ]

    def balanced(self, bins: int) -> Owner | None:
        """In exactly `bins`, by the cheaper of the balancing methods; None where none succeeds."""
        if len(self.slots) <= bins:
            return list(range(len(self.slots)))
        found = self._longest_first(bins)
        if not 1 < self.ranks < bins or len(self.slots) > EVENED_SLOTS:
            return found
        total = sum(self.costs)
        least = total / self.ranks
        if found is not None and self._cost(found, bins) <= EVEN * least:
            return found
        made = [found, *(self._stepped(bins, *part) for part in STEPS)]
        if self.costs[0] * bins > total:
            made.append(self._heavy_indices(bins))
        succeeded = [owner for owner in made if owner is not None]
        return min(succeeded, key=lambda owner: self._cost(owner, bins), default=None)

    def fitted(self, bins: int) -> Owner | None:
        """The first of `fits` that needs no more, split into exactly `bins`; None: neither."""
        for owner, needed in self.fits:
            if needed <= bins:
                return self._split(owner, needed, bins)
        return None

    def _split(self, owner: Owner, needed: int, bins: int) -> Owner:
        if needed == bins:
            return owner
        members: list[list[int]] = [[] for _ in range(needed)]
        for at, where in enumerate(owner):
            members[where].append(at)
        split = split_costliest(
            members,
            bins,
            cost=lambda bin_: sum(self.costs[at] for at in bin_),
            cut=lambda bin_: (bin_[::2], bin_[1::2]),
        )
        owner = [0] * len(owner)
        for where, bin_ in enumerate(split):
            for at in bin_:
                owner[at] = where
        return owner

    def _cost(self, owner: Owner, bins: int) -> int:
        loads = np.bincount(owner, weights=self.costs_array, minlength=bins)
        return step_cost(loads.astype(np.int64), self.ranks)

    def _longest_first(self, bins: int) -> Owner | None:
        rooms = [self.cap] * bins
        # The first slots go one to a bin, so that best fit leaves none empty.
        marks = [max(mark, bins) for mark in self.marks]
        owner, snapshots = longest_first(self.slots, self.costs, rooms, marks=marks)
        if owner is not None:
            return owner
        for placed, rooms in snapshots:
            rest = fill_gaps(self.slots[len(placed) :], rooms)
            if rest is not None:
                return placed + rest
        return None

    def _stepped(self, bins: int, part: int, of: int) -> Owner | None:
        slots, costs = self.slots, self.costs
        tops = np.array(slots[:bins]).reshape(-1, self.ranks)
        steps = (tops * tops).mean(axis=1).astype(np.int64) * part // of
        loads = self.costs_array[:bins] - np.repeat(steps, self.ranks)
        rooms = [self.cap - slot for slot in slots[:bins]]
        rest, _ = longest_first(
            slots[bins:], costs[bins:], rooms, loads=(loads - loads.min()).tolist()
        )
        return None if rest is None else [*range(bins), *rest]

    def _heavy_indices(self, bins: int) -> Owner | None:
        slots, costs, ranks = self.slots[::-1], self.costs[::-1], self.ranks  # ascending
        at_of = list(range(len(slots) - 1, -1, -1))
        owner = [0] * len(slots)
        total, first = sum(costs), 0
        # The last index takes what is left.
        while bins - first > ranks and costs[-1] * (bins - first) > total:
            limit = costs[-1]
            cheapest = list(range(first, first + ranks))  # load * bins + bin
            rooms = [self.cap] * ranks
            spare = len(slots) - (bins - first - ranks)  # one slot is kept for each later bin
            while cheapest and spare:
                key = cheapest[0]
                load, where = divmod(key, bins)
                longest = _longest_at(limit - load, self.crossover)
                at = bisect_right(slots, min(rooms[where - first], longest)) - 1
                if at < 0:
                    heapq.heappop(cheapest)
                    continue
                owner[at_of.pop(at)] = where
                rooms[where - first] -= slots.pop(at)
                cost = costs.pop(at)
                total, spare = total - cost, spare - 1
                heapq.heapreplace(cheapest, key + cost * bins)
            first += ranks
        rest, _ = longest_first(slots[::-1], costs[::-1], [self.cap] * (bins - first))
        if rest is None:
            return None
        for at, where in zip(reversed(at_of), rest, strict=True):
            owner[at] = first + where
        return owner


def _longest_at(cost: int, crossover: int) -> int:
    """The longest slot that costs at most `cost`."""
    return (isqrt(crossover * crossover + 4 * cost) - crossover) // 2
