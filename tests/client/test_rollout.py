"""RolloutClient against a real HTTP server that can refuse, stall and drop connections."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from headrace.client import Backlog, PolicyInfo, Report, RolloutClient
from headrace.client.answers import Answer
from headrace.client.sender import _wait_s
from headrace.schemas.errors import (
    ClientClosed,
    ClientError,
    DatumError,
    OutboxFull,
    PolicyTimeout,
    PostFailed,
    SettingsError,
)
from headrace.schemas.wire import WirePost

BOUND_S = 20.0  # of every wait on a condition; reached only by a failing test
DROP_BEFORE, DROP_AFTER = "drop-before", "drop-after"  # the post is taken; before or after it


def datum(name: str | None = None, tokens: int = 3, **more: Any) -> dict[str, Any]:
    ids = np.arange(tokens)
    losses = {"logprobs": np.zeros(tokens, np.float32), "advantages": np.float32([0.5])}
    base = {"input_ids": ids, "loss_fn_inputs": losses, "id": name, "policy_version": 0}
    return base | more


def dead_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# ---- what is sent


def test_what_the_service_sees(standin: Any) -> None:
    with RolloutClient(standin.url, actor="a-1", token="secret") as client:
        numbers = client.submit(
            {
                "input_ids": [1, 2, 3],
                "loss_fn_inputs": {"logprobs": [-0.5, 0.0, -1.5], "weights": [False, True, True]},
                "group_id": "g",
                "group_size": 1,
                "reward": 1,
            },
            policy_version=4,
        )
        report = client.flush(BOUND_S)
    assert (numbers, report) == (range(1), Report(delivered=1, failed=[], unknown=0, dropped=1))
    [got] = standin.received
    assert (got.token, got.post.actor) == ("Bearer secret", "a-1")
    [sent] = got.post.datums
    assert (sent.group_id, sent.group_size, sent.reward, sent.policy_version) == ("g", 1, 1.0, 4)
    assert sent.input_ids.tolist() == [1, 2, 3]
    assert sent.loss_fn_inputs["logprobs"].dtype == np.float32
    assert sent.loss_fn_inputs["weights"].tolist() == [False, True, True]


@pytest.mark.parametrize("float16", [False, True])
def test_posts_are_slim(standin: Any, float16: bool) -> None:
    losses = {"target_tokens": [2, 3, 9], "weights": [0.0, 1.0, 1.0], "logprobs": [0.0, -1, -2]}
    with RolloutClient(standin.url, float16_logprobs=float16) as client:
        client.submit({"input_ids": [1, 2, 3], "loss_fn_inputs": losses}, 0)
    body = msgpack.unpackb(standin.received[0].body)
    dtypes = {key: column["dtype"] for key, column in body["columns"].items()}
    assert body["targets"] == "implied"
    assert dtypes == {
        "input_ids": "int32", "weights": "uint8", "logprobs": "float16" if float16 else "float32",
    }  # fmt: skip
    [sent] = standin.received[0].post.datums
    assert sent.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 9]


def test_a_datums_own_version_goes_before_the_calls(standin: Any) -> None:
    with RolloutClient(standin.url) as client:
        client.submit([datum("a", policy_version=7), datum("b", policy_version=None)], 9)
    [got] = standin.received
    assert [d.policy_version for d in got.post.datums] == [7, 9]


def test_buffers_may_be_used_again_after_submit(standin: Any) -> None:
    standin.gate.clear()
    ids, logprobs = np.arange(4), np.ones(4, np.float32)
    with RolloutClient(standin.url) as client:
        client.submit({"input_ids": ids, "loss_fn_inputs": {"logprobs": logprobs}}, 0)
        ids[:], logprobs[:] = 9, 9
        standin.gate.set()
    [sent] = standin.received[0].post.datums
    assert sent.input_ids.tolist() == [0, 1, 2, 3]
    assert sent.loss_fn_inputs["logprobs"].tolist() == [1, 1, 1, 1]


def test_small_submits_share_a_post(standin: Any) -> None:
    with RolloutClient(standin.url, linger_s=60) as client:
        for i in range(20):
            client.submit(datum(str(i)))
        assert standin.received == []
        client.flush(BOUND_S)
    assert standin.taken == [str(i) for i in range(20)]
    assert len(standin.received) == 1


def test_a_post_goes_after_its_linger_without_a_flush(standin: Any) -> None:
    with RolloutClient(standin.url, linger_s=0.02) as client:
        client.submit(datum("a"))
        standin.wait(lambda: standin.taken == ["a"])


def test_a_full_post_goes_before_its_linger(standin: Any) -> None:
    with RolloutClient(standin.url, linger_s=60, post_bytes=2000) as client:
        client.submit([datum(str(i)) for i in range(8)])
        standin.wait(lambda: len(standin.taken) >= 6)


def test_a_group_in_one_list_is_never_split(standin: Any) -> None:
    with RolloutClient(standin.url, post_bytes=1500) as client:
        for g in range(6):
            group = [datum(f"{g}.{i}", group_id=f"g{g}", group_size=8) for i in range(8)]
            client.submit(group)
    assert len(standin.taken) == 48
    assert len(standin.received) == 6
    for got in standin.received:
        assert len({d.group_id for d in got.post.datums}) == 1
        assert len(got.post.datums) == 8


def test_differing_keys_go_in_posts_of_their_own(standin: Any) -> None:
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit(datum("a"))
        client.submit(datum("b", loss_fn_inputs={"logprobs": [0.0] * 3}))
        client.submit(datum("c"))
    assert sorted(standin.taken) == ["a", "b", "c"]
    assert len(standin.received) == 3


def test_default_actor_is_a_valid_name() -> None:
    with RolloutClient(dead_url()) as first, RolloutClient(dead_url()) as second:
        assert first.actor != second.actor
        assert f"-{os.getpid()}-" in first.actor
        assert len(first.actor) <= 63


# ---- refused at the caller


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (datum(input_ids=[]), "empty list"),
        (datum(input_ids=[[1, 2]]), "1-D"),
        (datum(input_ids=[1, 2**31]), "fits int32"),
        (datum(input_ids=[1.0, 2.0]), "want integers"),
        (datum(loss_fn_inputs={"logprobs": [0.0] * 2}), r"1-D \[3\]"),
        (datum(policy_version=None), "policy_version"),
        (datum(grup_id="g"), "unknown keys"),
        ({"loss_fn_inputs": {}}, "without input_ids"),
        (object(), "without input_ids"),
        (
            [
                datum(group_id="g"),
                datum(group_id="g", loss_fn_inputs={"logprobs": [0.0] * 3}),
            ],
            "same loss_fn_inputs keys",
        ),
    ],
)
def test_a_bad_datum_raises_in_submit_and_nothing_is_taken(
    standin: Any, bad: Any, message: str
) -> None:
    with RolloutClient(standin.url) as client:
        with pytest.raises(DatumError, match=message):
            client.submit([datum("good"), *(bad if isinstance(bad, list) else [bad])])
        assert client.statistics()["submitted"] == 0
        assert client.submit([]) == range(0)
    assert standin.received == []


@pytest.mark.parametrize(
    "settings",
    [
        {"on_full": "drop"},
        {"inflight": 0},
        {"post_bytes": 0},
        {"linger_s": float("nan")},
        {"actor": "Not A Name"},
        {"base_url": "host:8421"},
        {"base_url": "ftp://host"},
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(settings))):
        RolloutClient(**({"base_url": "http://localhost"} | settings))


# ---- tries


@pytest.mark.parametrize("first", [408, 429, 502, 503, 504, DROP_BEFORE, DROP_AFTER])
def test_another_try_has_the_same_key_and_bytes(standin: Any, first: Any) -> None:
    standin.script.append(first)
    with RolloutClient(standin.url) as client:
        client.submit([datum("a"), datum("b")])
        report = client.flush(BOUND_S)
        statistics = client.statistics()
    assert (report.delivered, report.failed, report.unknown) == (2, [], 0)
    assert standin.taken == ["a", "b"]
    once, again = standin.received
    assert (once.key, once.body) == (again.key, again.body)
    assert (statistics["posts"], statistics["retries"]) == (1, 1)
    assert statistics["bytes"] == len(once.body)


@pytest.mark.parametrize("status", [400, 401, 403, 409, 411, 415, 421, 500])
def test_a_refusal_is_not_tried_again(standin: Any, status: int) -> None:
    standin.script.append(status)
    with RolloutClient(standin.url) as client:
        client.submit([datum("a"), datum("b")])
        report = client.flush(BOUND_S)
        assert client.submit(datum("c")) == range(2, 3)
        assert client.flush(BOUND_S).delivered == 1
    assert [number for number, _ in report.failed] == [0, 1]
    error = report.failed[0][1]
    assert isinstance(error, PostFailed)
    assert error.http_status == status
    assert f"scripted {status}" in str(error)
    assert standin.taken == ["c"]


def test_the_deadline_ends_the_tries(standin: Any) -> None:
    standin.judge = lambda post: (503, {"code": "not_serving", "detail": "starting"})
    with RolloutClient(standin.url, deadline_s=0.3) as client:
        client.submit(datum("a"))
        [(number, error)] = client.flush(BOUND_S).failed
    assert (number, error.http_status) == (0, 503)
    assert "deadline_s=0.3" in str(error)
    assert "starting" in str(error)
    assert len(standin.received) >= 2
    assert len({got.key for got in standin.received}) == 1


def test_no_service_at_all() -> None:
    with RolloutClient(dead_url(), deadline_s=0.3) as client:
        client.submit([datum("a"), datum("b")])
        report = client.flush(BOUND_S)
    assert [number for number, _ in report.failed] == [0, 1]
    error = report.failed[0][1]
    assert error.http_status == 0
    assert "ConnectError" in str(error)
    assert "may have been taken" not in str(error)


def test_a_lost_answer_says_that_the_post_may_have_been_taken(standin: Any) -> None:
    standin.script.extend([DROP_AFTER] * 100)
    with RolloutClient(standin.url, deadline_s=0.3) as client:
        client.submit(datum("a"))
        [(_, error)] = client.flush(BOUND_S).failed
    assert standin.taken == ["a"]
    assert "may have been taken" in str(error)


def test_retry_after_is_kept_within_a_fifth() -> None:
    waits = [_wait_s(1, 10.0) for _ in range(500)]
    assert 8.0 <= min(waits) < 9.0
    assert 11.0 < max(waits) <= 12.0
    assert max(_wait_s(50, None) for _ in range(500)) <= 7.5
    assert min(_wait_s(1, 0.0) for _ in range(500)) >= 0.05


@pytest.mark.slow
def test_retry_after_is_waited_for(standin: Any) -> None:
    standin.script.append((429, {"Retry-After": "1"}))
    with RolloutClient(standin.url) as client:
        client.submit(datum("a"))
        standin.wait(lambda: len(standin.received) == 1)
        first = time.monotonic()
        standin.wait(lambda: len(standin.received) == 2)
        assert time.monotonic() - first > 0.7
        assert client.flush(BOUND_S).delivered == 1


def test_in_progress_is_tried_again_and_other_conflicts_are_not() -> None:
    def answer(status: int, code: str) -> Answer:
        return Answer.read(httpx.Response(status, json={"code": code}))

    assert answer(409, "in_progress").retried
    assert not answer(409, "conflict").retried


def test_an_answer_of_any_shape_is_read() -> None:
    for body in (b"", b"<html>", b"[1]", b'{"errors": 3}', b'{"errors": [1, {"index": "x"}]}'):
        assert Answer.read(httpx.Response(422, content=body)).status == 422
    odd = {"dropped": 3, "backlog": [], "admission": {"groups": "x"}, "policy_version": "7"}
    answer = Answer.read(httpx.Response(202, json=odd))
    assert (answer.taken, answer.dropped, answer.backlog, answer.policy) == (True, 0, None, None)


# ---- refusals by datum


def test_a_refused_submit_does_not_sink_those_it_shared_a_post_with(
    standin: Any, refuse: Any
) -> None:
    standin.judge = refuse("bad")
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit([datum("a"), datum("b")])
        client.submit([datum("c"), datum("bad")])
        client.submit(datum("d"))
        report = client.flush(BOUND_S)
    assert (report.delivered, report.unknown) == (3, 0)
    assert standin.taken == ["a", "b", "d"]
    beside, blamed = report.failed
    assert (beside[0], blamed[0]) == (2, 3)
    assert [e.index for e in blamed[1].errors] == [3]
    assert "datum 3, logprobs: length: got [2], want [3]" in str(blamed[1])
    assert "because of another datum" in str(beside[1])
    assert "datum 3" in str(beside[1])
    assert len({got.key for got in standin.received}) == len(standin.received) == 2


def test_one_submit_that_is_refused_is_not_sent_again(standin: Any, refuse: Any) -> None:
    standin.judge = refuse("bad")
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit([datum("a"), datum("bad")])
        report = client.flush(BOUND_S)
    assert len(standin.received) == 1
    assert [number for number, _ in report.failed] == [0, 1]


def test_many_refused_submits_cost_a_round_a_listing(standin: Any, refuse: Any) -> None:
    """The service lists at most so many findings; the others go on in one post."""
    bad = [str(i) for i in range(0, 60, 3)]
    judge = refuse(*bad)

    def first_eight(post: WirePost) -> Any:
        refusal = judge(post)
        return refusal and (422, refusal[1] | {"errors": refusal[1]["errors"][:8]})

    standin.judge = first_eight
    with RolloutClient(standin.url, linger_s=60) as client:
        for i in range(60):
            client.submit(datum(str(i)))
        report = client.flush(BOUND_S)
    assert [str(number) for number, _ in report.failed] == bad
    assert all(e.errors[0].index == number for number, e in report.failed)
    assert sorted(standin.taken, key=int) == [str(i) for i in range(60) if str(i) not in bad]
    assert len(standin.received) == 4  # 8, 8 and 4 refused, then all good


def test_a_refusal_without_a_place_sends_each_submit_by_itself(standin: Any) -> None:
    def judge(post: WirePost) -> Any:
        finding = {"index": None, "field": "x", "code": "keys_differ", "got": "a", "want": "b"}
        bad = any(d.id == "bad" for d in post.datums)
        return (422, {"code": "invalid", "errors": [finding]}) if bad else None

    standin.judge = judge
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit([datum("a"), datum("b")])
        client.submit(datum("bad"))
        client.submit(datum("c"))
        report = client.flush(BOUND_S)
    assert [n for n, _ in report.failed] == [2]
    assert standin.taken == ["a", "b", "c"]
    assert len(standin.received) == 4


def test_skipped_datums_fail_alone(standin: Any) -> None:
    def extra(post: WirePost) -> dict[str, Any]:
        names = [d.id for d in post.datums]
        findings = [
            {"index": i, "field": "logprobs", "code": code, "got": "nan", "want": "finite"}
            for i, name in enumerate(names)
            for code in ("not_finite", "too_high")
            if name == "bad"
        ]
        unnamed = names.count("worse")
        dropped = {"stale": 1, "late": 0, "invalid": names.count("bad") + unnamed}
        return {"skipped": findings, "dropped": dropped}

    standin.extra = extra
    with RolloutClient(standin.url, linger_s=60, on_invalid="skip") as client:
        client.submit([datum("a"), datum("bad"), datum("b")])
        report = client.flush(BOUND_S)
        assert (report.delivered, report.unknown, report.dropped) == (2, 0, 1)
        [(number, error)] = report.failed
        assert (number, error.http_status) == (1, 422)
        assert [e.code for e in error.errors] == ["not_finite", "too_high"]
        assert "datum 1, logprobs: not_finite: got nan, want finite" in str(error)
        # The service names so many and counts all: the books still balance.
        client.submit([datum("bad"), datum("worse"), datum("worse")])
        report = client.flush(BOUND_S)
        assert (report.delivered, report.dropped) == (2, 3)
        assert [number for number, _ in report.failed] == [3]
        statistics = client.statistics()
    assert (statistics["accepted"], statistics["failed"], statistics["buffered"]) == (4, 2, 0)
    assert [got.query for got in standin.received] == ["on_invalid=skip"] * 2


# ---- the bound, and order


def test_a_full_outbox_raises_where_asked(standin: Any) -> None:
    standin.gate.clear()
    with RolloutClient(standin.url, outbox_bytes=1000, on_full="raise") as client:
        client.submit([datum("a"), datum("b")])
        with pytest.raises(OutboxFull, match="outbox_bytes=1000"):
            client.submit([datum("c"), datum("d")])
        assert client.statistics()["submitted"] == 2
        standin.gate.set()
        assert client.flush(BOUND_S).delivered == 2
        client.submit([datum("e")])
    assert standin.taken == ["a", "b", "e"]


def test_a_full_outbox_blocks_until_there_is_room(standin: Any) -> None:
    standin.gate.clear()
    with RolloutClient(standin.url, outbox_bytes=1000, post_bytes=600) as client:
        thread = threading.Thread(target=lambda: client.submit([datum(str(i)) for i in range(30)]))
        thread.start()
        standin.wait(lambda: len(standin.received) == 2)
        assert thread.is_alive()
        assert client.statistics()["outbox"] <= 1000
        standin.gate.set()
        thread.join(BOUND_S)
        assert not thread.is_alive()
        assert client.flush(BOUND_S).delivered == 30
    assert len(standin.taken) == 30


def test_a_group_that_never_fits_raises(standin: Any) -> None:
    with (
        RolloutClient(standin.url, outbox_bytes=1000) as client,
        pytest.raises(OutboxFull, match="never fit outbox_bytes=1000"),
    ):
        client.submit([datum(group_id="g") for _ in range(9)])


def test_one_post_in_flight_keeps_the_order_through_retries(standin: Any) -> None:
    standin.script.extend([503, None, DROP_AFTER, None, DROP_BEFORE])
    names = [str(i) for i in range(12)]
    with RolloutClient(standin.url, inflight=1, post_bytes=1, linger_s=0) as client:
        for name in names:
            client.submit(datum(name))
        assert client.flush(BOUND_S).delivered == 12
    assert standin.taken == names


def test_a_stuck_post_is_overtaken_by_one_place(standin: Any) -> None:
    def judge(post: WirePost) -> tuple[int, dict[str, Any]] | None:
        return (503, {}) if post.datums[0].id == "0" and len(standin.received) < 4 else None

    standin.judge = judge
    with RolloutClient(standin.url, inflight=2, post_bytes=1, linger_s=0) as client:
        for i in range(10):
            client.submit(datum(str(i)))
        assert client.flush(BOUND_S).delivered == 10
    assert standin.taken.index("0") <= 1
    for place, name in enumerate(standin.taken):
        assert abs(place - int(name)) <= 1


# ---- policy, backlog


def test_the_last_answer_is_kept(standin: Any) -> None:
    standin.version = 3
    with RolloutClient(standin.url) as client:
        assert (client.policy, client.backlog, client.admission) == (None, None, None)
        client.submit(datum())
        client.flush(BOUND_S)
        assert client.policy == PolicyInfo(version=3, uri="weights/x")
        assert client.backlog == Backlog(datums=5, tokens=50, bytes=500, steps=1.5)
        assert client.admission is None


def test_wait_policy_returns_when_one_is_published(standin: Any) -> None:
    with RolloutClient(standin.url) as client:
        got: list[PolicyInfo] = []
        thread = threading.Thread(target=lambda: got.append(client.wait_policy(timeout=BOUND_S)))
        thread.start()
        standin.publish(0)
        thread.join(BOUND_S)
        assert got == [PolicyInfo(version=0, uri="weights/0")] == [client.policy]
        standin.publish(5)
        assert client.wait_policy(newer_than=0, timeout=BOUND_S).version == 5
        assert client.wait_policy(newer_than=4, timeout=BOUND_S).version == 5


def test_wait_policy_gives_up(standin: Any) -> None:
    standin.version = 2
    with RolloutClient(standin.url) as client:
        with pytest.raises(PolicyTimeout, match=r"newer than 2 within 0.1 s: .* has version 2"):
            client.wait_policy(newer_than=2, timeout=0.1)
        standin.script.append(503)
        assert client.wait_policy(newer_than=1, timeout=BOUND_S).version == 2
        standin.script.append(403)
        with pytest.raises(ClientError, match="HTTP 403"):
            client.wait_policy(newer_than=1, timeout=BOUND_S)


def test_a_long_poll_that_is_cut_short_is_not_repeated_at_once(standin: Any) -> None:
    polls: list[float] = []

    def at_once(newer_than: int, wait: float) -> dict[str, Any]:
        polls.append(wait)
        return {"version": 1, "uri": None}

    standin.policy = at_once
    with RolloutClient(standin.url) as client, pytest.raises(PolicyTimeout):
        client.wait_policy(newer_than=1, timeout=0.5)
    assert 2 <= len(polls) <= 7  # 0.1 s apart


def test_close_ends_a_wait_for_a_policy(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.policy.LONG_POLL_S", 0.1)
    errors: list[Exception] = []
    client = RolloutClient(standin.url)

    def wait() -> None:
        try:
            client.wait_policy()
        except ClientClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    standin.wait(lambda: standin.polls > 0)
    client.close()
    thread.join(BOUND_S)
    assert len(errors) == 1


def test_wait_policy_without_a_service() -> None:
    with (
        RolloutClient(dead_url(), deadline_s=0.1) as client,
        pytest.raises(PolicyTimeout, match="is the service up"),
    ):
        client.wait_policy()


# ---- the end


def test_the_end_of_the_run_ends_the_client(standin: Any) -> None:
    standin.judge = lambda post: (410, {"code": "run_finished", "detail": "the run has ended"})
    with RolloutClient(standin.url, inflight=1, post_bytes=1, linger_s=0) as client:
        client.submit(datum("a"))
        report = client.flush(BOUND_S)
        with pytest.raises(PostFailed, match="run has ended") as caught:
            client.submit(datum("b"))
        assert caught.value.http_status == 410
    assert [(n, e.http_status) for n, e in report.failed] == [(0, 410)]


def test_what_waits_behind_a_410_fails_with_it(standin: Any) -> None:
    standin.gate.clear()
    standin.judge = lambda post: (410, {"code": "run_finished"})
    with RolloutClient(standin.url, inflight=1, post_bytes=1, linger_s=0) as client:
        for i in range(5):
            client.submit(datum(str(i)))
        standin.gate.set()
        report = client.flush(BOUND_S)
    assert [(n, e.http_status) for n, e in report.failed] == [(n, 410) for n in range(5)]


def test_flush_reports_once_and_numbers_go_on(standin: Any) -> None:
    with RolloutClient(standin.url) as client:
        client.submit([datum("a"), datum("b")])
        assert client.flush(BOUND_S).delivered == 2
        assert client.flush(BOUND_S).delivered == 0
        assert client.submit(datum("c")) == range(2, 3)
        assert client.close().delivered == 1
        assert client.close().delivered == 1


def test_flush_that_runs_out_of_time_says_how_many_are_unknown(standin: Any) -> None:
    standin.gate.clear()
    with RolloutClient(standin.url) as client:
        client.submit([datum("a"), datum("b")])
        report = client.flush(0.05)
        assert (report.delivered, report.failed, report.unknown) == (0, [], 2)
        standin.gate.set()
        assert client.flush(BOUND_S).delivered == 2


def test_close_has_a_deadline_and_ends_the_tries(standin: Any) -> None:
    standin.judge = lambda post: (503, {})
    client = RolloutClient(standin.url, close_deadline_s=0.1)
    client.submit([datum("a"), datum("b")])
    report = client.close()
    assert (report.delivered, report.failed, report.unknown) == (0, [], 2)
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-sender")]
    for use in (
        lambda: client.submit(datum()),
        lambda: client.flush(),
        lambda: client.wait_policy(),
        lambda: client.__enter__(),
    ):
        with pytest.raises(ClientClosed):
            use()


def test_close_wakes_whoever_waits_for_room(standin: Any) -> None:
    standin.gate.clear()
    client = RolloutClient(standin.url, outbox_bytes=600, close_deadline_s=0.05)
    errors: list[Exception] = []

    def submit() -> None:
        try:
            client.submit([datum(str(i)) for i in range(5)])
        except ClientClosed as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    standin.wait(lambda: len(standin.received) >= 1)
    report = client.close()
    thread.join(BOUND_S)
    assert len(errors) == 1
    # None of the five is lost: two were posted, three never had room.
    assert [number for number, _ in report.failed] == [2, 3, 4]
    assert all("before the outbox had room" in str(error) for _, error in report.failed)
    assert (report.delivered, report.unknown) == (0, 2)


def test_leaving_the_block_by_an_exception_closes_too(standin: Any) -> None:
    client = RolloutClient(standin.url, linger_s=60)

    def sample() -> None:
        with client:
            client.submit(datum("a"))
            raise KeyError

    with pytest.raises(KeyError):
        sample()
    assert standin.taken == ["a"]
    with pytest.raises(ClientClosed):
        client.submit(datum())


def test_a_forked_child_gets_a_clear_error(standin: Any) -> None:
    with RolloutClient(standin.url) as client:
        client.submit(datum("a"))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = "nothing was raised"
            try:
                client.submit(datum("b"))
            except ClientClosed as error:
                said = str(error)
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        said = os.read(read, 1000).decode()
        os.close(read)
        os.waitpid(pid, 0)
        assert client.flush(BOUND_S).delivered == 1
    assert f"made in process {os.getpid()}" in said
    assert standin.taken == ["a"]


def test_an_unclosed_client_warns_at_exit() -> None:
    code = f"""
