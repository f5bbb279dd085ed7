"""One datum as it travels, checked: what may stand in a body, whichever form it has.

    WireDatum  input_ids int32 [T], loss_fn_inputs {key: [T] per token | [1] per sample
                                                         | [T, ...] or [T-1, ...] a named stream}

Owns the record, its metadata's names, and the rule which datums may share the columns of a body.
Which keys are streams, and of what dtype and shape, is the run's to say: here an array of more than
one dimension is taken for one. A stream of one dimension travels as per token.

Made by the client (snapshot.py), by wire.py's `unpack`, and by tests. Never shifts, pads or
repairs, and looks at no values but ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import DatumError
from headrace.schemas.tensors import WIRE_DTYPES

__all__ = ["METADATA", "Kind", "WireDatum", "kinds_of", "merge_kinds", "on_wire"]

ID_KEYS = frozenset({"input_ids", "target_tokens"})
INT32 = np.iinfo(np.int32)
LITTLE_ENDIAN = {
    **{dtype.newbyteorder(">"): dtype for dtype in WIRE_DTYPES.values()},
    **{dtype.newbyteorder("<"): dtype for dtype in WIRE_DTYPES.values()},
}

# singular (per-datum) -> plural (columnar), in the order of the bytes
METADATA = {
    "id": "ids",
    "rollout_id": "rollout_ids",
    "group_id": "group_ids",
    "group_size": "group_sizes",
    "policy_version": "policy_versions",
    "reward": "rewards",
    "source": "sources",
    "split": "splits",
}
STRINGS = ("id", "rollout_id", "group_id", "source", "split")

StreamKind: TypeAlias = tuple[str, tuple[int, ...], Literal["T", "T-1"]]  # dtype, trailing, rows
Kind: TypeAlias = Literal["token", "sample", "either"] | StreamKind  # "either": T = 1, both fit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WireDatum:
    """One datum as it travels. Raises DatumError where it cannot.

    Arrays are C-contiguous, little-endian, of a dtype in WIRE_DTYPES; a scalar becomes `[1]`. An
    array that is so already is kept, not copied.
    """

    input_ids: NDArray[np.int32]  # [T], T >= 1; any integer dtype is taken
    # key -> [T] or [1]; or a named stream's [T, ...] or [T-1, ...]
    loss_fn_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    id: str | None = None
    rollout_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None  # >= 1
    policy_version: int | None = None  # >= 0; None: the post's
    reward: float | None = None  # finite
    source: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        ids = on_wire("input_ids", self.input_ids)
        if ids.ndim != 1 or ids.size == 0:
            want = "want 1-D [T] with at least one token"
            raise DatumError(f"input_ids: got shape {list(ids.shape)}, {want}")
        entries = {k: _entry(k, v, ids.size) for k, v in self.loss_fn_inputs.items()}
        _check_metadata(self)
        object.__setattr__(self, "input_ids", ids)
        object.__setattr__(self, "loss_fn_inputs", entries)

    @property
    def nbytes(self) -> int:
        """Bytes of payload, metadata left out."""
        return int(self.input_ids.nbytes + sum(a.nbytes for a in self.loss_fn_inputs.values()))


def kinds_of(datum: WireDatum) -> dict[str, Kind]:
    """Whether each loss key is per token or per sample, "either" at T = 1, or what stream it is."""
    tokens = datum.input_ids.size
    kinds: dict[str, Kind] = {}
    for key, array in datum.loss_fn_inputs.items():
        if array.ndim > 1:
            rows: Literal["T", "T-1"] = "T" if len(array) == tokens else "T-1"
            kinds[key] = (array.dtype.name, array.shape[1:], rows)
        elif tokens == 1:
            kinds[key] = "either"
        else:
            kinds[key] = "token" if array.size == tokens else "sample"
    return kinds


def merge_kinds(first: Mapping[str, Kind], second: Mapping[str, Kind]) -> dict[str, Kind]:
    """The kinds of a body that holds both; DatumError where one body cannot."""
    if first.keys() != second.keys():
        raise DatumError(
            f"datums of one post need the same loss_fn_inputs keys: got {sorted(first)} and "
            f"{sorted(second)}; give every datum all of them"
        )
    if first == second:
        return dict(first)
    merged: dict[str, Kind] = {}
    for key, kind in first.items():
        other = second[key]
        streams = isinstance(kind, tuple) or isinstance(other, tuple)
        if kind != other and (streams or "either" not in (kind, other)):
            raise DatumError(
                f"loss_fn_inputs[{key!r}]: {_named(kind)} in some datums and {_named(other)} in "
                "others; send one kind in the whole run"
            )
        merged[key] = other if kind == "either" else kind
    return merged


def _named(kind: Kind) -> str:
    if isinstance(kind, tuple):
        dtype, trailing, rows = kind
        return f"a stream {dtype} [{', '.join([rows, *map(str, trailing)])}]"
    return "one value" if kind == "either" else f"per {kind}"


def on_wire(key: str, array: NDArray[Any]) -> NDArray[Any]:
    """The array in the wire's byte order, ids as int32. DatumError for dtypes it does not have."""
    dtype = LITTLE_ENDIAN.get(array.dtype)
    if dtype is None:
        want = f"want one of {', '.join(WIRE_DTYPES)}"
        raise DatumError(f"{key}: got dtype {array.dtype}, {want}; cast it before it is sent")
    if key in ID_KEYS and dtype is not WIRE_DTYPES["int32"]:
        if array.dtype.kind not in "iu":
            raise DatumError(f"{key}: got dtype {array.dtype}, want integers")
        if array.size:
            low, high = int(array.min()), int(array.max())
            if low < INT32.min or high > INT32.max:
                raise DatumError(f"{key}: got ids {low} .. {high}, want ids that fit int32")
        dtype = WIRE_DTYPES["int32"]
    return np.asarray(array, dtype=dtype, order="C")


def _entry(key: str, array: NDArray[Any], tokens: int) -> NDArray[Any]:
    if not isinstance(key, str) or key == "input_ids":
        raise DatumError(f'loss_fn_inputs: got key {key!r}, want a string other than "input_ids"')
    if array.ndim > 1 and len(array) in (tokens, tokens - 1) and key not in ID_KEYS:
        return on_wire(key, array)
    if array.ndim > 1 or array.size not in (1, tokens):
        got = f"got shape {list(array.shape)} beside {tokens} input_ids"
        raise DatumError(
            f"loss_fn_inputs[{key!r}]: {got}, want 1-D [{tokens}] (per token) or [1] (per sample); "
            f"only a named stream has [{tokens}, ...] or [{tokens - 1}, ...]"
        )
    return on_wire(key, array.reshape(-1))


def _check_metadata(datum: WireDatum) -> None:
    for name in STRINGS:
        value = getattr(datum, name)
        if value is not None and not isinstance(value, str):
            raise DatumError(f"{name}: got {value!r}, want a string")
    for name, least in (("group_size", 1), ("policy_version", 0)):
        value = getattr(datum, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise DatumError(f"{name}: got {value!r}, want an integer of at least {least}")
    if datum.group_size is not None and datum.group_id is None:
        raise DatumError(f"group_size: got {datum.group_size} without a group_id; give both")
    if datum.reward is not None and not (
        isinstance(datum.reward, int | float) and math.isfinite(datum.reward)
    ):
        raise DatumError(f"reward: got {datum.reward!r}, want a finite number, or leave it out")
