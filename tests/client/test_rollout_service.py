"""Both clients against the real service: what is slim arrives whole, what is refused is named."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.client import AsyncRolloutClient, RolloutClient, Trainer

BOUND_S = 20.0
SECRET = "0123456789abcdef" * 3


def drawn(random: np.random.Generator, number: int, **more: Any) -> dict[str, Any]:
    """A datum as a sampler makes it: targets are the ids shifted, weights a mask."""
    size = int(random.integers(1, 30))
    tokens = random.integers(0, 1000, size + 1)
    losses = {
        "target_tokens": tokens[1:],
        "weights": (random.random(size) > 0.3).astype(np.float32),
        "logprobs": -random.random(size, dtype=np.float32),
        "advantages": random.normal(size=1).astype(np.float32),
    }
    losses["weights"][0] = 1.0  # a datum without any loss is no part of this
    base = {"input_ids": tokens[:-1], "loss_fn_inputs": losses, "id": f"d{number}"}
    return base | {"policy_version": 0} | more


def wire(datum: dict[str, Any], posts: Any) -> dict[str, Any]:
    losses = {key: posts.tensor(array) for key, array in datum["loss_fn_inputs"].items()}
    return datum | {"input_ids": posts.tensor(datum["input_ids"]), "loss_fn_inputs": losses}


def batches(step: Any) -> list[tuple[list[str | None], dict[str, bytes]]]:
    seen = []
    for batch in step:
        arrays = {k: v.numpy().tobytes() for k, v in batch.items() if hasattr(v, "numpy")}
        seen.append((list(batch.info.datum_ids), arrays))
    return seen


@pytest.mark.slow
def test_slim_posts_are_delivered_as_full_ones_are(serve: Any, posts: Any) -> None:
    """Step 0 is posted per datum in full, step 1 by the client: the same bytes in the rings."""
    experts = {"experts": {"dtype": "int16", "shape": [2], "rows": "T-1"}}
    service = serve(
        **{
            "planner.batch_size": 24,
            "planner.microbatch_tokens": 256,
            "schema.streams": json.dumps(experts),
        }
    )
    random = np.random.default_rng(5)
    datums = [drawn(random, number) for number in range(24)]
    for datum in datums:
        rows = len(datum["input_ids"]) - 1
        datum["loss_fn_inputs"]["experts"] = random.integers(0, 64, (rows, 2), dtype=np.int16)
    full = [wire(datum | {"id": f"full-{datum['id']}"}, posts) for datum in datums]
    with (
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
        RolloutClient(service.url, linger_s=60, compress="zstd") as client,
    ):
        assert service.post(posts.body(*full)).status_code == 202
        steps = trainer.steps()
        first = batches(next(steps))
        client.submit(datums)
        assert client.flush(BOUND_S).delivered == 24
        sent = client.statistics()["bytes"]
        second = batches(next(steps))
    assert sent < sum(len(d["input_ids"]) for d in datums) * 14 + 24 * 20
    assert [[(i or "").removeprefix("full-") for i in ids] for ids, _ in first] == [
        ids for ids, _ in second
    ]
    assert [arrays for _, arrays in first] == [arrays for _, arrays in second]
    assert any(np.frombuffer(arrays["experts"], np.int16).any() for _, arrays in second)
    assert any(np.frombuffer(arrays["labels"], np.int64).max() > 0 for _, arrays in second)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(f"sampler rollout {SECRET}\nviewer viewer {SECRET[::-1]}\n")
    return path


@pytest.mark.slow
def test_what_the_service_refuses_is_told_about_the_callers_datum(
    serve: Any, tokens_file: Path, queue_dir: Path
) -> None:
    """One service with tokens and small limits, one client a case."""
    service = serve(
        **{
            "auth.tokens_file": tokens_file,
            "limits.max_body_bytes": "8KiB",
            "limits.max_datums_columnar": 5,
            "limits.max_errors": 3,
            "planner.batch_groups": 1000,
        }
    )
    random = np.random.default_rng(6)
    good = [drawn(random, number) for number in range(100)]

    def broken(number: int) -> dict[str, Any]:
        datum = drawn(random, number)
        datum["loss_fn_inputs"]["logprobs"][0] = np.nan
        return datum

    def client(**arguments: Any) -> RolloutClient:
        return RolloutClient(service.url, **({"token": SECRET, "linger_s": 60} | arguments))

    # The first post pins the run; posts shrink to five datums.
    with client() as small:
        small.submit(good[:12])
        assert small.flush(BOUND_S).delivered == 12
        assert small.statistics()["posts"] >= 3

    # The index of a finding is that of the caller's datum.
    with client() as refusing:
        refusing.submit(good[12])
        refusing.submit([good[13], broken(200)])
        refusing.submit(good[14])
        report = refusing.flush(BOUND_S)
        assert report.delivered == 2
        assert [n for n, _ in report.failed] == [1, 2]
        [finding] = report.failed[1][1].errors
        assert (finding.index, finding.field) == (2, "logprobs")
        assert report.failed[1][1].http_status == 422

    # Or the good ones are taken; more findings than are listed do not upset the books.
    with client(on_invalid="skip", compress="gzip") as skipping:
        skipping.submit([good[15], broken(201), good[16]])
        report = skipping.flush(BOUND_S)
        assert (report.delivered, [n for n, _ in report.failed]) == (2, [1])
        assert report.failed[0][1].errors[0].index == 1
        skipping.submit([good[17], *(broken(n) for n in range(202, 206))])
        report = skipping.flush(BOUND_S)
        assert (report.delivered, report.dropped, len(report.failed)) == (2, 1, 3)
        again = skipping.submit(good[17])  # its id is known
        report = skipping.flush(BOUND_S)
        assert (len(again), report.delivered, report.dropped) == (1, 1, 1)

    # A datum or a group that never fits says which limit.
    with client() as large:
        large.submit(drawn(random, 300, input_ids=np.arange(4000), loss_fn_inputs={}))
        large.submit([datum | {"group_id": "g"} for datum in good[20:27]])
        report = large.flush(BOUND_S)
        assert len(report.failed) == 8
        assert "limits.max_body_bytes = 8192" in str(report.failed[0][1])
        assert "limits.max_datums_columnar = 5" in str(report.failed[1][1])

    # Tokens: none, a wrong one, one of another role.
    for token, status in ((None, 401), (SECRET[:-1], 401), (SECRET[::-1], 403)):
        with client(token=token) as stranger:
            stranger.submit(good[30])
            [(_, error)] = stranger.flush(BOUND_S).failed
            assert error.http_status == status
            assert "token=" in str(error)
            assert stranger.statistics()["retries"] == 0

    # The same through asyncio, with the service going away meanwhile.
    async def awaited() -> None:
        url = service.url
        async with AsyncRolloutClient(url, token=SECRET, close_deadline_s=0.2) as waiting:
            await asyncio.gather(*(waiting.submit(datum) for datum in good[40:60]))
            assert (await waiting.flush(BOUND_S)).delivered == 20
            await waiting.submit([good[60], broken(206)])
            report = await waiting.flush(BOUND_S)
            assert [n for n, _ in report.failed] == [20, 21]
            assert service.stop(signal.SIGTERM) == 0
            await waiting.submit(good[61])
        assert (await waiting.close()).unknown == 1

    asyncio.run(awaited())
    assert SECRET not in service.stderr.read_text()
