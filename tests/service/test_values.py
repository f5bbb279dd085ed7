"""The least and greatest of a float16 column, taken through integers, are those that numpy finds among its numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np

from headrace.service.values import _range

EDGES = np.float16([0, -0.0, 1, -1, 6e-8, -6e-8, 65504, -65504, np.inf, -np.inf, np.nan, -np.nan])


def test_a_float16_column_has_the_range_of_its_numbers():
    for count in range(4):
        for drawn in itertools.product(EDGES, repeat=count):
            column = np.array(drawn, np.float16)
            least, greatest = _range(column)
            if np.isnan(column).any():
                assert math.isnan(least) or math.isnan(greatest), column
            else:
                wide = [0.0, *column.astype(np.float64)]
                assert (least, greatest) == (min(wide), max(wide)), column


def test_every_finite_float16_is_in_range_of_itself():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert _range(every[np.isfinite(every)].reshape(2, -1)) == (-65504.0, 65504.0)
