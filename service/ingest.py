"""Draft -> Post: checked against the run, copied into a segment, counted.

The order is cheap first: form against the run's schema and limits (views only), then one copy a
column into the spool's segment, then what needs values, on aligned columns. All or nothing: any
finding gives the segment's bytes back and raises InvalidDatums. Group rules belong to buffer.py,
durability to the spool.

A missing `weights` counts as all 1. Payload never becomes Python numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.service.decode import Findings
from headrace.service.records import (
    DATUM_META,
    SPLIT_TRAIN,
    Axis,
    Draft,
    DraftColumn,
    RunSchema,
    Spool,
    Staged,
)
from headrace.service.settings import Settings

__all__ = ["Ingest"]

ID_KEYS = ("input_ids", "target_tokens")
INT32 = np.dtype("<i4")


class Ingest:
    """Checks drafts against one run and stages them; `stage` may run off the loop, the rest runs on
    it.
    """

    def __init__(self, settings: Settings, spool: Spool) -> None:
        self._settings = settings
        self._spool = spool
        self._sources: dict[str, int] = {}
        keys = settings.run_schema.keys
        self._pinned_keys = None if keys is None else sorted(keys)

    def schema_of(self, draft: Draft, schema: RunSchema | None) -> RunSchema:
        """The run's schema after `draft`. Raises InvalidDatums where the two differ."""
        findings = Findings(self._settings.limits.max_errors)
        axes: dict[str, Axis] = {k: c.axis for k, c in draft.columns.items() if k != "input_ids"}
        if self._settings.run_schema.require_targets and "target_tokens" not in axes:
            findings.add(None, "target_tokens", "targets_missing", "no target_tokens", "int [T]")
        keys = self._pinned_keys if schema is None else sorted(schema.axes)
        if keys is not None and sorted(axes) != keys:
            findings.add(None, "loss_fn_inputs", "keys_differ", sorted(axes), keys)
        findings.raise_any()
        if schema is None:
            return RunSchema(axes=dict(sorted(axes.items())))
        merged: dict[str, Axis] = {}
        for key, want in schema.axes.items():
            got = axes[key]
            if "either" not in (got, want) and got != want:
                index = int(np.argmax(draft.lengths > 1))
                findings.add(
                    index, key, "kind_differs", f"per {got}", f"per {want}, as the run has it"
                )
            merged[key] = got if want == "either" else want
        findings.raise_any()
        return RunSchema(axes=merged)

    def stage(self, draft: Draft, schema: RunSchema) -> tuple[Staged, NDArray[Any]]:
        """(columns in a segment, DATUM_META [N] but for group and source). Raises InvalidDatums or
        SpoolFull.
        """
        findings = Findings(self._settings.limits.max_errors)
        self._check_small(draft, findings)
        columns = self._narrow_ids(draft, schema, findings)
        findings.raise_any()
        staged = self._spool.stage(columns)
        return staged, self._meta(draft, staged.arrays, columns)

    def name_sources(self, draft: Draft, meta: NDArray[Any]) -> list[tuple[str, int, str]]:
        """Number the post's sources in `meta`; ("source", number, name) of each."""
        if draft.sources is None:
            return []
        for index, name in enumerate(draft.sources):
            if name is not None:
                meta["source"][index] = self._sources.setdefault(name, len(self._sources) + 1)
        return [
            ("source", self._sources[n], n) for n in {n for n in draft.sources if n is not None}
        ]

    def _check_small(self, draft: Draft, findings: Findings) -> None:
        most = self._settings.max_sequence_tokens
        for index in np.flatnonzero(draft.lengths > most).tolist():
            tokens = int(draft.lengths[index])
            findings.add(index, "input_ids", "too_long", f"{tokens} tokens", f"at most {most}")
        for index in np.flatnonzero(draft.policy_versions < 0).tolist():
            findings.add(
                index, "policy_version", "policy_version_missing", "none", "an integer >= 0"
            )
        for index, split in enumerate(draft.splits or ()):
            if split not in (None, "train"):
                findings.add(index, "split", "split", repr(split), "'train' or null")

    def _narrow_ids(
        self, draft: Draft, schema: RunSchema, findings: Findings
    ) -> Mapping[str, DraftColumn]:
        """The draft's columns with ids as int32, after their range check, and the run's axes."""
        columns: dict[str, DraftColumn] = {}
        for key, column in draft.columns.items():
            if key not in ID_KEYS:
                columns[key] = replace(column, axis=schema.axes[key])
                continue
            columns[key] = replace(column, dtype=INT32)
            if np.can_cast(column.dtype, INT32, "safe"):
                continue
            for at, view in enumerate(column.views):
                low, high = int(view.min()), int(view.max())
                if low < -(2**31) or high >= 2**31:
                    index = (
                        at if len(column.views) > 1 else _datum_out_of_int32(view, draft.lengths)
                    )
                    worst = high if high >= 2**31 else low
                    findings.add(index, key, "id_range", worst, "an id that fits int32")
        return columns

    def _meta(
        self, draft: Draft, arrays: Mapping[str, NDArray[Any]], columns: Mapping[str, DraftColumn]
    ) -> NDArray[Any]:
        meta = np.zeros(len(draft), DATUM_META)
        meta["length"] = draft.lengths
        meta["loss_tokens"], meta["loss_weight"] = _loss_weights(
            draft.lengths, arrays.get("weights")
        )
        meta["policy_version"] = draft.policy_versions
        meta["reward"] = draft.rewards
        meta["group_size"] = draft.group_sizes
        meta["split"] = SPLIT_TRAIN
        if draft.rollout_ids is not None:
            meta["rollout"] = [
                0 if name is None else xxhash.xxh3_64_intdigest(name.encode()) or 1
                for name in draft.rollout_ids
            ]
        a_token = sum(c.dtype.itemsize for c in columns.values() if c.axis != "sample")
        a_datum = sum(c.dtype.itemsize for c in columns.values() if c.axis == "sample")
        meta["bytes"] = draft.lengths * a_token + a_datum
        return meta


def _loss_weights(
    lengths: NDArray[np.int64], weights: NDArray[Any] | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """([N] positions with weight != 0, [N] sums of weights in float64)."""
    if weights is None:
        return lengths, np.array(lengths, np.float64)
    if len(weights) == len(lengths):  # one value a datum, or one token each: the readings agree
        return np.where(weights != 0, lengths, 0), np.multiply(lengths, weights, dtype=np.float64)
    starts = np.cumsum(lengths) - lengths
    tokens = np.add.reduceat((weights != 0).view(np.int8), starts, dtype=np.int64)
    return tokens, np.add.reduceat(weights, starts, dtype=np.float64)


def _datum_out_of_int32(ids: NDArray[Any], lengths: NDArray[np.int64]) -> int:
    at = int(np.argmax((ids < -(2**31)) | (ids >= 2**31)))
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))
