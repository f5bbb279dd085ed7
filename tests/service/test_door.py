"""What the door refuses by value, what it leaves out, and the forms that lead to the same record."""

from __future__ import annotations

import gzip
import json
import threading

import msgpack
import numpy as np
import pytest
import torch
import zstandard

from headrace.client import Trainer

JSON = {"Content-Type": "application/json"}


def findings(answer, status=422):
    assert answer.status_code == status, answer.text
    return [(e["index"], e["field"], e["code"]) for e in answer.json()["errors"]]


def test_values_that_are_refused_and_never_repaired(serve, posts):
    """Per datum and columnar: the fault is named with its datum, and nothing of the post is kept."""
    service = serve(**{"limits.vocab_size": 1000})
    good = posts.datum(5)
    assert service.post(posts.body(good)).status_code == 202
    nan, inf = np.nan, np.inf
    zero = {"weights": np.float32([1, 1, 0, 1, 1])}
    cases = [
        ({"logprobs": np.float32([-1, nan, -1, -1, -1])}, ("logprobs", "not_finite")),
        ({"logprobs": np.float32([-1, -1, -1, -1, inf])}, ("logprobs", "not_finite")),
        ({"logprobs": np.float32([-inf, -1, -1, -1, -1])}, ("logprobs", "logprob_neg_inf")),
        ({"logprobs": np.float16([-inf, -1, -1, -1, -1])}, ("logprobs", "logprob_neg_inf")),
        ({"logprobs": np.float32([-1, -1, -1, 0.5, -1])}, ("logprobs", "logprob_positive")),
        ({"advantages": np.float32([nan])}, ("advantages", "not_finite")),
        ({"advantages": np.float64([1e300])}, ("advantages", "float32_range")),
        ({"weights": np.float32([1, nan, 1, 1, 1])}, ("weights", "not_finite")),
        ({"weights": np.float32([1, -1, 1, 1, 1])}, ("weights", "weight_negative")),
        ({"weights": np.int8([1, -1, 1, 1, 1])}, ("weights", "weight_negative")),
        ({"weights": np.float32([1, 1, 1, 1])}, ("weights", "length")),
        ({"input_ids": np.int32([1, -1, 3, 4, 5])}, ("input_ids", "id_range")),
        ({"input_ids": np.int64([1, 2, 3, 4, 1000])}, ("input_ids", "id_range")),
        ({"target_tokens": np.int32([1, 2, 3, 4, 1000])}, ("target_tokens", "id_range")),
        ({"logprobs": np.float32([-1, -1, nan, -1, -1]), **zero}, ("logprobs", "not_finite")),
    ]
    for changes, (field, code) in cases:
        assert findings(service.post(posts.body(good, altered(posts, good, changes)))) == [
            (1, field, code)
        ], changes
        whole = service.post(columnar(posts, [good, altered(posts, good, changes)]))
        if code != "length":
            assert findings(whole) == [(1, field, code)], changes
        else:
            assert whole.status_code == 422
    # Where the weight is 0 nothing is trained: the target may be -100 and the logprob anything finite.
    quiet = zero | {
        "logprobs": np.float32([-1, -1, 3, -1, -1]),
        "target_tokens": np.int32([1, 2, -100, 4, 5]),
    }
    for body in (
        posts.body(altered(posts, good, quiet)),
        columnar(posts, [altered(posts, good, quiet)]),
    ):
        assert service.post(body).status_code == 202
    assert service.books()["accepted"] == 3
    assert service.status()["spool"]["live_regions"] == 3
    bf16 = posts.tensor(np.uint16([1] * 5)) | {"dtype": "bfloat16"}
    inputs = good["loss_fn_inputs"] | {"logprobs": bf16}
    answer = service.post(posts.body(good | {"loss_fn_inputs": inputs}))
    assert findings(answer) == [(0, "logprobs", "dtype")]


def altered(posts, datum, changes):
    made = {key: posts.tensor(value) for key, value in changes.items()}
    ids = made.pop("input_ids", datum["input_ids"])
    return datum | {"input_ids": ids, "loss_fn_inputs": datum["loss_fn_inputs"] | made}


def arrays(tensors):
    return [np.frombuffer(t["data"], t["dtype"]) for t in tensors]


def columnar(posts, datums, **header):
    """The columnar body of per-datum wire datums."""
    columns = {"input_ids": arrays(d["input_ids"] for d in datums)}
    for key in datums[0]["loss_fn_inputs"]:
        columns[key] = arrays(d["loss_fn_inputs"][key] for d in datums)
    body = {
        "version": 1, "policy_version": 0,
        "lengths": posts.tensor(np.int32([len(ids) for ids in columns["input_ids"]])),
        "columns": {key: posts.tensor(np.concatenate(parts)) for key, parts in columns.items()},
    }  # fmt: skip
    return msgpack.packb(body | header)


