"""What a caller hands over -> WireDatum: a private copy, checked, so that the caller may go on.

Takes a Datum (ours, AutoModel's, or any object with `input_ids` and `loss_fn_inputs`) by its
attributes, or a mapping with the same names. Values may be

    torch tensors     detached, moved to the CPU, bfloat16 widened to float32
    numpy arrays      kept in their dtype
    lists, numbers    int -> int32, float -> float32, bool -> bool

Invariants: nothing of the result shares memory with the caller's data; torch is never imported;
every refusal is a DatumError raised in the caller's own call. Called by `RolloutClient.submit`.
Never repairs: a wrong length, dtype or key is refused, not cast or dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import DatumError
from headrace.schemas.wire_datum import METADATA, WireDatum

__all__ = ["snapshot"]

KNOWN = frozenset({"input_ids", "loss_fn_inputs", *METADATA})


def snapshot(source: Any, policy_version: int | None = None) -> WireDatum:
    """`source` as it is now. Its own `policy_version` goes before the argument.

    Raises DatumError for what cannot travel, among it a datum without any policy version.
    """
    if isinstance(source, Mapping):
        if unknown := sorted(str(key) for key in source.keys() - KNOWN):
            raise DatumError(f"datum: unknown keys {unknown}; known are {sorted(KNOWN)}")
        given = dict(source)
    else:
        given = {name: getattr(source, name, None) for name in KNOWN}
    if given.get("input_ids") is None:
        want = "a Datum, or a mapping with input_ids and loss_fn_inputs"
        raise DatumError(f"datum: got {type(source).__name__} without input_ids, want {want}")
    losses = given.get("loss_fn_inputs")
    if losses is not None and not isinstance(losses, Mapping):
        raise DatumError(f"loss_fn_inputs: got {type(losses).__name__}, want a mapping")

    metadata = {name: given.get(name) for name in METADATA}
    if metadata["policy_version"] is None:
        metadata["policy_version"] = policy_version
    if metadata["policy_version"] is None:
        hint = "pass submit(..., policy_version=), the version of the weights that sampled it"
        raise DatumError(f"policy_version: neither the datum nor the call names one; {hint}")
    for name in ("group_size", "policy_version"):
        metadata[name] = _integer(name, metadata[name])
    metadata["reward"] = _number("reward", metadata["reward"])
    return WireDatum(
        input_ids=_copy("input_ids", given["input_ids"]),
        loss_fn_inputs={
            key: _copy(f"loss_fn_inputs[{key!r}]", value) for key, value in (losses or {}).items()
        },
        **metadata,
    )


def _copy(field: str, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = _from_torch(field, value)
    elif isinstance(value, list | tuple | int | float) and not isinstance(value, np.generic):
        return _from_python(field, value)
    array = np.array(value, order="C")
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # ml_dtypes, as JAX gives
        array = array.astype(np.float32)
    return array


def _from_torch(field: str, tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        want = "want a dense tensor of a plain integer, float or bool dtype"
        raise DatumError(f"{field}: got a {tensor.dtype} tensor, {want}: {error}") from error


def _from_python(field: str, value: Any) -> NDArray[Any]:
    try:
        wide = np.asarray(value)
    except ValueError as error:
        raise DatumError(f"{field}: got a ragged list, want one flat list of numbers") from error
    if wide.dtype.kind not in "biuf" or wide.size == 0:
        got = "an empty list" if wide.size == 0 else f"a list of {wide.dtype}"
        raise DatumError(f"{field}: got {got}, want numbers")
    if wide.dtype.kind == "b":
        return wide
    narrow = np.dtype(np.float32 if wide.dtype.kind == "f" else np.int32)
    with np.errstate(over="ignore"):
        array = wide.astype(narrow)
    lost = np.isinf(array) & ~np.isinf(wide) if wide.dtype.kind == "f" else array != wide
    if lost.any():
        place = int(np.argmax(lost))
        want = f"want a value that fits {narrow}, or a numpy array of a wider dtype"
        raise DatumError(f"{field}: got {wide.reshape(-1)[place]} at {place}, {want}")
    return array


def _integer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool | np.bool_):
        raise DatumError(f"{name}: got {value!r}, want an integer")
    try:
        return operator.index(value)
    except TypeError as error:
        raise DatumError(f"{name}: got {value!r}, want an integer") from error


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatumError(f"{name}: got {value!r}, want a number") from error
