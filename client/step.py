"""Step and Microbatch: what a trainer's loop holds.

    for step in trainer.steps():          Step: iterable again and again, `len` microbatches
        for batch in step:                Microbatch: Mapping[str, Tensor | int | str], and `.info`

A microbatch's tensors are views into the ring; none of their bytes is copied or changed here. The
lease is the step: the views are good until the next step is asked for or `step.release()`. Under
release="microbatch" each is good until the iterator moves on, and a step can be gone through once.

Trainer makes both and reads the ring; a Step only remembers what it has been given and where it
stands:

    OPEN ──(step.release(), the next step, a clean end)──► RELEASED
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from headrace.client.reader import Record
from headrace.schemas.errors import TrainerError
from headrace.schemas.step import MicrobatchInfo, StepInfo, read_record

__all__ = ["Microbatch", "Step"]

Value = torch.Tensor | int | str


class Microbatch(Mapping[str, Value]):
    """The keys of `collate_datums`, and for THD `cu_seqlens` int32 [N+1] and `max_seqlen`.

    `info` says which step and which datums they are, and what to divide a loss by.
    """

    __slots__ = ("_values", "info")

    def __init__(self, values: dict[str, Value], info: MicrobatchInfo) -> None:
        self._values = values
        self.info = info

    @classmethod
    def of(cls, record: Record, device: torch.device) -> Microbatch:
        """Views into `record` on the CPU, copies on any other device. Raises RingCorrupt."""
        arrays, constants, info = read_record(record.payload, record.meta_offset)
        values: dict[str, Value] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if device.type != "cpu":
            values = {
                name: tensor.to(device)
                for name, tensor in values.items()
                if isinstance(tensor, torch.Tensor)
            }
        values.update(constants)
        return cls(values, info)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return (
            f"Microbatch(step={self.info.step}, index={self.info.index}, keys={list(self._values)})"
        )


class Step:
    """What one optimizer step consumes on this rank. `index` counts from 0 over the run's life."""

    def __init__(
        self,
        first: Record,
        batch: Microbatch,
        *,
        read: Callable[[Step, int], Microbatch],
        free: Callable[[Step, int], None],
        give_back: Callable[[Step], None],
        one_pass: bool,
    ) -> None:
        self._read, self._free, self._give_back, self._one_pass = read, free, give_back, one_pass
        self._batches: list[Microbatch] = [batch]
        self._passed = self._released = False
        self.first_sequence = first.sequence
        self.index = batch.info.step
        self.count = batch.info.count
        self.info = _step_info(batch.info)

    def __len__(self) -> int:
        return self.count

    @property
    def released(self) -> bool:
        return self._released

    def __iter__(self) -> Iterator[Microbatch]:
        """Each microbatch as soon as it is there. Raises TrainerError once the step is released."""
        self._check_open()
        if self._one_pass:
            return self._once()
        return self._again()

    def _again(self) -> Iterator[Microbatch]:
        for index in range(self.count):
            self._check_open()
            if index == len(self._batches):
                self._batches.append(self._read(self, index))
            yield self._batches[index]

    def _once(self) -> Iterator[Microbatch]:
        if self._passed:
            raise TrainerError(
                f"step {self.index}: gone through already; under release='microbatch' each one is "
                "freed as the iterator moves on: set trainer.release = 'step' in the service"
            )
        self._passed = True
        batches, self._batches = self._batches, []
        for index in range(self.count):
            self._check_open()
            yield batches.pop() if batches else self._read(self, index)
            self._free(self, index)

    def release(self) -> None:
        """Finish the step now: its views may change at once. Safe to call again."""
        if not self._released:
            self._give_back(self)

    def forget(self) -> None:
        """The trainer has given the step back."""
        self._released = True
        self._batches.clear()

    def _check_open(self) -> None:
        if self._released:
            raise TrainerError(
                f"step {self.index}: released: a step is good until the next one is asked for or "
                "step.release()"
            )

    def __repr__(self) -> str:
        return f"Step(index={self.index}, count={self.count})"


def _step_info(info: MicrobatchInfo) -> StepInfo:
    return StepInfo(
        step=info.step, count=info.count, dp_size=info.dp_size, layout=info.layout,
        step_loss_tokens=info.step_loss_tokens, step_loss_weight=info.step_loss_weight,
        step_datums=info.step_datums, step_rollouts=info.step_rollouts,
        step_groups=info.step_groups,
    )  # fmt: skip
