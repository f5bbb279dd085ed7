"""What a plan amounts to: slots, fill, cost and balance. Pure; all pictures draw these figures.

    strip of a thd or neat microbatch, S slots           strip of a padded one, B rows of T

    |<- slot ->|<-- slot -->|<-slot->|                   |<--- T -->|<--- T -->|<--- T -->|
    |aaaaaaaa..|bbbbbbbbbbbb|ccccc...|.....|             |aaaaaaaaaa|bbbbbb....|ccc.......|
     tokens  own padding               tail

A slot is a length rounded up to `sequence_multiple`; S is the sum of slots rounded up to
`pack_multiple`, or `row` where every row is equally long; T is the longest slot.

    cost     of a slot n + n²/quadratic_crossover, in token equivalents; of a microbatch the sum
             over its slots (padded: B times that of T). A tail costs nothing
    fill     tokens / what the microbatches may take (M x R x capacity)
    padding  share of the slots laid out that hold no token of the step: own padding, tails, fillers
    imbalance  sum over indices of the slowest rank's cost / sum over indices of the mean: 1 where
             no rank ever waits for another

Capacity is the cap on slots where the plan tells it, else `row`, else the largest microbatch. A
filler computes a copy of the shortest datum: it has slots and a cost, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.service.records import Plan

__all__ = ["Figures", "Piece", "SlotRule", "Strip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRule:
    """The planner's settings that say how long slots and rows become."""

    sequence_multiple: int = 1
    pack_multiple: int = 1
    row: int | None = None  # slots of every row; None: as long as needed
    cap: int | None = None  # slots a microbatch may take
    quadratic_crossover: float = 24576  # tokens

    @classmethod
    def of(cls, plan: Plan) -> SlotRule:
        placing = plan.placing
        return cls(
            sequence_multiple=placing.sequence_multiple,
            pack_multiple=placing.pack_multiple,
            row=placing.microbatch_tokens if placing.fixed_pack else None,
            cap=placing.microbatch_tokens,
            quadratic_crossover=placing.quadratic_crossover,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of slots `[start, stop)` of a strip."""

    start: int
    stop: int
    kind: Literal["sequence", "padding", "filler"]
    position: int  # of the sequence in its strip
    datum: int  # its index in the step; -1: padding behind the last slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One microbatch as it is laid out."""

    index: int
    rank: int
    members: NDArray[np.int64]  # [n] indices into the plan; of a filler the shortest datum
    lengths: NDArray[np.int64]  # [n] tokens
    slots: NDArray[np.int64]  # [n]
    total: int  # slots laid out, tail included
    cost: float
    filler: bool

    @property
    def tokens(self) -> int:
        return 0 if self.filler else int(self.lengths.sum())

    def pieces(self) -> Iterator[Piece]:
        """From left to right, without gaps."""
        stop = 0
        kind: Literal["sequence", "filler"] = "filler" if self.filler else "sequence"
        rows = zip(self.members.tolist(), self.lengths.tolist(), self.slots.tolist(), strict=True)
        for position, (datum, length, slot) in enumerate(rows):
            start, real, stop = stop, stop + length, stop + slot
            yield Piece(start=start, stop=real, kind=kind, position=position, datum=datum)
            if real < stop:
                yield Piece(start=real, stop=stop, kind="padding", position=position, datum=datum)
        if stop < self.total:
            yield Piece(
                start=stop, stop=self.total, kind="padding", position=len(self.members), datum=-1
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A plan, counted."""

    plan: Plan
    rule: SlotRule
    strips: tuple[Strip, ...]  # [M * R], index by index
    slots: NDArray[np.int64]  # [M, R]
    tokens: NDArray[np.int64]  # [M, R]
    costs: NDArray[np.float64]  # [M, R]

    @classmethod
    def of(cls, plan: Plan, rule: SlotRule | None = None) -> Figures:
        rule = SlotRule.of(plan) if rule is None else rule
        shape = (plan.count, plan.dp_size)
        strips = tuple(
            _strip(plan, rule, index, rank) for index in range(shape[0]) for rank in range(shape[1])
        )
        return cls(
            plan=plan,
            rule=rule,
            strips=strips,
            slots=np.array([strip.total for strip in strips], np.int64).reshape(shape),
            tokens=np.array([strip.tokens for strip in strips], np.int64).reshape(shape),
            costs=np.array([strip.cost for strip in strips], np.float64).reshape(shape),
        )

    def strip(self, index: int, rank: int) -> Strip:
        return self.strips[index * self.plan.dp_size + rank]

    @property
    def capacity(self) -> int:
        """Slots that each microbatch is measured against."""
        return self.rule.cap or self.rule.row or int(self.slots.max())

    @property
    def capacity_is(self) -> str:
        """Which of the three it is, as a word for titles."""
        return "cap" if self.rule.cap else "row" if self.rule.row else "largest"

    @property
    def fillers(self) -> int:
        return sum(strip.filler for strip in self.strips)

    @property
    def fill(self) -> float:
        return float(self.tokens.sum() / (self.slots.size * self.capacity))

    @property
    def padding(self) -> float:
        return float(1 - self.tokens.sum() / self.slots.sum())

    @property
    def wall(self) -> float:
        """Cost of the step as time passes: the slowest rank of each index."""
        return float(self.costs.max(axis=1).sum())

    @property
    def imbalance(self) -> float:
        return float(self.wall / self.costs.mean(axis=1).sum())

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        plan = self.plan
        return {
            "step": plan.step,
            "layout": plan.layout,
            "dp_size": plan.dp_size,
            "microbatches_per_rank": plan.count,
            "datums": len(plan.lengths),
            "groups": int(plan.groups.max()) + 1,
            "tokens": int(self.tokens.sum()),
            "slots": int(self.slots.sum()),
            "capacity": self.capacity,
            "capacity_is": self.capacity_is,
            "fillers": self.fillers,
            "fill": self.fill,
            "padding": self.padding,
            "imbalance": self.imbalance,
            "quadratic_crossover": self.rule.quadratic_crossover,
            "cost": self.wall,
            "rank_costs": self.costs.sum(axis=0).tolist(),
            "microbatches": [
                {
                    "index": strip.index,
                    "rank": strip.rank,
                    "datum_numbers": plan.numbers[strip.members].tolist(),
                    "lengths": strip.lengths.tolist(),
                    "slots": strip.slots.tolist(),
                    "total_slots": strip.total,
                    "tokens": strip.tokens,
                    "cost": strip.cost,
                    "is_filler": strip.filler,
                }
                for strip in self.strips
            ],
        }


def _strip(plan: Plan, rule: SlotRule, index: int, rank: int) -> Strip:
    members = plan.members(index, rank)
    filler = not len(members)
    if filler:
        members = np.array([int(np.argmin(plan.lengths))], np.int64)
    lengths = plan.lengths[members]
    slots = _round_up(lengths, rule.sequence_multiple)
    if plan.layout == "padded":
        slots = np.full(len(slots), slots.max())
        total = int(slots.sum())
    else:
        total = rule.row or int(_round_up(slots.sum(), rule.pack_multiple))
    return Strip(
        index=index,
        rank=rank,
        members=members,
        lengths=lengths,
        slots=slots,
        total=total,
        cost=float((slots + slots.astype(np.float64) ** 2 / rule.quadratic_crossover).sum()),
        filler=filler,
    )


def _round_up(n: Any, multiple: int) -> Any:
    return -(-n // multiple) * multiple
