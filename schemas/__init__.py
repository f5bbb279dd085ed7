"""What both sides agree on: datums, batches, errors, and the bytes between them.

    from headrace.schemas import Datum, collate_datums

Imports nothing else of headrace's, and no torch until a name that needs it is asked for: those are
resolved by `__getattr__`, so that an environment worker can import this package in a base install.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.schemas.errors import DatumError, FieldError, HeadraceError
from headrace.schemas.fields import CROSS_ENTROPY_IGNORE_IDX
from headrace.schemas.step import MicrobatchInfo, StepInfo

if TYPE_CHECKING:
    from headrace.schemas.collate import collate_datums
    from headrace.schemas.datum import Datum
    from headrace.schemas.packed_seq import (
        PackedSeqParams,
        packed_seq_params_from_doc_ids,
        to_flash_attention_kwargs,
    )

__all__ = [
    "CROSS_ENTROPY_IGNORE_IDX",
    "Datum",
    "DatumError",
    "FieldError",
    "HeadraceError",
    "MicrobatchInfo",
    "PackedSeqParams",
    "StepInfo",
    "collate_datums",
    "packed_seq_params_from_doc_ids",
    "to_flash_attention_kwargs",
]

_TORCH_BOUND = {
    "Datum": "datum",
    "PackedSeqParams": "packed_seq",
    "collate_datums": "collate",
    "packed_seq_params_from_doc_ids": "packed_seq",
    "to_flash_attention_kwargs": "packed_seq",
}


def __getattr__(name: str) -> Any:
    module = _TORCH_BOUND.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"headrace.schemas.{name} needs torch, which is not installed: "
            "pip install 'headrace[torch]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
