"""Slim bodies deliver the numbers of full ones, byte for byte, and say so when they cannot."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.schemas.errors import DatumError, MalformedBody
from headrace.schemas.slim import implied_targets
from headrace.schemas.wire import WireDatum, pack_columnar, unpack

WEIGHTS = ["float16", "float32", "float64", "bool", "uint8", "int8", "int64", "uint64"]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def tensor(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def shifted(tokens: list[int], **losses: Any) -> WireDatum:
    targets = {"target_tokens": ids(*tokens[1:])}
    return WireDatum(input_ids=ids(*tokens[:-1]), loss_fn_inputs=targets | losses)


def columns_of(datums: list[WireDatum], **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The body as plain msgpack, and the dtype of each column."""
    body = msgpack.unpackb(pack_columnar(datums, slim=True, **options))
    return body, {key: column["dtype"] for key, column in body["columns"].items()}


def delivered(key: str, array: np.ndarray) -> bytes:
    """The bytes that a trainer gets, but for the masking of labels."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.int64 if key == "target_tokens" else np.float32).tobytes()


@st.composite
def posts(draw: st.DrawFn) -> list[WireDatum]:
    """Datums whose targets mostly are their ids shifted, whose weights mostly are 0 and 1."""
    mostly = st.integers(0, 4)
    odd_targets, odd_weights = draw(mostly) == 0, draw(mostly) == 0
    per_token = draw(st.booleans())
    datums = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 6))
        tokens = draw(hnp.arrays(np.int32, size + 1, elements=st.integers(0, 2**31 - 1)))
        targets = draw(hnp.arrays(np.int32, size)) if odd_targets else tokens[1:]
        dtype = np.dtype(draw(st.sampled_from(WEIGHTS)))
        shape = size if per_token else 1
        if odd_weights:
            weights = draw(hnp.arrays(dtype, shape))
        else:
            weights = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 1))).astype(dtype)
        losses = {"target_tokens": targets, "weights": weights, "x": np.float64([0.1])}
        datums.append(WireDatum(input_ids=tokens[:-1], loss_fn_inputs=losses, policy_version=1))
    return datums


def check_same_delivery(datums: list[WireDatum]) -> None:
    full, slim = pack_columnar(datums), pack_columnar(datums, slim=True)
    assert slim == pack_columnar(datums, slim=True)
    for got, want in zip(unpack(slim).datums, unpack(full).datums, strict=True):
        assert got.input_ids.tobytes() == want.input_ids.tobytes()
        assert got.loss_fn_inputs.keys() == want.loss_fn_inputs.keys()
        for key, array in want.loss_fn_inputs.items():
            assert delivered(key, got.loss_fn_inputs[key]) == delivered(key, array), key


@settings(max_examples=60, deadline=None)
@given(posts())
def test_slim_delivers_the_same_bytes(datums: list[WireDatum]) -> None:
    check_same_delivery(datums)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(posts())
def test_slim_delivers_the_same_bytes_long(datums: list[WireDatum]) -> None:
    check_same_delivery(datums)


def test_the_drawn_example() -> None:
    assert implied_targets(ids(5, 6, 7, 8, 9), ids(3, 2), ids(2, 3)).tolist() == [6, 7, 2, 9, 3]
    datums = [shifted([5, 6, 7, 2]), shifted([8, 9, 3])]
    body, dtypes = columns_of(datums)
    assert (body["targets"], body["last_targets"]) == ("implied", tensor(ids(2, 3)))
    assert dtypes == {"input_ids": "int32"}
    got = unpack(pack_columnar(datums, slim=True)).datums
    assert [d.loss_fn_inputs["target_tokens"].tolist() for d in got] == [[6, 7, 2], [9, 3]]


def test_one_datum_of_other_targets_keeps_the_column() -> None:
    other = WireDatum(input_ids=ids(1, 2, 3), loss_fn_inputs={"target_tokens": ids(2, 4, 5)})
    body, dtypes = columns_of([shifted([5, 6, 7]), other])
    assert set(body) == {"version", "lengths", "columns"}
    assert dtypes == {"input_ids": "int32", "target_tokens": "int32"}
    # One target for several ids is wrong, and the service's to refuse, not ours to imply.
    wrong = WireDatum(input_ids=ids(1, 2), loss_fn_inputs={"target_tokens": ids(2)})
    assert "targets" not in columns_of([wrong])[0]


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        (np.float32([1, 0, 1]), "uint8"),
        (np.float64([0, 255, 2]), "uint8"),
        (np.int64([1, 0, 1]), "uint8"),
        (np.array([True, False, True]), "bool"),
        (np.float32([1, -0.0, 1]), "float32"),
        (np.float32([1, 0.5, 1]), "float32"),
        (np.float64([1, 256, 1]), "float64"),
        (np.float32([1, np.nan, 1]), "float32"),
        (np.int64([1, -1, 1]), "int64"),
    ],
)
def test_weights_narrow_where_nothing_is_lost(weights: np.ndarray, dtype: str) -> None:
    datum = shifted([1, 2, 3, 4], weights=weights)
    assert columns_of([datum])[1]["weights"] == dtype
    assert msgpack.unpackb(pack_columnar([datum]))["columns"]["weights"]["dtype"] == weights.dtype


def test_a_negative_byte_beside_wider_weights_stays_negative() -> None:
    """The service refuses a negative weight; 255 it would train on."""
    datums = [shifted([1, 2], weights=np.int8([-1])), shifted([1, 2], weights=np.int64([1]))]
    assert columns_of(datums)[1]["weights"] == "int64"
    assert unpack(pack_columnar(datums, slim=True)).datums[0].loss_fn_inputs["weights"] == -1


@pytest.mark.parametrize(
    ("logprobs", "dtype"),
    [
        (np.float32([-0.1, -2, 0]), "float16"),
        (np.float64([-0.1, -2, -np.inf]), "float16"),  # infinite before: the service refuses it
        (np.float32([-0.1, -2, -1e6]), "float32"),  # would become infinite
        (np.int32([-1, -2, 0]), "int32"),
    ],
)
def test_float16_logprobs_are_the_senders_choice(logprobs: np.ndarray, dtype: str) -> None:
    datum = shifted([1, 2, 3, 4], logprobs=logprobs)
    assert columns_of([datum])[1]["logprobs"] == logprobs.dtype
    assert columns_of([datum], float16_logprobs=True)[1]["logprobs"] == dtype
    assert not columns_of([datum], float16_logprobs=True)[0]["columns"].keys() & {"target_tokens"}


def test_a_slim_body_has_less_than_half_of_the_bytes() -> None:
    random = np.random.default_rng(0)
    datums = [
        shifted(
            random.integers(0, 1000, 401).tolist(),
            weights=np.ones(400, np.float32),
            logprobs=-random.random(400, np.float32),
            advantages=np.float32([1]),
        )
        for _ in range(4)
    ]
    a_token = [
        len(pack_columnar(datums, **options)) / 1600
        for options in ({}, {"slim": True}, {"slim": True, "float16_logprobs": True})
    ]
    assert 16 < a_token[0] < 16.5
    assert 9 < a_token[1] < 9.5
    assert 7 < a_token[2] < 7.5


def slim_body(**changes: Any) -> bytes:
    base = {"version": 1, "policy_version": 0, "lengths": tensor(ids(2, 1)), "targets": "implied"}
    columns = {"input_ids": tensor(np.int64([1, 2, 3])), "weights": tensor(np.uint8([1, 0, 0]))}
    body = base | {"columns": columns} | changes
    return msgpack.packb({k: v for k, v in body.items() if v is not None})


def test_last_targets_may_be_left_out_where_they_are_not_trained_on() -> None:
    got = unpack(slim_body()).datums
    assert [d.loss_fn_inputs["target_tokens"].tolist() for d in got] == [[2, 0], [0]]
    per_sample = {"input_ids": tensor(ids(1, 2, 3)), "weights": tensor(np.float32([0, 0]))}
    assert len(unpack(slim_body(columns=per_sample)).datums) == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"targets": "shifted"}, MalformedBody, "targets: got 'shifted', want 'implied'"),
        ({"targets": None, "last_targets": tensor(ids(1, 2))}, MalformedBody, "targets: got None"),
        (
            {"columns": {"input_ids": tensor(ids(1, 2, 3)), "target_tokens": tensor(ids(2, 3, 4))}},
            MalformedBody,
            "send one of them",
        ),
        ({"columns": {"input_ids": tensor(ids(1, 2, 3))}}, DatumError, "last_targets: got none"),
        (
            {
                "columns": {
                    "input_ids": tensor(ids(1, 2, 3)),
                    "weights": tensor(np.uint8([0, 1, 0])),
                }
            },
            DatumError,
            "last weight is not 0",
        ),
        ({"last_targets": tensor(ids(1, 2, 3))}, DatumError, r"got shape \[3\], want \[2\]"),
        ({"last_targets": tensor(np.float32([1, 2]))}, DatumError, "want integers"),
        ({"columns": {"input_ids": tensor(ids(1, 2))}}, DatumError, r"want integers \[3\]"),
        ({"columns": {"input_ids": tensor(np.float32([1, 2, 3]))}}, DatumError, "integers"),
    ],
)
def test_slim_bodies_that_are_refused(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        unpack(slim_body(**changes))
