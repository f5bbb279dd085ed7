"""Microbatches of a step: bins of datums under a strict cap, as many for every rank.

    lengths [N] ──► bins (each <= cap slots) ──► M * R bins, heavy first
                ──► index i of rank r = bin i * R + r

THD packs by longest-processing-time: the longest datum left goes to the bin with the fewest tokens.
Padded sorts by length and cuts runs whose rows x longest stays under the cap, so that rows of a bin
are nearly as long as each other. M is the least count for which this succeeds. Bins are split
before fillers are made: a bin stays empty only where there are fewer datums than bins.

The bins of one index are close in weight over the ranks, since bins are dealt in descending order;
odd rows are dealt backwards, so that no rank always gets the heaviest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_step"]

Bins = list[list[int]]


def pack_step(
    lengths: NDArray[np.int64], *, layout: str, dp_size: int, microbatch_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(bins [M * R + 1], items [N]) of `records.Plan`: every datum in exactly one bin, no bin over
    the cap.

    `lengths`: tokens, int `[N]`, each at most `microbatch_tokens`. Within a bin thd keeps the
    plan's order, padded puts the longest first. Raises ValueError where a datum exceeds the cap.

    >>> bins, items = pack_step(
    ...     np.array([3, 1, 2, 2]), layout="thd", dp_size=2, microbatch_tokens=4
    ... )
    >>> bins.tolist(), items.tolist()
    ([0, 2, 4], [0, 1, 2, 3])
    """
    if len(lengths) and int(lengths.max()) > microbatch_tokens:
        longest = int(lengths.max())
        raise ValueError(
            f"a datum of {longest} tokens exceeds microbatch_tokens = {microbatch_tokens}"
        )
    descending = np.argsort(-lengths, kind="stable").tolist()
    sizes: list[int] = lengths.tolist()
    make = _longest_first if layout == "thd" else _runs
    bins = make(sizes, descending, dp_size, microbatch_tokens)
    bins.sort(key=lambda members: -_slots(members, sizes, layout))
    dealt: list[Sequence[int]] = []
    for first in range(0, len(bins), dp_size):
        row = bins[first : first + dp_size]
        dealt += row if first // dp_size % 2 == 0 else _backwards(row)
    ordered = [sorted(members) if layout == "thd" else members for members in dealt]
    edges = np.cumsum([0, *(len(members) for members in ordered)])
    return edges.astype(np.int64), np.array([i for m in ordered for i in m], np.int64)


def _slots(members: Sequence[int], sizes: Sequence[int], layout: str) -> int:
    if not members:
        return 0
    if layout == "thd":
        return sum(sizes[i] for i in members)
    return len(members) * max(sizes[i] for i in members)


def _backwards(row: Bins) -> Bins:
    """The row reversed, with empty bins kept last: a filler goes to the highest ranks."""
    return [m for m in reversed(row) if m] + [m for m in row if not m]


def _longest_first(sizes: list[int], descending: list[int], ranks: int, cap: int) -> Bins:
    count = max(1, -(-sum(sizes) // (cap * ranks)))
    while True:
        bins = _try_longest_first(sizes, descending, count * ranks, cap)
        if bins is not None:
            return bins
        count += 1


def _try_longest_first(sizes: list[int], descending: list[int], bins: int, cap: int) -> Bins | None:
    filled: Bins = [[] for _ in range(bins)]
    loads = [(0, at) for at in range(bins)]
    for item in descending:
        load, at = loads[0]
        # The bin with the fewest tokens is the only one to ask: if it has no room, none has.
        if load + sizes[item] > cap:
            return None
        filled[at].append(item)
        heapq.heapreplace(loads, (load + sizes[item], at))
    return filled


def _runs(sizes: list[int], descending: list[int], ranks: int, cap: int) -> Bins:
    bins: Bins = []
    for item in descending:
        if bins and (len(bins[-1]) + 1) * sizes[bins[-1][0]] <= cap:
            bins[-1].append(item)
        else:
            bins.append([item])
    wanted = -(-len(bins) // ranks) * ranks
    heap = [(-_slots(members, sizes, "padded"), at) for at, members in enumerate(bins)]
    heapq.heapify(heap)
    while len(bins) < wanted and heap:
        _, at = heapq.heappop(heap)
        if len(bins[at]) == 1:
            continue
        half = (len(bins[at]) + 1) // 2
        bins.append(bins[at][half:])
        bins[at] = bins[at][:half]
        for part in (at, len(bins) - 1):
            heapq.heappush(heap, (-_slots(bins[part], sizes, "padded"), part))
    return bins + [[] for _ in range(wanted - len(bins))]
