"""When a step forms and of what: timeouts, lateness, lag, flush, exactness, shares, advantages, credits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.client import AsyncRolloutClient, RolloutClient, Trainer
from headrace.schemas.errors import AdmissionTimeout

JSON = {"Content-Type": "application/json"}


def tagged(posts, count=1, *, tokens=4, version=0, reward=None, advantage=0.5, **fields):
    made = []
    for _ in range(count):
        datum = posts.datum(tokens, policy_version=version, reward=reward, **fields)
        if advantage is None:
            del datum["loss_fn_inputs"]["advantages"]
        else:
            datum["loss_fn_inputs"]["advantages"] = posts.tensor(np.float32([advantage]))
        made.append(datum)
    return made


def post(service, posts, *datums, query=""):
    answer = service.client.post(
        f"/v1/datums{query}", content=posts.body(*datums), headers={"Content-Type": "application/msgpack"}
    )  # fmt: skip
    assert answer.status_code == 202, answer.text
    return answer.json()


def ask(service, path, **body):
    return service.client.post(path, json=body, headers=JSON)


@pytest.mark.parametrize("policy", ["drop", "ship"])
def test_a_straggler_does_not_wedge_the_queue(serve, posts, wait_until, policy):
    service = serve(
        **{"planner.batch_groups": 2, "groups.timeout_s": 0.5, "groups.on_timeout": policy}
    )
    post(service, posts, *tagged(posts, 3, group_id="short", group_size=4))
    post(service, posts, *tagged(posts, 2, group_id="a", group_size=2))
    assert "1 groups collect members" in wait_until(
        lambda: (s := service.status()["waits_for"]).startswith("Step 0 waits for 1 more") and s
    )
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        if policy == "drop":
            wait_until(lambda: service.books()["dropped"].get("timeout") == 3)
            post(service, posts, *tagged(posts, 2, group_id="b", group_size=2))
            step = next(trainer.steps())
            assert step.info.step_datums == 4
            assert service.status()["spool"]["posts_held"] == 2
        else:
            step = next(trainer.steps())
            infos = [batch.info for batch in step]
            assert (step.info.step_datums, step.info.step_groups) == (5, 2)
            assert step.info.step_loss_tokens == 20
            assert sorted(t for i in infos for t in i.group_loss_tokens.tolist()) == [
                8,
                8,
                12,
                12,
                12,
            ]
    late = post(service, posts, *tagged(posts, 1, group_id="short", group_size=4))
    assert (late["accepted"], late["dropped"]["late"]) == (0, 1)
    assert service.books()["dropped"]["late"] == 1


def test_a_group_is_closed_by_whoever_lost_a_rollout(serve, posts):
    service = serve()
    post(service, posts, *tagged(posts, 2, group_id="g", group_size=4))
    assert ask(service, "/v1/groups/close", group_id="g", size=1).status_code == 409
    assert ask(service, "/v1/groups/close", group_id="h", size=1).status_code == 404
    answer = ask(service, "/v1/groups/close", group_id="g", size=3)
    assert answer.json() == {"group_id": "g", "state": "collecting"}
    post(service, posts, *tagged(posts, 1, group_id="g", group_size=4))
    assert service.status()["groups"]["complete_datums"] == 3
    assert (
        post(service, posts, *tagged(posts, 1, group_id="g", group_size=4))["dropped"]["late"] == 1
    )
    # A second close finds the group ended.
    assert ask(service, "/v1/groups/close", group_id="g", size=1).json()["state"] == "complete"


def test_lag_at_the_door_and_at_consumption(serve, posts, wait_until):
    service = serve(**{"planner.batch_groups": 1, "eligibility.max_policy_lag": 1})
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        trainer.publish_policy_version(5)
        wait_until(lambda: service.status()["policy"]["version"] == 5)
        stale = tagged(posts, 2, group_id="s", group_size=3, version=3)
        answer = post(
            service, posts, *stale, *tagged(posts, 1, group_id="s", group_size=3, version=4)
        )
        assert (answer["accepted"], answer["dropped"]["stale"]) == (1, 2)
        steps = trainer.steps()
        # The stale members close their group short: it is trained with the fresh one.
        assert next(steps).info.step_datums == 1
        # Step 1 will be trained by version 6: version 4 is too old for it, version 5 is not.
        answer = post(service, posts, *tagged(posts, 1, version=4), *tagged(posts, 1, version=5))
        assert (answer["accepted"], answer["dropped"]["stale"]) == (1, 1)
        assert next(steps).info.step_datums == 1
        # One of these is planned at once; some versions on, the others are too old.
        for name in "uvw":
            post(service, posts, *tagged(posts, 1, group_id=name, group_size=1, version=5))
        trainer.publish_policy_version(9)
        wait_until(lambda: service.books()["dropped"].get("stale") == 5)
        books = service.books()
        assert (books["accepted"], books["buffered"]) == (8, 0)


def test_stale_posts_are_refused_where_that_is_asked(serve, posts, wait_until):
    service = serve(**{"eligibility.max_policy_lag": 0, "eligibility.on_stale": "refuse"})
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        trainer.publish_policy_version(2)
        wait_until(lambda: service.status()["policy"]["version"] == 2)
        answer = service.post(posts.body(*tagged(posts, 2, version=1)))
        assert (answer.status_code, answer.json()["code"]) == (409, "stale")
        mixed = post(service, posts, *tagged(posts, 1, version=1), *tagged(posts, 1, version=2))
        assert (mixed["accepted"], mixed["dropped"]["stale"]) == (1, 1)


def test_no_lag_at_all_waits_for_finish_and_publish(serve, posts, wait_until):
    service = serve(**{"planner.batch_groups": 1, "eligibility.max_policy_lag": 0})
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        trainer.publish_policy_version(0)
        wait_until(lambda: service.status()["policy"]["version"] == 0)
        post(service, posts, *tagged(posts, 1, version=0), *tagged(posts, 1, version=0))
        steps = trainer.steps()
        step = next(steps)
        wait_until(lambda: "until step 0 is finished" in service.status()["waits_for"])
        step.release()
        wait_until(lambda: "policy version newer than 0" in service.status()["waits_for"])
        trainer.publish_policy_version(1)
        # What was left of version 0 is now a version behind.
        wait_until(lambda: service.books()["dropped"].get("stale") == 1)
        post(service, posts, *tagged(posts, 1, version=1))
        assert next(steps).index == 1


def test_flush_and_patience_plan_what_there_is(serve, posts, wait_until):
    service = serve(**{"planner.batch_size": 100})
    post(service, posts, *tagged(posts, 3))
    assert service.client.post("/v1/flush", headers=JSON).status_code == 204
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        assert next(trainer.steps()).info.step_datums == 3
    patient = serve(
        **{"planner.batch_size": 100, "planner.partial_step_timeout_s": 0.2, "run.name": "patient"}
    )
    post(patient, posts, *tagged(posts, 2))
    with Trainer.attach("patient", queue_dir=patient.queue_dir) as trainer:
        assert next(trainer.steps()).info.step_datums == 2


def test_an_exact_batch_waits_for_groups_that_fit(serve, posts):
    service = serve(**{"planner.batch_size": 4, "planner.batch_exact": True})
    for name, size in (("a", 3), ("b", 2), ("c", 1)):
        post(service, posts, *tagged(posts, size, group_id=name, group_size=size))
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        step = next(trainer.steps())
        assert step.info.step_datums == 4
        assert sorted({int(g) for b in step for g in b.info.group_loss_tokens}) == [4, 12]


def test_sources_have_their_shares(serve, posts, wait_until):
    service = serve(
        **{"planner.batch_groups": 4, "planner.source_shares": '{"maths": 0.5, "code": 0.25}'}
    )
    for _ in range(5):
        post(service, posts, *tagged(posts, 1, source="maths"))
    post(service, posts, *tagged(posts, 1, source="chat"))
    wait_until(lambda: "source_shares" in service.status()["waits_for"])
    post(service, posts, *tagged(posts, 1, source="code"))
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        assert next(trainer.steps()).info.step_datums == 4
    assert service.books()["buffered"] == 3


def test_groups_that_teach_nothing_are_dropped_and_counted(serve, posts):
    service = serve(**{"planner.batch_groups": 1, "eligibility.drop_zero_advantage_groups": True})
    post(service, posts, *tagged(posts, 2, group_id="flat", group_size=2, advantage=0.0))
    post(service, posts, *tagged(posts, 2, group_id="good", group_size=2))
    assert service.books()["dropped"] == {"zero_advantage": 2}
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        (batch,) = next(trainer.steps())
        assert batch["advantages"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("layout", ["thd", "padded"])
def test_advantages_from_rewards(serve, posts, layout):
    service = serve(
        **{
            "planner.batch_groups": 2, "planner.advantage": "rloo", "planner.layout": layout,
            "eligibility.drop_zero_advantage_groups": True,
        }
    )  # fmt: skip
    answer = service.post(posts.body(*tagged(posts, 1)))
    assert answer.json()["errors"][0]["code"] == "advantages_computed"
    answer = service.post(posts.body(*tagged(posts, 1, advantage=None)))
    assert answer.json()["errors"][0]["code"] == "reward_missing"

    def member(group, reward, size):
        return tagged(posts, 1, advantage=None, reward=reward, group_id=group, group_size=size)

    # The members come one by one, as from different actors.
    for reward in (1.0, 0.0, 0.0):
        post(service, posts, *member("a", reward, 3))
    for reward in (0.5, 0.5):
        post(service, posts, *member("flat", reward, 2))
    for reward in (3.0, 1.0):
        post(service, posts, *member("b", reward, 2))
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        (batch,) = next(trainer.steps())
        assert batch["advantages"].tolist() == [1.0, -0.5, -0.5, 2.0, -2.0]
    assert service.books()["dropped"] == {"zero_advantage": 2}


def test_eval_data_is_kept_and_never_trained(serve, posts):
    service = serve(**{"planner.batch_size": 2, "spool.backlog_bytes": "64KiB"})
    post(service, posts, *tagged(posts, 2, split="eval"))
    post(service, posts, *tagged(posts, 2))
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        assert next(trainer.steps()).info.step_datums == 2
    status = service.status()
    assert status["books"]["buffered"] == 2
    assert status["backlog"]["datums"] == 0
    two = tagged(posts, 1, split="eval", group_id="g", group_size=2) + tagged(
        posts, 1, group_id="g", group_size=2
    )
    assert service.post(posts.body(*two)).json()["errors"][0]["code"] == "split_differs"
    assert service.post(posts.body(*tagged(posts, 2, tokens=400, split="eval"))).status_code == 429


def test_credits_bound_what_may_be_started(serve, posts, wait_until):
    service = serve(**{"planner.batch_groups": 2, "eligibility.max_policy_lag": 1})
    limits = service.client.get("/v1/limits").json()
    assert limits["admission"] == {"groups": 4}
    assert ask(service, "/v1/admission", groups=3).json() == {
        "granted": 3,
        "admission": {"groups": 1},
    }
    refused = ask(service, "/v1/admission", groups=2)
    assert (refused.status_code, refused.json()["code"]) == (429, "no_credits")
    # Opening a reserved group uses its reservation, not another credit.
    answer = post(service, posts, *tagged(posts, 1, group_id="a", group_size=2))
    assert answer["admission"] == {"groups": 1}
    for name in "bc":
        post(service, posts, *tagged(posts, 1, group_id=name, group_size=1))
    assert service.client.get("/v1/limits").json()["admission"] == {"groups": 1}
    post(service, posts, *tagged(posts, 1, group_id="a", group_size=2))
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        step = next(trainer.steps())
        assert service.client.get("/v1/limits").json()["admission"] == {"groups": 1}
        step.release()
        wait_until(lambda: service.client.get("/v1/limits").json()["admission"] == {"groups": 3})


def test_clients_are_admitted_or_wait(serve, posts):
    service = serve(**{"planner.batch_groups": 1, "eligibility.max_policy_lag": 1})
    with (
        RolloutClient(service.url) as client,
        Trainer.attach(queue_dir=service.queue_dir) as trainer,
    ):
        client.admit(2)
        with pytest.raises(AdmissionTimeout, match=r"for 1 groups within 0\.2 s.*max_policy_lag"):
            client.admit(timeout=0.2)
        with pytest.raises(ValueError, match="at least 1"):
            client.admit(0)
        post(service, posts, *tagged(posts, 1), *tagged(posts, 1))
        next(trainer.steps()).release()  # a finished step frees the credit of its group
        client.admit(timeout=10)

    async def again():
        async with AsyncRolloutClient(service.url) as client:
            with pytest.raises(AdmissionTimeout):
                await client.admit(timeout=0.1)

    asyncio.run(again())
    assert service.stop() == 0
    with (
        RolloutClient(service.url, deadline_s=0.1) as client,
        pytest.raises(AdmissionTimeout, match="is the service up"),
    ):
        client.admit()


def test_without_a_lag_everybody_is_admitted(serve):
    service = serve()
    with RolloutClient(service.url) as client:
        client.admit(1000, timeout=5)
    assert service.client.get("/v1/limits").json()["admission"] is None
