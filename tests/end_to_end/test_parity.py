"""What a Trainer yields equals `collate_datums` on the same datums, bit for bit.

Through real HTTP and real rings: the service, two trainers and the actor are four processes. Padded and THD, posts per
datum and columnar, every dtype that the wire takes, a run whose per-sample key is told by longer datums only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.client import RolloutClient
from headrace.schemas import Datum, collate_datums

SCRIPT = Path(__file__).with_name("trainer_process.py")
WORLD = 2
DTYPES = {
    "input_ids": ["<i4", "<i8", "<u2"],
    "target_tokens": ["<i4", "<i8", "<i2"],
    "weights": ["<f4", "<f8", "?", "u1", "<i8"],
    "logprobs": ["<f4", "<f2", "<f8"],
    "advantages": ["<f4", "<f8"],
    "values": ["<f4", "<i4"],
}


def draw(random: np.random.Generator, number: int) -> Datum:
    """A datum of 1 to 40 tokens whose entries have whatever dtype comes."""
    tokens = int(random.choice([1, 1, 2, 7, 19, 40]))
    dtype = {key: random.choice(names) for key, names in DTYPES.items()}
    inputs = {
        "target_tokens": random.integers(0, 30_000, tokens),
        "weights": (random.random(tokens) > 0.3) * random.integers(1, 3, tokens),
        "logprobs": -random.random(tokens),
        "advantages": random.normal(size=1),
        "values": random.normal(size=tokens) * 100,
    }
    if number % 3 == 0:
        inputs["advantages"] = inputs["advantages"].reshape(())
    arrays = {key: np.asarray(value).astype(dtype[key]) for key, value in inputs.items()}
    ids = random.integers(0, 30_000, tokens).astype(dtype["input_ids"])
    return Datum(
        torch.from_numpy(ids),
        {key: torch.from_numpy(array) for key, array in arrays.items()},
        id=f"d{number}",
        policy_version=0,
        group_id=f"g{number // 4}",
        group_size=4,
    )


def wire(datum: Datum, posts) -> dict:
    inputs = {key: posts.tensor(value.numpy()) for key, value in datum.loss_fn_inputs.items()}
    fields = {k: getattr(datum, k) for k in ("id", "group_id", "group_size", "policy_version")}
    return {"input_ids": posts.tensor(datum.input_ids.numpy()), "loss_fn_inputs": inputs} | fields


@pytest.mark.slow
@pytest.mark.parametrize("form", ["per_datum", "columnar"])
@pytest.mark.parametrize("layout", ["padded", "thd"])
def test_batches_equal_collate_datums(serve, posts, tmp_path, layout, form):
    service = serve(
        **{
            "planner.layout": layout, "planner.dp_size": WORLD, "planner.batch_size": 12,
            "planner.microbatch_tokens": 96, "queue.bytes": "1MiB",
        }
    )  # fmt: skip
    random = np.random.default_rng(len(layout) + len(form))
    datums = [draw(random, number) for number in range(36)]
    by_id = {datum.id: datum for datum in datums}
    trainers = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(service.queue_dir), str(rank), str(WORLD), "3", str(tmp_path)])
        for rank in range(WORLD)
    ]  # fmt: skip
    if form == "per_datum":
        for first in range(0, len(datums), 9):
            body = posts.body(*(wire(datum, posts) for datum in datums[first : first + 9]))
            assert service.post(body).status_code == 202
    else:
        with RolloutClient(service.url) as client:
            client.submit(datums[:20])
            client.submit(datums[20:])
            assert client.flush(30).delivered == 36
    assert [trainer.wait(60) for trainer in trainers] == [0, 0]

    seen: list[str] = []
    counts: dict[int, set[int]] = {}
    for file in sorted(tmp_path.glob("*.json")):
        told = json.loads(file.read_text())
        arrays = np.load(file.with_suffix(".npz"))
        members = [by_id[name] for name in told["ids"]]
        if told["filler"]:
            members = [silent(datum) for datum in members]
        else:
            seen += told["ids"]
        want = collate_datums(members, packed=layout == "thd", per_sample=("advantages",))
        extra = {"cu_seqlens", "max_seqlen"} if layout == "thd" else set()
        assert set(told["order"]) == want.keys() | extra
        arrays_of = [key for key in told["order"] if key not in {*extra, "qkv_format"}]
        assert arrays_of == [key for key in want if key != "qkv_format"]
        for key, value in want.items():
            if isinstance(value, torch.Tensor):
                got = torch.from_numpy(arrays[key])
                assert (got.dtype, got.shape) == (value.dtype, value.shape), key
                if told["filler"] and key == "labels":
                    value = torch.full_like(value, -100)
                assert torch.equal(got, value), (file.name, key)
            else:
                assert told["plain"][key] == value
        if layout == "thd":
            lengths = [datum.seq_len for datum in members]
            assert arrays["cu_seqlens"].tolist() == np.cumsum([0, *lengths]).tolist()
            assert arrays["cu_seqlens"].dtype == np.int32
            assert told["plain"]["max_seqlen"] == max(lengths)
            assert sum(lengths) <= 96
        else:
            assert arrays["input_ids"].size <= 96
        _, step, _ = file.stem.split("-")
        counts.setdefault(int(step), set()).add(told["count"])
    assert sorted(seen) == sorted(by_id)
    assert all(len(count) == 1 for count in counts.values()), "every rank has as many microbatches"
    assert service.books() == {
        "accepted": 36, "buffered": 0, "planned": 0, "delivered": 0, "committed": 36, "dropped": {},
    }  # fmt: skip


def silent(datum: Datum) -> Datum:
    """The datum as a filler carries it."""
    zeros = {
        key: torch.zeros_like(value) if key in ("weights", "logprobs", "advantages") else value
        for key, value in datum.loss_fn_inputs.items()
    }
    return Datum(datum.input_ids, zeros)
