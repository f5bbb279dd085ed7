"""Bodies that nobody should send: each gets a 4xx, none makes the process grow, and a good post still gets in.

How long each takes is measured by `headrace bench hostile`, not here.
"""

from __future__ import annotations

import copy

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.bench.hostile import corpus

MIB = 1 << 20
GROWTH = 64 * MIB


def tensor(values):
    array = np.asarray(values)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def rss(service, field="VmRSS"):
    with open(f"/proc/{service.process.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def reset_peak(service):
    with open(f"/proc/{service.process.pid}/clear_refs", "w") as file:
        file.write("5")


@pytest.mark.slow
def test_the_corpus(serve, posts):
    service = serve(**{"limits.max_body_bytes": "32MiB", "spool.segment_bytes": "32MiB"})
    good = posts.body(posts.datum(5))
    assert service.post(b"\x90" * (24 * MIB)).status_code == 422  # warms the body pool
    assert service.post(good).status_code == 202
    for number, (name, body) in enumerate(corpus(), 2):
        reset_peak(service)
        before = rss(service)
        answer = service.post(body)
        assert answer.status_code in (400, 413, 422), (name, answer.status_code)
        assert answer.headers["content-type"] == "application/problem+json", name
        assert len(answer.content) < 64 << 10, name
        grown = rss(service, "VmHWM") - before
        assert grown < GROWTH, (name, grown)
        assert service.post(good).status_code == 202, name
        assert service.books()["accepted"] == number
    assert "Traceback" not in service.stderr.read_text()


def paths(value, path=()):
    """Every place in a body."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from paths(value[index], (*path, index))


def replaced(value, path, new):
    if not path:
        return new
    made = copy.copy(value)
    made[path[0]] = replaced(value[path[0]], path[1:], new)
    return made


def without(value, path):
    made = copy.deepcopy(value)
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return made


ids = np.arange(7, dtype=np.int32)
COLUMNS = {
    "input_ids": tensor(ids), "target_tokens": tensor(ids), "weights": tensor(np.ones(7, np.float32)),
    "logprobs": tensor(-np.ones(7, np.float32)), "advantages": tensor(np.float32([1, 2])),
}  # fmt: skip
DATUM = {
    "input_ids": tensor(ids),
    "loss_fn_inputs": {k: v for k, v in COLUMNS.items() if k not in ("input_ids", "advantages")}
    | {"advantages": tensor(np.float32([1]))},
    "id": None, "rollout_id": "r", "group_id": None, "group_size": None, "policy_version": 3, "reward": 0.5,
    "source": "s", "split": "train",
}  # fmt: skip
HEADER = {"version": 1, "policy_version": 0, "actor": "a-1"}
BODIES = [
    HEADER | {"datums": [DATUM, DATUM]},
    HEADER
    | {
        "lengths": tensor(np.int32([3, 4])), "columns": COLUMNS, "ids": [None, None], "rollout_ids": ["r", None],
        "group_ids": [None, None], "group_sizes": [None, None], "sources": ["s", "s"], "splits": [None, "train"],
        "policy_versions": [1, None], "rewards": tensor(np.float32([1, np.nan])),
    },
]  # fmt: skip
PLACES = [(body, path) for body in BODIES for path in paths(body)]
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=200),
    st.binary(max_size=64),
    st.lists(st.integers(0, 300), max_size=6),
    st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
    st.sampled_from(
        [
            "int32",
            "float64",
            "bool",
            "uint64",
            "implied",
            [7],
            [2],
            [],
            [7, 1],
            tensor([1.5]),
            tensor(ids),
        ]
    ),
)


def mutate(service, posts, draw):
    body, path = draw(st.sampled_from(PLACES))
    made = (
        replaced(body, path, draw(odd)) if not path or draw(st.booleans()) else without(body, path)
    )
    packed = msgpack.packb(made)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(packed) - 1))
        packed = packed[:at] + draw(st.binary(max_size=3)) + packed[at + draw(st.integers(0, 3)) :]
    answer = service.post(packed)
    assert answer.status_code in (202, 400, 422), answer.text
    assert service.books()["accepted"] >= 2
    if answer.status_code == 422:
        for finding in answer.json()["errors"]:
            assert finding.keys() == {"index", "field", "code", "got", "want"}
            assert finding["index"] in (None, 0, 1)


def drive(serve, posts, examples):
    """Every field mutated: 202, 400 or 422, and never anything else; then a good post of each form."""
    service = serve()
    for body in BODIES:
        assert service.post(msgpack.packb(body)).status_code == 202

    @given(st.data())
    @settings(
        max_examples=examples, deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip
    def run(data):
        mutate(service, posts, data.draw)

    run()
    before = service.books()["accepted"]
    for body in BODIES:
        assert service.post(msgpack.packb(body)).status_code == 202
    assert service.books()["accepted"] == before + 4
    assert "Traceback" not in service.stderr.read_text()


@pytest.mark.slow
def test_every_field_mutated(serve, posts):
    drive(serve, posts, 150)


@pytest.mark.soak
def test_every_field_mutated_long(serve, posts):
    drive(serve, posts, 10_000)
