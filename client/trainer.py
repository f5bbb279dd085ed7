"""Trainer: steps out of the shared-memory queue, words back into it.

    with Trainer.attach("default", dp_rank=rank, dp_size=world) as trainer:
        for step in trainer.steps():
            for batch in step: ...
            trainer.publish_policy_version(step.index + 1, uri="weights/...")
            trainer.commit(step)

Owns one reader line of one ring; needs no HTTP. One thread at a time; not for a forked child.

What is written, and when:
- finish:   `finished_step`, then `released`: when the next step is asked for, at `step.release()`,
            or when the `with` block is left without an exception. Left by one, Ctrl-C included, the
            step stays unfinished and comes again.
- commit:   by `commit(step)`; with commit="on_next_step", step k when step k+1 is asked for.
- version:  the message, then the word; never below what this line has announced.

Invariants. Records come in order: a step starts at microbatch 0 and follows the one before, else
RingGap. Nothing is released that was not finished, except under release="microbatch", where each
microbatch is freed as the iterator moves on. Every wait ends: with a record, with state ENDED, or
with ServiceGone once the writer's lock has been free for `service_gone_s`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch

from headrace.client.reader import WAIT_CAP_S, Record, RingReader
from headrace.client.step import Microbatch, Step
from headrace.schemas.errors import (
    HeadraceError,
    ResumeUnknown,
    RingCorrupt,
    RingGap,
    ServiceGone,
    TopologyMismatch,
    TrainerError,
)
from headrace.schemas.ring import Kind, State

__all__ = ["Microbatch", "Step", "Trainer"]

CLOSE_BOUND_S = 10.0  # how long a clean end waits for the rest of a step that is being published

log = logging.getLogger(__name__)


class Trainer:
    """Made by `attach`. `release` is the ring's: "step" or "microbatch"."""

    def __init__(
        self,
        reader: RingReader,
        *,
        commit: Literal["explicit", "on_next_step"] = "explicit",
        service_gone_s: float | None = 300.0,
        device: str | torch.device = "cpu",
    ) -> None:
        if commit not in ("explicit", "on_next_step"):
            raise ValueError(f'commit: got {commit!r}, want "explicit" or "on_next_step"')
        self._reader, self._service_gone_s, self._device = (
            reader,
            service_gone_s,
            torch.device(device),
        )
        self._commits_itself = commit == "on_next_step"
        self._step: Step | None = None  # handed out and not yet finished
        self._read = 0  # its microbatches read so far
        self._last: int | None = None  # the index of the step handed out last
        self._gone: tuple[float, str] | None = (
            None  # since when the writer's lock is free: monotonic, wall clock
        )
        self._steps = self._microbatches = self._bytes = 0
        self._waited_s = 0.0
        self._final: dict[str, Any] | None = None  # statistics of a trainer that has left

    @classmethod
    def attach(
        cls,
        run: str = "default",
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        queue_dir: str | os.PathLike[str] | None = None,
        commit: Literal["explicit", "on_next_step"] = "explicit",
        resume_after: int | Literal["committed"] | None = None,
        replica: int = 0,
        replicas: int = 1,
        attach_timeout_s: float = 600.0,
        service_gone_s: float | None = 300.0,
        device: str | torch.device = "cpu",
    ) -> Trainer:
        """Take this rank's place at the run's queue, waiting up to `attach_timeout_s` for the
        service to make it.

        `queue_dir`: else HEADRACE_QUEUE__DIR, else /dev/shm/headrace-{uid}. `resume_after=None`
        continues at the first step that no earlier holder of this place has released. tp, pp and cp
        peers share `dp_rank` and are `replica` i of `replicas`. `service_gone_s`: how long to wait
        for a service that has died; 0 not at all, None for ever. Raises ServiceGone, RingBusy,
        RingForeign, TopologyMismatch, ResumeUnknown.
        """
        if not 0 <= dp_rank < dp_size:
            raise TopologyMismatch(
                f"dp_rank: got {dp_rank}, want 0 .. {dp_size - 1} (dp_size {dp_size})"
            )
        if resume_after is not None:
            raise ResumeUnknown(
                f"resume_after: got {resume_after!r}, want None: this service keeps no delivered "
                "steps to resume from; None continues at the first unreleased step"
            )
        reader = RingReader.attach(
            _queue_dir(queue_dir),
            run,
            dp_rank,
            replica,
            dp_size=dp_size,
            replicas=replicas,
            timeout_s=attach_timeout_s,
        )
        try:
            return cls(reader, commit=commit, service_gone_s=service_gone_s, device=device)
        except BaseException:
            reader.close()
            raise

    # steps

    def steps(self) -> Iterator[Step]:
        """Each step as its first microbatch is there; ends when the service has ended the run.

        Asking for the next step finishes the one before. Raises ServiceGone, RingGap, RingCorrupt,
        or the error that the service left as a notice.
        """
        while True:
            self._finish_step(bound_s=None)
            if self._commits_itself and self._last is not None:
                self._reader.commit(self._last)
            record = self._await()
            if record is None:
                return
            yield self._begin(record)

    def _begin(self, record: Record) -> Step:
        if record.index:
            raise RingGap(
                f"step {record.step}: the first record is microbatch {record.index} of "
                f"{record.count}; those before it were freed by a process that did not finish the "
                "step (release='microbatch'): start the service anew"
            )
        if self._last is not None and record.step != self._last + 1:
            raise RingGap(f"step {record.step}: want {self._last + 1}: steps were skipped")
        step = Step(
            record, self._open(record), read=self._read_microbatch, free=self._free_microbatch,
            give_back=self._release_step, one_pass=self.release == "microbatch",
        )  # fmt: skip
        self._step, self._read, self._last = step, 1, step.index
        self._steps += 1
        return step

    def _read_microbatch(self, step: Step, index: int) -> Microbatch:
        """For Step: the next record, which is microbatch `index` of `step`."""
        return self._open(self._next_of(step, index, bound_s=None))

    def _free_microbatch(self, step: Step, index: int) -> None:
        """For Step under release="microbatch": the iterator has left microbatch `index`."""
        if step is self._step:
            self._reader.release(step.first_sequence + index + 1)

    def _release_step(self, step: Step) -> None:
        """For Step: `step.release()`."""
        if step is self._step:
            self._finish_step(bound_s=None)

    def _next_of(self, step: Step, index: int, bound_s: float | None) -> Record:
        record = self._await(bound_s)
        if record is None:
            raise ServiceGone(f"step {step.index}: only {index} of {step.count} microbatches came")
        if (record.step, record.index, record.count) != (step.index, index, step.count):
            raise RingCorrupt(
                f"{self._reader.path.name}, record {record.sequence}: got step {record.step}, "
                f"microbatch {record.index} of {record.count}, want step {step.index}, microbatch "
                f"{index} of {step.count}"
            )
        self._read = index + 1
        return record

    def _open(self, record: Record) -> Microbatch:
        batch = Microbatch.of(record, self._device)
        if (batch.info.step, batch.info.index) != (record.step, record.index):
            raise RingCorrupt(
                f"{self._reader.path.name}, record {record.sequence}: the head says step "
                f"{batch.info.step}, microbatch {batch.info.index}, the descriptor step "
                f"{record.step}, microbatch {record.index}"
            )
        self._microbatches += 1
        self._bytes += len(record.payload)
        return batch

    def _finish_step(self, *, bound_s: float | None) -> None:
        """Finish the step handed out last and give it back, read to its end or not."""
        step = self._step
        if step is None:
            return
        while self._read < step.count:
            if self.release == "microbatch":
                self._reader.release(step.first_sequence + self._read)
            self._next_of(step, self._read, bound_s)
        self._step = None
        step.forget()
        self._reader.finish(step.index)
        self._reader.release(step.first_sequence + step.count)

    # waiting

    def _await(self, bound_s: float | None = None) -> Record | None:
        """The next record; None where the run has ended, or after `bound_s` without one."""
        if not self._reader.attached:
            raise TrainerError("this trainer has left: it is closed, or this is a forked child")
        started = time.monotonic()
        limit = None if bound_s is None else started + bound_s
        try:
            while True:
                record = self._reader.next(timeout_s=WAIT_CAP_S)
                if record is not None:
                    return self._checked(record)
                ended = self._reader.state in (State.ENDED, State.REFUSED)
                alive = self._reader.writer_alive()
                # after both looks: nothing is published behind an end or a death
                if self._reader.cursor < self._reader.published:
                    continue
                if ended:
                    self._raise_notice()
                    return None
                if alive:
                    self._back()
                else:
                    self._missing()
                if limit is not None and time.monotonic() >= limit:
                    return None
        finally:
            self._waited_s += time.monotonic() - started

    def _checked(self, record: Record) -> Record | None:
        self._back()
        if record.kind is Kind.END:
            return None
        if record.kind is Kind.RESET:
            raise RingGap(
                f"the service has gone back and starts generation {record.generation + 1}: attach "
                "again, saying by resume_after which step your weights come from"
            )
        return record

    def _raise_notice(self) -> None:
        notice = self._reader.notice
        if notice is not None and "code" in notice:
            kind = _error_class(str(notice["code"]))
            raise kind(f"the service ended the run: {notice.get('message', notice)}")

    def _missing(self) -> None:
        if self._gone is None:
            self._gone = (time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S"))
            bound = "for ever" if self._service_gone_s is None else f"{self._service_gone_s:g} s"
            log.warning(
                "no service holds %s since %s; waiting %s", self._reader.path, self._gone[1], bound
            )
        if (
            self._service_gone_s is not None
            and time.monotonic() - self._gone[0] >= self._service_gone_s
        ):
            self._service_gone(self._gone[1])

    def _service_gone(self, since: str) -> NoReturn:
        raise ServiceGone(
            f"no service holds {self._reader.path} since {since}, and service_gone_s is "
            f"{self._service_gone_s:g}: what was published has been delivered; start the service "
            "and attach again"
        )

    def _back(self) -> None:
        if self._gone is not None:
            log.info("a service holds %s again", self._reader.path)
            self._gone = None

    # words

    def commit(self, step: Step | int) -> None:
        """This and every earlier step is in a checkpoint that survives. ValueError: never seen."""
        index = step.index if isinstance(step, Step) else step
        known = max((k for k in (self._last, self.finished_step) if k is not None), default=-1)
        if not 0 <= index <= known:
            raise ValueError(
                f"commit: got step {index}, want 0 .. {known}, the last one that was handed out"
            )
        self._reader.commit(index)

    def publish_policy_version(self, version: int, uri: str | None = None, **metadata: Any) -> None:
        """The weights of `version` are at `uri`. `metadata` is JSON; with the uri at most about
        3,000 bytes.

        Raises ValueError below the version announced before, or where it is too long.
        """
        message = {"policy_version": version, "uri": uri, "metadata": metadata}
        self._reader.publish_policy_version(version, message)

    @property
    def release(self) -> str:
        """ "step" or "microbatch": what the lease is, by the ring's header."""
        return self._reader.geometry.release

    @property
    def finished_step(self) -> int | None:
        """The last step finished at this place, by this process or an earlier one."""
        found: int | None = self.statistics()["finished_step"]
        return found

    @property
    def committed_step(self) -> int | None:
        found: int | None = self.statistics()["committed_step"]
        return found

    @property
    def policy_version(self) -> int | None:
        """The version announced last at this place."""
        found: int | None = self.statistics()["policy_version"]
        return found

    def statistics(self) -> dict[str, Any]:
        """Counts since `attach`, seconds waited, and where this place stands."""
        if self._final is not None:
            return dict(self._final)
        return {
            "steps": self._steps,
            "microbatches": self._microbatches,
            "bytes": self._bytes,
            "waited_s": self._waited_s,
            "ready_records": self._reader.published - self._reader.cursor,
            "leased_records": self._reader.cursor - self._reader.released,
            "damaged_records": self._reader.damaged,
            "finished_step": self._reader.finished_step,
            "committed_step": self._reader.committed_step,
            "policy_version": self._reader.policy_version,
            "state": self._reader.state.name,
        }

    # leaving

    def close(self) -> None:
        """Finish the step handed out last and leave. Tensors stay readable. Safe to call again."""
        try:
            if self._reader.attached:
                self._finish_step(bound_s=CLOSE_BOUND_S)
        except HeadraceError as error:
            log.warning("the last step stays unfinished and comes again: %s", error)
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._final is None:
            self._final = self.statistics()
            self._reader.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()


def _queue_dir(given: str | os.PathLike[str] | None) -> Path:
    named = given if given is not None else os.environ.get("HEADRACE_QUEUE__DIR")
    return Path(named) if named else Path(f"/dev/shm/headrace-{os.geteuid()}")


def _error_class(code: str) -> type[HeadraceError]:
    """The class of the tree whose `code` it is; TrainerError for any other word."""
    waiting: list[type[HeadraceError]] = [HeadraceError]
    while waiting:
        kind = waiting.pop()
        if kind.__dict__.get("code") == code:
            return kind
        waiting.extend(kind.__subclasses__())
    return TrainerError
