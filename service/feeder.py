"""Plans in, ring records out: lays each microbatch out in place in its rank's ring.

    prepare(plan) ──► [write_plan] ──► enqueue ──► advance() ... ──► numbers of delivered steps
    sizes, and that                                publishes index-major:
    it can fit                                     microbatch i to every rank, then i + 1

Under release="step" a step is published only when it fits whole in every ring, so no rank starts a
step that another cannot get. Under "microbatch" each record goes out as room appears, still
index-major. Nothing here waits: a rank without room ends the call, and `waiting()` names it. Runs
on the pump's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from headrace.schemas import layout
from headrace.schemas.errors import RecordTooLarge
from headrace.schemas.fields import CROSS_ENTROPY_IGNORE_IDX, Layout
from headrace.schemas.ring import Kind
from headrace.schemas.step import RecordLayout
from headrace.service.plan.step import StepCounts, microbatch_info
from headrace.service.records import Plan, RunSchema, Spool
from headrace.service.ring import RingWriter

__all__ = ["Feeder", "PreparedStep"]

LOSS_KEYS = ("weights", "advantages", "logprobs")  # what a filler carries zeros in


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRecord:
    index: int
    rank: int
    members: NDArray[np.int64]
    slots: NDArray[np.int64] | None  # [N] where they are not the lengths
    filler: bool
    record: RecordLayout


@dataclass(slots=True, kw_only=True)
class PreparedStep:
    """A plan with the size of each of its records; `at` is the next one to publish."""

    plan: Plan
    schema: RunSchema
    records: list[PreparedRecord]
    at: int = 0
    of_rank: dict[int, list[int]] = field(default_factory=dict)  # bytes a record, by rank


class Feeder:
    """The writer of all ranks' rings."""

    def __init__(
        self, spool: Spool, rings: Sequence[RingWriter], *, release: Literal["step", "microbatch"]
    ) -> None:
        self._spool = spool
        self._rings = rings
        self._release = release
        self._queue: deque[PreparedStep] = deque()

    def prepare(self, plan: Plan, schema: RunSchema) -> PreparedStep:
        """The sizes of the step's records. Raises RecordTooLarge where they can never fit the
        rings.
        """
        counts = StepCounts.of(plan)
        ids = self._spool.ids(plan.numbers)
        extras = set(schema.axes.keys() - {"target_tokens", *schema.streams})
        per_sample = schema.per_sample
        if len(plan.advantages):
            extras.add("advantages")
            per_sample |= {"advantages"}
        kind = cast(Layout, plan.layout)
        prepared = PreparedStep(plan=plan, schema=schema, records=[])
        for index in range(plan.count):
            for rank in range(plan.dp_size):
                members, info = microbatch_info(plan, counts, index, rank, ids)
                lengths = plan.lengths[members]
                slots, row = plan.placing.of(lengths, plan.layout)
                specs = layout.array_specs(
                    lengths,
                    sorted(extras),
                    layout=kind,
                    targets="target_tokens" in schema.axes,
                    per_sample=per_sample,
                    streams=schema.streams,
                    slots=slots,
                    row=row,
                )
                plain = layout.constants(lengths, kind, slots=slots, row=row)
                record = RecordLayout(specs, plain, info)
                prepared.records.append(
                    PreparedRecord(
                        index=index,
                        rank=rank,
                        members=members,
                        slots=slots,
                        filler=info.is_filler,
                        record=record,
                    )
                )
                prepared.of_rank.setdefault(rank, []).append(record.nbytes)
        self._check_fit(prepared)
        return prepared

    def _check_fit(self, prepared: PreparedStep) -> None:
        for rank, sizes in prepared.of_rank.items():
            ring = self._rings[rank]
            whole = self._release == "step"
            if ring.can_ever_fit(sizes if whole else [max(sizes)]):
                continue
            what = f"step {prepared.plan.step}" if whole else "a microbatch"
            need = sum(sizes) if whole else max(sizes)
            raise RecordTooLarge(
                f"{what} needs {need} bytes in {len(sizes) if whole else 1} records of rank "
                f"{rank}'s ring, which has "
                f"queue.bytes = {ring.capacity} and queue.records = {ring.geometry.records}: raise "
                "them, lower "
                f"planner.batch_size or batch_groups, or set trainer.release = microbatch"
            )

    def enqueue(self, prepared: PreparedStep) -> None:
        """Publish this step after those before it. Its plan is written down."""
        self._queue.append(prepared)

    def advance(self) -> list[int]:
        """Publish what fits now; the steps that are now delivered whole."""
        delivered: list[int] = []
        while self._queue:
            step = self._queue[0]
            if self._release == "step" and step.at == 0 and self._full_rank(step) is not None:
                break
            while step.at < len(step.records) and self._publish(step, step.records[step.at]):
                step.at += 1
            if step.at < len(step.records):
                break
            delivered.append(self._queue.popleft().plan.step)
        return delivered

    def waiting(self) -> str | None:
        """What the next undelivered step waits for, as a clause; None where no step is waiting."""
        if not self._queue:
            return None
        step = self._queue[0]
        rank = self._full_rank(step)
        if rank is None:
            return f"step {step.plan.step} is being published"
        readers = self._rings[rank].readers()
        absent = [r.replica for r in readers if not r.attached]
        who = (
            f"replica {absent[0]} is not attached"
            if absent
            else "its trainer has not released enough"
        )
        return f"step {step.plan.step} is planned and waits for room in rank {rank}'s ring: {who}"

    @property
    def undelivered(self) -> int:
        """Planned steps that are not delivered whole."""
        return len(self._queue)

    def _full_rank(self, step: PreparedStep) -> int | None:
        """The first rank whose ring has no room for what must go out next."""
        if self._release == "step" and step.at == 0:
            for rank, sizes in step.of_rank.items():
                if not self._rings[rank].fits(sizes):
                    return rank
            return None
        record = step.records[step.at]
        return None if self._rings[record.rank].fits([record.record.nbytes]) else record.rank

    def _publish(self, step: PreparedStep, entry: PreparedRecord) -> bool:
        ring, record, plan = self._rings[entry.rank], entry.record, step.plan
        memory = ring.reserve(record.nbytes)
        if memory is None:
            return False
        arrays = record.write(memory)
        numbers = plan.numbers[entry.members]
        sequences = self._spool.read(numbers, step.schema)
        if len(plan.advantages):
            computed = [plan.advantages[at : at + 1] for at in entry.members.tolist()]
            sequences = replace(
                sequences,
                extras={**sequences.extras, "advantages": computed},
                per_sample=sequences.per_sample | {"advantages"},
            )
        layout.fill(arrays, sequences, layout=cast(Layout, plan.layout), slots=entry.slots)
        if entry.filler:
            _silence(arrays)
        ring.publish(
            kind=Kind.FILLER if entry.filler else Kind.DATA,
            step=plan.step,
            index=entry.index,
            count=plan.count,
            length=record.nbytes,
            meta_offset=record.meta_offset,
        )
        return True


def _silence(arrays: dict[str, NDArray[Any]]) -> None:
    """Take the loss out of a filler: its gradient is exactly 0."""
    if "labels" in arrays:
        arrays["labels"].fill(CROSS_ENTROPY_IGNORE_IDX)
    for key in LOSS_KEYS:
        if key in arrays:
            arrays[key].fill(0)
