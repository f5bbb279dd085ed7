"""Ours against NeMo AutoModel 0.7.0 on the same valid input: keys, order, dtypes, shapes, bits."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.schemas import (
    Datum,
    collate_datums,
    packed_seq_params_from_doc_ids,
    to_flash_attention_kwargs,
)

INT_DTYPES = [torch.int16, torch.int32, torch.int64]
NUMBER_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHORT = settings(max_examples=50, deadline=None)
LONG = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))


def random_integers(rng: np.random.Generator, length: int, dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    values = rng.integers(info.min, info.max, length, endpoint=True)
    small = rng.integers(-200, 50_000 if info.max > 2**16 else 200, length)
    return torch.from_numpy(np.where(rng.random(length) < 0.1, values, small)).to(dtype)


def random_numbers(rng: np.random.Generator, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Many zeros, some infinities, and float64 that under- and overflow float32."""
    values = rng.normal(size=length) * 10.0 ** rng.integers(-3, 4, length)
    if dtype == torch.float64:
        values = np.where(rng.random(length) < 0.1, 1e-300, values)
        values = np.where(rng.random(length) < 0.1, 1e300, values)
    if dtype.is_floating_point:
        values = np.where(rng.random(length) < 0.05, -np.inf, values)
        values = np.where(rng.random(length) < 0.05, -0.0, values)
    values = np.where(rng.random(length) < 0.3, 0.0, values)
    if dtype == torch.int64:
        return torch.from_numpy(rng.integers(-(2**62), 2**62, length)) * (
            torch.from_numpy(values) != 0
        )
    tensor = torch.from_numpy(values)
    return tensor.abs().to(dtype) if dtype == torch.uint8 else tensor.to(dtype)


@st.composite
def batches(
    draw: st.DrawFn,
) -> tuple[list[tuple[torch.Tensor, dict[str, torch.Tensor]]], dict[str, Any]]:
    """(datums as plain pairs, keywords). The shape is drawn, the numbers come from a seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    packed = draw(st.booleans())
    longest = draw(st.sampled_from([1, 3, 12, 300]))
    count = draw(st.integers(1, 6))
    lengths = rng.integers(1, longest + 1, count)
    if draw(st.booleans()):
        lengths[rng.integers(count)] = 1
    if not packed and draw(st.integers(0, 9)) == 0:
        lengths[rng.integers(count)] = 0

    datums: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    id_dtype = draw(st.sampled_from(INT_DTYPES))
    for length in lengths:
        datums.append((random_integers(rng, length, id_dtype), {}))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(INT_DTYPES))
        for (_, inputs), length in zip(datums, lengths, strict=True):
            inputs["target_tokens"] = random_integers(rng, length, dtype)
    names = draw(st.sets(st.sampled_from(["weights", "logprobs", "advantages", "Z", "ref/lp"])))
    for name in sorted(names, key=lambda n: rng.random()):
        dtype = draw(st.sampled_from(NUMBER_DTYPES))
        mixed = draw(st.booleans())
        kind = draw(st.sampled_from(["token", "token", "one", "scalar"]))
        for (_, inputs), length in zip(datums, lengths, strict=True):
            if mixed:
                dtype = NUMBER_DTYPES[rng.integers(len(NUMBER_DTYPES))]
            values = random_numbers(rng, int(length) if kind == "token" else 1, dtype)
            inputs[name] = values[0] if kind == "scalar" else values
    keywords: dict[str, Any] = {"packed": packed}
    if draw(st.booleans()):
        keywords["pad_seq_len_divisible"] = draw(st.sampled_from([None, 0, 1, 2, 8, 64]))
    if draw(st.booleans()):
        keywords["ignore_index"] = draw(st.sampled_from([-100, -1, 0, 7, -32768]))
    return datums, keywords


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for key, want in theirs.items():
        got = ours[key]
        assert type(got) is type(want), key
        if isinstance(want, torch.Tensor):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), key
            assert got.numpy().tobytes() == want.contiguous().numpy().tobytes(), (key, got, want)
        else:
            assert got == want, key


def check_collate(automodel: Any, batch: Any) -> None:
    pairs, keywords = batch
    theirs = [automodel.datum.Datum(ids.clone(), dict(inputs)) for ids, inputs in pairs]
    ours = [Datum(ids, dict(inputs)) for ids, inputs in pairs]
    want = automodel.datum.collate_datums(theirs, **keywords)
    assert_same(collate_datums(ours, **keywords), want)
    assert_same(collate_datums(theirs, **keywords), want)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.to_features() == other.to_features()
        assert mine.seq_len == other.seq_len


def test_the_installed_reference_is_the_one_that_parity_is_claimed_with() -> None:
    assert version("nemo-automodel") == "0.7.0"


@SHORT
@given(batch=batches())
def test_collate_equals_automodel(automodel: Any, batch: Any) -> None:
    check_collate(automodel, batch)


@pytest.mark.soak
@LONG
@given(batch=batches())
def test_collate_equals_automodel_long(automodel: Any, batch: Any) -> None:
    check_collate(automodel, batch)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, -1, 0])
@pytest.mark.parametrize("weights", ["token", "sample", "none"])
@pytest.mark.parametrize("targets", [True, False])
def test_collate_equals_automodel_in_every_corner(
    automodel: Any, packed: bool, ignore_index: int, weights: str, targets: bool
) -> None:
    pairs = []
    for length, on in ((3, 1.0), (1, 0.0), (5, 1.0)):
        inputs = {"advantages": torch.tensor(on + 0.5)}
        if targets:
            inputs["target_tokens"] = torch.arange(length) + 2**40
        if weights == "token":
            inputs["weights"] = (torch.arange(length) % 2).double()
        if weights == "sample":
            inputs["weights"] = torch.tensor([on])
        pairs.append((torch.arange(length), inputs))
    keywords = {"packed": packed, "ignore_index": ignore_index, "pad_seq_len_divisible": 4}
    check_collate(automodel, (pairs, keywords))


def check_packed_seq(automodel: Any, doc_ids: torch.Tensor) -> None:
    ours = packed_seq_params_from_doc_ids(doc_ids)
    theirs = automodel.packed_seq.packed_seq_params_from_doc_ids(doc_ids)
    assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
    assert ours.cu_seqlens.dtype == theirs.cu_seqlens.dtype == torch.int32
    assert ours.max_seqlen == theirs.max_seqlen
    assert type(ours.max_seqlen) is int
    assert ours.doc_ids is doc_ids
    assert to_flash_attention_kwargs(ours).keys() == (
        automodel.packed_seq.to_flash_attention_kwargs(theirs).keys()
    )


@st.composite
def document_maps(draw: st.DrawFn) -> torch.Tensor:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    highest = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    flat = np.sort(rng.integers(0, highest + 1, (rows, width)), axis=1)
    if draw(st.booleans()):
        flat = rng.integers(0, highest + 1, (rows, width))
    doc_ids = torch.from_numpy(flat).to(draw(st.sampled_from([torch.int32, torch.int64])))
    return doc_ids.t().contiguous().t() if draw(st.booleans()) else doc_ids


@SHORT
@given(doc_ids=document_maps())
def test_packed_seq_equals_automodel(automodel: Any, doc_ids: torch.Tensor) -> None:
    check_packed_seq(automodel, doc_ids)


@pytest.mark.soak
@LONG
@given(doc_ids=document_maps())
def test_packed_seq_equals_automodel_long(automodel: Any, doc_ids: torch.Tensor) -> None:
    check_packed_seq(automodel, doc_ids)
