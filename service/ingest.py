"""Draft -> columns in a segment: checked against the run, copied once, counted.

The order is cheap first: small fields and the range of wide ids on the body's views, then one copy
a column into the spool's segment, then what needs values, on aligned columns (2-3 times faster than
on a body's views). A fault gives the segment's bytes back. Refused and never repaired:

    logprobs, advantages, weights   not finite, at any position; a -inf logprob has its own code
    logprobs                        above limits.logprob_max where the weight is not 0
    weights                         negative
    input_ids                       below 0, or from limits.vocab_size on
    target_tokens                   the same, where the weight is not 0
    any float64                     beyond float32
    tokens of a datum               over limits.max_sequence_tokens

A missing `weights` counts as all 1. Payload never becomes Python numbers. Group rules belong to
buffer.py, durability to the spool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.schemas.fields import TARGETS
from headrace.schemas.layout import StreamSpec
from headrace.service.findings import Findings
from headrace.service.forms import IDS
from headrace.service.records import (
    DATUM_META,
    SIGNAL_BY_REWARD,
    SIGNAL_NONE,
    SIGNAL_SOME,
    SPLIT_EVAL,
    SPLIT_TRAIN,
    Axis,
    Draft,
    DraftColumn,
    RunSchema,
    Spool,
    Staged,
)
from headrace.service.settings import Settings
from headrace.service.values import Values

__all__ = ["Ingest"]

INT32 = np.dtype("<i4")
LONG = 256  # tokens of a datum from which a call of its own pays


class Ingest:
    """Checks drafts and stages them; `stage` may run off the loop, the rest runs on it."""

    def __init__(self, settings: Settings, spool: Spool, streams: Mapping[str, StreamSpec]) -> None:
        self._settings = settings
        self._spool = spool
        self._streams = streams
        self._sources: dict[str, int] = {}
        self._values = Values(settings.limits)

    def schema_of(self, draft: Draft, pinned: RunSchema | None, findings: Findings) -> RunSchema:
        """The run's schema after `draft`, whose keys fit `pinned` where that is one."""
        axes = {key: c.axis for key, c in draft.columns.items() if key != IDS}
        if draft.implied_targets:
            axes[TARGETS] = "token"
        if not draft.columns:
            return pinned or RunSchema(axes={}, streams=self._streams)
        if self._settings.run_schema.require_targets and TARGETS not in axes:
            findings.add(None, TARGETS, "targets_missing", "no target_tokens", "int [T]")
        if self._settings.planner.advantage is not None and "advantages" in axes:
            want = "none: planner.advantage computes them from rewards"
            findings.add(None, "advantages", "advantages_computed", "present", want)
        keys = self._settings.run_schema.keys
        if pinned is None:
            if keys is not None and sorted(axes) != sorted(keys):
                want = f"{sorted(keys)}, of schema.keys"
                findings.add(None, "loss_fn_inputs", "keys_differ", sorted(axes), want)
            return RunSchema(axes=dict(sorted(axes.items())), streams=self._used(axes))
        merged = {k: axes[k] if want == "either" else want for k, want in pinned.axes.items()}
        return RunSchema(axes=merged, streams=pinned.streams)

    def _used(self, axes: Mapping[str, Axis]) -> dict[str, StreamSpec]:
        return {key: spec for key, spec in self._streams.items() if key in axes}

    def stage(
        self, draft: Draft, schema: RunSchema, findings: Findings
    ) -> tuple[Draft, Staged | None, NDArray[Any]]:
        """(the good datums, their columns in a segment, DATUM_META [N] but for group and source).

        No column where no datum is good. Raises InvalidDatums as `findings` settles, or SpoolFull.
        """
        self._check_small(draft, findings)
        columns = self._columns(draft, schema, findings)
        findings.settle()
        draft, columns = _without_faulty(draft, columns, findings)
        while len(draft):
            staged = self._spool.stage(columns)
            try:
                self._derive(draft, staged)
                self._values.check(draft, staged.arrays, findings)
                findings.settle()
            except BaseException:
                self._spool.abandon(staged)
                raise
            good, columns = _without_faulty(draft, columns, findings)
            if len(good) == len(draft):
                return draft, staged, self._meta(draft, staged.arrays, columns)
            self._spool.abandon(staged)
            draft = good
        return draft, None, np.zeros(0, DATUM_META)

    def source_number(self, name: str) -> int:
        """The number by which meta knows a source."""
        return self._sources.setdefault(name, len(self._sources) + 1)

    def name_sources(self, draft: Draft, meta: NDArray[Any]) -> list[tuple[str, int, str]]:
        """Number the post's sources in `meta`; ("source", number, name) of each."""
        if draft.sources is None:
            return []
        for index, name in enumerate(draft.sources):
            if name is not None:
                meta["source"][index] = self.source_number(name)
        return [
            ("source", self._sources[n], n) for n in {n for n in draft.sources if n is not None}
        ]

    def _check_small(self, draft: Draft, findings: Findings) -> None:
        most = self._settings.max_sequence_tokens
        origin = draft.origin.tolist()
        for at in np.flatnonzero(draft.lengths > most).tolist():
            got = f"{int(draft.lengths[at])} tokens"
            findings.add(origin[at], IDS, "too_long", got, f"at most {most}")
        for at in np.flatnonzero(draft.policy_versions < 0).tolist():
            want = "an integer >= 0, of the post or the datum"
            findings.add(origin[at], "policy_version", "policy_version_missing", "none", want)
        for at, split in enumerate(draft.splits or ()):
            if split not in (None, "train", "eval"):
                findings.add(origin[at], "split", "split", repr(split), "'train', 'eval' or null")
        if self._settings.planner.advantage is not None:
            for at in np.flatnonzero(np.isnan(draft.rewards)).tolist():
                want = "a number: planner.advantage is computed from it"
                findings.add(origin[at], "reward", "reward_missing", "none", want)

    def _columns(
        self, draft: Draft, schema: RunSchema, findings: Findings
    ) -> dict[str, DraftColumn]:
        """The draft's columns with ids as int32, after their range check, and the run's axes."""
        columns: dict[str, DraftColumn] = {}
        for key, column in draft.columns.items():
            if key not in (IDS, TARGETS):
                columns[key] = replace(column, axis=schema.axes[key])
                continue
            columns[key] = replace(column, dtype=INT32)
            if not np.can_cast(column.dtype, INT32, "safe"):
                self._values.check_int32(draft, column, findings)
        if draft.implied_targets and len(draft):
            columns[TARGETS] = _implied(columns[IDS])
        return columns

    def _derive(self, draft: Draft, staged: Staged) -> None:
        """Put the last targets where the ids of the next datum were shifted in."""
        if draft.implied_targets:
            last = 0 if draft.last_targets is None else draft.last_targets
            staged.arrays[TARGETS][np.cumsum(draft.lengths) - 1] = last

    def _meta(
        self, draft: Draft, arrays: Mapping[str, NDArray[Any]], columns: Mapping[str, DraftColumn]
    ) -> NDArray[Any]:
        meta = np.zeros(len(draft), DATUM_META)
        meta["length"] = draft.lengths
        tokens, sums = _loss_weights(draft.lengths, arrays.get("weights"))
        meta["loss_tokens"], meta["loss_weight"] = tokens, sums
        meta["policy_version"] = draft.policy_versions
        meta["reward"] = draft.rewards
        meta["group_size"] = draft.group_sizes
        meta["split"] = SPLIT_TRAIN
        for at, split in enumerate(draft.splits or ()):
            if split == "eval":
                meta["split"][at] = SPLIT_EVAL
        advantages = arrays.get("advantages")
        if self._settings.planner.advantage is not None:
            meta["signal"] = SIGNAL_BY_REWARD
        elif advantages is None:
            meta["signal"] = SIGNAL_SOME
        else:
            meta["signal"] = np.where(_signal(draft.lengths, advantages), SIGNAL_SOME, SIGNAL_NONE)
        if draft.rollout_ids is not None:
            meta["rollout"] = [
                0 if name is None else xxhash.xxh3_64_intdigest(name.encode()) or 1
                for name in draft.rollout_ids
            ]
        a_token = sum(_token_bytes(c) for c in columns.values() if c.axis != "sample")
        a_datum = sum(c.dtype.itemsize for c in columns.values() if c.axis == "sample")
        meta["bytes"] = draft.lengths * a_token + a_datum
        return meta


