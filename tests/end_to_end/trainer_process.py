"""A trainer in a process of its own, driven by tests: writes what it saw to files.

    python trainer_process.py QUEUE_DIR RANK WORLD STEPS OUT

Each microbatch becomes OUT/{rank}-{step}-{index}.npz, its plain values and info OUT/....json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from headrace.client import Trainer


def main() -> None:
    queue_dir, rank, world, steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    with Trainer.attach(
        dp_rank=int(rank), dp_size=int(world), queue_dir=queue_dir, service_gone_s=5
    ) as trainer:
        trainer.publish_policy_version(0, uri="weights/0")
        for step in trainer.steps():
            for _ in range(2):  # a second pass sees the same bytes
                batches = list(step)
            for batch in batches:
                write(Path(out) / f"{rank}-{step.index}-{batch.info.index}", batch)
            trainer.publish_policy_version(step.index + 1, uri=f"weights/{step.index + 1}")
            trainer.commit(step)
            if step.index == int(steps) - 1:
                break


def write(name: Path, batch: object) -> None:
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    np.savez(name.with_suffix(".npz"), **{k: v.numpy() for k, v in tensors.items()})
    info = batch.info
    told = {
        "order": list(batch),
        "plain": {k: v for k, v in batch.items() if k not in tensors},
        "ids": info.datum_ids,
        "numbers": info.datum_numbers.tolist(),
        "filler": info.is_filler,
        "count": info.count,
        "step_loss_tokens": info.step_loss_tokens,
        "step_datums": info.step_datums,
        "datum_loss_tokens": info.datum_loss_tokens.tolist(),
    }
    name.with_suffix(".json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