from headrace.client import RolloutClient
client = RolloutClient({dead_url()!r})
client.submit([{{"input_ids": [1]}}] * 3, policy_version=0)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "3 datums of RolloutClient" in done.stderr
    assert "never answered for" in done.stderr


# ---- everything at once


def chaos(standin: Any, refuse: Any, seed: int, count: int) -> None:
    """Whatever the service and the network do: each datum once, taken or failed, books balanced."""
    rng = random.Random(seed)
    doomed = {str(i) for i in range(count) if rng.random() < 0.03}
    standin.judge = refuse(*doomed)
    faults = [503, 429, 502, DROP_BEFORE, DROP_AFTER]
    standin.script.extend(rng.choice([*[None] * 10, *faults]) for _ in range(count // 3))
    client = RolloutClient(standin.url, post_bytes=2000, outbox_bytes=6000, linger_s=0.001)
    with client:
        sent = 0
        while sent < count:
            size = min(rng.randint(1, 6), count - sent)
            group = {"group_id": f"g{sent}", "group_size": size} if rng.random() < 0.5 else {}
            client.submit(
                [datum(str(sent + i), tokens=rng.randint(1, 20), **group) for i in range(size)]
            )
            sent += size
        report = client.flush(60)
        statistics = client.statistics()
    failed = [str(number) for number, _ in report.failed]
    assert report.unknown == 0
    assert sorted(standin.taken + failed, key=int) == [str(i) for i in range(count)]
    assert doomed <= set(failed)
    assert report.delivered == len(standin.taken) == statistics["accepted"]
    assert statistics["failed"] == len(failed)
    assert (statistics["buffered"], statistics["outbox"]) == (0, 0)


def test_chaos(standin: Any, refuse: Any) -> None:
    chaos(standin, refuse, seed=1, count=40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_chaos_long(standin: Any, refuse: Any, seed: int) -> None:
    chaos(standin, refuse, seed=seed, count=600)
