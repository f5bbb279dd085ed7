"""The trainer: takes each step from the ring, trains two epochs over it, publishes the new weights.

    attach -> publish version 0 -> for each step k: 2 x (microbatches, optimizer) -> publish k + 1

The loss is divided by the tokens of the whole step, so that the gradient is the same however the
step is cut into microbatches. Weights are safetensors files, written beside and renamed, so that no
actor reads half a file; the newest few are kept for actors that come late for theirs.

One JSON line a step goes to stdout: step, reward (mean over the step's samples), lag (versions
between the trained policy and the one that made the oldest sample), tokens, microbatches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.client import Step, Trainer
from headrace.demo.policy import Policy, token_losses

EPOCHS = 2
LEARNING_RATE = 1e-3
WEIGHTS_KEPT = 16


def train(policy: Policy, optimizer: torch.optim.Optimizer, step: Step) -> None:
    """One optimizer step an epoch. A step can be walked through as often as it is needed."""
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        for batch in step:
            losses = token_losses(policy, batch)
            scale = batch.info.loss_scale("ddp") / batch.info.step_loss_tokens
            (losses.sum() * scale).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def publish(policy: Policy, version: int, trainer: Trainer, folder: Path) -> None:
    path = folder / f"{version}.safetensors"
    save_file(policy.state_dict(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    trainer.publish_policy_version(version, uri=str(path))
    (folder / f"{version - WEIGHTS_KEPT}.safetensors").unlink(missing_ok=True)


def metrics(step: Step) -> dict[str, float]:
    rewards = torch.cat([batch["reward"] for batch in step])
    infos = [batch.info for batch in step]
    return {
        "step": step.index,
        "reward": rewards.mean().item(),
        "lag": step.index - min(info.policy_version_min for info in infos),
        "tokens": sum(batch["input_ids"].numel() for batch in step),
        "microbatches": len(infos),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace.demo.trainer")
    parser.add_argument("--queue-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    folder = arguments.queue_dir / "weights"
    folder.mkdir()

    with Trainer.attach(
        "demo", queue_dir=arguments.queue_dir, commit="on_next_step", service_gone_s=5
    ) as trainer:
        publish(policy, 0, trainer, folder)
        for step in trainer.steps():
            train(policy, optimizer, step)
            publish(policy, step.index + 1, trainer, folder)
            print(json.dumps(metrics(step)), flush=True)
            if step.index + 1 == arguments.steps:
                break


if __name__ == "__main__":
    main()
