"""What travels with every microbatch: MicrobatchInfo, StepInfo, and the self-describing head of a
ring record.

A record in the ring is

    | array 0 | pad to 64 | array 1 | ... | info array 0 | ... | meta (msgpack) |
    0                                                          meta_offset      length

`meta` names each array by (name, dtype, shape, offset from the record's start), the plain values of
the mapping (`qkv_format`, `max_seqlen`), and the fields of MicrobatchInfo. The service writes it
(`RecordLayout`), the trainer reads it (`read_record`); neither needs the run's settings to do so.

Arrays of the mapping come in the order of `collate_datums`' keys, info arrays after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import RingCorrupt
from headrace.schemas.tensors import ArraySpec, aligned

__all__ = ["MicrobatchInfo", "RecordLayout", "StepInfo", "read_record"]

Strategy = Literal["ddp", "fsdp", "sum"]

INFO_ARRAYS = (
    "datum_numbers",
    "datum_loss_tokens",
    "rollout_loss_tokens",
    "group_loss_tokens",
    "group_rollouts",
    "group_index",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """One optimizer step as planned for all ranks. Counts are over the whole step, fillers left
    out.
    """

    step: int  # from 0 over the run's life
    count: int  # microbatches a rank
    dp_size: int
    layout: str  # "padded" | "thd"
    step_loss_tokens: int  # positions with weight != 0
    step_loss_weight: float  # sum of weights
    step_datums: int  # datums with at least one loss token
    step_rollouts: int  # rollouts with at least one loss token
    step_groups: int  # groups with at least one loss token


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInfo:
    """One microbatch of one rank, and the denominators of its whole step.

    Arrays are `[N]`, one entry a datum of this microbatch, in batch order. A loss normalised by
    them adds up over microbatches and ranks to the loss of the step in one batch.
    """

    step: int
    index: int  # 0 .. count-1
    count: int
    dp_rank: int
    dp_size: int
    layout: str
    num_datums: int
    is_filler: bool  # a copy that carries no loss, so that every rank has `count` microbatches
    policy_version_min: int
    policy_version_max: int
    step_loss_tokens: int
    step_loss_weight: float
    step_datums: int
    step_rollouts: int
    step_groups: int
    datum_ids: list[str | None]  # [N] the client's id
    datum_numbers: NDArray[np.uint64]  # [N] (post << 16) + index, unique in the run
    datum_loss_tokens: NDArray[np.int64]  # [N] loss tokens of the datum
    rollout_loss_tokens: NDArray[np.int64]  # [N] ... of its rollout, in the whole step
    group_loss_tokens: NDArray[np.int64]  # [N] ... of its group, in the whole step
    group_rollouts: NDArray[np.int64]  # [N] rollouts of its group in the step
    group_index: NDArray[np.int64]  # [N] 0-based number of its group within the step

    def loss_scale(self, strategy: Strategy) -> int:
        """What to multiply a step-normalised loss sum by, so that gradients add up over ranks.

        "ddp" and "fsdp" average gradients over `dp_size` ranks, hence `dp_size`; "sum" is 1.
        Raises ValueError for another word.
        """
        if strategy not in ("ddp", "fsdp", "sum"):
            raise ValueError(f'loss_scale: got {strategy!r}, want "ddp", "fsdp" or "sum"')
        return 1 if strategy == "sum" else self.dp_size


SCALARS = tuple(f.name for f in fields(MicrobatchInfo) if f.name not in INFO_ARRAYS)


class RecordLayout:
    """Offsets of one record, known before a byte of it is written.

    `specs`: the arrays of the mapping, in key order; `constants`: its plain values; `info`: what
    goes beside it.
    """

    def __init__(
        self, specs: Sequence[ArraySpec], constants: Mapping[str, Any], info: MicrobatchInfo
    ) -> None:
        self._info = info
        info_specs = [_spec_of(name, getattr(info, name)) for name in INFO_ARRAYS]
        placed, offset = [], 0
        for spec in (*specs, *info_specs):
            placed.append((spec, offset))
            offset += aligned(spec.nbytes)
        self._arrays, self._info_arrays = placed[: len(specs)], placed[len(specs) :]
        self._meta = cast(
            bytes,
            msgpack.packb(
                {
                    "arrays": [[s.name, s.dtype, list(s.shape), at] for s, at in self._arrays],
                    "info_arrays": [
                        [s.name, s.dtype, list(s.shape), at] for s, at in self._info_arrays
                    ],
                    "constants": dict(constants),
                    "info": {name: getattr(info, name) for name in SCALARS},
                }
            ),
        )
        self.meta_offset = offset
        self.nbytes = offset + len(self._meta)

    def write(self, record: memoryview) -> dict[str, NDArray[Any]]:
        """Put the info arrays and the meta into `record`; return the mapping's arrays as views to
        fill.
        """
        for spec, at in self._info_arrays:
            spec.view(record, at)[...] = getattr(self._info, spec.name)
        record[self.meta_offset : self.nbytes] = self._meta
        return {spec.name: spec.view(record, at) for spec, at in self._arrays}


def read_record(
    record: memoryview, meta_offset: int
) -> tuple[dict[str, NDArray[Any]], dict[str, Any], MicrobatchInfo]:
    """(arrays, constants, info) of a record, as views into `record` without copying.

    Raises RingCorrupt when the head is not one that `RecordLayout` wrote.
    """
    try:
        meta = msgpack.unpackb(record[meta_offset:])
        arrays = _views(record, meta["arrays"])
        fields: dict[str, Any] = meta["info"] | _views(record, meta["info_arrays"])
        info = MicrobatchInfo(**fields)
        return arrays, meta["constants"], info
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        where = f"record head at byte {meta_offset} of {len(record)}"
        raise RingCorrupt(f"{where}: {error!r}") from error


def _spec_of(name: str, array: NDArray[Any]) -> ArraySpec:
    return ArraySpec(name=name, dtype=array.dtype.str, shape=array.shape)


def _views(record: memoryview, entries: list[list[Any]]) -> dict[str, NDArray[Any]]:
    return {
        name: ArraySpec(name=name, dtype=dtype, shape=tuple(shape)).view(record, at)
        for name, dtype, shape, at in entries
    }
