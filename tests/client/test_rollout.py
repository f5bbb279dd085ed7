"""RolloutClient against a real HTTP server that can refuse, stall and drop connections."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
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
from headrace.schemas.wire import WirePost, unpack

BOUND_S = 20.0  # of every wait on a condition; reached only by a failing test
DROP_BEFORE, DROP_AFTER = "drop-before", "drop-after"  # the post is taken; before or after it


@dataclass
class Received:
    key: str
    body: bytes
    post: WirePost
    token: str | None


@dataclass
class Standin:
    """The service's side of the contract, in one process with the test, on a real socket."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)  # datum ids in the order of their 202
    keys: dict[str, int] = field(default_factory=dict)
    script: deque[Any] = field(default_factory=deque)  # answers to come, then 202
    judge: Callable[[WirePost], tuple[int, dict[str, Any]] | None] = lambda post: None
    version: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)  # cleared: posts stall
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, reached: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(reached, BOUND_S)

    def publish(self, version: int) -> None:
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def policy(self, newer_than: int, wait: float) -> dict[str, Any]:
        def newer() -> bool:
            return self.version is not None and self.version > newer_than

        with self.changed:
            self.changed.wait_for(newer, wait)
            return {"version": self.version, "uri": f"weights/{self.version}"}

    def answer(self, got: Received) -> tuple[int, dict[str, Any], dict[str, str]] | str:
        with self.changed:
            self.received.append(got)
            step = self.script.popleft() if self.script else None
            self.changed.notify_all()
        self.gate.wait(BOUND_S)
        if step == DROP_BEFORE:
            return DROP_BEFORE
        if isinstance(step, int | tuple):
            status, headers = step if isinstance(step, tuple) else (step, {})
            return status, {"code": "scripted", "detail": f"scripted {status}"}, headers
        if refusal := self.judge(got.post):
            return (*refusal, {})
        with self.changed:
            count, duplicate = len(got.post.datums), got.key in self.keys
            if not duplicate:
                self.keys[got.key] = count
                self.taken += [d.id or "" for d in got.post.datums]
            self.changed.notify_all()
        body = {
            "accepted": count,
            "first_datum": 0,
            "duplicate": duplicate,
            "dropped": {"stale": 1},
        }
        body |= {"policy_version": self.version, "policy_uri": "weights/x", "admission": None}
        body |= {"backlog": {"datums": 5, "tokens": 50, "bytes": 500, "steps": 1.5}}
        return DROP_AFTER if step == DROP_AFTER else (202, body, {})


