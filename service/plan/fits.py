"""The methods that put slots into bins under a strict cap, on plain lists: exact, deterministic.

    longest_first   the cheapest bin with room        best_fit    the fullest bin with room, else a
    fill_gaps       the fullest bin with room                     new one
                                                      next_fit    the last bin, else a new one

Called by rows.py, which chooses among them. A heap or a sorted list holds integers, `cost * bins +
bin` or `room * bins + bin`, so that no tuple is made a slot: 65,536 slots take about 0.1 s. A bin
that not even the shortest slot fits is taken out, which keeps heaps and lists short.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["Owner", "best_fit", "fill_gaps", "longest_first", "next_fit"]

Owner = list[int]  # [N] the bin of each slot, in the order the slots were given


def longest_first(
    slots: list[int],
    costs: list[int],
    rooms: list[int],
    *,
    marks: Sequence[int] = (),
    loads: Sequence[int] = (),
) -> tuple[Owner | None, list[tuple[Owner, list[int]]]]:
    """Each of `slots` [N], descending, to the cheapest bin with room; None where one finds none.

    `rooms`: of each bin, consumed. `loads`: what each bin costs already, 0 unless given. The second
    part: (owner, rooms) as they stood after so many slots as `marks` say, the most first, for those
    that were reached.
    """
    bins, shortest = len(rooms), slots[-1]
    owner: Owner = []
    snapshots: list[tuple[Owner, list[int]]] = []
    cheapest = [load * bins + where for where, load in enumerate(loads or [0] * bins)]
    heapq.heapify(cheapest)
    short: list[tuple[int, int]] = []  # (-room, key): had no room for a longer slot than is next
    stops = sorted({*marks, len(slots)})
    start = 0
    for stop in stops:
        for at in range(start, stop):
            slot = slots[at]
            while short and -short[0][0] >= slot:
                heapq.heappush(cheapest, heapq.heappop(short)[1])
            while cheapest:
                key = cheapest[0]
                where = key % bins
                if rooms[where] >= slot:
                    break
                heapq.heappop(cheapest)
                heapq.heappush(short, (-rooms[where], key))
            else:
                return None, snapshots[::-1]
            owner.append(where)
            room = rooms[where] = rooms[where] - slot
            if room < shortest:
                heapq.heappop(cheapest)
            else:
                heapq.heapreplace(cheapest, key + costs[at] * bins)
        if stop in marks:
            snapshots.append((owner.copy(), rooms.copy()))
        start = stop
    return owner, snapshots[::-1]


def fill_gaps(slots: list[int], rooms: list[int]) -> Owner | None:
    """Each of `slots`, descending, to the fullest bin with room; None where one finds none."""
    if not slots:
        return []
    bins, shortest = len(rooms), slots[-1]
    owner: Owner = []
    gaps = sorted(room * bins + where for where, room in enumerate(rooms) if room >= shortest)
    for slot in slots:
        at = bisect_left(gaps, slot * bins)
        if at == len(gaps):
            return None
        room, where = divmod(gaps.pop(at), bins)
        owner.append(where)
        if room - slot >= shortest:
            insort(gaps, (room - slot) * bins + where)
    return owner


def best_fit(slots: list[int], cap: int) -> tuple[Owner, int]:
    """(owner, bins): as `fill_gaps`, with a new bin where a slot finds no room."""
    most, shortest = len(slots), slots[-1]
    owner: Owner = []
    gaps: list[int] = []  # room * most + bin, ascending
    bins = 0
    for slot in slots:
        at = bisect_left(gaps, slot * most)
        if at == len(gaps):
            room, where = cap, bins
            bins += 1
        else:
            room, where = divmod(gaps.pop(at), most)
        owner.append(where)
        if room - slot >= shortest:
            insort(gaps, (room - slot) * most + where)
    return owner, bins


def next_fit(slots: list[int], cap: int) -> tuple[Owner, int]:
    """(owner, bins): in the order given; a new bin where a slot finds no room in the last."""
    owner: Owner = []
    bins, room = 0, 0
    for slot in slots:
        if slot > room:
            bins, room = bins + 1, cap
        room -= slot
        owner.append(bins - 1)
    return owner, bins
