"""The door: the order in which a body becomes a recorded post, or is refused with nothing kept.

    inflate ─► decode ─► forms ─► run's schema ─► known ids left out ─► room? ─► values, copy
            ─► groups ─► spool.append ─► buffer.add ─► Accepted

Runs on the event loop; bodies of 128 KiB and more, and encoded ones, are worked on in a pool of one
thread. Whatever ends early gives back what it took: segment bytes, places in groups, ids. A post
runs to its end even where its sender has left: what is half recorded cannot be left.

While the run's schema is not settled (no post yet, or only datums of one token), posts go one after
another, so that the first accepted one pins it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.schemas.errors import AllStale, InProgress, KeyConflict, NotServing, SpoolError
from headrace.service.admission import Admission
from headrace.service.bodies import Bodies, Body
from headrace.service.body import MsgpackPost, check_padding, decode_body
from headrace.service.buffer import Buffer
from headrace.service.datum_ids import DatumIds
from headrace.service.findings import Findings
from headrace.service.forms import Forms, group_ids_of, stream_specs
from headrace.service.groups import Reservation
from headrace.service.inflate import inflate, inflated_bound
from headrace.service.ingest import Ingest
from headrace.service.records import Accepted, Draft, Headers, Post, RunSchema, Staged
from headrace.service.settings import Settings
from headrace.service.spool.local import LocalSpool

__all__ = ["Door", "Head"]

T = TypeVar("T")

THREAD_BYTES = 128 << 10  # bodies of at least so many bytes are worked on off the loop
IN_PROGRESS_S = 30.0  # how long a second try waits for the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a request says before its body."""

    nbytes: int  # of the body as it is sent
    json: bool = False
    encoding: str | None = None
    key: str | None = None  # Idempotency-Key
    skip: bool = False  # ?on_invalid=skip
    token: str = ""  # the name of the sender's token


