"""Datum and Datum.from_tokens: what they take and refuse, and worked examples of alignment."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas import CROSS_ENTROPY_IGNORE_IDX, Datum, DatumError

NAN, INF = float("nan"), float("inf")


def values(datum: Datum) -> dict[str, Any]:
    return {"input_ids": datum.input_ids.tolist()} | {
        key: [round(x, 4) for x in tensor.tolist()] for key, tensor in datum.loss_fn_inputs.items()
    }


def test_lists_and_arrays_become_tensors_and_tensors_stay_the_same() -> None:
    mine = torch.tensor([1.0, 2.0])
    datum = Datum([1, 2], {"weights": [1, 0], "logprobs": mine, "a": np.float32(0.5)})
    assert datum.input_ids.dtype == torch.int64
    assert datum.loss_fn_inputs["logprobs"] is mine
    assert datum.loss_fn_inputs["a"].shape == ()
    assert datum.loss_fn_inputs["a"].dtype == torch.float32


@pytest.mark.parametrize("ids", [5, [[1, 2]], torch.zeros(2, 3, dtype=torch.long)])
def test_input_ids_of_another_rank_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="must be 1-D") as caught:
        Datum(ids)
    assert isinstance(caught.value, DatumError)


def test_metadata_is_keyword_only_and_ignored_by_equality() -> None:
    assert [f.name for f in fields(Datum)] == [
        *("input_ids", "loss_fn_inputs"),
        *("id", "rollout_id", "group_id", "group_size", "policy_version"),
        *("reward", "source", "split"),
    ]
    datum = Datum([1, 2], group_id="q", group_size=8, reward=0.5)
    assert datum.policy_version is None
    assert datum == Datum([1, 2], id="other")
    with pytest.raises(TypeError):
        Datum([1], {}, "q")  # type: ignore[misc]


def test_equality_compares_tensors() -> None:
    datum = Datum([1, 2], {"a": [1.0, 2.0]})
    assert datum == Datum([1, 2], {"a": [1.0, 2.0]})
    assert datum != Datum([1, 3], {"a": [1.0, 2.0]})
    assert datum != Datum([1, 2], {"a": [1.0, 3.0]})
    assert datum != Datum([1, 2], {"b": [1.0, 2.0]})
    assert datum != Datum([1, 2], {"a": [1.0]})
    assert datum != "datum"


def test_a_datum_is_mutable_and_survives_pickling() -> None:
    datum = Datum([1, 2], {"a": [1.0, 2.0]}, group_id="q")
    datum.group_size = 4
    again = pickle.loads(pickle.dumps(datum))
    assert again == datum
    assert (again.group_id, again.group_size) == ("q", 4)


def test_features_mask_with_a_value_that_the_targets_dtype_cannot_hold() -> None:
    targets = torch.tensor([5, 6], dtype=torch.uint8)
    datum = Datum([1, 2], {"target_tokens": targets, "weights": [0, 1]})
    assert datum.to_features()["labels"] == [CROSS_ENTROPY_IGNORE_IDX, 6]


# from_tokens: tokens 7 8 9 5 (L = 4), so T = 3


def test_the_drawn_example_in_both_alignments() -> None:
    want = {
        "input_ids": [7, 8, 9],
        "target_tokens": [8, 9, 5],
        "weights": [0, 1, 1],
        "logprobs": [0, -0.1, -0.2],
    }
    by_token = Datum.from_tokens([7, 8, 9, 5], logprobs=[None, None, -0.1, -0.2], prompt_len=2)
    by_response = Datum.from_tokens([7, 8, 9, 5], logprobs=[-0.1, -0.2], prompt_len=2)
    assert values(by_token) == values(by_response) == want
    assert by_token == by_response
    assert {k: t.dtype for k, t in by_token.loss_fn_inputs.items()} == {
        "target_tokens": torch.int64,
        "weights": torch.float32,
        "logprobs": torch.float32,
    }


def test_a_prompt_of_one_token() -> None:
    datum = Datum.from_tokens(
        [7, 8, 9, 5], logprobs=[-0.1, -0.2, -0.3], advantages=[1, 2, 3], prompt_len=1
    )
    assert values(datum) == {
        "input_ids": [7, 8, 9],
        "target_tokens": [8, 9, 5],
        "weights": [1, 1, 1],
        "logprobs": [-0.1, -0.2, -0.3],
        "advantages": [1, 2, 3],
    }


def test_a_response_of_one_token() -> None:
    datum = Datum.from_tokens([7, 8, 9, 5], logprobs=[-0.3], mask=[1], advantages=2.5, prompt_len=3)
    assert values(datum) == {
        "input_ids": [7, 8, 9],
        "target_tokens": [8, 9, 5],
        "weights": [0, 0, 1],
        "logprobs": [0, 0, -0.3],
        "advantages": [2.5],
    }


def test_the_shortest_sequence() -> None:
    assert values(Datum.from_tokens([7, 8], logprobs=[-0.5], prompt_len=1)) == {
        "input_ids": [7],
        "target_tokens": [8],
        "weights": [1],
        "logprobs": [-0.5],
    }


def test_token_aligned_columns_of_several_turns() -> None:
    datum = Datum.from_tokens(
        np.array([7, 8, 9, 5], dtype=np.int32),
        logprobs=torch.tensor([NAN, -0.1, -INF, -0.3]),
        mask=[False, True, False, True],
        advantages=np.array([9.0, 1.0, 2.0, 3.0]),
    )
    assert values(datum) == {
        "input_ids": [7, 8, 9],
        "target_tokens": [8, 9, 5],
        "weights": [1, 0, 1],
        "logprobs": [-0.1, 0, -0.3],
        "advantages": [1, 2, 3],
    }


def test_tokens_alone_have_no_weights() -> None:
    assert values(Datum.from_tokens([7, 8, 9])) == {"input_ids": [7, 8], "target_tokens": [8, 9]}


def test_a_first_logprob_is_never_missed_since_nothing_predicts_the_first_token() -> None:
    datum = Datum.from_tokens([7, 8], logprobs=[None, -0.5])
    assert values(datum)["logprobs"] == [-0.5]


def test_metadata_passes_through() -> None:
    datum = Datum.from_tokens([7, 8], group_id="q", group_size=2, reward=0.5, policy_version=3)
    assert (datum.group_id, datum.group_size, datum.reward) == ("q", 2, 0.5)
    assert datum.policy_version == 3


def test_a_scalar_advantage_is_one_a_sample_whatever_its_type() -> None:
    for scalar in (0.5, np.float64(0.5), torch.tensor(0.5)):
        datum = Datum.from_tokens([7, 8, 9], advantages=scalar)
        assert values(datum)["advantages"] == [0.5]


@pytest.mark.parametrize(
    ("match", "keywords"),
    [
        (r"mask\[0\]: got 1.0, want 0", {"mask": [1, 1, 1, 1]}),
        ("mask: got -1.0 for token 2", {"mask": [0, 1, -1, 1]}),
        ("mask: got nan for token 3", {"mask": [0, 1, 1, NAN]}),
        ("mask: got length 3, want 4, one a token", {"mask": [1, 1, 1]}),
        ("logprobs: got nan for token 2", {"logprobs": [None, -0.1, None, -0.1]}),
        ("logprobs: got -inf for token 3", {"logprobs": [-0.1, -INF], "prompt_len": 2}),
        # a mask that is on in the prompt needs the prompt's logprobs
        (
            "logprobs: got nan for token 1",
            {"logprobs": [-0.1, -0.1], "mask": [0, 1, 1, 1], "prompt_len": 2},
        ),
        (
            r"logprobs: got length 3, want 4 \(one a token\) or 2 \(one a response token\)",
            {"logprobs": [-0.1] * 3, "prompt_len": 2},
        ),
        ("logprobs: must be 1-D", {"logprobs": [[-0.1] * 4]}),
        ("mask: must be 1-D", {"mask": torch.tensor(1.0)}),
        ("advantages: got inf for token 1", {"advantages": [0.0, INF, 0.0, 0.0]}),
        ("advantages: got length 1, want 4.*a bare number", {"advantages": [0.5]}),
        ("prompt_len: got 0, want 1 .. 3", {"prompt_len": 0}),
        ("prompt_len: got 4, want 1 .. 3", {"prompt_len": 4}),
    ],
)
def test_refusals_of_from_tokens(match: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(DatumError, match=match):
        Datum.from_tokens([7, 8, 9, 5], **keywords)


@pytest.mark.parametrize("tokens", [[7], [], [1.5, 2.5]])
def test_tokens_that_cannot_be_shifted_are_refused(tokens: list[Any]) -> None:
    with pytest.raises(DatumError, match="want at least two integers"):
        Datum.from_tokens(tokens)
