"""(dtype, shape, bytes) <-> ndarray, without copying.

Owns the wire's dtype names and the 64-byte alignment that spool and ring share. Little-endian, C
order, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "WIRE_DTYPES", "ArraySpec", "aligned"]

ALIGNMENT = 64  # bytes; a cache line

WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "bool",
    )
}  # fmt: skip


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the next multiple of 64."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """An array that has a name and a size, and not yet a place."""

    name: str
    dtype: str  # as np.dtype(...).str, e.g. "<i8"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def view(self, buffer: memoryview | bytearray, offset: int = 0) -> NDArray[Any]:
        """The array at `offset` of `buffer`. Raises ValueError where it does not fit."""
        count = prod(self.shape)
        if offset < 0 or offset + self.nbytes > len(buffer):
            raise ValueError(
                f"{self.name}: {self.nbytes} bytes at {offset} exceed a buffer of {len(buffer)}"
            )
        flat = np.frombuffer(buffer, dtype=self.dtype, count=count, offset=offset)
        return flat.reshape(self.shape)

    def empty(self) -> NDArray[Any]:
        return np.empty(self.shape, dtype=self.dtype)
