"""The wire: both forms there and back, golden bytes, plain packb bodies, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.schemas.errors import DatumError, MalformedBody
from headrace.schemas.tensors import WIRE_DTYPES
from headrace.schemas.wire import (
    METADATA,
    WIRE_VERSION,
    WireDatum,
    kinds_of,
    merge_kinds,
    pack_columnar,
    pack_per_datum,
    unpack,
)

GOLDEN = Path(__file__).parent / "golden"
PACK = {
    "per_datum": pack_per_datum,
    "columnar": pack_columnar,
    "slim": partial(pack_columnar, slim=True),
}


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def tensor(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(a: WireDatum, b: WireDatum) -> None:
    assert same_array(a.input_ids, b.input_ids)
    assert a.loss_fn_inputs.keys() == b.loss_fn_inputs.keys()
    for key, array in a.loss_fn_inputs.items():
        assert same_array(array, b.loss_fn_inputs[key]), key
    assert {k: getattr(a, k) for k in METADATA} == {k: getattr(b, k) for k in METADATA}


# ---- golden fixtures


def described(path: Path) -> tuple[str, list[WireDatum], dict[str, Any]]:
    told = json.loads(path.read_text())

    def array(a: dict[str, Any]) -> np.ndarray:
        return np.array(a["data"], WIRE_DTYPES[a["dtype"]]).reshape(a["shape"])

    datums = [
        WireDatum(
            **{k: v for k, v in d.items() if k in METADATA},
            input_ids=array(d["input_ids"]),
            loss_fn_inputs={k: array(a) for k, a in d["loss_fn_inputs"].items()},
        )
        for d in told["datums"]
    ]
    return told["form"], datums, {k: told[k] for k in ("policy_version", "actor")}


GOLDEN_CASES = sorted(GOLDEN.glob("*.json"))


@pytest.mark.parametrize("path", GOLDEN_CASES, ids=lambda p: p.stem)
def test_golden_bytes(path: Path) -> None:
    form, datums, head = described(path)
    body = path.with_suffix(".msgpack").read_bytes()
    assert PACK[form](datums, **head) == body
    post = unpack(body)
    assert (post.policy_version, post.actor) == (head["policy_version"], head["actor"])
    assert len(post.datums) == len(datums)
    for got, want in zip(post.datums, datums, strict=True):
        assert_same(got, want)


def test_golden_files_come_in_pairs() -> None:
    assert len(GOLDEN_CASES) >= 3
    assert {p.stem for p in GOLDEN_CASES} == {p.stem for p in GOLDEN.glob("*.msgpack")}


# ---- there and back


@st.composite
def posts(draw: st.DrawFn, *, one_schema: bool) -> list[WireDatum]:
    """Datums of a post. `one_schema`: the same keys, kinds and dtypes, as a columnar body needs."""
    dtypes = st.sampled_from(sorted(WIRE_DTYPES))
    keys = st.dictionaries(
        st.text("abcxyz_", min_size=1, max_size=6), st.tuples(dtypes, st.booleans()), max_size=4
    )
    schema = draw(keys)
    text = st.none() | st.text(max_size=5)
    datums = []
    for _ in range(draw(st.integers(1, 5))):
        keyed = schema if one_schema else draw(keys)
        tokens = draw(st.integers(1, 6))
        id_range = st.integers(-(2**31), 2**31 - 1)
        group = draw(text)
        datums.append(
            WireDatum(
                input_ids=draw(hnp.arrays(np.int32, tokens, elements=id_range)),
                loss_fn_inputs={
                    k: draw(hnp.arrays(WIRE_DTYPES[dtype], tokens if per_token else 1))
                    for k, (dtype, per_token) in keyed.items()
                },
                id=draw(text),
                rollout_id=draw(text),
                group_id=group,
                group_size=None if group is None else draw(st.none() | st.integers(1, 9)),
                policy_version=draw(st.none() | st.integers(0, 2**63 - 1)),
                reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
                source=draw(text),
                split=draw(text),
            )
        )
    return datums


def check_round_trip(form: str, datums: list[WireDatum]) -> None:
    body = PACK[form](datums, policy_version=3, actor="a-1")
    assert body == PACK[form](datums, policy_version=3, actor="a-1")
    plain = msgpack.unpackb(body)
    assert plain["version"] == WIRE_VERSION
    assert msgpack.packb(plain) == body  # what plain packb of the same dicts gives
    assert msgspec.msgpack.decode(body) == plain
    post = unpack(body)
    assert (post.policy_version, post.actor, len(post.datums)) == (3, "a-1", len(datums))
    for got, want in zip(post.datums, datums, strict=True):
        assert_same(got, want)


@settings(max_examples=40, deadline=None)
@given(posts(one_schema=False))
def test_per_datum_round_trip(datums: list[WireDatum]) -> None:
    check_round_trip("per_datum", datums)


@settings(max_examples=40, deadline=None)
@given(posts(one_schema=True))
def test_columnar_round_trip(datums: list[WireDatum]) -> None:
    check_round_trip("columnar", datums)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(posts(one_schema=True))
def test_both_forms_round_trip_long(datums: list[WireDatum]) -> None:
    check_round_trip("per_datum", datums)
    check_round_trip("columnar", datums)


@pytest.mark.parametrize("tokens", [63, 64, 16_383, 16_384, 70_000])
def test_the_length_heads_of_large_columns(tokens: int) -> None:
    datum = WireDatum(
        input_ids=np.arange(tokens),
        loss_fn_inputs={"a": np.arange(tokens, dtype=np.uint8)},
        policy_version=0,
    )
    check_round_trip("columnar", [datum])


def test_decoded_arrays_view_the_bytes() -> None:
    [datum] = unpack(pack_columnar([WireDatum(input_ids=ids(1, 2), policy_version=0)])).datums
    assert not datum.input_ids.flags.owndata
    assert not datum.input_ids.flags.writeable


def test_plain_packb_of_dicts_is_a_body() -> None:
    losses = {"target_tokens": tensor(ids(6, 2)), "advantages": tensor(np.float32(0.5).reshape(()))}
    entry = {"reward": 1, "group_id": "g", "loss_fn_inputs": losses, "input_ids": tensor(ids(5, 6))}
    post = unpack(msgpack.packb({"datums": [entry], "policy_version": 2, "version": 1}))
    [datum] = post.datums
    assert (post.policy_version, post.actor, datum.group_id, datum.reward) == (2, None, "g", 1)
    assert datum.input_ids.tolist() == [5, 6]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 2]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0.5]


# ---- what packing decides


def test_the_drawn_example_in_columns() -> None:
    datums = [
        WireDatum(input_ids=ids(*t), loss_fn_inputs={"advantages": np.float32([a])})
        for t, a in (((5, 6), 1), ((7,), 2), ((8, 9), 3))
    ]
    body = msgpack.unpackb(pack_columnar(datums, policy_version=0))
    assert body["lengths"] == tensor(ids(2, 1, 2))
    assert body["columns"]["input_ids"] == tensor(ids(5, 6, 7, 8, 9))
    assert body["columns"]["advantages"] == tensor(np.float32([1, 2, 3]))
    assert set(body) == {"version", "policy_version", "lengths", "columns"}


@pytest.mark.parametrize(
    ("first", "second", "widest"),
    [
        ("float16", "float32", "float32"),
        ("bool", "int8", "int8"),
        ("int32", "float32", "float64"),
        ("uint8", "int8", "int16"),
    ],
)
def test_a_column_of_two_dtypes_is_sent_in_the_widest(first: str, second: str, widest: str) -> None:
    datums = [
        WireDatum(input_ids=ids(1, 2), loss_fn_inputs={"w": np.array([1, 0], dtype)})
        for dtype in (first, second)
    ]
    got = unpack(pack_columnar(datums, policy_version=0)).datums
    for datum in got:
        assert same_array(datum.loss_fn_inputs["w"], np.array([1, 0], widest))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "uint64", ">i4"])
def test_ids_travel_as_int32(dtype: str) -> None:
    datum = WireDatum(
        input_ids=np.array([1, 2], dtype),
        loss_fn_inputs={"target_tokens": np.array([2, 3], dtype)},
    )
    for body in (pack_columnar([datum]), pack_per_datum([datum])):
        [got] = unpack(body).datums
        assert same_array(got.input_ids, ids(1, 2))
        assert same_array(got.loss_fn_inputs["target_tokens"], ids(2, 3))


def test_a_per_sample_key_meets_single_tokens() -> None:
    one = WireDatum(input_ids=ids(1), loss_fn_inputs={"a": np.float32([1])})
    sample = WireDatum(input_ids=ids(1, 2), loss_fn_inputs={"a": np.float32([2])})
    token = WireDatum(input_ids=ids(1, 2), loss_fn_inputs={"a": np.float32([3, 4])})
    assert [kinds_of(d)["a"] for d in (one, sample, token)] == ["either", "sample", "token"]
    assert merge_kinds(kinds_of(one), kinds_of(sample)) == {"a": "sample"}
    assert merge_kinds(kinds_of(token), kinds_of(one)) == {"a": "token"}
    with pytest.raises(DatumError, match="per sample in some datums and per token in others"):
        pack_columnar([sample, one, token])


def streamed(tokens: int, rows: int, dtype: str = "int16") -> WireDatum:
    stream = np.arange(rows * 6, dtype=dtype).reshape(rows, 2, 3)
    return WireDatum(
        input_ids=np.arange(tokens), loss_fn_inputs={"experts": stream}, policy_version=0
    )


@pytest.mark.parametrize("missing", [0, 1])
def test_named_streams_keep_their_shape_and_dtype(missing: int) -> None:
    datums = [streamed(tokens, tokens - missing) for tokens in (3, 1, 4)]
    for form in PACK:
        check_round_trip(form, datums)
    column = msgpack.unpackb(pack_columnar(datums))["columns"]["experts"]
    assert (column["shape"], column["dtype"]) == ([8 - 3 * missing, 2, 3], "int16")


def test_streams_of_one_post_are_alike() -> None:
    first = streamed(3, 3)
    alone = WireDatum(input_ids=ids(1), loss_fn_inputs={"experts": np.int16([1])})
    for other in (streamed(3, 2), streamed(3, 3, "int32"), alone):
        with pytest.raises(DatumError, match=r"a stream int16 \[T, 2, 3\] in some datums and"):
            pack_columnar([first, other])
    with pytest.raises(DatumError, match=r"only a named stream has \[3, ...\] or \[2, ...\]"):
        streamed(3, 4)
    with pytest.raises(DatumError, match="got shape"):
        WireDatum(input_ids=ids(1, 2), loss_fn_inputs={"target_tokens": np.zeros((2, 2), int)})


def test_differing_keys_cannot_share_columns() -> None:
    a = WireDatum(input_ids=ids(1), loss_fn_inputs={"a": np.float32([1])})
    b = WireDatum(input_ids=ids(1), loss_fn_inputs={"b": np.float32([1])})
    with pytest.raises(DatumError, match="same loss_fn_inputs keys"):
        pack_columnar([a, b])
    assert len(unpack(pack_per_datum([a, b])).datums) == 2
    with pytest.raises(DatumError, match="at least one"):
        pack_columnar([])


# ---- refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": np.zeros((2, 2), np.int32)}, r"input_ids: got shape \[2, 2\]"),
        ({"input_ids": np.zeros(0, np.int32)}, "at least one token"),
        ({"input_ids": np.float32([1])}, "want integers"),
        ({"input_ids": np.array([True])}, "want integers"),
        ({"input_ids": np.array([2**31])}, "fit int32"),
        ({"input_ids": np.array([-(2**31) - 1])}, "fit int32"),
        ({"loss_fn_inputs": {"a": np.zeros(2)}}, r"want 1-D \[3\] \(per token\) or \[1\]"),
        ({"loss_fn_inputs": {"a": np.zeros((1, 3))}}, r"got shape \[1, 3\]"),
        ({"loss_fn_inputs": {"a": np.zeros(3, complex)}}, "got dtype complex128"),
        ({"loss_fn_inputs": {"a": np.array(["x", "y", "z"])}}, "got dtype"),
        ({"loss_fn_inputs": {"target_tokens": np.float32([1, 2, 3])}}, "want integers"),
        ({"loss_fn_inputs": {"target_tokens": np.array([1, 2, 2**40])}}, "fit int32"),
        ({"loss_fn_inputs": {"input_ids": ids(1, 2, 3)}}, "got key 'input_ids'"),
        ({"group_id": 7}, "group_id: got 7, want a string"),
        ({"group_id": "g", "group_size": 0}, "group_size: got 0"),
        ({"group_size": 4}, "without a group_id"),
        ({"policy_version": -1}, "policy_version: got -1"),
        ({"policy_version": True}, "policy_version: got True"),
        ({"reward": float("nan")}, "reward: got nan"),
        ({"reward": "1"}, "reward: got '1'"),
    ],
)
def test_a_datum_that_cannot_travel(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DatumError, match=message):
        WireDatum(**({"input_ids": ids(1, 2, 3)} | fields))


def columnar(**changes: Any) -> dict[str, Any]:
    base = {"version": 1, "policy_version": 0, "lengths": tensor(ids(2, 1))}
    return base | {"columns": {"input_ids": tensor(ids(1, 2, 3))}} | changes


def per_datum(**changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "datums": [{"input_ids": tensor(ids(1, 2)), "loss_fn_inputs": {}} | changes],
    }


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b"", MalformedBody, "not one msgpack value"),
        (b"\xc1", MalformedBody, "not one msgpack value"),
        (msgpack.packb(columnar()) + b"\x00", MalformedBody, "not one msgpack value"),
        (msgpack.packb(columnar())[:-1], MalformedBody, "not one msgpack value"),
        (b"\x91" * 5000 + b"\xc0", MalformedBody, "not one msgpack value"),
        ([1], MalformedBody, "exactly one of"),
        ({"version": 1}, MalformedBody, "exactly one of"),
        (columnar(datums=[]), MalformedBody, "exactly one of"),
        (columnar(version=2), MalformedBody, "version: got 2, want 1"),
        (columnar(extra=1), MalformedBody, r"unknown keys \['extra'\]"),
        (columnar(actor=1), MalformedBody, "actor a string"),
        (columnar(columns={}), MalformedBody, "input_ids"),
        (columnar(lengths=tensor(ids(2, 2))), DatumError, r"want \[4\]"),
        (columnar(lengths=tensor(ids(3, 0))), DatumError, "each at least 1"),
        (columnar(ids=["a"]), DatumError, "ids: want a list of 2"),
        (columnar(rewards=tensor(np.zeros(3))), DatumError, "rewards: want a list of 2"),
        (per_datum(grup_id="g"), MalformedBody, r"unknown keys \['grup_id'\]"),
        (per_datum(input_ids=[1, 2]), MalformedBody, "want a map"),
        (per_datum(input_ids=tensor(ids(1)) | {"shape": [-1]}), MalformedBody, "none negative"),
        (per_datum(input_ids=tensor(ids(1)) | {"shape": [2]}), DatumError, "got 4 bytes, want 8"),
        (per_datum(input_ids=tensor(ids(1)) | {"dtype": "bfloat16"}), DatumError, "'bfloat16'"),
        (per_datum(input_ids=tensor(ids(1)) | {"data": "abcd"}), MalformedBody, "data .bin."),
        (per_datum(reward=msgpack.ExtType(5, b"x")), DatumError, "reward"),
    ],
)
def test_bodies_that_are_refused(body: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        unpack(body if isinstance(body, bytes) else msgpack.packb(body))


if __name__ == "__main__":
    for case in GOLDEN_CASES:
        form, datums, head = described(case)
        case.with_suffix(".msgpack").write_bytes(PACK[form](datums, **head))