def test_skip_takes_the_good_ones_and_closes_their_group_one_short(serve, posts):
    service = serve()
    group = {"group_id": "g", "group_size": 4}
    good = [posts.datum(5, **group) for _ in range(2)]
    faulty = altered(posts, posts.datum(5, **group), {"logprobs": np.float32([np.nan] * 5)})
    short = posts.datum(5, **group)
    short["input_ids"] = posts.tensor(np.int32([]))
    body = posts.body(faulty, good[0], short, good[1])
    assert findings(service.post(body))[0] == (2, "input_ids", "shape")
    answer = service.client.post(
        "/v1/datums?on_invalid=skip", content=body,
        headers={"Content-Type": "application/msgpack", "Idempotency-Key": "a"},
    )  # fmt: skip
    assert answer.status_code == 202, answer.text
    content = answer.json()
    assert (content["accepted"], content["dropped"]["invalid"]) == (2, 2)
    assert [(e["index"], e["code"]) for e in content["skipped"]] == [
        (2, "shape"),
        (0, "not_finite"),
    ]
    # Four were promised, two were skipped: the group is complete with two.
    groups = service.status()["groups"]
    assert (groups["collecting"], groups["complete_datums"]) == (0, 2)
    again = service.client.post(
        "/v1/datums?on_invalid=skip", content=body,
        headers={"Content-Type": "application/msgpack", "Idempotency-Key": "a"},
    )  # fmt: skip
    assert again.json() | {"duplicate": False, "backlog": 0} == content | {"backlog": 0}
    # A fault of the post as a whole cannot be skipped.
    missing = service.client.post(
        "/v1/datums?on_invalid=skip", content=posts.body(good[0], version=2),
        headers={"Content-Type": "application/msgpack"},
    )  # fmt: skip
    assert missing.status_code == 422
    wrong = service.client.post(
        "/v1/datums?on_invalid=maybe", content=body, headers={"Content-Type": "application/msgpack"}
    )
    assert findings(wrong) == [(None, "on_invalid", "query")]


def test_skip_where_no_datum_is_good_is_remembered(serve, posts):
    service = serve()
    assert service.post(posts.body(posts.datum(5))).status_code == 202
    faulty = altered(
        posts, posts.datum(5, group_id="g", group_size=2), {"weights": np.float32([-1] * 5)}
    )
    headers = {"Content-Type": "application/msgpack", "Idempotency-Key": "k"}
    for duplicate in (False, True):
        answer = service.client.post(
            "/v1/datums?on_invalid=skip", content=posts.body(faulty), headers=headers
        ).json()
        assert (answer["accepted"], answer["duplicate"]) == (0, duplicate)
    # The group ends with one member, by one skip and not by two.
    assert service.post(posts.body(posts.datum(5, group_id="g", group_size=2))).status_code == 202
    assert service.status()["groups"]["complete"] == 2


def test_a_datum_id_is_taken_once(serve, posts):
    service = serve()
    group = {"group_id": "g", "group_size": 3}
    first = service.post(
        posts.body(posts.datum(4, id="a", **group), posts.datum(4, id="b", **group))
    )
    assert first.json()["accepted"] == 2
    more = posts.body(*(posts.datum(4, id=name, **group) for name in "abcc"))
    answer = service.post(more).json()
    assert (answer["accepted"], answer["dropped"]["duplicate_id"]) == (1, 3)
    assert service.books() == {
        "accepted": 6, "buffered": 3, "planned": 0, "delivered": 0, "committed": 0, "dropped": {"duplicate_id": 3},
    }  # fmt: skip
    # A refused post gives its ids back.
    refused = service.post(posts.body(posts.datum(4, id="z"), posts.datum(0)))
    assert refused.status_code == 422
    assert service.post(posts.body(posts.datum(4, id="z"))).json()["accepted"] == 1


def test_two_tries_at_once_are_one_post(serve, posts):
    service = serve()
    body = posts.body(*(posts.datum(900) for _ in range(200)))
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(service.post(body, Idempotency_Key="k")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a.json()["duplicate"] for a in answers) == [False, True, True, True]
    assert service.books()["accepted"] == 200


