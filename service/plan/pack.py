"""Microbatches of a step: bins of datums under a strict cap, as many for every rank.

    lengths [N] ──► slots [N] ──────────► M * R bins <= cap ──► index i of rank r = bin i * R + r
       rounded up to sequence_multiple    rows.py: thd, neat    balance.py: heavy first, the bins
                                          padded.py             of an index close in cost

Invariants. Every datum is in exactly one bin. A bin lays out at most `microbatch_tokens`: S, the
sum of its slots rounded up to `pack_multiple`; padded B * T, T the longest slot; or at most
`microbatch_size` rows. Every rank gets M microbatches, M a multiple of `microbatch_multiple` and
the least that a method finds. Bins are split before fillers are made: one is empty only where every
other has a single datum. The step cost of balance.py is at most the mean of the ranks plus the
heaviest bin. The same arguments give the same plan, on any machine.

Called by plan/step.py. Never looks at what datums hold, never cuts or leaves one out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.service.plan.balance import deal, slot_costs
from headrace.service.plan.padded import pack_padded
from headrace.service.plan.rows import pack_rows

__all__ = ["longest_datum", "pack_step"]

QUADRATIC_CROSSOVER = 24576  # tokens at which a slot's quadratic cost equals its linear cost


def pack_step(
    lengths: NDArray[np.int64],
    *,
    layout: str,
    dp_size: int,
    microbatch_tokens: int | None = None,
    microbatch_size: int | None = None,
    microbatch_multiple: int = 1,
    sequence_multiple: int = 1,
    pack_multiple: int = 1,
    fixed_pack: bool = False,
    quadratic_crossover: int = QUADRATIC_CROSSOVER,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(bins [M * R + 1], items [N]) of `records.Plan`.

    `lengths`: tokens of each datum, int `[N]`, N >= 1. `layout`: "padded", "thd" or "neat"; the
    last two pack alike. `microbatch_tokens`: the cap on slots; padded takes `microbatch_size`,
    rows, in its place. `pack_multiple` and `fixed_pack` (every row has `microbatch_tokens` slots)
    are of thd and neat. Within a bin thd and neat keep the order of `lengths`, padded puts the
    longest first. Raises ValueError where a datum exceeds the cap or settings exclude each other.

    >>> bins, items = pack_step(
    ...     np.array([3, 1, 2, 2]), layout="thd", dp_size=2, microbatch_tokens=4
    ... )
    >>> bins.tolist(), items.tolist()
    ([0, 2, 4], [0, 1, 2, 3])
    """
    _check(layout, microbatch_tokens, microbatch_size, sequence_multiple, pack_multiple, fixed_pack)
    if not len(lengths):
        raise ValueError("a step has at least one datum: got no lengths")
    lengths = np.asarray(lengths, np.int64)
    slots = -(-lengths // sequence_multiple) * sequence_multiple
    packed = layout != "padded"
    if microbatch_tokens is not None:
        longest = longest_datum(
            layout=layout, microbatch_tokens=microbatch_tokens,
            sequence_multiple=sequence_multiple, pack_multiple=pack_multiple,
        )  # fmt: skip
        if int(lengths.max()) > longest:
            raise ValueError(
                f"a datum of {int(lengths.max())} tokens exceeds microbatch_tokens = "
                f"{microbatch_tokens}: at most {longest} fit with sequence_multiple = "
                f"{sequence_multiple} and pack_multiple = {pack_multiple}"
            )
    longest_first = np.argsort(-lengths, kind="stable")
    if packed:
        assert microbatch_tokens is not None
        owner, count = pack_rows(
            slots, cap=microbatch_tokens // pack_multiple * pack_multiple, ranks=dp_size,
            multiple=microbatch_multiple, crossover=quadratic_crossover,
        )  # fmt: skip
    else:
        owner, count = pack_padded(
            slots, longest_first, cap=microbatch_tokens, rows=microbatch_size, ranks=dp_size,
            multiple=microbatch_multiple, crossover=quadratic_crossover,
        )  # fmt: skip

    sizes = np.bincount(owner, minlength=count)
    costs = slot_costs(slots, quadratic_crossover)
    bin_costs = np.zeros(count, np.int64)
    if packed:
        np.add.at(bin_costs, owner, costs)
    else:
        np.maximum.at(bin_costs, owner, costs)
        bin_costs *= sizes
    bin_costs[sizes == 0] = costs.min()
    places = deal(bin_costs, sizes == 0, dp_size)
    order = np.arange(len(lengths)) if packed else longest_first
    items = order[np.argsort(places[owner[order]], kind="stable")]
    edges = np.zeros(count + 1, np.int64)
    edges[1 + places] = sizes
    return np.cumsum(edges), items.astype(np.int64, copy=False)


def longest_datum(
    *, layout: str, microbatch_tokens: int, sequence_multiple: int = 1, pack_multiple: int = 1
) -> int:
    """Tokens of the longest datum that fits a microbatch; the door refuses longer ones.

    >>> longest_datum(layout="thd", microbatch_tokens=100, sequence_multiple=16, pack_multiple=64)
    64
    """
    cap = microbatch_tokens
    if layout != "padded":
        cap = cap // pack_multiple * pack_multiple
    return cap // sequence_multiple * sequence_multiple


def _check(
    layout: str,
    tokens: int | None,
    rows: int | None,
    sequence_multiple: int,
    pack_multiple: int,
    fixed_pack: bool,
) -> None:
    if (tokens is None) == (rows is None):
        raise ValueError(
            f"microbatch_tokens = {tokens} and microbatch_size = {rows}: set exactly one"
        )
    if rows is not None and layout != "padded":
        raise ValueError(
            f"microbatch_size = {rows} counts rows of the padded layout: got layout = {layout!r}, "
            "set microbatch_tokens"
        )
    if fixed_pack and layout != "padded":
        for name, multiple in (
            ("sequence_multiple", sequence_multiple),
            ("pack_multiple", pack_multiple),
        ):
            if tokens is not None and tokens % multiple:
                raise ValueError(
                    f"fixed_pack makes rows of microbatch_tokens = {tokens} slots, which is no "
                    f"multiple of {name} = {multiple}: change one of them"
                )
