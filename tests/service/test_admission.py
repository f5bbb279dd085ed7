"""Budgets, shares and Retry-After; whose group it is; a second try while the first one runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.schemas.errors import BacklogFull, InProgress, SettingsError
from headrace.service import door
from headrace.service.admission import Admission, Budgets
from headrace.service.door import Head
from headrace.service.pipeline import Pipeline
from headrace.service.settings import load_settings

SMALL = [
    "--queue.bytes=1MiB", "--planner.microbatch_tokens=4096", "--spool.segment_bytes=1MiB",
    "--limits.max_body_bytes=1MiB",
]  # fmt: skip


def admission(held, *, share=1.0, clock=lambda: 0.0, held_by=lambda token: 0):
    budgets = Budgets(backlog_bytes=1000, retain_bytes=1000)
    return Admission(budgets, share=share, held=lambda: held[0], held_by=held_by, clock=clock)


def test_hard_limit_soft_limit_and_share():
    held = [850]
    gate = admission(held, share=0.5, held_by={"a": 450, "b": 0}.__getitem__)
    gate.before_body(150)
    with pytest.raises(BacklogFull, match=r"spool\.backlog_bytes is 1000"):
        gate.before_body(151)
    gate.of_post(50, token="b", opens_group=True)
    with pytest.raises(BacklogFull, match="open group"):
        gate.of_post(51, token="b", opens_group=True)
    gate.of_post(51, token="b", opens_group=False)
    with pytest.raises(BacklogFull, match=r"auth\.per_token_share"):
        gate.of_post(51, token="a", opens_group=False)


def test_retry_after_is_what_the_drain_rate_says():
    now, held = [0.0], [1000]
    gate = admission(held, clock=lambda: now[0])

    def wait(nbytes):
        with pytest.raises(BacklogFull) as refused:
            gate.before_body(nbytes)
        return refused.value.retry_after

    assert wait(1) == 5  # nothing has drained: nobody knows
    for at in range(11):
        now[0] = float(at)
        gate.drained(10)
    # 110 bytes in 10 s: 11 a second.
    assert [wait(n) for n in (1, 11, 12, 110, 10_000)] == [1, 1, 2, 10, 30]
    now[0] = 100.0
    assert wait(1) == 5


def test_budgets_that_do_not_fit_the_tmpfs_are_refused(queue_dir):
    settings = load_settings([*SMALL, "--spool.backlog_bytes=100TiB"])
    with pytest.raises(SettingsError, match=r"spool\.backlog_bytes .*--shm-size"):
        Budgets.of(settings, queue_dir)


def test_a_second_try_waits_for_the_first_and_then_gives_up(queue_dir, posts, monkeypatch):
    monkeypatch.setattr(door, "IN_PROGRESS_S", 0.05)
    settings = load_settings([*SMALL, f"--queue.dir={queue_dir}"])
    data = posts.body(posts.datum(5))

    async def run():
        pipeline = Pipeline.open(settings)
        go = threading.Event()
        # The spool's thread is busy: what it has been given is under way and not recorded.
        pipeline._spool._submit(lambda: go.wait(10))

        def post():
            body = pipeline.bodies.lease(len(data))
            body.buffer[:] = data
            return pipeline.accept(body, Head(nbytes=len(data), key="k"))

        first = asyncio.ensure_future(post())
        while not pipeline._door._in_flight:
            await asyncio.sleep(0.001)
        with pytest.raises(InProgress):
            await post()
        go.set()
        answer = await first
        again = await post()
        await pipeline.close()
        return answer, again

    answer, again = asyncio.run(run())
    assert (answer["duplicate"], again["duplicate"]) == (False, True)
    assert answer["first_datum"] == again["first_datum"]


def test_a_group_belongs_to_the_token_that_opened_it(serve, posts, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a rollout secret-of-actor-a-0001\nb rollout secret-of-actor-b-0002\n")
    tokens.chmod(0o600)
    headers = {name: f"Bearer secret-of-actor-{name}-000{n}" for n, name in enumerate("ab", 1)}
    group = {"group_id": "g", "group_size": 3}
    for shared, status in (("false", 422), ("true", 202)):
        service = serve(
            **{"auth.tokens_file": tokens, "groups.shared": shared, "run.name": f"shared-{shared}"}
        )
        body = posts.body(posts.datum(4, **group))
        assert service.post(body).status_code == 401
        assert service.post(body, Authorization=headers["a"]).status_code == 202
        answer = service.post(body, Authorization=headers["b"])
        assert answer.status_code == status, answer.text
        if status == 422:
            assert answer.json()["errors"][0]["code"] == "group_foreign"
        # A key is the token's own: another token's post under it is another post.
        keyed = [
            service.post(posts.body(posts.datum(4)), Authorization=headers[n], Idempotency_Key="k")
            for n in "ab"
        ]
        assert [a.json()["duplicate"] for a in keyed] == [False, False]
