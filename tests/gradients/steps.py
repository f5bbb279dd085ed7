"""Random steps, and the microbatches that the planner and `layout.py` make of them. numpy.

A `Draw` is what the datums of one step are; a `Case` is how the step is cut and laid out, and which
loss it gets. Draws have what goes wrong by hand: rollouts of several datums, a group that was
shipped short, datums and whole groups without a loss token, datums of one token, weights that are
fractions, one a sample, or absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from headrace.client.step import Microbatch
from headrace.schemas.layout import Sequences, array_specs, constants, fill
from headrace.schemas.step import RecordLayout, read_record
from headrace.service.plan.pack import pack_step
from headrace.service.plan.step import StepCounts, microbatch_info, plan_step
from headrace.service.records import DATUM_META, Placing, Plan, datum_numbers

VOCABULARY = 19
LAYOUTS = ("padded", "thd", "neat")
LOSSES = ("policy_gradient", "importance", "ppo_clip", "dual_clip", "cross_entropy")
AGGREGATES = ("token_mean", "sequence_mean", "rollout_mean", "group_mean", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """N datums. `sizes` [N]: how many members a datum's group was meant to have."""

    number: int
    lengths: np.ndarray  # int64 [N]
    columns: dict[str, list[np.ndarray]]  # N arrays each: input_ids, target_tokens, logprobs, ...
    per_sample: frozenset[str]
    groups: np.ndarray  # int64 [N]
    rollouts: np.ndarray  # int64 [N]
    sizes: np.ndarray  # int64 [N]

    def weights(self, at: int) -> np.ndarray:
        """float64 [T] of datum `at`."""
        given = self.columns["weights"][at] if "weights" in self.columns else np.ones(1)
        return np.broadcast_to(given, self.lengths[at]).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    draw: int
    layout: str
    loss: str
    aggregate: str
    partition: str  # "planned" | "random": any bins at all
    microbatch_tokens: int | None
    microbatch_size: int | None
    microbatch_multiple: int
    sequence_multiple: int
    pack_multiple: int
    fixed_pack: bool
    sync: str  # "each" | "last": when gradients are reduced


def draw_step(seed: int, number: int, longest: int) -> Draw:
    random = np.random.default_rng((seed, number))
    groups, rollouts = [], []
    for group in range(int(random.integers(3, 6))):
        for rollout in range(int(random.integers(1, 4))):
            for _ in range(int(random.choice([1, 1, 2, 3]))):
                groups.append(group)
                rollouts.append(10 * group + rollout + 1)
    count = len(groups)
    sizes = np.bincount(groups)[groups] + 2 * np.equal(groups, 1)  # group 1 was shipped two short
    lengths = np.where(random.random(count) < 0.2, 1, random.integers(2, longest + 1, count))

    def numbers(make, per_sample: bool) -> list[np.ndarray]:
        return [make(1 if per_sample else n).astype(np.float32) for n in lengths]

    ids = [random.integers(0, VOCABULARY, n + 1, dtype=np.int32) for n in lengths]
    weighting = ("token", "sample", "absent")[number % 3]
    samples = {"advantages"} if number % 2 else set()
    columns = {
        "input_ids": [i[:-1] for i in ids],
        "target_tokens": [i[1:] for i in ids],
        # near the model's own, so that ratios fall on both sides of every clip
        "logprobs": numbers(lambda n: random.normal(-3.0, 0.7, n), False),
        "advantages": numbers(lambda n: random.normal(size=n), "advantages" in samples),
        "reward": numbers(lambda n: random.normal(size=n), True),
    }
    samples |= {"reward"}
    if weighting != "absent":
        columns["weights"] = numbers(
            lambda n: (random.random(n) < 0.6) * random.uniform(0.25, 2.0, n), weighting == "sample"
        )
        samples |= {"weights"} if weighting == "sample" else set()
        for at in range(count):  # the last group carries no loss; the first of all does
            columns["weights"][at] *= groups[at] != groups[-1]
        columns["weights"][0][:] = 0.75
    return Draw(
        number=number, lengths=lengths, columns=columns, per_sample=frozenset(samples),
        groups=np.array(groups), rollouts=np.array(rollouts), sizes=sizes,
    )  # fmt: skip


