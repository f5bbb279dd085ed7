"""collate_datums beyond parity: refusals, pinned kinds, streams, and tensors of every origin."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas import Datum, DatumError, collate_datums

T = torch.tensor
BOTH = pytest.mark.parametrize("packed", [False, True])


def refused(match: str, datums: list[Datum], **keywords: Any) -> None:
    for packed in (False, True):
        with pytest.raises(DatumError, match=match) as caught:
            collate_datums(datums, packed=packed, **keywords)
        assert isinstance(caught.value, ValueError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_datum_is_refused() -> None:
    refused("at least one", [])


def test_differing_keys_are_refused() -> None:
    datums = [Datum([1], {"a": [1.0]}), Datum([1], {"b": [1.0]})]
    refused(r"datum 1: got keys \['b'\].*same loss_fn_inputs keys", datums)


def test_an_empty_sequence_cannot_be_packed_and_is_a_row_of_pads_otherwise() -> None:
    datums = [Datum([4, 5]), Datum([])]
    with pytest.raises(DatumError, match="datum 1, input_ids: cannot pack an empty sequence"):
        collate_datums(datums, packed=True)
    batch = collate_datums(datums)
    assert batch["input_ids"].tolist() == [[4, 5], [0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("key", ["weights", "logprobs", "other"])
def test_a_length_that_is_neither_t_nor_1_is_refused(key: str) -> None:
    datums = [Datum([1, 2, 3], {key: [1.0, 2.0, 3.0]}), Datum([1, 2, 3], {key: [1.0, 2.0]})]
    refused(f"datum 1, {key}: got length 2, want 3", datums)


def test_a_key_of_two_kinds_is_refused() -> None:
    datums = [Datum([1, 2], {"a": [1.0, 2.0]}), Datum([1, 2], {"a": [1.0]})]
    refused("a: got one value a token in datum 0 and one a sample in datum 1", datums)
    refused("a: got one value a token in datum 1 and one a sample in datum 0", datums[::-1])


def test_a_single_token_datum_takes_the_kind_of_the_others() -> None:
    one = Datum([7], {"a": [9.0]})
    assert collate_datums([Datum([1, 2], {"a": [1.0]}), one])["a"].tolist() == [1.0, 9.0]
    assert collate_datums([Datum([1, 2], {"a": [1.0, 2.0]}), one])["a"].tolist() == [[1, 2], [9, 0]]


@BOTH
def test_a_scalar_on_a_single_token_is_per_token(packed: bool) -> None:
    batch = collate_datums([Datum([7], {"a": 0.5}), Datum([8], {"a": [1.5]})], packed=packed)
    assert batch["a"].tolist() == ([[0.5, 1.5]] if packed else [[0.5], [1.5]])


def test_several_dimensions_are_refused_unless_named_a_stream() -> None:
    datums = [Datum([1, 2], {"a": [[1.0, 2.0]]})]
    refused(r"datum 0, a: got shape \(1, 2\)", datums)


def test_targets_of_another_length_are_refused() -> None:
    refused("datum 0, target_tokens: got length 1, want 2", [Datum([1, 2], {"target_tokens": [3]})])


def test_targets_that_are_not_integers_are_refused() -> None:
    refused("target_tokens: got torch.float32", [Datum([1], {"target_tokens": [1.5]})])
    huge = torch.tensor([2**64 - 1], dtype=torch.uint64)
    refused("target_tokens: got torch.uint64", [Datum([1], {"target_tokens": huge})])


def test_complex_numbers_are_refused() -> None:
    refused("datum 0, a: got torch.complex64", [Datum([1], {"a": [1j]})])


@pytest.mark.parametrize(
    ("packed", "name"),
    [(False, "labels"), (False, "padding_mask"), (True, "seq_lens"), (True, "cu_seqlens")],
)
def test_a_key_that_the_batch_has_itself_is_refused(packed: bool, name: str) -> None:
    with pytest.raises(DatumError, match=f"got \\['{name}'\\]"):
        collate_datums([Datum([1], {name: [1.0]})], packed=packed)


def test_negative_divisor_is_refused() -> None:
    refused("pad_seq_len_divisible: got -2", [Datum([1])], pad_seq_len_divisible=-2)


@BOTH
def test_per_sample_keeps_one_value_a_sample_in_a_batch_of_single_tokens(packed: bool) -> None:
    datums = [Datum([1], {"a": [1.0], "b": [3.0]}), Datum([2], {"a": [2.0], "b": [4.0]})]
    batch = collate_datums(datums, packed=packed, per_sample=["a"])
    assert batch["a"].tolist() == [1.0, 2.0]
    assert batch["b"].tolist() == ([[3.0, 4.0]] if packed else [[3.0], [4.0]])


def test_per_sample_refuses_what_is_not() -> None:
    datums = [Datum([1, 2], {"a": [1.0, 2.0]})]
    refused(r"datum 0, a: got length 2, want \[1\]", datums, per_sample=["a"])
    refused(r"per_sample: got \['b'\]", datums, per_sample=["b"])
    refused("per_sample: got the string 'a'", datums, per_sample="a")


@BOTH
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bfloat16, torch.bool])
def test_a_stream_keeps_dtype_and_shape(packed: bool, dtype: torch.dtype) -> None:
    first = torch.arange(12).reshape(3, 2, 2).to(dtype)
    second = torch.arange(4).reshape(1, 2, 2).to(dtype)
    datums = [Datum([1, 2, 3], {"routes": first}), Datum([4], {"routes": second})]
    got = collate_datums(datums, packed=packed, streams=["routes"])["routes"]
    want = torch.cat([first, second])[None]
    if not packed:
        want = torch.stack([first, torch.cat([second, torch.zeros(2, 2, 2).to(dtype)])])
    assert got.dtype == dtype
    assert torch.equal(got, want)


def test_a_stream_of_another_shape_or_dtype_is_refused() -> None:
    datums = [Datum([1, 2], {"s": torch.zeros(2, 3)}), Datum([1], {"s": torch.zeros(1, 4)})]
    refused(r"datum 1, s: got torch.float32 \(1, 4\), want the stream's", datums, streams=["s"])
    refused("streams: got", [Datum([1], {"weights": [1.0]})], streams=["weights"])


@BOTH
def test_tensors_with_grad_in_bfloat16_strided_or_read_only_are_taken(packed: bool) -> None:
    read_only = np.array([1.0, 2.0])
    read_only.flags.writeable = False
    inputs = {
        "bf": T([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        "grad": T([1.0, 2.0], requires_grad=True),
        "strided": torch.arange(4.0)[::2],
        "numpy": np.array([1.0, 2.0], dtype=">f8")[::-1],
        "fixed": read_only,
    }
    batch = collate_datums([Datum([1, 2], inputs)], packed=packed)
    assert {key: batch[key][0].tolist() for key in inputs} == {
        "bf": [1.0, 2.0],
        "grad": [1.0, 2.0],
        "strided": [0.0, 2.0],
        "numpy": [2.0, 1.0],
        "fixed": [1.0, 2.0],
    }
    assert not any(
        value.requires_grad for value in batch.values() if isinstance(value, torch.Tensor)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_are_taken() -> None:
    batch = collate_datums([Datum(T([1, 2]).cuda(), {"a": T([1.0, 2.0]).bfloat16().cuda()})])
    assert batch["input_ids"].tolist() == [[1, 2]]
    assert batch["a"].tolist() == [[1.0, 2.0]]


@BOTH
@pytest.mark.parametrize("weights", [[0.0, 1.0], [False, True], [0, 3], [-0.0, 1e-300]])
def test_labels_are_masked_where_the_weight_is_0_in_its_own_dtype(
    packed: bool, weights: list[Any]
) -> None:
    values = T(weights, dtype=torch.float64) if weights[1] == 1e-300 else T(weights)
    datum = Datum([1, 2], {"target_tokens": [2**62, -(2**62)], "weights": values})
    labels = collate_datums([datum, datum], packed=packed, ignore_index=5)["labels"]
    assert labels.flatten().tolist() == [5, -(2**62)] * 2


@BOTH
def test_masking_is_exact_over_several_blocks(packed: bool) -> None:
    length = 40_000  # more than MASK_BLOCK
    on = torch.arange(length) % 3 != 0
    targets = torch.arange(length) * 2**40
    datums = [Datum(targets, {"target_tokens": targets, "weights": on})] * 2
    labels = collate_datums(datums, packed=packed)["labels"].reshape(2, length)
    assert torch.equal(labels[1], torch.where(on, targets, -100))


@BOTH
def test_the_batch_shares_no_memory_with_the_datums(packed: bool) -> None:
    datum = Datum([1, 2], {"a": [1.0, 2.0]})
    batch = collate_datums([datum], packed=packed)
    batch["input_ids"].fill_(9)
    batch["a"].fill_(9)
    assert datum == Datum([1, 2], {"a": [1.0, 2.0]})
