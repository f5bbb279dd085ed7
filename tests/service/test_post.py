"""POST /v1/datums against a real service: what is taken, what is refused, and what a refusal says."""

from __future__ import annotations

import socket
from typing import Any

import msgpack
import numpy as np

MSGPACK = {"Content-Type": "application/msgpack"}


def refused(answer: Any, status: int = 422) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["detail"]
    return problem


def test_plain_packb_is_accepted_and_answered_with_every_key(serve, posts):
    service = serve()
    answer = service.post(posts.body(posts.datum(5), posts.datum(1), actor="rollout-3"))
    assert answer.status_code == 202, answer.text
    content = answer.json()
    assert content.pop("backlog").keys() == {"datums", "tokens", "bytes", "steps"}
    assert content == {
        "accepted": 2,
        "first_datum": 1 << 16,
        "dropped": {"stale": 0, "late": 0, "duplicate_id": 0},
        "duplicate": False,
        "policy_version": None,
        "policy_uri": None,
        "admission": None,
    }
    assert service.books()["accepted"] == 2
    keys = service.client.get("/v1/limits").json()["keys"]
    assert keys == {
        "advantages": {"kind": "sample", "dtype": "float32"},
        "logprobs": {"kind": "token", "dtype": "float32"},
        "target_tokens": {"kind": "token", "dtype": "int64"},
        "weights": {"kind": "token", "dtype": "float32"},
    }  # fmt: skip


def test_every_fault_of_contents_is_a_422_that_names_it(serve, posts):
    """One service, one good post that pins the run, then a body a fault; nothing of them is kept."""
    service = serve(**{"limits.max_sequence_tokens": 8})
    assert service.post(posts.body(posts.datum(5))).status_code == 202
    good = posts.datum(5)
    inputs = good["loss_fn_inputs"]
    tensor = posts.tensor

    def with_inputs(**changes: Any) -> dict[str, Any]:
        merged = {k: v for k, v in (inputs | changes).items() if v is not None}
        return good | {"loss_fn_inputs": merged}

    wrong_bytes = tensor(np.ones(5, np.float32)) | {"shape": [6]}
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("unknown dtype", good | {"input_ids": tensor(np.ones(5, np.int32)) | {"dtype": "bf16"}}, "input_ids", "dtype"),
        ("float ids", good | {"input_ids": tensor(np.ones(5, np.float32))}, "input_ids", "dtype"),
        ("bytes and shape", with_inputs(weights=wrong_bytes), "weights", "byte_length"),
        ("neither T nor 1", with_inputs(logprobs=tensor(np.ones(4, np.float32))), "logprobs", "length"),
        ("two dimensions", with_inputs(logprobs=tensor(np.ones((5, 1), np.float32))), "logprobs", "length"),
        ("one target", with_inputs(target_tokens=tensor(np.ones(1, np.int32))), "target_tokens", "length"),
        ("empty", good | {"input_ids": tensor(np.ones(0, np.int32))}, "input_ids", "shape"),
        ("too long", posts.datum(9), "input_ids", "too_long"),
        ("beyond int32", good | {"input_ids": tensor(np.int64([1, 2, 2**31, 4, 5]))}, "input_ids", "id_range"),
        ("target beyond", with_inputs(target_tokens=tensor(np.uint64([1, 2, 3, 4, 2**40]))), "target_tokens", "id_range"),
        ("missing key", with_inputs(logprobs=None), "loss_fn_inputs", "keys_differ"),
        ("other key", with_inputs(values=tensor(np.ones(5, np.float32))), "loss_fn_inputs", "keys_differ"),
        ("other kind", with_inputs(advantages=tensor(np.ones(5, np.float32))), "advantages", "kind_differs"),
        ("reserved key", with_inputs(labels=tensor(np.ones(5, np.int32))), "labels", "reserved"),
        ("no targets", with_inputs(target_tokens=None), "loss_fn_inputs", "keys_differ"),
        ("size without id", good | {"group_size": 3}, "group_id", "group_id_missing"),
        ("unknown split", good | {"split": "test"}, "split", "split"),
        ("unknown field", good | {"colour": "blue"}, "", "schema"),
        ("group size 0", good | {"group_id": "g", "group_size": 0}, "group_size", "schema"),
    ]  # fmt: skip
    for name, datum, field, code in cases:
        # The fault stands second, so that an index of 0 would be wrong.
        finding = refused(service.post(posts.body(good, datum)))["errors"][0]
        assert (finding["code"], name) == (code, name), finding
        assert field in finding["field"], (name, finding)
        assert (finding["index"], bool(finding["got"]), bool(finding["want"])) == (1, True, True)
    assert service.books()["accepted"] == 1
    assert service.status()["spool"]["live_regions"] == 1
    assert service.post(posts.body(good)).status_code == 202


