"""The service's one run, from body to ring: the only module that knows the order of the stages.

    door.py   body ─► draft ─► columns in a segment ─► groups ─► spool.append ─► buffer ─► answer
    pump.py   buffer ─► plan ─► spool.write_plan ─► feeder ─► rings

The door runs on the event loop, the pump on its own thread; they meet in the buffer and the spool.
A post is in the books when the spool has recorded it, and answered after that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from headrace.schemas.errors import Draining, NoCredits, NotServing
from headrace.schemas.wire import WIRE_VERSION
from headrace.service.admission import Admission, Budgets
from headrace.service.bodies import Bodies, Body
from headrace.service.body import MAX_ID_CHARS, MAX_KEYS
from headrace.service.buffer import Buffer
from headrace.service.door import Door, Head
from headrace.service.inflate import ENCODINGS
from headrace.service.leftovers import clear_leftovers, spool_directory
from headrace.service.pacing import Pacing
from headrace.service.pump import Policy, Pump
from headrace.service.records import Accepted, RunSchema
from headrace.service.ring import ReaderWords, RingWriter, State, prepare_directory
from headrace.service.settings import Settings
from headrace.service.spool.local import LocalSpool

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)

POOL_BYTES = 128 << 20  # of request buffers kept for reuse
DROPPED = {"stale": 0, "late": 0, "duplicate_id": 0}


class Pipeline:
    """Made and started by `open`, ended by `close`."""

    def __init__(
        self, settings: Settings, budgets: Budgets, spool: LocalSpool, rings: list[RingWriter]
    ) -> None:
        self.settings, self.budgets = settings, budgets
        self._spool, self._rings = spool, rings
        self._buffer = Buffer(
            memory_s=settings.groups.memory_s,
            max_open=settings.groups.max_open,
            shared=settings.groups.shared,
            drop_zero_advantage=settings.eligibility.drop_zero_advantage_groups,
        )
        self._policy_waiters: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self.serving = False
        self.bodies = Bodies(int(settings.limits.inflight_body_bytes), POOL_BYTES)
        self._admission = Admission(
            budgets,
            share=settings.auth.per_token_share,
            held=lambda: self._buffer.backlog().bytes,
            held_by=self._buffer.backlog_of,
        )
        self._pacing = Pacing(
            max_lag=settings.eligibility.max_policy_lag,
            lease_s=settings.admission.lease_s,
            outstanding=lambda: self._buffer.unfinished_groups(self._pump.finished_step),
            a_step=self._groups_a_step,
        )
        self._door = Door(
            settings,
            spool=spool,
            buffer=self._buffer,
            bodies=self.bodies,
            admission=self._admission,
            freshest=lambda: self._pump.oldest_fresh,
            poke=lambda: self._pump.groups_came(),
            opened=self._pacing.opened,
        )
        self._pump = Pump(
            settings,
            buffer=self._buffer,
            spool=spool,
            rings=rings,
            retain_bytes=budgets.retain_bytes,
            schema=lambda: self._door.schema,
            on_policy=self._hear_policy,
            on_delivered=self._admission.drained,
            shares=self._door.numbered(settings.planner.source_shares),
        )

    @classmethod
    def open(cls, settings: Settings, *, discard: bool = False) -> Pipeline:
        """Take the run's names, make spool and rings, start the pump. On an error nothing of it is
        left.

        Raises LeftoverFound, RingBusy, SpoolBusy, RingNoSpace, SpoolFull, SettingsError.
        """
        queue, planner, run = settings.queue, settings.planner, settings.run.name
        with ExitStack() as undo:
            os.close(prepare_directory(queue.dir))
            removed = clear_leftovers(queue.dir, run, discard_them=discard)
            for path in removed:
                log.warning("discarded %s of an earlier process", path)
            budgets = Budgets.of(settings, queue.dir)
            spool = LocalSpool(
                spool_directory(queue.dir, run),
                segment_bytes=settings.spool.segment_bytes,
                pool_segments=settings.spool.pool_segments,
                window_s=settings.idempotency.window_s,
            )
            undo.callback(spool.close, remove=True)
            rings: list[RingWriter] = []
            for rank in range(planner.dp_size):
                ring = RingWriter.create(
                    queue.dir,
                    run=run,
                    dp_rank=rank,
                    dp_size=planner.dp_size,
                    replicas=queue.replicas,
                    layout=planner.layout,
                    release=settings.trainer.release,
                    data_bytes=queue.bytes,
                    records=queue.records,
                    mode=queue.mode,
                    prefault=queue.prefault,
                )
                undo.callback(ring.close, unlink=True)
                rings.append(ring)
            pipeline = cls(settings, budgets, spool, rings)
            for ring in rings:
                ring.set_state(State.SERVING)
            pipeline._pump.start()
            pipeline.serving = True
            undo.pop_all()
            return pipeline

    def drain(self) -> None:
        """Take no more posts and answer the long polls; posts that are open go on."""
        self.serving = False
        self._tell_policy()

    async def close(self) -> None:
        """End the run: trainers see ENDED and leave, rings go, the spool stays only where it still
        holds datums.
        """
        self.drain()
        await self._door.close()
        await asyncio.to_thread(self._pump.stop)
        for ring in self._rings:
            ring.set_state(State.ENDED)
        await self._readers_left(bound_s=min(2.0, self.settings.server.drain_timeout_s))
        for ring in self._rings:
            if not ring.close(unlink=True):
                log.warning("%s stays: a trainer still holds it", ring.path)
        books = self._buffer.books()
        held = books["accepted"] - books["committed"]
        if held:
            log.warning("%d accepted datums are not committed; they stay in the spool", held)
        self._spool.close(remove=not held)

    async def _readers_left(self, *, bound_s: float) -> None:
        until = time.monotonic() + bound_s
        while time.monotonic() < until:
            if not any(w.attached for ring in self._rings for w in ring.readers()):
                return
            await asyncio.sleep(0.02)

    # posts

    def admit(self, head: Head) -> None:
        """Before a body is read. Raises NotServing or BacklogFull."""
        if not self.serving:
            raise Draining("the service is stopping: send it again later, or elsewhere", 5)
        if self._pump.failure is not None:
            raise NotServing(f"posts are not taken: {self._pump.failure}", 5)
        self._admission.before_body(head.nbytes)

    async def accept(self, body: Body, head: Head) -> dict[str, Any]:
        """The content of a 202 for `body`, recorded. Raises a Refused; then nothing was kept."""
        accepted, duplicate = await self._door.take(body, head)
        return self._answer(accepted, duplicate=duplicate)

    def _answer(self, accepted: Accepted, *, duplicate: bool) -> dict[str, Any]:
        policy = self._pump.policy
        skipped = [finding.to_dict() for finding in accepted.skipped]
        return {
            "accepted": accepted.accepted,
            "first_datum": accepted.first_datum,
            "dropped": DROPPED | dict(accepted.dropped),
            **({"skipped": skipped} if skipped else {}),
            "duplicate": duplicate,
            "policy_version": policy.version,
            "policy_uri": policy.uri,
            "admission": self._credits(),
            "backlog": self._backlog(),
        }

    def _backlog(self) -> dict[str, int]:
        tally, groups = self._buffer.backlog(), self._buffer.group_counts()
        if self.settings.batch_size is not None:
            formable = groups["complete_datums"] // self.settings.batch_size
        else:
            formable = groups["complete"] // (self.settings.planner.batch_groups or 1)
        return {**asdict(tally), "steps": formable + self._pump.undelivered_steps}

    def close_group(self, name: str, size: int, token: str) -> str:
        """A group ends with `size` members; its state. Raises GroupUnknown or GroupLarger."""
        state = self._buffer.close(name, size, token)
        self._pump.poke()
        return state.value

    def reserve(self, groups: int, token: str) -> dict[str, Any]:
        """Hold credits for groups that are about to be started. Raises NoCredits."""
        if not self._pacing.reserve(groups, token):
            raise NoCredits(
                f"groups: got {groups}, want at most {self._pacing.credits()}: more could come to "
                f"exceed eligibility.max_policy_lag; wait for the trainer"
            )
        return {"granted": groups, "admission": self._credits()}

    def _credits(self) -> dict[str, int] | None:
        left = self._pacing.credits()
        return None if left is None else {"groups": left}

    def _groups_a_step(self) -> int:
        """Groups that a step takes at least."""
        planner, size = self.settings.planner, self.settings.batch_size
        if planner.batch_groups is not None or size is None:
            return planner.batch_groups or 1
        return -(-size // max(1, self._buffer.largest_group))

    def flush(self) -> None:
        """Plan what is complete, once a step is due."""
        self._pump.flush()

    # what others ask

    @property
    def ready(self) -> bool:
        """Posts are accepted (a full backlog counts as ready)."""
        return self.serving and self._pump.failure is None

    async def policy(self, *, newer_than: int, wait_s: float) -> Policy:
        """The newest policy, once its version exceeds `newer_than`; after `wait_s` seconds whatever
        there is.
        """
        until = self._loop.time() + wait_s
        while (self._pump.policy.version is None or self._pump.policy.version <= newer_than) and (
            self.serving and self._loop.time() < until
        ):
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._policy_waiters.add(waiter)
            await asyncio.wait([waiter], timeout=until - self._loop.time())
            self._policy_waiters.discard(waiter)
        return self._pump.policy

    def _hear_policy(self) -> None:
        """Called on the pump's thread."""
        self._loop.call_soon_threadsafe(self._tell_policy)

    def _tell_policy(self) -> None:
        for waiter in self._policy_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def limits(self) -> dict[str, Any]:
        """What a post must keep to, and what the run looks like."""
        s = self.settings
        schema = None if self._door.schema is None else _keys(self._door.schema)
        return {
            "wire_version": WIRE_VERSION,
            "run": s.run.name,
            "max_body_bytes": int(s.limits.max_body_bytes),
            "max_datums_per_post": s.limits.max_datums_per_post,
            "max_datums_columnar": s.limits.max_datums_columnar,
            "max_json_bytes": int(s.limits.max_json_bytes),
            "encodings": list(ENCODINGS),
            "vocab_size": s.limits.vocab_size,
            "logprob_max": s.limits.logprob_max,
            "max_keys": MAX_KEYS,
            "max_id_chars": MAX_ID_CHARS,
            "max_sequence_tokens": s.max_sequence_tokens,
            "backlog_bytes": self.budgets.backlog_bytes,
            "require_targets": s.run_schema.require_targets,
            "keys": schema,
            "admission": self._credits(),
        }

    def status(self) -> dict[str, Any]:
        """Where everything is: books, what the next step waits for, each rank."""
        policy = self._pump.policy
        ranks = [
            {
                "dp_rank": rank,
                **ring.statistics(),
                "readers": [_reader(words) for words in self._pump.words[rank]],
            }
            for rank, ring in enumerate(self._rings)
        ]
        return {
            "run": self.settings.run.name,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "serving": self.ready,
            "waits_for": self._pump.waits_for,
            "books": self._buffer.books(),
            "groups": self._buffer.group_counts() | self._buffer.groups_in_steps(),
            "admission": self._credits(),
            "backlog": self._backlog(),
            "budgets": asdict(self.budgets) | {"retained_bytes": self._buffer.retained_bytes},
            "policy": {"version": policy.version, "uri": policy.uri},
            "steps": self._pump.statistics(),
            "ranks": ranks,
            "spool": self._spool.statistics(),
            "bodies": self.bodies.statistics(),
        }


def _keys(schema: RunSchema) -> dict[str, dict[str, Any]]:
    """Each key of the run: per token or per sample, and the dtype in which it is delivered."""
    keys: dict[str, dict[str, Any]] = {}
    for key, axis in schema.axes.items():
        stream = schema.streams.get(key)
        dtype = "int64" if key == "target_tokens" else "float32"
        if stream is not None:
            dtype = np.dtype(stream.dtype).name
        keys[key] = {"kind": axis, "dtype": dtype}
        if stream is not None:
            keys[key]["shape"] = list(stream.trailing)
    return keys


def _reader(words: ReaderWords) -> dict[str, Any]:
    return {
        "replica": words.replica,
        "attached": words.attached,
        "released": words.released,
        "finished_step": words.finished_step,
        "committed_step": words.committed_step,
        "policy_version": words.policy_version,
    }
