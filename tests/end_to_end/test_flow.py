"""One run from posts to commits, seen from the service's side."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace.client import RolloutClient, Trainer
from headrace.schemas import Datum
from headrace.schemas.errors import RecordTooLarge


def datums(count: int, group: str, tokens: int = 6) -> list[Datum]:
    torch.manual_seed(0)
    return [
        Datum(
            torch.randint(0, 99, (tokens,)),
            {"target_tokens": torch.randint(0, 99, (tokens,)), "advantages": torch.tensor([1.0])},
            group_id=group,
            group_size=count,
        )
        for _ in range(count)
    ]


def test_steps_are_planned_no_further_ahead_than_plan_ahead(serve, wait_until):
    service = serve(**{"planner.batch_groups": 1, "planner.plan_ahead": 1})
    with (
        RolloutClient(service.url) as client,
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
    ):
        for number in range(6):
            client.submit(datums(4, f"g{number}"), policy_version=0)
        assert client.flush(10).delivered == 24
        wait_until(lambda: service.status()["steps"]["delivered_step"] == 1)
        assert "Step 2 waits until step 0 is finished by rank 0" in wait_until(
            lambda: (s := service.status()["waits_for"]).startswith("Step 2") and s
        )
        assert service.books() | {"dropped": {}} == {
            "accepted": 24, "buffered": 16, "planned": 0, "delivered": 8, "committed": 0, "dropped": {},
        }  # fmt: skip
        steps = trainer.steps()
        first = next(steps)
        assert (first.index, len(first), first.info.step_datums) == (0, 1, 4)
        second = next(steps)  # finishes the first
        wait_until(lambda: service.status()["steps"]["delivered_step"] == 2)
        trainer.commit(second)
        wait_until(lambda: service.books()["committed"] == 8)
        assert service.status()["spool"]["posts_held"] <= 4


def test_a_full_retain_budget_stops_planning_and_status_says_so(serve, wait_until):
    service = serve(**{"planner.batch_groups": 1, "spool.retain_bytes": 300})
    with (
        RolloutClient(service.url) as client,
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
    ):
        for number in range(9):
            client.submit(datums(2, f"g{number}"), policy_version=0)
        client.flush(10)
        steps = trainer.steps()
        taken = [next(steps).index]

        def stopped():
            status = service.status()
            if "waits for a commit" not in status["waits_for"]:
                if status["steps"]["delivered_step"] > taken[-1]:
                    taken.append(next(steps).index)
                return None
            return status["waits_for"]

        sentence = wait_until(stopped)
        assert "spool.retain_bytes is 300" in sentence
        assert service.books()["buffered"] > 0
        trainer.commit(taken[-1])
        for index in range(taken[-1] + 1, 9):
            step = next(steps)
            assert step.index == index
            trainer.commit(step)
        wait_until(lambda: service.books()["committed"] == 18)


def test_a_published_version_reaches_pollers_and_posters(serve, posts):
    service = serve()
    answers = []
    poll = threading.Thread(
        target=lambda: answers.append(service.client.get("/v1/policy?newer_than=0&wait=20").json())
    )
    with (
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
        RolloutClient(service.url) as client,
    ):
        trainer.publish_policy_version(0, uri="weights/0")
        assert (client.wait_policy(timeout=10).version, client.policy.uri) == (0, "weights/0")
        poll.start()
        trainer.publish_policy_version(1, uri="weights/1", note="x")
        poll.join(20)
        assert answers == [{"version": 1, "uri": "weights/1"}]
        answer = service.post(posts.body(posts.datum())).json()
        assert (answer["policy_version"], answer["policy_uri"]) == (1, "weights/1")


def test_a_step_that_can_never_fit_is_refused_by_name(serve, wait_until):
    service = serve(
        **{"queue.bytes": "256KiB", "planner.batch_size": 64, "planner.microbatch_tokens": 512}
    )
    big = datums(64, "g", tokens=500)
    with (
        RolloutClient(service.url) as client,
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
    ):
        client.submit(big, policy_version=0)
        client.flush(20)
        with pytest.raises(RecordTooLarge, match=r"step 0 needs .*queue\.bytes.*trainer\.release"):
            next(trainer.steps())
    status = service.status()
    assert "queue.bytes" in status["waits_for"]
    assert status["books"]["buffered"] == 64
    assert service.client.get("/readyz").status_code == 503


def test_a_step_larger_than_the_ring_goes_microbatch_by_microbatch(serve, wait_until):
    service = serve(
        **{
            "queue.bytes": "256KiB", "planner.batch_size": 64, "planner.microbatch_tokens": 512,
            "trainer.release": "microbatch",
        }
    )  # fmt: skip
    with (
        RolloutClient(service.url) as client,
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
    ):
        client.submit(datums(64, "g", tokens=500), policy_version=0)
        step = next(trainer.steps())
        sums = [int(batch["input_ids"].sum()) for batch in step]
        assert len(sums) == step.count == 64
        assert sorted(sums) == sorted(int(d.input_ids.sum()) for d in datums(64, "g", tokens=500))
        client.flush(20)