def test_encodings_are_inflated_within_bounds(serve, posts):
    service = serve(**{"limits.max_inflate_ratio": 5})
    body = posts.body(*(posts.datum(300) for _ in range(8)))
    whole = zstandard.compress(body)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    for encoding, encoded in (("zstd", whole), ("zstd", unsized), ("gzip", gzip.compress(body))):
        assert service.post(encoded, Content_Encoding=encoding).json()["accepted"] == 8
    zeros = bytes(64 << 20)
    bombs = [
        ("zstd", zstandard.compress(zeros)),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(zeros)),
        ("gzip", gzip.compress(zeros)),
        ("gzip", gzip.compress(zeros[:20]) * 4000 + gzip.compress(zeros)),
    ]
    for encoding, bomb in bombs:
        answer = service.post(bomb, Content_Encoding=encoding)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    for encoding, bad in (("zstd", whole[:-9]), ("zstd", b"junk"), ("zstd", whole + b"junk"), ("gzip", b"junk"),
                          ("gzip", gzip.compress(body)[:-9]), ("gzip", b""), ("zstd", b"")):  # fmt: skip
        assert service.post(bad, Content_Encoding=encoding).status_code == 400, (encoding, bad[:8])
    assert service.post(body, Content_Encoding="br").status_code == 415
    assert service.post(body, Content_Encoding="identity").status_code == 202
    assert service.status()["bodies"]["in_flight_bytes"] == 0


def test_a_post_typed_by_hand(serve):
    service = serve()
    datum = {
        "input_ids": [1, 2, 3], "group_id": "g", "group_size": 1,
        "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [0, 1, 1.5], "advantages": 0.5},
    }  # fmt: skip
    post = {"version": 1, "policy_version": 3, "datums": [datum]}
    answer = service.client.post("/v1/datums", content=json.dumps(post), headers=JSON)
    assert (answer.status_code, answer.json().get("accepted")) == (202, 1), answer.text
    for changes, code in (
        ({"input_ids": [1, 2.5, 3]}, "schema"),
        ({"input_ids": []}, "shape"),
        ({"input_ids": [1, 2, 2**70]}, "dtype"),
        ({"input_ids": [[1], [2]]}, "schema"),
    ):
        body = json.dumps(
            post | {"datums": [datum | changes | {"group_id": None, "group_size": None}]}
        )
        answer = service.client.post("/v1/datums", content=body, headers=JSON)
        assert findings(answer)[0][2] == code, changes
    assert service.client.post("/v1/datums", content=b"{", headers=JSON).status_code == 400
    big = b" " * (1 << 20) + b"{}"
    assert service.client.post("/v1/datums", content=big, headers=JSON).status_code == 413


def test_slim_columns_give_the_same_batch(serve, posts, tmp_path):
    service = serve(**{"planner.batch_size": 6})
    random = np.random.default_rng(3)
    lengths = [4, 1, 7]
    ids = [random.integers(0, 900, n + 1, dtype=np.int32) for n in lengths]
    mask = [np.uint8(random.random(n) < 0.6) for n in lengths]
    logprobs = [-random.random(n).astype(np.float16) for n in lengths]
    advantages = np.float32([1, 2, 3])

    def body(slim):
        dtype = np.uint8 if slim else np.float32
        columns = {
            "input_ids": np.concatenate([x[:-1] for x in ids]),
            "weights": np.concatenate(mask).astype(dtype),
            "logprobs": np.concatenate(logprobs).astype(np.float16 if slim else np.float32),
            "advantages": advantages,
        }
        if not slim:
            columns["target_tokens"] = np.concatenate([x[1:] for x in ids])
        made = {"version": 1, "policy_version": 0, "lengths": posts.tensor(np.int32(lengths))}
        made["columns"] = {key: posts.tensor(value) for key, value in columns.items()}
        if slim:
            made |= {
                "targets": "implied",
                "last_targets": posts.tensor(np.int32([x[-1] for x in ids])),
            }
        return made

    full, slim = msgpack.packb(body(False)), msgpack.packb(body(True))
    assert service.post(full).status_code == 202
    assert service.post(slim).status_code == 202
    missing = body(True)
    del missing["last_targets"]
    needed = [i for i, m in enumerate(mask) if m[-1]]
    answer = findings(service.post(msgpack.packb(missing)))
    assert answer == [(i, "last_targets", "missing") for i in needed]
    both = body(False) | {"targets": "implied"}
    assert findings(service.post(msgpack.packb(both)))[0] == (None, "targets", "form")
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        (batch,) = next(trainer.steps())
        half = sum(lengths)
        for key in ("input_ids", "labels", "weights", "logprobs"):
            assert torch.equal(batch[key][0, :half], batch[key][0, half:]), key
        assert batch["advantages"].tolist() == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("layout", ["thd", "padded"])