def test_group_rules(serve, posts):
    service = serve()
    pair = {"group_id": "q1", "group_size": 2}
    assert service.post(posts.body(posts.datum(**pair))).status_code == 202
    other_size = refused(service.post(posts.body(posts.datum(group_id="q1", group_size=3))))
    assert other_size["errors"][0]["code"] == "group_size_differs"
    both = posts.body(posts.datum(**pair), posts.datum(**pair))
    full = refused(service.post(both))
    assert full["errors"][0] | {"got": ""} == {
        "index": 1, "field": "group_id", "code": "group_full", "got": "", "want": "2 members",
    }  # fmt: skip
    assert service.post(posts.body(posts.datum(**pair))).status_code == 202
    assert refused(service.post(posts.body(posts.datum(**pair))))["errors"][0]["index"] == 0
    # Without a size a group is complete when its post ends.
    unsized = posts.datum(group_id="q2")
    assert service.post(posts.body(unsized, posts.datum(group_id="q2"))).status_code == 202
    assert refused(service.post(posts.body(unsized)))["errors"][0]["code"] == "group_full"
    assert service.status()["groups"]["complete"] == 2


def test_versions_are_asked_for(serve, posts):
    service = serve()
    body = msgpack.packb({"version": 1, "datums": [posts.datum(), posts.datum(policy_version=3)]})
    problem = refused(service.post(body))
    assert [(e["index"], e["code"]) for e in problem["errors"]] == [(0, "policy_version_missing")]
    newer = refused(service.post(posts.body(posts.datum(), version=2)))
    assert newer["errors"][0]["field"] == "version"


def test_columnar_form(serve, posts):
    service = serve()
    lengths = np.int32([3, 1, 4])
    columns = {
        "input_ids": posts.tensor(np.arange(8, dtype=np.int64)),
        "target_tokens": posts.tensor(np.arange(8, dtype=np.int16)),
        "advantages": posts.tensor(np.float32([1, 2, 3])),
    }
    body = {
        "version": 1, "policy_version": 4, "lengths": posts.tensor(lengths), "columns": columns,
        "group_ids": ["a", "a", None], "group_sizes": [2, 2, None],
        "rewards": posts.tensor(np.float32([1, np.nan, 0])), "ids": ["x", None, "z"],
    }  # fmt: skip
    answer = service.post(msgpack.packb(body))
    assert answer.status_code == 202, answer.text
    assert answer.json()["accepted"] == 3
    short = columns | {"advantages": posts.tensor(np.float32([1, 2]))}
    problem = refused(service.post(msgpack.packb(body | {"columns": short, "group_ids": None})))
    assert problem["errors"][0]["field"] == "advantages"
    beyond = columns | {"input_ids": posts.tensor(np.int64([0, 1, 2, 3, 4, 2**33, 6, 7]))}
    problem = refused(service.post(msgpack.packb(body | {"columns": beyond, "group_ids": None})))
    assert (problem["errors"][0]["index"], problem["errors"][0]["code"]) == (2, "id_range")
    wrong = refused(service.post(msgpack.packb(body | {"sources": ["a"]})))
    assert wrong["errors"][0]["field"] == "sources"


