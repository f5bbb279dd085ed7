"""Multiples, fixed rows and neat through the whole of the service: what a Trainer sees, and what a model takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.client import RolloutClient, Trainer
from headrace.schemas import (
    Datum,
    PackedSeqParams,
    packed_seq_params_from_doc_ids,
    to_flash_attention_kwargs,
)

LENGTHS = [5, 9, 1, 12, 7, 3, 8, 2]


def datums():
    random = np.random.default_rng(2)
    return [
        Datum(
            random.integers(1, 90, n),
            {
                "target_tokens": torch.from_numpy(random.integers(1, 90, n)),
                "weights": torch.ones(n),
            },
            id=f"d{at}",
        )
        for at, n in enumerate(LENGTHS)
    ]


def batches(serve, **settings):
    service = serve(**{"planner.batch_size": len(LENGTHS), "queue.bytes": "1MiB"} | settings)
    with RolloutClient(service.url) as client, Trainer.attach(queue_dir=service.queue_dir, dp_size=int(settings.get("planner.dp_size", 1))) as trainer:  # fmt: skip
        client.submit(datums(), policy_version=0)
        step = next(trainer.steps())
        return [
            (
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()},
                batch.info,
            )
            for batch in step
        ]


@pytest.mark.parametrize("layout", ["thd", "neat"])
@pytest.mark.parametrize("fixed", [False, True])
def test_slots_and_rows_are_multiples(serve, layout, fixed):
    made = batches(
        serve,
        **{
            "planner.layout": layout, "planner.microbatch_tokens": 64, "planner.sequence_multiple": 4,
            "planner.pack_multiple": 16, "planner.fixed_pack": fixed, "planner.microbatch_multiple": 2,
        },
    )  # fmt: skip
    assert len(made) % 2 == 0
    by_id = {d.id: d for d in datums()}
    seen = []
    for batch, info in made:
        row = batch["input_ids"].shape[1]
        assert row == 64 if fixed else row % 16 == 0
        at = 0
        for name in info.datum_ids:
            ids = by_id[name].input_ids
            slot = -(-len(ids) // 4) * 4
            assert torch.equal(batch["input_ids"][0, at : at + len(ids)], ids)
            assert not batch["input_ids"][0, at + len(ids) : at + slot].any()
            assert (batch["labels"][0, at + len(ids) : at + slot] == -100).all()
            seen += [] if info.is_filler else [name]
            at += slot
        assert at <= row <= 64
        assert (batch["labels"][0, at:] == -100).all()
        assert not batch["weights"][0, at:].any()
        assert batch["cu_seqlens"][-1] == row
        if layout == "thd":
            slots = batch["seq_lens_padded"][0]
            assert torch.equal(batch["cu_seqlens"][: len(slots) + 1].diff(), slots.int())
        else:
            want = packed_seq_params_from_doc_ids(batch["doc_ids"])
            assert torch.equal(batch["cu_seqlens"], want.cu_seqlens)
            assert batch["max_seqlen"] == want.max_seqlen
            mine = PackedSeqParams(batch["cu_seqlens"], batch["max_seqlen"], batch["doc_ids"])
            assert to_flash_attention_kwargs(mine)["max_length_q"] == want.max_seqlen
    assert sorted(seen) == sorted(by_id)


def test_padded_rows_are_bucketed_by_length(serve):
    made = batches(
        serve,
        **{"planner.layout": "padded", "planner.microbatch_size": 2, "planner.microbatch_tokens": None, "planner.sequence_multiple": 4,
           "limits.max_sequence_tokens": 16},
    )  # fmt: skip
    assert [batch["input_ids"].shape[0] for batch, _ in made] == [2, 2, 2, 2]
    assert sorted(batch["input_ids"].shape[1] for batch, _ in made) == [4, 8, 8, 12]


def test_a_datum_that_fits_no_microbatch_is_refused_at_the_door(serve, posts):
    service = serve(
        **{
            "planner.microbatch_tokens": 70,
            "planner.sequence_multiple": 16,
            "planner.pack_multiple": 32,
        }
    )
    answer = service.post(posts.body(posts.datum(65)))
    assert answer.json()["errors"][0]["want"] == "at most 64"
    assert service.post(posts.body(posts.datum(64))).status_code == 202