def handler_of(standin: Standin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/datums"
            assert self.headers["Content-Type"] == "application/msgpack"
            token = self.headers.get("Authorization")
            got = Received(self.headers["Idempotency-Key"], body, unpack(body), token)
            answer = standin.answer(got)
            if isinstance(answer, str):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.reply(*answer)

        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            with standin.changed:
                step = standin.script.popleft() if standin.script else None
            if step is not None:
                self.reply(step, {"code": "scripted"}, {})
                return
            body = standin.policy(int(asked["newer_than"][0]), float(asked["wait"][0]))
            self.reply(200, body, {})

        def reply(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was closed meanwhile


@pytest.fixture
def standin() -> Iterator[Standin]:
    standin = Standin()
    standin.gate.set()
    server = Server(("127.0.0.1", 0), handler_of(standin))
    standin.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield standin
    standin.gate.set()
    server.shutdown()
    thread.join(BOUND_S)
    server.server_close()


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


def test_what_the_service_sees(standin: Standin) -> None:
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


def test_a_datums_own_version_goes_before_the_calls(standin: Standin) -> None:
    with RolloutClient(standin.url) as client:
        client.submit([datum("a", policy_version=7), datum("b", policy_version=None)], 9)
    [got] = standin.received
    assert [d.policy_version for d in got.post.datums] == [7, 9]


def test_buffers_may_be_used_again_after_submit(standin: Standin) -> None:
    standin.gate.clear()
    ids, logprobs = np.arange(4), np.ones(4, np.float32)
    with RolloutClient(standin.url) as client:
        client.submit({"input_ids": ids, "loss_fn_inputs": {"logprobs": logprobs}}, 0)
        ids[:], logprobs[:] = 9, 9
        standin.gate.set()
    [sent] = standin.received[0].post.datums
    assert sent.input_ids.tolist() == [0, 1, 2, 3]
    assert sent.loss_fn_inputs["logprobs"].tolist() == [1, 1, 1, 1]


def test_small_submits_share_a_post(standin: Standin) -> None:
    with RolloutClient(standin.url, linger_s=60) as client:
        for i in range(20):
            client.submit(datum(str(i)))
        assert standin.received == []
        client.flush(BOUND_S)
    assert standin.taken == [str(i) for i in range(20)]
    assert len(standin.received) == 1


def test_a_post_goes_after_its_linger_without_a_flush(standin: Standin) -> None:
    with RolloutClient(standin.url, linger_s=0.02) as client:
        client.submit(datum("a"))
        standin.wait(lambda: standin.taken == ["a"])


def test_a_full_post_goes_before_its_linger(standin: Standin) -> None:
    with RolloutClient(standin.url, linger_s=60, post_bytes=2000) as client:
        client.submit([datum(str(i)) for i in range(8)])
        standin.wait(lambda: len(standin.taken) >= 6)


def test_a_group_in_one_list_is_never_split(standin: Standin) -> None:
    with RolloutClient(standin.url, post_bytes=1500) as client:
        for g in range(6):
            group = [datum(f"{g}.{i}", group_id=f"g{g}", group_size=8) for i in range(8)]
            client.submit(group)
    assert len(standin.taken) == 48
    assert len(standin.received) == 6
    for got in standin.received:
        assert len({d.group_id for d in got.post.datums}) == 1
        assert len(got.post.datums) == 8


def test_differing_keys_go_in_posts_of_their_own(standin: Standin) -> None:
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
    standin: Standin, bad: Any, message: str
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
def test_another_try_has_the_same_key_and_bytes(standin: Standin, first: Any) -> None:
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


@pytest.mark.parametrize("status", [400, 401, 403, 409, 411, 413, 415, 500])
def test_a_refusal_is_not_tried_again(standin: Standin, status: int) -> None:
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


def test_the_deadline_ends_the_tries(standin: Standin) -> None:
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


def test_a_lost_answer_says_that_the_post_may_have_been_taken(standin: Standin) -> None:
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
def test_retry_after_is_waited_for(standin: Standin) -> None:
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


def refuse(*names: str) -> Callable[[WirePost], tuple[int, dict[str, Any]] | None]:
    def judge(post: WirePost) -> tuple[int, dict[str, Any]] | None:
        errors = [
            {"index": i, "field": "logprobs", "code": "length", "got": "[2]", "want": "[3]"}
            for i, d in enumerate(post.datums)
            if d.id in names
        ]
        return (422, {"code": "invalid", "errors": errors}) if errors else None

    return judge


def test_a_refused_submit_does_not_sink_those_it_shared_a_post_with(standin: Standin) -> None:
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
    assert len({got.key for got in standin.received}) == len(standin.received) == 4


def test_one_submit_that_is_refused_is_not_sent_again(standin: Standin) -> None:
    standin.judge = refuse("bad")
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit([datum("a"), datum("bad")])
        report = client.flush(BOUND_S)
    assert len(standin.received) == 1
    assert [number for number, _ in report.failed] == [0, 1]


# ---- the bound, and order


def test_a_full_outbox_raises_where_asked(standin: Standin) -> None:
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


def test_a_full_outbox_blocks_until_there_is_room(standin: Standin) -> None:
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


def test_a_group_that_never_fits_raises(standin: Standin) -> None:
    with (
        RolloutClient(standin.url, outbox_bytes=1000) as client,
        pytest.raises(OutboxFull, match="never fit outbox_bytes=1000"),
    ):
        client.submit([datum(group_id="g") for _ in range(9)])


def test_one_post_in_flight_keeps_the_order_through_retries(standin: Standin) -> None:
    standin.script.extend([503, None, DROP_AFTER, None, 429, None, DROP_BEFORE])
    names = [str(i) for i in range(12)]
    with RolloutClient(standin.url, inflight=1, post_bytes=1, linger_s=0) as client:
        for name in names:
            client.submit(datum(name))
        assert client.flush(BOUND_S).delivered == 12
    assert standin.taken == names


def test_a_stuck_post_is_overtaken_by_one_place(standin: Standin) -> None:
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


def test_the_last_answer_is_kept(standin: Standin) -> None:
    standin.version = 3
    with RolloutClient(standin.url) as client:
        assert (client.policy, client.backlog, client.admission) == (None, None, None)
        client.submit(datum())
        client.flush(BOUND_S)
        assert client.policy == PolicyInfo(version=3, uri="weights/x")
        assert client.backlog == Backlog(datums=5, tokens=50, bytes=500, steps=1.5)
        assert client.admission is None


def test_wait_policy_returns_when_one_is_published(standin: Standin) -> None:
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


def test_wait_policy_gives_up(standin: Standin) -> None:
    standin.version = 2
    with RolloutClient(standin.url) as client:
        with pytest.raises(PolicyTimeout, match=r"newer than 2 within 0.1 s: .* has version 2"):
            client.wait_policy(newer_than=2, timeout=0.1)
        standin.script.append(503)
        assert client.wait_policy(newer_than=1, timeout=BOUND_S).version == 2
        standin.script.append(403)
        with pytest.raises(ClientError, match="HTTP 403"):
            client.wait_policy(newer_than=1, timeout=BOUND_S)


def test_wait_policy_without_a_service() -> None:
    with (
        RolloutClient(dead_url(), deadline_s=0.1) as client,
        pytest.raises(PolicyTimeout, match="is the service up"),
    ):
        client.wait_policy()


# ---- the end


def test_the_end_of_the_run_ends_the_client(standin: Standin) -> None:
    standin.judge = lambda post: (410, {"code": "run_finished", "detail": "the run has ended"})
    with RolloutClient(standin.url, inflight=1, post_bytes=1, linger_s=0) as client:
        client.submit(datum("a"))
        report = client.flush(BOUND_S)
        with pytest.raises(PostFailed, match="run has ended") as caught:
            client.submit(datum("b"))
        assert caught.value.http_status == 410
    assert [(n, e.http_status) for n, e in report.failed] == [(0, 410)]


def test_what_waits_behind_a_410_fails_with_it(standin: Standin) -> None:
    standin.gate.clear()
    standin.judge = lambda post: (410, {"code": "run_finished"})
    with RolloutClient(standin.url, inflight=1, post_bytes=1, linger_s=0) as client:
        for i in range(5):
            client.submit(datum(str(i)))
        standin.gate.set()
        report = client.flush(BOUND_S)
    assert [(n, e.http_status) for n, e in report.failed] == [(n, 410) for n in range(5)]


def test_flush_reports_once_and_numbers_go_on(standin: Standin) -> None:
    with RolloutClient(standin.url) as client:
        client.submit([datum("a"), datum("b")])
        assert client.flush(BOUND_S).delivered == 2
        assert client.flush(BOUND_S).delivered == 0
        assert client.submit(datum("c")) == range(2, 3)
        assert client.close().delivered == 1
        assert client.close().delivered == 1


def test_flush_that_runs_out_of_time_says_how_many_are_unknown(standin: Standin) -> None:
    standin.gate.clear()
    with RolloutClient(standin.url) as client:
        client.submit([datum("a"), datum("b")])
        report = client.flush(0.05)
        assert (report.delivered, report.failed, report.unknown) == (0, [], 2)
        standin.gate.set()
        assert client.flush(BOUND_S).delivered == 2


def test_close_has_a_deadline_and_ends_the_tries(standin: Standin) -> None:
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


def test_close_wakes_whoever_waits_for_room(standin: Standin) -> None:
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
    client.close()
    thread.join(BOUND_S)
    assert len(errors) == 1


def test_leaving_the_block_by_an_exception_closes_too(standin: Standin) -> None:
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


def test_a_forked_child_gets_a_clear_error(standin: Standin) -> None:
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


def chaos(standin: Standin, seed: int, count: int) -> None:
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


def test_chaos(standin: Standin) -> None:
    chaos(standin, seed=1, count=40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_chaos_long(standin: Standin, seed: int) -> None:
    chaos(standin, seed=seed, count=600)