def test_streams_travel_with_their_dtype(serve, posts, layout):
    streams = {
        "routed": {"dtype": "uint8", "shape": [2, 3], "rows": "T-1"},
        "top": {"dtype": "int16", "shape": [4]},
    }
    service = serve(
        **{"schema.streams": json.dumps(streams), "planner.batch_size": 3, "planner.layout": layout}
    )
    random = np.random.default_rng(5)
    lengths = [5, 3, 1]
    routed = [random.integers(1, 250, (n - 1, 2, 3)).astype(np.uint8) for n in lengths]
    top = [random.integers(-99, 99, (n, 4)).astype(np.int16) for n in lengths]
    datums = []
    for n, r, t in zip(lengths, routed, top, strict=True):
        datum = posts.datum(n)
        datum["loss_fn_inputs"] |= {"routed": posts.tensor(r), "top": posts.tensor(t)}
        datums.append(datum)
    assert service.post(posts.body(datums[0])).status_code == 202
    columns = {"input_ids": np.concatenate(arrays(d["input_ids"] for d in datums[1:]))}
    for key in ("target_tokens", "weights", "logprobs", "advantages"):
        columns[key] = np.concatenate(arrays(d["loss_fn_inputs"][key] for d in datums[1:]))
    columns |= {"routed": np.concatenate(routed[1:]), "top": np.concatenate(top[1:])}
    body = {
        "version": 1, "policy_version": 0, "lengths": posts.tensor(np.int32(lengths[1:])),
        "columns": {key: posts.tensor(value) for key, value in columns.items()},
    }  # fmt: skip
    answer = service.post(msgpack.packb(body))
    assert answer.status_code == 202, answer.text
    assert service.client.get("/v1/limits").json()["keys"]["routed"] == {
        "kind": "token", "dtype": "uint8", "shape": [2, 3],
    }  # fmt: skip
    with Trainer.attach(queue_dir=service.queue_dir) as trainer:
        (batch,) = next(trainer.steps())
        padded_row = np.zeros((1, 2, 3), np.uint8)
        whole = [np.concatenate([padded_row, r]) for r in routed]
        assert (batch["routed"].dtype, batch["top"].dtype) == (torch.uint8, torch.int16)
        if layout == "thd":
            assert np.array_equal(batch["routed"][0].numpy(), np.concatenate(whole))
            assert np.array_equal(batch["top"][0].numpy(), np.concatenate(top))
        else:
            for row, n in enumerate(lengths):
                assert np.array_equal(batch["routed"][row, :n].numpy(), whole[row])
                assert not batch["routed"][row, n:].any()
                assert np.array_equal(batch["top"][row, :n].numpy(), top[row])
    for changes in (
        {"routed": posts.tensor(routed[0].astype(np.int16))},
        {"routed": posts.tensor(routed[0][:-1])},
        {"top": posts.tensor(top[0][:, :3])},
    ):
        faulty = posts.datum(lengths[0])
        faulty["loss_fn_inputs"] |= {
            "routed": posts.tensor(routed[0]),
            "top": posts.tensor(top[0]),
        } | changes
        (key,) = changes
        assert findings(service.post(posts.body(faulty)))[0][:2] == (0, key)


def test_above_the_soft_limit_only_open_groups_get_in(serve, posts):
    service = serve(**{"spool.backlog_bytes": "64KiB", "planner.batch_groups": 1000})
    group = {"group_id": "open", "group_size": 3}
    assert service.post(posts.body(posts.datum(10, **group))).status_code == 202
    filler = posts.body(posts.datum(350))  # 5,604 bytes
    codes = [service.post(filler).status_code for _ in range(12)]
    assert codes.count(202) == 10
    refused = service.post(filler)
    assert (refused.status_code, "open group" in refused.text) == (429, True)
    assert service.post(posts.body(posts.datum(10, **group))).status_code == 202
    mixed = posts.body(posts.datum(10, **group), posts.datum(350))
    assert service.post(mixed).status_code == 429
    # Beyond the hard limit nothing gets in.
    assert service.post(posts.body(posts.datum(600, **group))).status_code == 429


def test_too_many_open_groups_are_a_429(serve, posts):
    service = serve(**{"groups.max_open": 2})
    opening = [posts.body(posts.datum(4, group_id=name, group_size=2)) for name in "abc"]
    assert [service.post(body).status_code for body in opening] == [202, 202, 429]
    assert service.post(opening[0]).status_code == 202
    assert service.post(opening[2]).status_code == 202