def test_what_is_not_a_post(serve, posts):
    service = serve()
    good = posts.body(posts.datum())
    for body in (b"", b"\xc1", good[:-3], good + b"\x00", b"\x91" * 5000):
        answer = service.post(body)
        assert answer.status_code in (400, 422), answer.text
    assert refused(service.post(good[:-3]), 400)["code"] == "malformed"
    assert refused(service.post(good + b"\x00"), 400)["code"] == "malformed"
    for form in ({}, {"datums": [], "columns": {}}):
        body = msgpack.packb({"version": 1, "policy_version": 0} | form)
        assert refused(service.post(body))["errors"][0]["code"] == "form"
    json = service.client.post("/v1/datums", content=b"{}", headers={"Content-Type": "text/plain"})
    assert refused(json, 415)["code"] == "unsupported_media"
    assert refused(service.post(good, Content_Encoding="br"), 415)
    assert refused(service.post(good, Idempotency_Key="k" * 129), 400)
    too_large = service.post(b"x" * (4 * 2**20 + 1))
    assert refused(too_large, 413)["code"] == "body_too_large"
    assert too_large.headers["connection"] == "close"
    assert refused(service.client.get("/v1/datums"), 405)["code"] == "method_not_allowed"
    assert refused(service.client.get("/nowhere"), 404)["code"] == "not_found"
    query = refused(service.client.get("/v1/policy?wait=61"))
    assert (query["errors"][0]["field"], query["errors"][0]["got"]) == ("wait", "'61'")
    assert service.post(good).status_code == 202


def test_no_content_length_is_411(serve, posts):
    service = serve()
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(
            b"POST /v1/datums HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        answer = raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 411")
    assert b"length_missing" in answer or b"connection: close" in answer.lower()


def test_a_backlog_over_its_budget_is_429_until_the_trainer_takes(serve, posts):
    service = serve(**{"spool.backlog_bytes": "64KiB", "planner.batch_groups": 1000})
    body = posts.body(*(posts.datum(200) for _ in range(10)))
    answers = [service.post(body) for _ in range(6)]
    codes = [answer.status_code for answer in answers]
    assert codes[0] == 202
    assert codes[-1] == 429
    last = answers[-1]
    assert refused(last, 429)["code"] == "backlog_full"
    assert 1 <= int(last.headers["retry-after"]) <= 30
    assert service.books()["accepted"] == 10 * codes.count(202)
    assert service.client.get("/readyz").status_code == 204


def test_a_key_names_one_body(serve, posts):
    service = serve()
    body, other = posts.body(posts.datum()), posts.body(posts.datum())
    first = service.post(body, Idempotency_Key="post-1")
    again = service.post(body, Idempotency_Key="post-1")
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json()["duplicate"] is True
    assert again.json()["first_datum"] == first.json()["first_datum"]
    assert refused(service.post(other, Idempotency_Key="post-1"), 409)["code"] == "conflict"
    # A refused post is not remembered: its key is free for a good one.
    assert service.post(b"\xc1", Idempotency_Key="post-2").status_code == 400
    assert service.post(other, Idempotency_Key="post-2").json()["duplicate"] is False
    assert service.books()["accepted"] == 2


def test_the_first_accepted_post_pins_the_run_and_a_refused_one_does_not(serve, posts):
    service = serve()
    tensor = posts.tensor
    lone = {"target_tokens": tensor(np.int32([1])), "values": tensor(np.float32([1]))}
    bare = {"input_ids": tensor(np.int32([1])), "loss_fn_inputs": {"values": lone["values"]}}
    assert refused(service.post(posts.body(bare)))["errors"][0]["code"] == "targets_missing"
    refused_first = {"input_ids": tensor(np.int64([2**40])), "loss_fn_inputs": lone}
    assert service.post(posts.body(refused_first)).status_code == 422
    assert service.client.get("/v1/limits").json()["keys"] is None
    # A datum of one token does not say whether `advantages` is per token or per sample.
    assert service.post(posts.body(posts.datum(1))).status_code == 202
    assert service.client.get("/v1/limits").json()["keys"]["advantages"]["kind"] == "either"
    assert service.post(posts.body(posts.datum(4))).status_code == 202
    assert service.client.get("/v1/limits").json()["keys"]["advantages"]["kind"] == "sample"