class Door:
    """Takes the posts of one run."""

    def __init__(
        self,
        settings: Settings,
        *,
        spool: LocalSpool,
        buffer: Buffer,
        bodies: Bodies,
        admission: Admission,
        freshest: Callable[[], int | None],
        poke: Callable[[], None],
        opened: Callable[[int, str], None],
    ) -> None:
        self._settings, self._spool, self._buffer = settings, spool, buffer
        self._bodies, self._admission, self._poke = bodies, admission, poke
        self._freshest, self._opened = freshest, opened
        streams = settings.run_schema.streams
        self._streams = stream_specs(streams)
        self._forms = Forms(settings.limits, streams)
        self._ingest = Ingest(settings, spool, self._streams)
        self._ids = DatumIds(window_s=settings.idempotency.window_s, held=spool.holds)
        self._pinning = asyncio.Lock()
        self._in_flight: dict[tuple[str, str], asyncio.Event] = {}
        self._open_posts: set[asyncio.Task[Any]] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-ingest")
        self._loop = asyncio.get_running_loop()
        self.schema: RunSchema | None = None

    def numbered(self, shares: Mapping[str, float]) -> dict[int, float]:
        """Shares by the number that meta knows a source by."""
        return {self._ingest.source_number(name): share for name, share in shares.items()}

    async def take(self, body: Body, head: Head) -> tuple[Accepted, bool]:
        """(what was recorded, whether it was before). Raises Refused. Releases `body`."""
        task = self._loop.create_task(self._take(body, head))
        self._open_posts.add(task)
        task.add_done_callback(self._open_posts.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for the posts that are open."""
        await asyncio.gather(*self._open_posts, return_exceptions=True)
        self._pool.shutdown()

    async def _take(self, body: Body, head: Head) -> tuple[Accepted, bool]:
        with body:
            if head.key is None:
                return await self._decode(body, head, b""), False
            scope = (head.token, head.key)
            while (first_try := self._in_flight.get(scope)) is not None:
                try:
                    await asyncio.wait_for(first_try.wait(), IN_PROGRESS_S)
                except TimeoutError:
                    raise InProgress(
                        f"the first try with this Idempotency-Key has run for {IN_PROGRESS_S:.0f} "
                        f"s and is not done: send it again later"
                    ) from None
            self._in_flight[scope] = asyncio.Event()
            try:
                body_hash = await self._off_loop(
                    len(body.buffer), xxhash.xxh3_128_digest, body.buffer
                )
                known = self._spool.known(head.token, head.key)
                if known is None:
                    return await self._decode(body, head, body_hash), False
                if known.body_hash != body_hash:
                    raise KeyConflict(
                        "this Idempotency-Key came before with other bytes: a key names one body; "
                        "use a new one"
                    )
                return known, True
            finally:
                self._in_flight.pop(scope).set()

    async def _decode(self, body: Body, head: Head, body_hash: bytes) -> Accepted:
        if head.encoding is None:
            return await self._settle(body.buffer, head, body_hash)
        limits = self._settings.limits
        bound = inflated_bound(
            head.nbytes, most=limits.max_body_bytes, ratio=limits.max_inflate_ratio
        )
        with self._bodies.lease(bound) as room:
            nbytes = await self._loop.run_in_executor(
                self._pool, inflate, body.buffer, head.encoding, room.buffer
            )
            with room.buffer[:nbytes] as inflated:
                return await self._settle(inflated, head, body_hash)

    async def _settle(self, content: memoryview, head: Head, body_hash: bytes) -> Accepted:
        if self.schema is not None and self.schema.settled:
            return await self._record(content, self.schema, head, body_hash)
        async with self._pinning:
            return await self._record(content, self.schema, head, body_hash)

    async def _record(
        self, content: memoryview, pinned: RunSchema | None, head: Head, body_hash: bytes
    ) -> Accepted:
        findings = Findings(self._settings.limits.max_errors, skip=head.skip)
        read = await self._off_loop(
            len(content), self._understand, content, head.json, pinned, findings
        )
        dropped: Counter[str] = Counter()
        draft, schema = self._fresh(read, dropped), read.schema
        if draft.splits is not None and "eval" in draft.splits:
            self._admission.of_eval(self._buffer.eval_bytes, draft.payload_bytes)
        opens = self._buffer.opens_group(draft)
        self._admission.of_post(draft.payload_bytes, token=head.token, opens_group=opens)
        while True:
            try:
                draft, staged, meta = await self._off_loop(
                    len(content), self._ingest.stage, draft, schema, findings
                )
            except SpoolError as error:
                raise NotServing(str(error), 5) from error
            claim = Claim(self._spool, self._buffer, self._ids, staged)
            try:
                again = self._claim(claim, draft, read, findings, head, dropped)
                if again is not None:
                    draft = again
                    claim.give_back()
                    continue
                if head.skip:
                    dropped["invalid"] = len(findings.datums)
                accepted = await self._append(
                    claim, draft, schema, meta, head, body_hash, dropped, findings
                )
            except BaseException:
                claim.give_back()
                raise
            self._ids.confirm(accepted.post, claim.ids)
            for reason in ("duplicate_id", "late", "stale"):
                if dropped[reason]:
                    self._buffer.drop(reason, dropped[reason])
            became = self._buffer.add(claim.groups, Headers(post=accepted.post, meta=meta))
            alone = len(draft) if claim.groups.singles is not None else 0
            self._opened(len(claim.groups.opened) + alone, head.token)
            if accepted.accepted and schema != self.schema:
                self.schema = schema
                became += 1
            if became:
                self._poke()
            return accepted

    def _understand(
        self, content: memoryview, json: bool, pinned: RunSchema | None, findings: Findings
    ) -> Read:
        body = decode_body(content, json=json)
        draft = self._forms.draft(body, pinned, findings)
        if isinstance(body, MsgpackPost):
            check_padding(body, len(content), draft.body_bytes)
        schema = self._ingest.schema_of(draft, pinned, findings)
        findings.settle()
        return Read(draft=draft, schema=schema, groups=group_ids_of(body))

    def _fresh(self, read: Read, dropped: Counter[str]) -> Draft:
        """The datums that are not stale already. Raises AllStale where that is refused."""
        oldest = self._freshest()
        if oldest is None:
            return read.draft
        keep = read.draft.policy_versions >= oldest
        if keep.all():
            return read.draft
        if not keep.any() and self._settings.eligibility.on_stale == "refuse":
            newest = int(read.draft.policy_versions.max())
            raise AllStale(
                f"policy_version: got {newest} at most, want at least {oldest} "
                f"(eligibility.max_policy_lag = {self._settings.eligibility.max_policy_lag}): "
                f"take the newest weights"
            )
        dropped["stale"] += int((~keep).sum())
        read.gone.update(read.draft.origin[~keep].tolist())
        return read.draft.take(keep)

    def _claim(
        self,
        claim: Claim,
        draft: Draft,
        read: Read,
        findings: Findings,
        head: Head,
        dropped: Counter[str],
    ) -> Draft | None:
        """Take ids and places in groups; a smaller draft where some datums cannot have them."""
        claim.ids, known = self._ids.reserve(draft.ids or ())
        if known:
            dropped["duplicate_id"] += len(known)
            keep = np.ones(len(draft), bool)
            keep[known] = False
            return draft.take(keep)
        faulty = len(findings.datums)
        gone = read.gone | findings.datums if read.groups else set()
        left_out = [read.groups[at] for at in sorted(gone)]
        claim.groups = self._buffer.reserve(
            draft,
            findings,
            token=head.token,
            left_out=[(name, size) for name, size in left_out if name is not None],
        )
        findings.settle()
        if claim.groups.late:
            dropped["late"] += len(claim.groups.late)
            keep = np.ones(len(draft), bool)
            keep[list(claim.groups.late)] = False
            return draft.take(keep)
        if len(findings.datums) == faulty:
            return None
        return draft.take(~np.isin(draft.origin, list(findings.datums)))

    async def _append(
        self,
        claim: Claim,
        draft: Draft,
        schema: RunSchema,
        meta: NDArray[Any],
        head: Head,
        body_hash: bytes,
        dropped: Counter[str],
        findings: Findings,
    ) -> Accepted:
        staged, opened = claim.staged, claim.groups.opened
        meta["group"] = claim.groups.groups
        names = [("group", g.number, g.name) for g in opened if g.name is not None]
        settles = len(draft) and schema != self.schema
        post = Post(
            segment=None if staged is None else staged.segment,
            offset=0 if staged is None else staged.offset,
            nbytes=0 if staged is None else staged.nbytes,
            columns=() if staged is None else staged.columns,
            arrays={} if staged is None else staged.arrays,
            meta=meta,
            ids=draft.ids,
            run_values={"schema": dict(schema.axes)} if settles else {},
            new_names=[*names, *self._ingest.name_sources(draft, meta)],
            actor=draft.actor,
            token=head.token,
            key=head.key,
            body_hash=body_hash,
            dropped=+dropped,
            skipped=findings.errors,
        )
        try:
            return await asyncio.wrap_future(self._spool.append(post))
        except SpoolError as error:
            raise NotServing(str(error), 5) from error

    async def _off_loop(self, nbytes: int, work: Callable[..., T], *arguments: Any) -> T:
        if nbytes < THREAD_BYTES:
            return work(*arguments)
        return await self._loop.run_in_executor(self._pool, work, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A body understood: the datums without a fault, and the run as it is with them."""

    draft: Draft
    schema: RunSchema
    groups: Sequence[tuple[str | None, int]]  # (group_id, group_size) of every datum of the body
    gone: set[int] = field(default_factory=set)  # places in the body of datums that are stale


class Claim:
    """What a post holds before it is recorded: segment bytes, datum ids, places in groups."""

    def __init__(
        self, spool: LocalSpool, buffer: Buffer, ids: DatumIds, staged: Staged | None
    ) -> None:
        self._spool, self._buffer, self._ids = spool, buffer, ids
        self.staged = staged
        self.ids: list[str] = []
        self.groups = Reservation(np.zeros(0, np.uint64))

    def give_back(self) -> None:
        self._buffer.cancel(self.groups)
        self._ids.cancel(self.ids)
        if self.staged is not None:
            self._spool.abandon(self.staged)
