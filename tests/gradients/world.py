"""The ranks of the gradient proof: real processes, gloo, DDP and FSDP2, in float64.

    python world.py DRAWS SEED LONGEST OUT

Forks worlds of 1, 2 and 4 ranks one after another; OUT gets one JSON line a measurement: what was
measured, and the relative error of the gradient and of the loss against the datums taken one by one
(`transformer.by_the_book`). World 1 computes those, and also measures a few things that are wrong
on purpose, as "spoiled: ...".
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from steps import Case, Draw, draw_cases, draw_step, microbatches, plan_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformer import (
    CAP,
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    alone,
    by_the_book,
    flat,
    logprobs_of,
    transformer,
)

from headrace.client.losses import cross_entropy_loss, policy_gradient_loss, ppo_clip_loss
from headrace.client.step import Microbatch

WORLDS = (1, 2, 4)
STUCK = timedelta(seconds=120)


def loss_of(case: Case, logprobs: Tensor, batch: Microbatch) -> Tensor:
    a = case.aggregate
    if case.loss == "cross_entropy":
        return cross_entropy_loss(logprobs, batch, aggregate=a)
    if case.loss in ("policy_gradient", "importance"):
        cap = CAP if case.loss == "importance" else None
        return policy_gradient_loss(logprobs, batch, aggregate=a, importance_cap=cap)
    return ppo_clip_loss(
        logprobs, batch, aggregate=a, clip_low=CLIP_LOW, clip_high=CLIP_HIGH,
        dual_clip=DUAL_CLIP if case.loss == "dual_clip" else None,
    )  # fmt: skip


class Plain:
    """One process and no wrapper."""

    strategy = "sum"

    def __init__(self) -> None:
        self.model: nn.Module = transformer()

    def step(self, batches: list[Microbatch], case: Case, **wrong: bool) -> tuple[Tensor, Tensor]:
        """(gradient [parameters], loss []) of the step, over all ranks."""
        self.model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            with self.sync(case.sync == "each" or index == len(batches) - 1):
                logprobs = logprobs_of(self.model, batch, blocks=wrong.get("blocks", True))
                loss = loss_of(case, logprobs, batch)
                if wrong.get("mean_of_means"):
                    live = (batch["labels"] != -100).sum().clamp(min=1)
                    step = batch.info.step_loss_tokens
                    loss = loss * step / (live * len(batches))
                (loss * batch.info.loss_scale(self.strategy)).backward()
                total += loss.detach()
        return flat(self.gradients()), total

    def sync(self, reduce: bool):
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters()]


class Ddp(Plain):
    strategy = "ddp"

    def __init__(self) -> None:
        self.model = DistributedDataParallel(transformer())

    def sync(self, reduce: bool):
        return nullcontext() if reduce else self.model.no_sync()


class Fsdp(Plain):
    strategy = "fsdp"

    def __init__(self) -> None:
        self.model = transformer()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=mesh)

    def sync(self, reduce: bool):
        self.model.set_requires_gradient_sync(reduce)
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return [p.grad.full_tensor() for p in self.model.parameters()]


def references(draws: list[Draw], seed: int) -> dict[tuple[int, str, str], tuple[Tensor, Tensor]]:
    model, made = transformer(), {}
    for draw in draws:
        logprobs = alone(model, draw)
        for case in draw_cases(seed, draw):
            loss = by_the_book(draw, logprobs, case.loss, case.aggregate)
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            made[draw.number, case.loss, case.aggregate] = flat(gradients), loss.detach()
    return made


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def measure(rank: int, world: int, draws: list[Draw], seed: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/world-{world}", rank=rank, world_size=world,
        timeout=STUCK,
    )  # fmt: skip
    if world == 1:
        torch.save(references(draws, seed), folder / "references.pt")
    known = torch.load(folder / "references.pt")

    def tell(what: str, case: Case, batches: list[Microbatch], got: tuple[Tensor, Tensor]) -> None:
        gradient, loss = got
        fillers = torch.tensor(sum(batch.info.is_filler for batch in batches))
        for total in (loss, fillers):
            dist.all_reduce(total)
        want = known[case.draw, case.loss, case.aggregate]
        line = {
            "what": what, "world": world, "gradient": error(gradient, want[0]),
            "loss_value": error(loss, want[1]), "fillers": int(fillers), "count": len(batches),
            **asdict(case),
        }  # fmt: skip
        if rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for kind in (Plain,) if world == 1 else (Ddp, Fsdp):
        made = kind()
        for draw in draws:
            for at, case in enumerate(draw_cases(seed, draw)):
                if not chosen(kind, world, at, draw.number):
                    continue
                batches = microbatches(plan_of(seed, draw, case, world), draw, case, rank)
                tell(kind.__name__.lower(), case, batches, made.step(batches, case))
    if world == 1:
        spoil(made, seed, draws[2], tell)  # without weights: all datums carry loss
    dist.destroy_process_group()


def chosen(kind: type[Plain], world: int, at: int, draw: int) -> bool:
    """Whether case `at` of the 25 of `draw` is measured.

    All on up to 2 ranks. Of 4 ranks, where a case costs more, 10: in three draws these are all
    losses with all aggregates. Under FSDP2, ten times as slow, 5: each loss and each aggregate.
    """
    diagonal = (at - at // 5) % 5
    if kind is Fsdp:
        return diagonal == draw % 5
    return world < 4 or diagonal in (2 * draw % 5, (2 * draw + 1) % 5)


def spoil(plain: Plain, seed: int, draw: Draw, tell) -> None:
    """Mistakes that the proof is there to find."""
    case = replace(
        next(draw_cases(seed, draw)), layout="thd", partition="planned", microbatch_multiple=1,
        microbatch_tokens=2 * int(draw.lengths.max()), microbatch_size=None, sequence_multiple=1,
        pack_multiple=1, fixed_pack=False, loss="policy_gradient", aggregate="token_mean",
    )  # fmt: skip
    batches = microbatches(plan_of(seed, draw, case, 1), draw, case, 0)
    tell("spoiled: a mean of means", case, batches, plain.step(batches, case, mean_of_means=True))
    tell("spoiled: no blocks", case, batches, plain.step(batches, case, blocks=False))
    case = replace(case, microbatch_multiple=len(draw.lengths) + 1)
    batches = microbatches(plan_of(seed, draw, case, 1), draw, case, 0, silent=False)
    tell("spoiled: a loud filler", case, batches, plain.step(batches, case))


def fork(rank: int, *arguments) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the script
        measure(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> int:
    count, seed, longest = map(int, sys.argv[1:4])
    out = Path(sys.argv[4])
    draws = [draw_step(seed, number, longest) for number in range(count)]
    with tempfile.TemporaryDirectory() as name:
        for world in WORLDS:
            ranks = {fork(rank, world, draws, seed, Path(name), out) for rank in range(world)}
            while ranks:
                pid, status = os.wait()
                ranks.discard(pid)
                if status:
                    return 1  # the others die with us
    return 0


if __name__ == "__main__":
    sys.exit(main())
