"""What the numbers of a post may be: checks on whole aligned columns, which point at the datum only
after they fail.

A good column costs one or two passes without an allocation (min and max carry a NaN through); masks
are made only for a column that is not good, to find its datums. Called by ingest.py, which says
what is refused and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.fields import TARGETS, WEIGHTS
from headrace.service.findings import Findings
from headrace.service.forms import IDS
from headrace.service.records import Draft, DraftColumn
from headrace.service.settings import Limits

__all__ = ["Values"]

FINITE = ("weights", "logprobs", "advantages")
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Values:
    """The value checks under one service's limits."""

    def __init__(self, limits: Limits) -> None:
        self._most_id = INT32_MAX if limits.vocab_size is None else limits.vocab_size - 1
        self._most_logprob = limits.logprob_max

    def check_int32(self, draft: Draft, column: DraftColumn, findings: Findings) -> None:
        """Ids of a wide dtype must fit int32 before they are copied into it."""
        for at, view in enumerate(column.views):
            low, high = int(view.min(initial=0)), int(view.max(initial=0))
            if low >= -(2**31) and high <= INT32_MAX:
                continue
            if len(column.views) == len(draft):
                worst = high if high > INT32_MAX else low
                self._id(draft, [(at, worst)], column.key, findings)
            else:
                bad = np.flatnonzero((view < -(2**31)) | (view > INT32_MAX))
                self._id(draft, _firsts(draft, view, bad), column.key, findings)

    def check(self, draft: Draft, arrays: Mapping[str, NDArray[Any]], findings: Findings) -> None:
        """Everything else, on the staged columns. One minimum and one maximum a column."""
        weights = arrays.get(WEIGHTS)
        self._check_ids(draft, arrays, weights, findings)
        for key, array in arrays.items():
            if array.dtype.kind != "f" or (key not in FINITE and array.dtype.itemsize <= 4):
                continue
            low, high = _range(array)
            if not (low >= -FLOAT32_MAX and high <= FLOAT32_MAX):
                self._check_floats(draft, key, array, findings)
            if key == "logprobs" and not high <= self._most_logprob:
                self._check_logprobs(draft, array, weights, findings)
            if key == WEIGHTS and not low >= 0:
                self._check_weights(draft, array, findings)
        if weights is not None and weights.dtype.kind == "i" and weights.min(initial=0) < 0:
            self._check_weights(draft, weights, findings)

    def _check_logprobs(
        self,
        draft: Draft,
        logprobs: NDArray[Any],
        weights: NDArray[Any] | None,
        findings: Findings,
    ) -> None:
        high = (logprobs > self._most_logprob) & np.isfinite(logprobs)
        if weights is not None:
            high &= _per_token(draft, logprobs, weights) != 0
        want = f"at most {self._most_logprob} where the weight is not 0: a logprob, not a prob"
        self._add(draft, "logprobs", "logprob_positive", logprobs, high, want, findings)

    def _check_weights(self, draft: Draft, weights: NDArray[Any], findings: Findings) -> None:
        negative = np.isfinite(weights) & (weights < 0)
        want = "a weight >= 0; the sign belongs to the advantage"
        self._add(draft, WEIGHTS, "weight_negative", weights, negative, want, findings)

    def _check_ids(
        self,
        draft: Draft,
        arrays: Mapping[str, NDArray[Any]],
        weights: NDArray[Any] | None,
        findings: Findings,
    ) -> None:
        want = f"an id of 0 to {self._most_id}"
        for key in (IDS, TARGETS):
            array = arrays.get(key)
            # As unsigned, a negative id is larger than any good one: one pass finds both faults.
            if array is None or int(array.view(np.uint32).max(initial=0)) <= self._most_id:
                continue
            bad = array.view(np.uint32) > self._most_id
            if key == TARGETS and weights is not None:
                bad &= _per_token(draft, array, weights) != 0
            self._add(draft, key, "id_range", array, bad, want, findings)
        if draft.implied_targets and draft.last_targets is None:
            last = np.cumsum(draft.lengths) - 1
            needed = np.ones(len(draft), bool)
            if weights is not None:
                needed = _per_token(draft, arrays[IDS], weights)[last] != 0
            for at in np.flatnonzero(needed).tolist():
                where, text = int(draft.origin[at]), "int32 [N]: the last weight is not 0"
                findings.add(where, "last_targets", "missing", "nothing", text)

    def _check_floats(
        self, draft: Draft, key: str, array: NDArray[Any], findings: Findings
    ) -> None:
        if key == "logprobs":
            minus = np.isneginf(array)
            want = (
                "a finite logprob: -inf is a token the sampler could not have drawn (top-p, masks)"
            )
            self._add(draft, key, "logprob_neg_inf", array, minus, want, findings)
            other = ~np.isfinite(array) & ~minus
        else:
            other = ~np.isfinite(array)
        if key in FINITE:
            self._add(draft, key, "not_finite", array, other, "a finite number", findings)
        if array.dtype.itemsize > 4:
            beyond = np.isfinite(array) & (np.abs(array) > FLOAT32_MAX)
            want = f"within float32, at most {FLOAT32_MAX:g}"
            self._add(draft, key, "float32_range", array, beyond, want, findings)

    def _id(
        self, draft: Draft, faults: list[tuple[int, Any]], key: str, findings: Findings
    ) -> None:
        for at, value in faults:
            findings.add(int(draft.origin[at]), key, "id_range", value, "an id that fits int32")

    def _add(
        self,
        draft: Draft,
        key: str,
        code: str,
        array: NDArray[Any],
        bad: NDArray[np.bool_],
        want: str,
        findings: Findings,
    ) -> None:
        for at, value in _firsts(draft, array, np.flatnonzero(bad)):
            findings.add(int(draft.origin[at]), key, code, value, want)


def _range(array: NDArray[Any]) -> tuple[float, float]:
    """(least, greatest) of an array and 0; one of them is NaN where the array holds one."""
    if array.dtype != np.float16:
        return float(array.min(initial=0)), float(array.max(initial=0))
    # numpy compares float16 one by one. As integers, positive ones order as they are, and negative
    # ones, read without a sign, by size; infinities and NaN lie beyond the finite ones.
    low = array.view(np.uint16).max(initial=0x8000)
    high = array.view(np.int16).max(initial=0).astype(np.uint16)
    least, greatest = np.array([low, high], np.uint16).view(np.float16).tolist()
    return least, greatest


def _firsts(draft: Draft, array: NDArray[Any], bad: NDArray[np.int64]) -> list[tuple[int, Any]]:
    """(datum, value) of the first faulty position of each faulty datum. `bad`: ascending places."""
    rows = array.shape[0]
    datums = bad
    if rows != len(draft):
        if array.ndim > 1:
            return []
        datums = np.searchsorted(np.cumsum(draft.lengths), bad, side="right")
    found, first = np.unique(datums, return_index=True)
    return [(int(d), array[bad[f]].item()) for d, f in zip(found, first, strict=True)]


def _per_token(draft: Draft, like: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """`weights` aligned with the column `like`: as they are, or each datum's over its tokens."""
    if len(weights) == len(like):
        return weights
    if len(like) == len(draft):  # one value a datum against weights of each token
        starts = np.cumsum(draft.lengths) - draft.lengths
        return np.maximum.reduceat(weights, starts)
    return np.repeat(weights, draft.lengths)
