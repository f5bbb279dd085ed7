"""The pump: the one thread that reads what trainers say, plans steps, and feeds the rings.

    turn:  readers' words ─► finished, committed, policy version
           complete groups ─► choose ─► plan ─► written down ─► feeder ─► rings

It waits on a condition that a newly complete group wakes, at most 1 ms after something changed,
doubling to 20 ms while nothing does. At most `plan_ahead` steps are planned beyond the one being
consumed, and none while the retain budget is full. A ring whose reader breaks an invariant is given
up with an error; an unexpected exception ends the pump, and status and posts say so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.errors import HeadraceError, RingError, SpoolError
from headrace.service.buffer import Buffer
from headrace.service.feeder import Feeder
from headrace.service.plan.choose import ShortageError, choose_groups
from headrace.service.plan.step import plan_step
from headrace.service.records import Placing, RunSchema
from headrace.service.ring import ReaderWords, RingWriter, State
from headrace.service.settings import Settings
from headrace.service.spool.local import LocalSpool

__all__ = ["Policy", "Pump"]

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.001, 0.02
SENTENCE_EVERY_S = 0.05  # between two looks at what is waited for


@dataclass(frozen=True, slots=True)
class Policy:
    """The newest policy version that a trainer published; None before the first."""

    version: int | None = None
    uri: str | None = None


class Pump:
    """Owns the thread. What it reports is read by other threads: small values, replaced whole."""

    def __init__(
        self,
        settings: Settings,
        *,
        buffer: Buffer,
        spool: LocalSpool,
        rings: Sequence[RingWriter],
        retain_bytes: int,
        schema: Callable[[], RunSchema | None],
        on_policy: Callable[[], None],
        on_delivered: Callable[[int], None],
        shares: Mapping[int, float] | None = None,
    ) -> None:
        self._planner = settings.planner
        self._batch_size = settings.batch_size
        self._placing = Placing(
            microbatch_tokens=settings.microbatch_tokens,
            microbatch_size=self._planner.microbatch_size,
            microbatch_multiple=self._planner.microbatch_multiple,
            sequence_multiple=self._planner.sequence_multiple,
            pack_multiple=self._planner.pack_multiple,
            fixed_pack=self._planner.fixed_pack,
            quadratic_crossover=self._planner.quadratic_crossover,
        )
        self._buffer, self._spool, self._rings = buffer, spool, rings
        self._feeder = Feeder(spool, rings, release=settings.trainer.release)
        self._retain_bytes = retain_bytes
        self._schema, self._on_policy, self._on_delivered = schema, on_policy, on_delivered
        self._wake = threading.Condition()
        self._stopping = self._poked = False
        self._thread = threading.Thread(target=self._run, name="headrace-pump", daemon=True)
        self.policy = Policy()
        self.next_step = 0
        self.delivered_step = self.finished_step = self.committed_step = -1
        self.failure: str | None = None  # why the pump ended, or plans no more
        self.words: list[tuple[ReaderWords, ...]] = [() for _ in rings]  # as heard in the last turn
        self.waits_for = "Step 0 waits for the first datum."
        self._eligibility, self._groups = settings.eligibility, settings.groups
        self._shares = shares
        self._flush_wanted = False
        self._planned_at_version: int | None = None
        self._shortage = "the first datum"
        self._spool_error = ""
        self._sentence_due = 0.0

    def start(self) -> None:
        self._thread.start()

    def groups_came(self) -> None:
        """Groups became complete: take a turn now, if they are enough for a step."""
        if self._partial() or self._enough():
            self.poke()

    def poke(self) -> None:
        """Something may have become possible: take a turn now."""
        with self._wake:
            self._poked = True
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after its current turn."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        wait = FIRST_WAIT_S
        while True:
            try:
                changed = self._turn()
            except Exception as error:
                log.exception("the pump ended: no step is planned or delivered from here on")
                self._fail(error)
                return
            if time.monotonic() >= self._sentence_due:
                self.waits_for = self._sentence()
                self._sentence_due = time.monotonic() + SENTENCE_EVERY_S
            wait = FIRST_WAIT_S if changed else min(2 * wait, LONGEST_WAIT_S)
            with self._wake:
                if not self._poked and not self._stopping:
                    self._wake.wait(wait)
                self._poked = False
                if self._stopping:
                    return

    def _turn(self) -> bool:
        if self.failure is not None:
            return False
        try:
            changed = self._hear()
            changed = self._end_groups() or changed
            while self._plan():
                changed = True
            for step in self._feeder.advance():
                self._on_delivered(self._buffer.delivered(step))
                self.delivered_step, changed = step, True
        except SpoolError as error:
            # Nothing was recorded, so nothing was done: the same turn is taken again.
            if str(error) != self._spool_error:
                log.error("planning waits for the spool: %s", error)
            self._spool_error = str(error)
            return False
        except RingError as error:
            log.error("the run ends for the trainers: %s", error)
            self._fail(error)
            return True
        self._spool_error = ""
        return changed

    def _hear(self) -> bool:
        """Take over what the readers' words say; whether anything changed."""
        self.words = by_rank = [ring.readers() for ring in self._rings]
        firsts = [words[0] for words in by_rank]
        finished = min(-1 if w.finished_step is None else w.finished_step for w in firsts)
        committed = min(-1 if w.committed_step is None else w.committed_step for w in firsts)
        changed = finished != self.finished_step
        self.finished_step = finished
        if committed > self.committed_step:
            self._commit(committed)
            changed = True
        newest = max(
            (w for words in by_rank for w in words if w.policy_version is not None),
            key=lambda w: (w.policy_version, w.message is not None),
            default=None,
        )
        return self._hear_policy(newest) or changed

    def _hear_policy(self, newest: ReaderWords | None) -> bool:
        if newest is None or newest.policy_version == self.policy.version:
            return False
        message = newest.message or {}
        if message.get("policy_version", 0) > (newest.policy_version or 0):
            return False  # the message stands before its word: both are there in the next turn
        policy = Policy(newest.policy_version, message.get("uri"))
        self._spool.record("policy", [policy.version, policy.uri])
        self.policy = policy
        self._on_policy()
        return True

    def _commit(self, committed: int) -> None:
        self._spool.commit(committed, self._buffer.forget())
        for step in range(self.committed_step + 1, committed + 1):
            self._buffer.committed(step)
        self.committed_step = committed
        for ring in self._rings:
            ring.set_committed(committed)

    def _end_groups(self) -> bool:
        """End groups by time and by age; tell the spool what was dropped."""
        if self._groups.on_timeout != "wait":
            self._buffer.expire(self._groups.timeout_s, self._groups.on_timeout)
        oldest = self.oldest_fresh
        if oldest is not None:
            self._buffer.drop_stale(oldest)
        gone = self._buffer.take_dropped()
        for numbers, reason in gone:
            self._spool.drop(numbers, reason)
        return bool(gone)

    @property
    def oldest_fresh(self) -> int | None:
        """The oldest policy version that the next step may train; None where any may.

        `version_at(s) = current + (s - finished - 1)` is what the policy will be when step s is
        consumed, if every step publishes one version.
        """
        most = self._eligibility.max_policy_lag
        if most is None or self.policy.version is None:
            return None
        ahead = self.next_step - self.finished_step - 1
        return self.policy.version + max(ahead, 0) - most

    def flush(self) -> None:
        """Plan what is complete, once a step is due, though it be less than a batch."""
        self._flush_wanted = True
        self.poke()

    def _due(self) -> bool:
        """Whether the next step may be planned now."""
        strict = self._eligibility.max_policy_lag == 0
        ahead = 0 if strict else self._planner.plan_ahead
        if self.next_step > self.finished_step + 1 + ahead:
            return False
        # With no lag allowed, a step waits until the one before has published its weights.
        return not strict or self.next_step == 0 or self.policy.version != self._planned_at_version

    def _enough(self) -> bool:
        """Whether there is a batch at all; said without looking at each group."""
        there = self._buffer.group_counts()
        if self._batch_size is not None:
            have, want, unit = there["complete_datums"], self._batch_size, "datums of complete"
        else:
            have, want, unit = there["complete"], self._planner.batch_groups or 1, "complete"
        if have < want:
            self._shortage = f"{want - have} more {unit} groups ({have} of {want})"
        return have >= want

    def _partial(self) -> bool:
        """Whether a step may be formed of less than a batch."""
        if self._flush_wanted:
            return True
        patience, since = self._planner.partial_step_timeout_s, self._buffer.oldest_complete_at
        return patience is not None and since is not None and time.monotonic() - since >= patience

    def _plan(self) -> bool:
        """Plan the next step if it is due and can be formed."""
        schema = self._schema()
        if schema is None or not self._due() or self._retain_full():
            return False
        planner, partial = self._planner, self._partial()
        if not partial and not self._enough():
            return False
        try:
            chosen = choose_groups(
                self._buffer.complete(),
                batch_size=self._batch_size,
                batch_groups=planner.batch_groups,
                exact=planner.batch_exact and not partial,
                shares=None if partial else self._shares,
                partial=partial,
            )
        except ShortageError as shortage:
            self._shortage = str(shortage)
            self._flush_wanted = self._flush_wanted and self._buffer.oldest_complete_at is not None
            return False
        numbers, meta = self._buffer.plan(chosen)
        plan = plan_step(
            self.next_step,
            numbers,
            meta,
            layout=planner.layout,
            dp_size=planner.dp_size,
            placing=self._placing,
            advantage=planner.advantage,
        )
        prepared = self._feeder.prepare(plan, schema)
        self._spool.write_plan(plan)
        self._buffer.planned(plan.step, chosen, meta)
        self._feeder.enqueue(prepared)
        self.next_step += 1
        self._planned_at_version = self.policy.version
        self._flush_wanted = self._flush_wanted and self._buffer.oldest_complete_at is not None
        return True

    def _retain_full(self) -> bool:
        return self._buffer.retained_bytes >= self._retain_bytes

    def _fail(self, error: Exception) -> None:
        """Tell everybody that waits: status, posts, and the trainers by a notice."""
        code = error.code if isinstance(error, HeadraceError) else "error"
        self.failure = str(error) or repr(error)
        self.waits_for = self._sentence()
        for ring in self._rings:
            try:
                ring.notify({"code": code, "message": self.failure[:1500]})
                ring.set_state(State.ENDED)
            except (HeadraceError, ValueError) as second:
                log.error("rank %d's ring takes no notice: %s", ring.geometry.dp_rank, second)

    @property
    def undelivered_steps(self) -> int:
        return self._feeder.undelivered

    def _sentence(self) -> str:
        """What the next step waits for."""
        step, groups = self.next_step, self._buffer.group_counts()
        if self.failure is not None:
            return f"No more steps: {self.failure}"
        if self._spool_error:
            return f"Step {step} waits for the spool: {self._spool_error}."
        waiting = self._feeder.waiting()
        if waiting is not None:
            return f"{waiting[0].upper()}{waiting[1:]}."
        if self._retain_full():
            return (
                f"Step {step} waits for a commit: {self._buffer.retained_bytes} bytes are "
                "delivered and not committed, "
                f"spool.retain_bytes is {self._retain_bytes}, the last committed step is "
                f"{self.committed_step}."
            )
        if not self._due() and self.next_step <= self.finished_step + 1:
            return (
                f"Step {step} waits for a policy version newer than {self.policy.version} "
                f"(eligibility.max_policy_lag = 0)."
            )
        if not self._due():
            behind = [
                str(rank)
                for rank, words in enumerate(self.words)
                if words
                and (words[0].finished_step is None or words[0].finished_step <= self.finished_step)
            ]
            return (
                f"Step {step} waits until step {self.finished_step + 1} is finished by rank "
                f"{', '.join(behind)} "
                f"({self._ahead_by})."
            )
        collecting = groups["collecting"]
        return f"Step {step} waits for {self._shortage}; {collecting} groups collect members."

    @property
    def _ahead_by(self) -> str:
        if self._eligibility.max_policy_lag == 0:
            return "eligibility.max_policy_lag = 0"
        return f"planner.plan_ahead = {self._planner.plan_ahead}"

    def statistics(self) -> dict[str, Any]:
        return {
            "next_step": self.next_step,
            "delivered_step": self.delivered_step,
            "finished_step": self.finished_step,
            "committed_step": self.committed_step,
            "undelivered_steps": self._feeder.undelivered,
        }
