"""Slim columns: what can be left out or narrowed without a reader seeing another number.

    targets    input_ids   5 6 7 | 8 9        where each datum's targets are its ids one place to
               targets     6 7 2 | 9 3   ->   the left, only the last ones travel: last_targets 2 3
    weights    whole numbers 0 .. 255  ->  uint8: 1.0 0.0 1.0 -> 1 0 1
    logprobs   float16, by choice of the sender alone: 5e-5 mean, 3.5e-3 largest error

Invariant: but for the float16 logprobs, what is delivered (int64 labels, float32) has the same
bytes as from the full columns; so a weight of -0.0 or 0.5 keeps its column as it is. Functions
return None where a column must stay as it is. Called by wire.py, both ways. Never looks at the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["half_precision", "implied_targets", "last_targets", "small_whole_numbers"]


def last_targets(
    input_ids: Sequence[NDArray[np.int32]], targets: Sequence[NDArray[np.int32]]
) -> NDArray[np.int32] | None:
    """int32 [N], if every datum's targets [T] are its ids [T] one place to the left."""
    for ids, wanted in zip(input_ids, targets, strict=True):
        if wanted.size != ids.size or not (ids[1:] == wanted[:-1]).all():
            return None
    return np.array([wanted[-1] for wanted in targets], np.int32)


def implied_targets(
    input_ids: NDArray[np.int32], lengths: NDArray[Any], last: NDArray[np.int32]
) -> NDArray[np.int32]:
    """int32 [sum T] of ids [sum T] cut by lengths [N]; `last` int32 [N] end the datums.

    implied_targets([5 6 7 8 9], [3 2], [2 3]) is [6 7 2 9 3].
    """
    targets = np.empty_like(input_ids)
    targets[:-1] = input_ids[1:]
    targets[np.cumsum(lengths, dtype=np.int64) - 1] = last
    return targets


def small_whole_numbers(arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.uint8]] | None:
    """The arrays as uint8, if every value is a whole number from 0 to 255."""
    if all(array.itemsize == 1 for array in arrays):
        return None
    narrow = []
    for array in arrays:
        with np.errstate(invalid="ignore"):  # NaN and negatives: the comparison finds them
            small = array.astype(np.uint8)
        if array.dtype.kind == "f":  # by bytes: -0.0 equals 0.0 and is another float32
            same = np.array_equal(small.astype(array.dtype).view(np.uint8), array.view(np.uint8))
        else:  # by value: -1 as int8 has the byte of 255
            same = np.array_equal(small, array)
        if not same:
            return None
        narrow.append(small)
    return narrow


def half_precision(arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float16]] | None:
    """The arrays as float16, if they are wider floats and no value becomes infinite."""
    if any(array.dtype.kind != "f" for array in arrays):
        return None
    with np.errstate(over="ignore"):
        halves = [array.astype(np.float16) for array in arrays]
    grown = any((np.isinf(h) != np.isinf(a)).any() for h, a in zip(halves, arrays, strict=True))
    return None if grown else halves