def _without_faulty(
    draft: Draft, columns: dict[str, DraftColumn], findings: Findings
) -> tuple[Draft, dict[str, DraftColumn]]:
    """Draft and columns of the datums that have no fault."""
    if not findings.datums:
        return draft, columns
    keep = ~np.isin(draft.origin, list(findings.datums))
    if keep.all():
        return draft, columns
    # An implied target column is made anew from the ids that are left.
    given = {key: c for key, c in columns.items() if key in draft.columns}
    taken = {key: c.take(keep, draft.lengths) for key, c in given.items()}
    draft = draft.take(keep)
    if draft.implied_targets and len(draft):
        taken[TARGETS] = _implied(taken[IDS])
    return draft, taken


def _implied(ids: DraftColumn) -> DraftColumn:
    """Targets as the ids that follow; what stands at each datum's end is put right by `_derive`."""
    (whole,) = ids.views
    return replace(ids, key=TARGETS, views=[whole[1:], np.zeros(1, ids.dtype)])


def _token_bytes(column: DraftColumn) -> int:
    return column.dtype.itemsize * int(np.prod(column.trailing, dtype=np.int64))


def _signal(lengths: NDArray[np.int64], advantages: NDArray[Any]) -> NDArray[np.bool_]:
    """`[N]` whether a datum has an advantage that is not 0."""
    if len(advantages) == len(lengths):
        nonzero: NDArray[np.bool_] = advantages != 0
        return nonzero
    starts = np.cumsum(lengths) - lengths
    found: NDArray[np.bool_] = np.logical_or.reduceat(advantages != 0, starts)
    return found


def _loss_weights(
    lengths: NDArray[np.int64], weights: NDArray[Any] | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """([N] positions with weight != 0, [N] sums of weights in float64)."""
    if weights is None:
        return lengths, np.array(lengths, np.float64)
    if len(weights) == len(lengths):  # one value a datum, or one token each: the readings agree
        return np.where(weights != 0, lengths, 0), np.multiply(lengths, weights, dtype=np.float64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if int(ends[-1]) < LONG * len(lengths):
        tokens = np.add.reduceat((weights != 0).view(np.int8), starts, dtype=np.int64)
        return tokens, np.add.reduceat(weights, starts, dtype=np.float64)
    # Long datums: one call each of the vectorised count and sum beats reduceat's inner loop.
    pairs = list(zip(starts.tolist(), ends.tolist(), strict=True))
    counts = np.array([np.count_nonzero(weights[a:b]) for a, b in pairs], np.int64)
    if int(counts.sum()) == np.count_nonzero(weights == 1):  # a mask of 0 and 1
        return counts, counts.astype(np.float64)
    return counts, np.array([weights[a:b].sum(dtype=np.float64) for a, b in pairs], np.float64)
