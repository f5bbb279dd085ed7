"""The service's one run, from body to ring: the only module that knows the order of the stages.

    accept:  decode ─► ingest (check, copy into a segment) ─► buffer.reserve
                    ─► spool.append ─► buffer.add ─► answer
    pump:    buffer ─► plan ─► spool.write_plan ─► feeder ─► rings          (pump.py)

`accept` runs on the event loop; bodies of 1 MiB and more are decoded and copied in a pool of one
thread, so that the loop is not held up. A post is in the books when the spool has recorded it, and
answered after that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import xxhash
from numpy.typing import NDArray

from headrace.schemas.errors import KeyConflict, NotServing, SpoolError
from headrace.schemas.wire import WIRE_VERSION
from headrace.service.admission import Budgets
from headrace.service.buffer import Buffer
from headrace.service.decode import MAX_ID_CHARS, MAX_KEYS, Decoder, Findings
from headrace.service.ingest import Ingest
from headrace.service.leftovers import clear_leftovers, spool_directory
from headrace.service.pump import Policy, Pump
from headrace.service.records import Accepted, Draft, Headers, Post, RunSchema, Staged
from headrace.service.ring import ReaderWords, RingWriter, State, prepare_directory
from headrace.service.settings import Settings
from headrace.service.spool.local import LocalSpool

__all__ = ["Pipeline"]

T = TypeVar("T")
log = logging.getLogger(__name__)

THREAD_BYTES = 1 << 20  # bodies of at least so many bytes are decoded off the loop
DROPPED = {"stale": 0, "late": 0, "duplicate_id": 0}


class Pipeline:
    """Made and started by `open`, ended by `close`."""

    def __init__(
        self, settings: Settings, budgets: Budgets, spool: LocalSpool, rings: list[RingWriter]
    ) -> None:
        self.settings, self.budgets = settings, budgets
        self._spool, self._rings = spool, rings
        self._decode = Decoder(settings.limits)
        self._ingest = Ingest(settings, spool)
        self._buffer = Buffer(memory_s=settings.groups.memory_s)
        self._schema: RunSchema | None = None
        self._pinning = asyncio.Lock()
        self._in_flight: dict[tuple[str, str], asyncio.Event] = {}
        self._open_posts: set[asyncio.Task[dict[str, Any]]] = set()
        self._policy_waiters: set[asyncio.Future[None]] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-ingest")
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self.serving = False
        self._pump = Pump(
            settings,
            buffer=self._buffer,
            spool=spool,
            rings=rings,
            retain_bytes=budgets.retain_bytes,
            schema=lambda: self._schema,
            on_policy=self._hear_policy,
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
        await asyncio.gather(*self._open_posts, return_exceptions=True)
        await asyncio.to_thread(self._pump.stop)
        self._pool.shutdown()
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

    def admit(self, nbytes: int) -> None:
        """Before a body of `nbytes` is read. Raises NotServing or BacklogFull."""
        if not self.serving or self._pump.failure is not None:
            why = self._pump.failure or "the service is starting or stopping"
            raise NotServing(f"posts are not taken: {why}", 5)
        self.budgets.admit(held_bytes=self._buffer.backlog().bytes, post_bytes=nbytes)

    async def accept(self, body: bytearray, key: str | None, token: str = "") -> dict[str, Any]:
        """The content of a 202 for `body`, recorded. Raises a Refused of errors.py; then nothing
        was kept.

        Runs to its end even where the caller is cancelled: what is half recorded cannot be left.
        """
        task = self._loop.create_task(self._accept_once(body, key, token))
        self._open_posts.add(task)
        task.add_done_callback(self._open_posts.discard)
        return await asyncio.shield(task)

    async def _accept_once(self, body: bytearray, key: str | None, token: str) -> dict[str, Any]:
        if key is None:
            return self._answer(await self._accept(body, None, token, b""), duplicate=False)
        scope = (token, key)
        while (first_try := self._in_flight.get(scope)) is not None:
            await first_try.wait()
        body_hash = xxhash.xxh3_128_digest(body)
        known = self._spool.known(token, key)
        if known is not None:
            if known.body_hash != body_hash:
                raise KeyConflict(
                    "this Idempotency-Key came before with other bytes: a key names one body; use "
                    "a new one"
                )
            return self._answer(known, duplicate=True)
        self._in_flight[scope] = asyncio.Event()
        try:
            return self._answer(await self._accept(body, key, token, body_hash), duplicate=False)
        finally:
            self._in_flight.pop(scope).set()

    async def _accept(
        self, body: bytearray, key: str | None, token: str, body_hash: bytes
    ) -> Accepted:
        draft = await self._off_loop(len(body), self._decode, body)
        origin = Origin(key=key, token=token, body_hash=body_hash, nbytes=len(body), run_values={})
        if self._schema is not None and "either" not in self._schema.axes.values():
            self._ingest.schema_of(draft, self._schema)
            return await self._record(draft, self._schema, origin)
        # What the run looks like is not settled: one post after another, so that the first accepted
        # one pins it.
        async with self._pinning:
            schema = self._ingest.schema_of(draft, self._schema)
            if schema == self._schema:
                return await self._record(draft, schema, origin)
            origin = replace(origin, run_values={"schema": dict(schema.axes)})
            accepted = await self._record(draft, schema, origin)
            self._schema = schema
            self._pump.poke()
            return accepted

    async def _record(self, draft: Draft, schema: RunSchema, origin: Origin) -> Accepted:
        try:
            staged, meta = await self._off_loop(origin.nbytes, self._ingest.stage, draft, schema)
            try:
                return await self._append(draft, staged, meta, origin)
            except BaseException:
                self._spool.abandon(staged)
                raise
        except SpoolError as error:
            raise NotServing(str(error), 5) from error

    async def _append(
        self, draft: Draft, staged: Staged, meta: NDArray[Any], origin: Origin
    ) -> Accepted:
        findings = Findings(self.settings.limits.max_errors)
        reservation = self._buffer.reserve(draft, findings)
        findings.raise_any()
        meta["group"] = reservation.groups
        names = [("group", g.number, g.name) for g in reservation.opened if g.name is not None]
        post = Post(
            segment=staged.segment,
            offset=staged.offset,
            nbytes=staged.nbytes,
            columns=staged.columns,
            meta=meta,
            ids=draft.ids,
            run_values=origin.run_values,
            new_names=[*names, *self._ingest.name_sources(draft, meta)],
            actor=draft.actor,
            token=origin.token,
            key=origin.key,
            body_hash=origin.body_hash,
        )
        try:
            accepted = await asyncio.wrap_future(self._spool.append(post))
        except BaseException:
            self._buffer.cancel(reservation)
            raise
        if self._buffer.add(reservation, Headers(post=accepted.post, meta=meta)):
            self._pump.poke()
        return accepted

    async def _off_loop(self, nbytes: int, work: Callable[..., T], *arguments: Any) -> T:
        if nbytes < THREAD_BYTES:
            return work(*arguments)
        return await self._loop.run_in_executor(self._pool, work, *arguments)

    def _answer(self, accepted: Accepted, *, duplicate: bool) -> dict[str, Any]:
        policy = self._pump.policy
        return {
            "accepted": accepted.accepted,
            "first_datum": accepted.first_datum,
            "dropped": dict(DROPPED),
            "duplicate": duplicate,
            "policy_version": policy.version,
            "policy_uri": policy.uri,
            "admission": None,
            "backlog": self._backlog(),
        }

    def _backlog(self) -> dict[str, int]:
        tally, groups = self._buffer.backlog(), self._buffer.group_counts()
        if self.settings.batch_size is not None:
            formable = groups["complete_datums"] // self.settings.batch_size
        else:
            formable = groups["complete"] // (self.settings.planner.batch_groups or 1)
        return {**asdict(tally), "steps": formable + self._pump.undelivered_steps}

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
        schema = None if self._schema is None else dict(self._schema.axes)
        return {
            "wire_version": WIRE_VERSION,
            "run": s.run.name,
            "max_body_bytes": int(s.limits.max_body_bytes),
            "max_datums_per_post": s.limits.max_datums_per_post,
            "max_datums_columnar": s.limits.max_datums_columnar,
            "max_keys": MAX_KEYS,
            "max_id_chars": MAX_ID_CHARS,
            "max_sequence_tokens": s.max_sequence_tokens,
            "backlog_bytes": self.budgets.backlog_bytes,
            "require_targets": s.run_schema.require_targets,
            "keys": schema,
            "admission": None,
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
            "groups": self._buffer.group_counts(),
            "backlog": self._backlog(),
            "budgets": asdict(self.budgets) | {"retained_bytes": self._buffer.retained_bytes},
            "policy": {"version": policy.version, "uri": policy.uri},
            "steps": self._pump.statistics(),
            "ranks": ranks,
            "spool": self._spool.statistics(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose body it is, and what of the run it settles."""

    key: str | None
    token: str
    body_hash: bytes
    nbytes: int
    run_values: Mapping[str, Any]


def _reader(words: ReaderWords) -> dict[str, Any]:
    return {
        "replica": words.replica,
        "attached": words.attached,
        "released": words.released,
        "finished_step": words.finished_step,
        "committed_step": words.committed_step,
        "policy_version": words.policy_version,
    }
