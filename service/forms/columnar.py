"""One tensor a key over all datums, and the slim form, where targets are implied by the ids.

A column belongs to the post: its faults have no index. Only a datum's length, and a kind that
differs from the run's, name the datum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.fields import TARGETS
from headrace.service.body import MsgpackPost, Tensor
from headrace.service.findings import Findings
from headrace.service.forms.entries import IDS, INTEGER_KEYS, array_of, check_name, column_of
from headrace.service.records import Axis, Draft, DraftColumn, RunSchema
from headrace.service.settings import Limits, Stream

__all__ = ["COLUMNAR_ONLY", "Columnar"]

LISTS = ("ids", "rollout_ids", "group_ids", "sources", "splits", "group_sizes", "policy_versions")
COLUMNAR_ONLY = ("lengths", "rewards", "targets", "last_targets", *LISTS)


class Columnar:
    """Knows the limits and the named streams of one run."""

    def __init__(self, limits: Limits, streams: Mapping[str, Stream]) -> None:
        self._limits, self._streams = limits, streams

    def draft(
        self, body: MsgpackPost, schema: RunSchema | None, findings: Findings
    ) -> Draft | None:
        assert body.columns is not None
        lengths = self._lengths(body, findings)
        if lengths is None:
            return None
        keys = {key for key in body.columns if key != IDS}
        implied = body.targets is not None
        if implied:
            if body.targets != "implied" or TARGETS in keys:
                got = repr(body.targets) if body.targets != "implied" else f"a column {TARGETS} too"
                findings.add(None, "targets", "form", got, "'implied', and no such column")
            keys.add(TARGETS)
        elif body.last_targets is not None:
            findings.add(None, "last_targets", "form", "present", "only with targets = 'implied'")
        axes: dict[str, Axis] = dict(schema.axes) if schema else dict.fromkeys(keys, "either")
        for key in sorted(keys):
            check_name(key, None, findings)
        if keys != axes.keys():
            findings.add(None, "columns", "keys_differ", sorted(keys), sorted(axes))
            return None
        columns: dict[str, DraftColumn] = {}
        for key in (IDS, *sorted(keys)):
            if key == TARGETS and implied:
                continue
            array = array_of(body.columns[key], None, key, findings)
            if array is not None:
                column = self._whole_column(key, array, lengths, axes, findings)
                if column is not None:
                    columns[key] = column
        return self._columnar_draft(body, lengths, columns, implied, findings)

    def _lengths(self, body: MsgpackPost, findings: Findings) -> NDArray[np.int64] | None:
        if body.lengths is None or IDS not in (body.columns or {}):
            missing = "lengths" if body.lengths is None else f"columns.{IDS}"
            findings.add(None, missing, "missing", "nothing", "an integer tensor")
            return None
        lengths = array_of(body.lengths, None, "lengths", findings, integer=True)
        if lengths is None:
            return None
        most = self._limits.max_datums_columnar
        if lengths.ndim != 1 or not 0 < len(lengths) <= most:
            findings.add(None, "lengths", "count", list(lengths.shape), f"[N], N 1 to {most}")
            return None
        for index in np.flatnonzero((lengths < 1) | (lengths > 2**31 - 1)).tolist():
            findings.add(index, IDS, "shape", [int(lengths[index])], "[T] with T >= 1")
        clipped: NDArray[np.int64] = np.clip(lengths, 0, 2**31 - 1).astype(np.int64)
        return clipped

    def _whole_column(
        self,
        key: str,
        array: NDArray[Any],
        lengths: NDArray[np.int64],
        axes: dict[str, Axis],
        findings: Findings,
    ) -> DraftColumn | None:
        count, total = len(lengths), int(lengths.sum())
        stream = self._streams.get(key)
        if stream is not None:
            return self._stream_column(key, stream, array, lengths, findings)
        token_only = key in INTEGER_KEYS
        if array.ndim != 1 or (len(array) != total and (token_only or len(array) != count)):
            want = f"[{total}]" if token_only else f"[{total}] or [{count}]"
            findings.add(None, key, "length", list(array.shape), want)
            return None
        axis: Axis = "token" if len(array) == total else "sample"
        if total == count and not token_only:
            axis = "either"
        known = axes.get(key, "token")
        if "either" not in (axis, known) and axis != known:
            index = int(np.argmax(lengths > 1))
            findings.add(
                index, key, "kind_differs", f"per {axis}", f"per {known}, as the run has it"
            )
        return DraftColumn(key=key, axis=axis, dtype=array.dtype, views=[array])

    def _stream_column(
        self,
        key: str,
        stream: Stream,
        array: NDArray[Any],
        lengths: NDArray[np.int64],
        findings: Findings,
    ) -> DraftColumn | None:
        shorter = stream.rows == "T-1"
        rows = int(lengths.sum()) - (len(lengths) if shorter else 0)
        shape = (rows, *stream.shape)
        if array.dtype != np.dtype(stream.dtype):
            findings.add(None, key, "dtype", array.dtype.name, stream.dtype)
        elif array.shape != shape:
            findings.add(None, key, "length", list(array.shape), list(shape))
        else:
            views = [array]
            if shorter:
                cuts = np.cumsum(lengths - 1)[:-1]
                return column_of(key, "token", np.split(array, cuts), self._streams)
            return DraftColumn(
                key=key, axis="token", dtype=array.dtype, views=views, trailing=tuple(stream.shape)
            )
        return None

    def _columnar_draft(
        self,
        body: MsgpackPost,
        lengths: NDArray[np.int64],
        columns: dict[str, DraftColumn],
        implied: bool,
        findings: Findings,
    ) -> Draft | None:
        count = len(lengths)
        for name in LISTS:
            values = getattr(body, name)
            if values is not None and len(values) != count:
                findings.add(None, name, "length", len(values), count)
        rewards = _per_datum(body.rewards, "rewards", count, findings)
        last = _per_datum(body.last_targets, "last_targets", count, findings, integer=True)
        findings.settle()
        default = -1 if body.policy_version is None else body.policy_version
        versions = body.policy_versions or [None] * count
        draft = Draft(
            actor=body.actor,
            lengths=lengths,
            columns=columns,
            policy_versions=np.array([default if v is None else v for v in versions], np.int64),
            rewards=np.full(count, np.nan) if rewards is None else rewards.astype(np.float64),
            group_sizes=np.array([s or 0 for s in body.group_sizes or [0] * count], np.int64),
            ids=body.ids,
            rollout_ids=body.rollout_ids,
            group_ids=body.group_ids,
            sources=body.sources,
            splits=body.splits,
            origin=np.arange(count),
            last_targets=last,
            implied_targets=implied,
        )
        return draft.take(lengths > 0) if findings.datums else draft


def _per_datum(
    tensor: Tensor | None, name: str, count: int, findings: Findings, *, integer: bool = False
) -> NDArray[Any] | None:
    array = None if tensor is None else array_of(tensor, None, name, findings, integer=integer)
    if array is not None and array.shape != (count,):
        findings.add(None, name, "length", list(array.shape), [count])
        return None
    return array