def draw_cases(seed: int, draw: Draw) -> Iterator[Case]:
    """Every loss with every aggregate, each in one layout; in three draws, in all three."""
    random = np.random.default_rng((seed, draw.number, 1))
    for at, (loss, aggregate) in enumerate(product(LOSSES, AGGREGATES)):
        layout = LAYOUTS[(at + draw.number) % 3]
        multiple = int(random.choice([1, 1, 2, 4]))
        room = int(draw.lengths.max()) + int(random.integers(0, 60))
        by_rows = layout == "padded" and random.random() < 0.4
        yield Case(
            draw=draw.number,
            layout=layout,
            loss=loss,
            aggregate=aggregate,
            partition="random" if random.random() < 0.3 else "planned",
            microbatch_tokens=None if by_rows else -(-room // 8) * 8,
            microbatch_size=int(random.integers(1, 5)) if by_rows else None,
            microbatch_multiple=int(random.choice([1, 1, 2, 7])),
            sequence_multiple=multiple,
            pack_multiple=multiple * int(random.choice([1, 2])) if layout != "padded" else 1,
            fixed_pack=layout != "padded" and random.random() < 0.4,
            sync=str(random.choice(["each", "last"])),
        )


def plan_of(seed: int, draw: Draw, case: Case, ranks: int) -> Plan:
    """The plan for `ranks` ranks; the same in every process."""
    meta = np.zeros(len(draw.lengths), DATUM_META)
    meta["length"] = draw.lengths
    meta["group"], meta["rollout"], meta["group_size"] = draw.groups, draw.rollouts, draw.sizes
    weights = [draw.weights(at) for at in range(len(meta))]
    meta["loss_tokens"] = [np.count_nonzero(w) for w in weights]
    meta["loss_weight"] = [w.sum() for w in weights]
    cap = 1 << 20  # the bins of this one are replaced
    plan = plan_step(
        draw.number, datum_numbers(1, len(meta)), meta, layout=case.layout, dp_size=ranks,
        placing=Placing(microbatch_tokens=cap),
    )  # fmt: skip
    if case.partition == "random":
        random = np.random.default_rng((seed, draw.number, ranks))
        bins = ranks * int(random.integers(1, 6))
        inner = np.sort(random.integers(0, len(meta) + 1, bins - 1))
        edges = np.concatenate([[0], inner, [len(meta)]])
        return replace(plan, bins=edges, items=random.permutation(len(meta)))
    edges, items = pack_step(
        draw.lengths, layout=case.layout, dp_size=ranks, microbatch_tokens=case.microbatch_tokens,
        microbatch_size=case.microbatch_size, microbatch_multiple=case.microbatch_multiple,
        sequence_multiple=case.sequence_multiple, pack_multiple=case.pack_multiple,
        fixed_pack=case.fixed_pack,
    )  # fmt: skip
    return replace(plan, bins=edges, items=items)


def microbatches(
    plan: Plan, draw: Draw, case: Case, rank: int, *, silent: bool = True
) -> list[Microbatch]:
    """What a Trainer of `rank` holds. `silent=False` leaves the loss in fillers, which is wrong."""
    counts = StepCounts.of(plan)
    ids: list[str | None] = [None] * len(draw.lengths)
    made = []
    for index in range(plan.count):
        members, info = microbatch_info(plan, counts, index, rank, ids)
        lengths = draw.lengths[members]
        slots = _up(lengths, case.sequence_multiple)
        row = None
        if case.layout != "padded":
            row = int(_up(slots.sum(), case.pack_multiple))
            if case.fixed_pack and case.partition == "planned":
                row = case.microbatch_tokens
        extras = draw.columns.keys() - {"input_ids", "target_tokens"}
        specs = array_specs(
            lengths, extras, layout=case.layout, targets=True, per_sample=draw.per_sample,
            slots=slots, row=row,
        )  # fmt: skip
        plain = constants(lengths, case.layout, slots=slots, row=row)
        record = RecordLayout(specs, plain, info)
        memory = memoryview(bytearray(record.nbytes))
        taken = {key: [arrays[at] for at in members] for key, arrays in draw.columns.items()}
        sequences = Sequences(
            lengths=lengths, input_ids=taken["input_ids"], targets=taken["target_tokens"],
            extras={key: taken[key] for key in extras}, per_sample=draw.per_sample,
        )  # fmt: skip
        arrays = record.write(memory)
        fill(arrays, sequences, layout=case.layout, slots=slots)
        if info.is_filler and silent:
            arrays["labels"].fill(-100)
            for key in {"weights", "advantages", "logprobs"} & arrays.keys():
                arrays[key].fill(0)
        views, plain, info = read_record(memory, record.meta_offset)
        tensors = {name: torch.from_numpy(array) for name, array in views.items()}
        made.append(Microbatch(tensors | plain, info))
    return made


def _up(n, multiple: int):
    return -(-n // multiple) * multiple
