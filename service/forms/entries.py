"""One tensor of a body: as an array over its bytes, and how it lies beside its datum's tokens.

Used by both forms. A fault is a finding, and the array None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.fields import LAYOUTS, TARGETS, reserved_names
from headrace.schemas.layout import StreamSpec
from headrace.schemas.tensors import WIRE_DTYPES
from headrace.service.body import Tensor
from headrace.service.findings import Findings
from headrace.service.records import Axis, DraftColumn
from headrace.service.settings import Stream

__all__ = ["IDS", "INTEGER_KEYS", "array_of", "axis_of", "check_name", "column_of", "stream_specs"]

IDS = "input_ids"
INTEGER_KEYS = (IDS, TARGETS)
# Keys that a batch has already: a loss input of that name would overwrite it.
RESERVED = frozenset[str]().union(*(reserved_names(layout) for layout in LAYOUTS))


def check_name(key: str, index: int | None, findings: Findings) -> None:
    """Refuse a loss input that would overwrite an array of the batch."""
    if key in RESERVED:
        findings.add(index, key, "reserved", key, "a name that a batch does not have already")


def axis_of(array: NDArray[Any], tokens: int, key: str) -> Axis | None:
    """How a datum's entry lies; None where it is neither [T] nor one value."""
    if key == TARGETS:
        return "token" if array.shape == (tokens,) else None
    if array.ndim > 1 or (array.size not in (1, tokens)):
        return None
    if tokens == 1:
        return "either"
    return "sample" if array.size == 1 else "token"


def array_of(
    tensor: Tensor, index: int | None, key: str, findings: Findings, *, integer: bool | None = None
) -> NDArray[Any] | None:
    """The tensor as an array over the body's bytes; None after a finding."""
    integer = key in INTEGER_KEYS if integer is None else integer
    dtype = WIRE_DTYPES.get(tensor.dtype)
    if dtype is None or (integer and dtype.kind not in "iu"):
        want = [n for n, d in WIRE_DTYPES.items() if not integer or d.kind in "iu"]
        findings.add(index, key, "dtype", repr(tensor.dtype), ", ".join(want))
        return None
    count = 1
    for size in tensor.shape:
        count *= size
    if count * dtype.itemsize != tensor.data.nbytes:
        want_text = f"{count * dtype.itemsize} ({tensor.dtype} {tensor.shape})"
        findings.add(index, key, "byte_length", f"{tensor.data.nbytes} bytes", want_text)
        return None
    flat = np.frombuffer(tensor.data, dtype)
    return flat if len(tensor.shape) == 1 else flat.reshape(tensor.shape)


def column_of(
    key: str, axis: Axis, views: Sequence[NDArray[Any]], streams: Mapping[str, Stream]
) -> DraftColumn:
    """The column of views in datum order; a stream of T-1 rows gets its row of zeros in front."""
    stream = streams.get(key)
    if stream is not None:
        trailing = tuple(stream.shape)
        if stream.rows == "T-1":
            row = np.zeros((1, *trailing), stream.dtype)
            views = [np.concatenate([row, view]) for view in views]
        dtype = np.dtype(stream.dtype)
        return DraftColumn(key=key, axis="token", dtype=dtype, views=views, trailing=trailing)
    dtypes = {view.dtype for view in views}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes)
    return DraftColumn(key=key, axis=axis, dtype=dtype, views=views)


def stream_specs(streams: Mapping[str, Stream]) -> dict[str, StreamSpec]:
    """The named streams as the layout knows them."""
    return {
        name: StreamSpec(dtype=np.dtype(s.dtype).str, trailing=tuple(s.shape))
        for name, s in streams.items()
    }
