"""Lists of datums, each with its own tensors (or JSON's lists), to a draft.

A fault of one datum names its place in the body; under skip that datum is left out. Each datum is
held against the run's schema, or against the first one where no post has pinned it.

Nearly every tensor is what the run expects: 1-D, as long as its datum, of a number's dtype. Those
take the short way through `_entry`; the others are looked at in turn until a fault is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.fields import TARGETS
from headrace.schemas.tensors import WIRE_DTYPES
from headrace.service.body import (
    JsonDatum,
    JsonPost,
    Metadata,
    MsgpackPost,
    Tensor,
    Values,
    WireDatum,
)
from headrace.service.findings import Findings
from headrace.service.forms.entries import IDS, array_of, axis_of, check_name, column_of
from headrace.service.records import Axis, Draft, RunSchema
from headrace.service.settings import Limits, Stream

__all__ = ["Listed", "tensors_of"]

INTEGERS = {name: dtype for name, dtype in WIRE_DTYPES.items() if dtype.kind in "iu"}


class Listed:
    """Knows the limits and the named streams of one run."""

    def __init__(self, limits: Limits, streams: Mapping[str, Stream]) -> None:
        self._limits, self._streams = limits, streams

    def draft(
        self,
        body: MsgpackPost | JsonPost,
        datums: Sequence[WireDatum],
        schema: RunSchema | None,
        findings: Findings,
    ) -> Draft | None:
        """The draft of the datums without a fault; None where the post as a whole has one."""
        if not 0 < len(datums) <= self._limits.max_datums_per_post:
            want = f"1 to {self._limits.max_datums_per_post}"
            findings.add(None, "datums", "count", len(datums), want)
            return None
        axes: dict[str, Axis] = (
            dict(schema.axes) if schema else dict.fromkeys(datums[0].loss_fn_inputs, "either")
        )
        keys = sorted(axes)
        views: dict[str, list[NDArray[Any]]] = {key: [] for key in (IDS, *keys)}
        good: list[int] = []
        lengths: list[int] = []
        for index, datum in enumerate(datums):
            if datum.loss_fn_inputs.keys() != axes.keys():
                for key in datum.loss_fn_inputs:
                    check_name(key, index, findings)
                got = sorted(datum.loss_fn_inputs)
                findings.add(index, "loss_fn_inputs", "keys_differ", got, keys)
                continue
            arrays = self._arrays(index, datum, keys, axes, findings)
            if arrays is None:
                continue
            good.append(index)
            lengths.append(len(arrays[0]))
            for key, array in zip(views, arrays, strict=True):
                views[key].append(array)
        if schema is None:
            for key in keys:
                check_name(key, 0, findings)
        kept = [datums[index] for index in good]
        columns = {
            key: column_of(key, "token" if key == IDS else axes[key], arrays, self._streams)
            for key, arrays in views.items()
            if arrays
        }
        default = -1 if body.policy_version is None else body.policy_version
        versions = [default if d.policy_version is None else d.policy_version for d in kept]
        return Draft(
            actor=body.actor,
            lengths=np.array(lengths, np.int64),
            columns=columns,
            policy_versions=np.array(versions, np.int64),
            rewards=np.array([np.nan if d.reward is None else d.reward for d in kept], np.float64),
            group_sizes=np.array([d.group_size or 0 for d in kept], np.int64),
            ids=_names(kept, lambda d: d.id),
            rollout_ids=_names(kept, lambda d: d.rollout_id),
            group_ids=_names(kept, lambda d: d.group_id),
            sources=_names(kept, lambda d: d.source),
            splits=_names(kept, lambda d: d.split),
            origin=np.array(good, np.int64),
        )

    def _arrays(
        self,
        index: int,
        datum: WireDatum,
        keys: Sequence[str],
        axes: dict[str, Axis],
        findings: Findings,
    ) -> list[NDArray[Any]] | None:
        """Its ids and its entries in the order of `keys`; None after a finding.

        Learns axes that were "either".
        """
        ids = array_of(datum.input_ids, index, IDS, findings)
        if ids is None:
            return None
        if ids.ndim != 1 or not len(ids):
            findings.add(index, IDS, "shape", list(ids.shape), "[T] with T >= 1")
            return None
        arrays: list[NDArray[Any]] = [ids]
        learnt: dict[str, Axis] = {}
        tokens, inputs = len(ids), datum.loss_fn_inputs
        for key in keys:
            array = self._entry(index, key, inputs[key], tokens, axes[key], learnt, findings)
            if array is not None:
                arrays.append(array)
        if len(arrays) <= len(keys):
            return None
        axes.update(learnt)
        return arrays

    def _entry(
        self,
        index: int,
        key: str,
        tensor: Tensor,
        tokens: int,
        known: Axis,
        learnt: dict[str, Axis],
        findings: Findings,
    ) -> NDArray[Any] | None:
        if known == "token" and not self._streams:
            dtype = (INTEGERS if key == TARGETS else WIRE_DTYPES).get(tensor.dtype)
            data = tensor.data
            if (
                dtype is not None
                and tensor.shape == [tokens]
                and data.nbytes == tokens * dtype.itemsize
            ):
                return np.frombuffer(data, dtype)
        array = array_of(tensor, index, key, findings)
        if array is None:
            return None
        stream = self._streams.get(key)
        fault: tuple[str, object, object] | None = None
        if stream is not None:
            fault = _stream_fault(array, tokens, stream)
        else:
            axis = axis_of(array, tokens, key)
            if axis is None:
                want = f"[{tokens}]" if key == TARGETS else f"[{tokens}], [1] or []"
                fault = "length", list(array.shape), want
            elif "either" not in (axis, known) and axis != known:
                fault = "kind_differs", f"per {axis}", f"per {known}, as the run has it"
            elif axis != "either":
                learnt[key] = axis
        if fault is not None:
            findings.add(index, key, *fault)
            return None
        return array if stream is not None else array.reshape(-1)


def _stream_fault(
    array: NDArray[Any], tokens: int, stream: Stream
) -> tuple[str, object, object] | None:
    shape = (tokens - 1 if stream.rows == "T-1" else tokens, *stream.shape)
    if array.dtype != np.dtype(stream.dtype):
        return "dtype", array.dtype.name, stream.dtype
    return None if array.shape == shape else ("length", list(array.shape), list(shape))


def tensors_of(datum: JsonDatum) -> WireDatum:
    """A datum typed by hand, as one that came in msgpack."""
    return WireDatum(
        input_ids=_tensor(list(datum.input_ids)),
        loss_fn_inputs={key: _tensor(values) for key, values in datum.loss_fn_inputs.items()},
        id=datum.id,
        rollout_id=datum.rollout_id,
        group_id=datum.group_id,
        group_size=datum.group_size,
        policy_version=datum.policy_version,
        reward=datum.reward,
        source=datum.source,
        split=datum.split,
    )


def _tensor(values: Values) -> Tensor:
    array = np.array(values) if values != [] else np.zeros(0, np.int64)
    if array.dtype == object:  # an integer of more than 64 bits: refused by its dtype
        return Tensor(dtype="integer", shape=[0], data=memoryview(b""))
    data = memoryview(array.tobytes())
    return Tensor(dtype=array.dtype.name, shape=list(array.shape), data=data)


def _names(
    datums: Sequence[Metadata], of: Callable[[Metadata], str | None]
) -> list[str | None] | None:
    names = [of(datum) for datum in datums]
    return names if any(name is not None for name in names) else None
