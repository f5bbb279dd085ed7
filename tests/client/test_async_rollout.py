"""AsyncRolloutClient: the same promises as RolloutClient, without ever holding up the loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from headrace.client import AsyncRolloutClient, PolicyInfo
from headrace.schemas.errors import (
    ClientClosed,
    ClientError,
    DatumError,
    OutboxFull,
    PolicyTimeout,
    PostFailed,
)

BOUND_S = 20.0


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(BOUND_S):
            return await main

    return asyncio.run(bounded())


async def until(reached: Callable[[], Any]) -> None:
    while not reached():
        await asyncio.sleep(0.002)


def test_submit_flush_close(standin: Any, datum: Any) -> None:
    async def main() -> None:
        async with AsyncRolloutClient(standin.url, actor="a-1", token="s") as client:
            group = [datum(f"g{i}", group_id="g", group_size=2) for i in range(2)]
            assert await client.submit(datum("a")) == range(1)
            assert await client.submit(group, policy_version=3) == range(1, 3)
            report = await client.flush(BOUND_S)
            assert (report.delivered, report.failed, report.unknown) == (3, [], 0)
            assert client.backlog is not None
            await client.submit(datum("b"))
        report = await client.close()
        assert (report.delivered, report.unknown) == (1, 0)
        assert client.statistics()["accepted"] == 4
        for use in (
            client.submit(datum()),
            client.flush(),
            client.wait_policy(),
            client.__aenter__(),
        ):
            with pytest.raises(ClientClosed):
                await use

    run(main())
    assert sorted(standin.taken) == ["a", "b", "g0", "g1"]
    assert {got.token for got in standin.received} == {"Bearer s"}
    assert {got.post.actor for got in standin.received} == {"a-1"}


def test_a_full_outbox_is_awaited_and_the_loop_goes_on(standin: Any, datum: Any) -> None:
    standin.gate.clear()

    async def main() -> None:
        async with AsyncRolloutClient(standin.url, outbox_bytes=1000, post_bytes=600) as client:
            names = [str(i) for i in range(30)]
            tasks = [asyncio.create_task(client.submit(datum(name))) for name in names]
            await until(lambda: len(standin.received) == 2)
            turns = 0
            while turns < 50:  # the loop turns though nothing moves
                await asyncio.sleep(0.001)
                turns += 1
            assert 0 < sum(task.done() for task in tasks) < 10
            assert client.statistics()["outbox"] <= 1000
            standin.gate.set()
            await asyncio.gather(*tasks)
            assert (await client.flush(BOUND_S)).delivered == 30
            # First come, first served.
            assert [task.result() for task in tasks] == [range(i, i + 1) for i in range(30)]

    run(main())
    assert sorted(standin.taken, key=int) == [str(i) for i in range(30)]


def test_a_long_list_is_copied_in_turns(standin: Any, datum: Any) -> None:
    async def main() -> None:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with AsyncRolloutClient(standin.url) as client:
            task = asyncio.create_task(turn())
            await client.submit([datum(str(i)) for i in range(160)])
            assert turns >= 10
            task.cancel()

    run(main())
    assert len(standin.taken) == 160


def test_a_full_outbox_raises_where_asked(standin: Any, datum: Any) -> None:
    standin.gate.clear()

    async def main() -> None:
        async with AsyncRolloutClient(standin.url, outbox_bytes=1000, on_full="raise") as client:
            await client.submit([datum("a"), datum("b")])
            with pytest.raises(OutboxFull, match="outbox_bytes=1000"):
                await client.submit([datum("c"), datum("d")])
            with pytest.raises(DatumError, match="unknown keys"):
                await client.submit(datum(grup="g"))
            standin.gate.set()
            assert (await client.flush(BOUND_S)).delivered == 2

    run(main())
    assert standin.taken == ["a", "b"]


def test_a_cancelled_submit_is_in_the_report(standin: Any, datum: Any) -> None:
    standin.gate.clear()

    async def main() -> None:
        async with AsyncRolloutClient(standin.url, outbox_bytes=600) as client:
            first = asyncio.create_task(client.submit([datum(str(i)) for i in range(4)]))
            second = asyncio.create_task(client.submit(datum("later")))
            await until(lambda: standin.received)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            standin.gate.set()
            assert await second == range(4, 5)
            report = await client.flush(BOUND_S)
            assert (report.delivered, [n for n, _ in report.failed]) == (3, [2, 3])

    run(main())
    assert standin.taken == ["0", "1", "later"]


def test_findings_name_the_callers_datums(standin: Any, datum: Any, refuse: Any) -> None:
    standin.judge = refuse("bad")

    async def main() -> None:
        async with AsyncRolloutClient(standin.url, linger_s=60) as client:
            await client.submit(datum("a"))
            await client.submit([datum("b"), datum("bad")])
            report = await client.flush(BOUND_S)
            assert report.delivered == 1
            assert [n for n, _ in report.failed] == [1, 2]
            assert report.failed[1][1].errors[0].index == 2

    run(main())


def test_wait_policy(standin: Any) -> None:
    async def main() -> None:
        async with AsyncRolloutClient(standin.url) as client:
            waits = [asyncio.create_task(client.wait_policy(n)) for n in (-1, -1, 3)]
            await asyncio.sleep(0)
            standin.publish(0)
            assert await waits[0] == await waits[1] == PolicyInfo(version=0, uri="weights/0")
            assert not waits[2].done()
            standin.publish(5)
            assert (await waits[2]).version == 5 == client.policy.version
            with pytest.raises(PolicyTimeout, match=r"newer than 5 within 0.05 s: .* version 5"):
                await client.wait_policy(5, timeout=0.05)
            standin.script.append(503)
            assert (await client.wait_policy(4)).version == 5
            standin.script.append(403)
            with pytest.raises(ClientError, match="HTTP 403"):
                await client.wait_policy(4)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await client.wait_policy(5)

    run(main())


def test_close_ends_every_wait(standin: Any, datum: Any) -> None:
    standin.gate.clear()

    async def main() -> None:
        client = AsyncRolloutClient(standin.url, outbox_bytes=600, close_deadline_s=0.05)
        submits = [
            asyncio.create_task(client.submit([datum(), datum(), datum()])) for _ in range(2)
        ]
        polls = [asyncio.create_task(client.wait_policy()) for _ in range(2)]
        await until(lambda: standin.received)
        report = await client.close()
        for task in (*submits, *polls):
            with pytest.raises(ClientClosed):
                await task
        assert (report.delivered, report.unknown, [n for n, _ in report.failed]) == (0, 2, [2])
        assert await client.close() is report

    run(main())


def test_a_cancelled_close_has_stopped_the_client(standin: Any, datum: Any) -> None:
    standin.gate.clear()

    async def main() -> None:
        client = AsyncRolloutClient(standin.url)
        await client.submit(datum())
        await until(lambda: standin.received)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await client.close()
        standin.gate.set()
        with pytest.raises(ClientClosed):
            await client.submit(datum())
        assert (await client.close()).unknown == 1

    run(main())


def test_the_end_of_the_run(standin: Any, datum: Any) -> None:
    standin.judge = lambda post: (410, {"code": "run_finished", "detail": "the run has ended"})

    async def main() -> None:
        async with AsyncRolloutClient(standin.url) as client:
            await client.submit(datum("a"))
            [(number, error)] = (await client.flush(BOUND_S)).failed
            assert (number, error.http_status) == (0, 410)
            with pytest.raises(PostFailed, match="run has ended"):
                await client.submit(datum("b"))

    run(main())


def test_large_posts_are_packed_and_sent_beside_the_loop(standin: Any) -> None:
    tokens = np.arange(100_000, dtype=np.int32)
    large = {"input_ids": tokens, "loss_fn_inputs": {"logprobs": tokens.astype(np.float32)}}

    async def main() -> int:
        turns = 0

        async def watch() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with AsyncRolloutClient(standin.url, post_bytes=1, compress="gzip") as client:
            task = asyncio.create_task(watch())
            for _ in range(4):
                await client.submit(large, policy_version=0)
            before = turns
            assert (await client.flush(BOUND_S)).delivered == 4
            task.cancel()
        return turns - before

    # Each post takes its thread tens of milliseconds; on the loop it would be one turn.
    assert run(main()) > 50


def chaos(standin: Any, datum: Any, refuse: Any, seed: int, count: int) -> None:
    """Tasks that come, wait and are cancelled, a service that fails: each number has one end."""
    rng = random.Random(seed)
    standin.judge = refuse(*(str(i) for i in range(count) if rng.random() < 0.03))
    faults = [503, 429, 502, "drop-before", "drop-after"]
    standin.script.extend(rng.choice([*[None] * 10, *faults]) for _ in range(count // 3))

    async def submit(
        client: AsyncRolloutClient, first: int, size: int, limit: float | None
    ) -> None:
        names = [str(first + i) for i in range(size)]
        try:
            async with asyncio.timeout(limit):
                await client.submit([datum(name) for name in names])
        except TimeoutError:
            pass

    async def main() -> None:
        async with AsyncRolloutClient(
            standin.url, post_bytes=2000, outbox_bytes=4000, linger_s=0.001
        ) as client:
            tasks, sent = [], 0
            while sent < count:
                size = min(rng.randint(1, 6), count - sent)
                limit = rng.choice([None, None, None, rng.random() / 50])
                tasks.append(asyncio.create_task(submit(client, sent, size, limit)))
                sent += size
            await asyncio.gather(*tasks)
            report = await client.flush()
            statistics = client.statistics()
        assert report.unknown == 0
        assert len(standin.taken) == len(set(standin.taken)) == report.delivered
        numbers = [number for number, _ in report.failed]
        assert len(numbers) == len(set(numbers)) == statistics["failed"]
        assert statistics["submitted"] == report.delivered + len(numbers)
        assert (statistics["buffered"], statistics["outbox"]) == (0, 0)

    asyncio.run(main())


def test_chaos(standin: Any, datum: Any, refuse: Any) -> None:
    chaos(standin, datum, refuse, seed=3, count=60)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_chaos_long(standin: Any, datum: Any, refuse: Any, seed: int) -> None:
    chaos(standin, datum, refuse, seed=seed, count=600)
