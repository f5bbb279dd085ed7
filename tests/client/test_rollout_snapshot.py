"""What submit takes: Datums by their attributes, tensors, arrays, lists; always a private copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.client.snapshot import snapshot
from headrace.schemas.errors import DatumError

torch.set_num_threads(1)


def taken(value: Any, tokens: int = 3) -> np.ndarray:
    source = {"input_ids": list(range(tokens)), "loss_fn_inputs": {"x": value}}
    return snapshot(source, 0).loss_fn_inputs["x"]


def test_any_object_with_the_attributes_is_a_datum() -> None:
    datum = SimpleNamespace(
        input_ids=torch.tensor([1, 2, 3]),
        loss_fn_inputs={"target_tokens": torch.tensor([2, 3, 4])},
        seq_len=3,
    )
    got = snapshot(datum, 5)
    assert (got.input_ids.dtype, got.input_ids.tolist()) == (np.int32, [1, 2, 3])
    assert got.loss_fn_inputs["target_tokens"].dtype == np.int32
    assert (got.policy_version, got.group_id, got.reward) == (5, None, None)


def test_metadata_is_read_from_attributes() -> None:
    datum = SimpleNamespace(
        input_ids=torch.tensor([1]),
        loss_fn_inputs={},
        group_id="g",
        group_size=np.int64(4),
        policy_version=torch.tensor(3),
        reward=torch.tensor([0.5]),
        source="math",
    )
    got = snapshot(datum, 9)
    assert (got.group_id, got.group_size, got.policy_version) == ("g", 4, 3)
    assert (got.reward, got.source) == (0.5, "math")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.float16, "float16"),
        (torch.float64, "float64"),
        (torch.int64, "int64"),
        (torch.uint8, "uint8"),
        (torch.bool, "bool"),
    ],
)
def test_torch_dtypes(dtype: torch.dtype, name: str) -> None:
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    got = taken(tensor)
    assert got.dtype.name == name
    assert got.tolist() == tensor.tolist()


def test_tensors_with_grad_strides_and_no_dimension() -> None:
    leaf = torch.arange(3.0, requires_grad=True)
    assert taken(leaf * 2).tolist() == [0, 2, 4]
    assert taken(torch.arange(6)[::2]).tolist() == [0, 2, 4]
    assert taken(torch.tensor(1.5)).tolist() == [1.5]
    assert taken(np.arange(6)[::-2]).tolist() == [5, 3, 1]


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [
        ([1, 2, 3], "int32", [1, 2, 3]),
        ([1.0, 2, 3], "float32", [1, 2, 3]),
        ((True, False, True), "bool", [True, False, True]),
        (0.5, "float32", [0.5]),
        (7, "int32", [7]),
        (np.float64(0.1), "float64", [0.1]),
        (np.array([1, 2, 3], ">i2"), "int16", [1, 2, 3]),
        ([float("inf"), float("-inf"), 0.0], "float32", [float("inf"), float("-inf"), 0]),
    ],
)
def test_lists_numbers_and_arrays(value: Any, dtype: str, want: list[Any]) -> None:
    got = taken(value)
    assert (got.dtype, got.tolist()) == (np.dtype(dtype), want)


@pytest.mark.parametrize("value", [torch.ones(3), np.ones(3, np.float32), np.ones(6)[::2]])
def test_the_copy_is_private(value: Any) -> None:
    source = {"input_ids": np.arange(3, dtype=np.int32), "loss_fn_inputs": {"x": value}}
    got = snapshot(source, 0)
    value[:], source["input_ids"][:] = 7, 7
    source["loss_fn_inputs"]["y"] = value
    assert got.loss_fn_inputs["x"].tolist() == [1, 1, 1]
    assert got.input_ids.tolist() == [0, 1, 2]
    assert set(got.loss_fn_inputs) == {"x"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2, 2**31], "got 2147483648 at 2, want a value that fits int32"),
        ([0.0, 1e300, 0.0], "got 1e.300 at 1, want a value that fits float32"),
        ([1, [2], 3], "ragged"),
        ([[1, 2, 3]], "got shape"),
        (["a", "b", "c"], "want numbers"),
        ([1, 2, 2**70], "want numbers"),
        ([None, 1, 2], "want numbers"),
        ("abc", "got dtype"),
        (None, "got dtype object"),
        (torch.ones(3, dtype=torch.complex64), "got dtype complex64"),
        (torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.eye(3).to_sparse(), "want a dense tensor"),
        (torch.ones(1, 3), "got shape"),
        (torch.ones(2), "per token"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    with pytest.raises(DatumError, match=message):
        taken(value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_fn_inputs": [1]}, "loss_fn_inputs: got list"),
        ({"group_id": "g", "group_size": 2.5}, "group_size: got 2.5"),
        ({"policy_version": True}, "policy_version: got True"),
        ({"reward": "high"}, "reward: got 'high'"),
        ({"reward": torch.ones(2)}, "reward"),
        ({"split": 3}, "split: got 3"),
    ],
)
def test_metadata_that_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DatumError, match=message):
        snapshot({"input_ids": [1, 2]} | fields, 0)
