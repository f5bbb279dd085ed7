"""The host's side of the container test: one step through, as the uid that the container runs as.

    one_step.py URL QUEUE_DIR

Posts four sequences with `RolloutClient`, attaches with `Trainer`, takes the step that the service
in the container lays out, compares every tensor with `collate_datums` on the same datums, commits,
and sees the version that it publishes come back over HTTP. Prints one JSON line of what it saw;
anything that is not as it should be is an exception. Run by test_image.py in a process of its own,
because that process changes its uid.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from headrace.client import RolloutClient, Trainer
from headrace.schemas import Datum, collate_datums

LENGTHS = (3, 7, 20, 30)  # T of each datum; 60 slots under a cap of 40: two microbatches


def make_datums() -> dict[str, Datum]:
    """One datum a length, by id, with keys per token and per sample."""
    generator = torch.Generator().manual_seed(0)
    datums = {}
    for length in LENGTHS:
        tokens = torch.randint(0, 1000, (length + 1,), generator=generator)
        datums[f"d{length}"] = Datum(
            input_ids=tokens[:-1],
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": (torch.arange(length) % 3 != 0).float(),
                "logprobs": -torch.rand(length, generator=generator),
                "advantages": torch.randn(1, generator=generator),
            },
            id=f"d{length}",
        )
    return datums


def main(url: str, queue_dir: str) -> dict[str, object]:
    torch.set_num_threads(1)
    datums = make_datums()
    seen: list[str] = []
    with (
        RolloutClient(url, actor="host") as client,
        Trainer.attach("default", dp_rank=0, dp_size=1, queue_dir=queue_dir) as trainer,
    ):
        client.submit(list(datums.values()), policy_version=0)
        report = client.flush(timeout=30)
        assert report.delivered == len(LENGTHS), report
        assert not report.failed, report

        step = next(iter(trainer.steps()))
        microbatches = 0
        for batch in step:
            ids = [name for name in batch.info.datum_ids if name is not None]
            want = collate_datums([datums[i] for i in ids], packed=True)
            for key, value in want.items():
                got = batch[key]
                same = torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
                assert same, f"{key} of {ids}: got {got}, want {value}"
            seen += ids
            microbatches += 1
        assert sorted(seen) == sorted(datums), f"got {seen}, want each of {list(datums)} once"

        trainer.publish_policy_version(step.index + 1, uri="weights/1")
        trainer.commit(step)
        policy = client.wait_policy(newer_than=0)
        return {
            "uid": os.getuid(),
            "step": step.index,
            "microbatches": microbatches,
            "datums": len(seen),
            "policy": [policy.version, policy.uri],
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
