"""What the service's limits do to posts: asked for before the first, kept to, learnt from a 413."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from headrace.client import RolloutClient
from headrace.client.limits import Limits

BOUND_S = 20.0


def sizes(standin: Any) -> list[int]:
    return [len(got.post.datums) for got in standin.received]


def test_posts_shrink_to_what_the_service_says(standin: Any, datum: Any) -> None:
    standin.limits = {"max_body_bytes": 4000, "max_datums_columnar": 3, "max_keys": 16}
    with RolloutClient(standin.url, linger_s=60, inflight=1) as client:
        client.submit([datum(str(i)) for i in range(8)])
        assert client.flush(BOUND_S).delivered == 8
        client.submit([datum(str(i), tokens=200) for i in range(8, 14)])
        assert client.flush(BOUND_S).delivered == 6
    assert standin.taken == [str(i) for i in range(14)]
    assert max(sizes(standin)) <= 3
    assert max(len(got.body) for got in standin.received) <= 4000
    assert standin.limits_asked == 1


def test_what_exceeds_the_limits_alone_fails_for_good_and_is_not_sent(
    standin: Any, datum: Any
) -> None:
    standin.limits = {"max_body_bytes": 4000, "max_datums_columnar": 3}
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit([datum("a"), datum("big", tokens=2000), datum("b")])
        client.submit([datum(f"g{i}", group_id="g", group_size=4) for i in range(4)])
        report = client.flush(BOUND_S)
    assert (report.delivered, report.unknown) == (2, 0)
    assert standin.taken == ["a", "b"]
    assert [(n, e.http_status) for n, e in report.failed] == [(n, 413) for n in (1, 3, 4, 5, 6)]
    big, group = str(report.failed[0][1]), str(report.failed[1][1])
    assert "this datum alone" in big
    assert "over limits.max_body_bytes = 4000" in big
    assert "this group, which is never split, makes too large a post: 4 datums" in group
    assert "over limits.max_datums_columnar = 3" in group


@pytest.mark.parametrize("limits", [404, 500, {"max_body_bytes": "many"}])
def test_posts_go_where_limits_are_not_told(standin: Any, datum: Any, limits: Any) -> None:
    standin.limits = limits
    with RolloutClient(standin.url) as client:
        for i in range(3):
            client.submit(datum(str(i)))
            assert client.flush(BOUND_S).delivered == 1
    assert standin.limits_asked == 1  # no answer: not asked again within 5 s


def test_a_413_divides_the_post_and_is_remembered(standin: Any, datum: Any) -> None:
    """A proxy with a lower limit than the service's own."""
    most = 1500

    def judge(post: Any) -> Any:
        return (413, {"code": "proxy"}) if len(standin.received[-1].body) > most else None

    standin.judge = judge
    with RolloutClient(standin.url, linger_s=60, inflight=1) as client:
        client.submit([datum(str(i), tokens=30) for i in range(32)])
        assert client.flush(BOUND_S).delivered == 32
        refused = sum(len(got.body) > most for got in standin.received)
        assert 1 <= refused <= 6  # 32, 16, 8, ... datums, each size once
        client.submit([datum(str(i), tokens=30) for i in range(32, 64)])
        assert client.flush(BOUND_S).delivered == 32
        client.submit([datum("a", tokens=10), datum("big", tokens=400)])
        [(number, error)] = client.flush(BOUND_S).failed
    assert sum(len(got.body) > most for got in standin.received) <= refused + 2
    assert sorted(standin.taken, key=lambda name: (len(name), name)) == sorted(
        ["a", *map(str, range(64))], key=lambda name: (len(name), name)
    )
    assert (number, error.http_status) == (65, 413)
    assert "this datum alone makes too large a post" in str(error)


def test_too_many_datums_divide_the_post_as_well(standin: Any, datum: Any) -> None:
    def judge(post: Any) -> Any:
        finding = {"index": None, "field": "lengths", "code": "count", "got": "n", "want": "2"}
        return (422, {"code": "invalid", "errors": [finding]}) if len(post.datums) > 2 else None

    standin.limits, standin.judge = 404, judge
    with RolloutClient(standin.url, linger_s=60) as client:
        client.submit([datum(str(i)) for i in range(7)])
        assert client.flush(BOUND_S).delivered == 7
    assert standin.taken == [str(i) for i in range(7)]


def test_a_service_that_came_back_with_lower_limits_is_asked_again(
    standin: Any, datum: Any
) -> None:
    def judge(post: Any) -> Any:
        return (413, {"code": "body_too_large"}) if len(standin.received[-1].body) > 1000 else None

    with RolloutClient(standin.url, linger_s=60, inflight=1) as client:
        client.submit(datum("a"))
        assert client.flush(BOUND_S).delivered == 1
        standin.limits, standin.judge = {"max_body_bytes": 1000}, judge
        client.submit([datum(str(i), tokens=20) for i in range(40)])
        assert client.flush(BOUND_S).delivered == 40
    assert standin.limits_asked == 2
    assert sum(len(got.body) > 1000 for got in standin.received) == 1


@pytest.mark.parametrize("compress", ["zstd", "gzip"])
def test_compressed_bodies(standin: Any, datum: Any, compress: Any) -> None:
    standin.script.append(503)
    with RolloutClient(standin.url, compress=compress, linger_s=60) as client:
        client.submit(datum("a", tokens=3000))
        assert client.flush(BOUND_S).delivered == 1
        client.submit(datum("small"))
        assert client.flush(BOUND_S).delivered == 1
        sent = client.statistics()["bytes"]
    again, once, small = standin.received
    assert (once.encoding, small.encoding) == (compress, None)
    assert (once.key, once.body, once.nbytes) == (again.key, again.body, again.nbytes)
    assert once.nbytes < len(once.body) * 0.8
    assert sent == once.nbytes + small.nbytes
    assert msgpack.unpackb(once.body)["lengths"]["shape"] == [1]


def test_a_body_that_looks_like_a_bomb_goes_as_it_is(standin: Any, datum: Any) -> None:
    standin.limits = {"max_inflate_ratio": 20}
    zeros = {"x": np.zeros(20_000, np.float32)}
    with RolloutClient(standin.url, compress="gzip") as client:
        client.submit({"input_ids": np.zeros(20_000, np.int32), "loss_fn_inputs": zeros}, 0)
        assert client.flush(BOUND_S).delivered == 1
    assert standin.received[0].encoding is None


def test_limits_of_any_shape_are_read() -> None:
    assert Limits.read([1]) == Limits.read({"max_body_bytes": None}) == Limits()
    assert Limits.read({"max_body_bytes": -1, "max_datums_columnar": True}) == Limits()
    assert Limits.read({"max_body_bytes": 7, "keys": None}).max_body_bytes == 7
