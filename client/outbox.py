"""The bounded queue between `submit` and the wire: datums in, posts out. No HTTP, no encoding.

    submit -> [ parcel | parcel | parcel ] -> take -> post in flight -> delivered | failed
               `--------- at most outbox_bytes, until answered for ---------'

A parcel is what is never split: the datums of one submit that share a group_id, or one datum. A
post is parcels in submit order that fit one body: up to `post_bytes` and `MAX_DATUMS`, or less
after `bound`, with the same loss keys of the same kinds. One is taken when it is full, when its
oldest parcel has waited for `linger_s`, or at once while somebody flushes.

Invariants:
- a parcel's bytes count from its admission until it is answered for, and never exceed the bound;
- posts are taken in submit order, and none is taken while one `inflight` places before it is open,
  so that a post overtakes by at most `inflight - 1` places, retries included;
- every datum that got a number is counted once: submitted = buffered + accepted + failed. One whose
  submit ended while it waited for room, by a close or a cancelled task, failed.

Every wait is on one Monitor and ends at `stop()`. Called by the clients (admit, flush, seal, stop;
`_async` in a task) and by the sender's threads (take, bound, delivered, failed, pause, finish).
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from headrace.client.answers import Report
from headrace.client.monitor import Monitor, Steps
from headrace.schemas.errors import ClientClosed, DatumError, OutboxFull, PostFailed
from headrace.schemas.wire_datum import Kind, WireDatum, kinds_of, merge_kinds

__all__ = ["Outbox", "Parcel", "Post", "parcels_of"]

MAX_DATUMS = 16_384  # the service's limits.max_datums_columnar
OVERHEAD = 256  # bytes counted for a datum beside its payload
MAX_UNREPORTED = 100_000  # failed datums kept for the next report; the counts go on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parcel:
    """Datums that travel in one post or not at all."""

    datums: tuple[WireDatum, ...]
    kinds: dict[str, Kind]  # of its loss keys
    nbytes: int
    numbers: tuple[int, ...] = ()  # [len(datums)] in submit order from 0, over the client's life
    submit: int = -1  # which call it came with
    order: int = -1  # its place among all parcels
    since: float = 0.0  # monotonic seconds of its admission


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Post:
    """What one HTTP request carries, under one key for all its tries."""

    parcels: tuple[Parcel, ...]
    place: int  # among all posts
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def datums(self) -> list[WireDatum]:
        return [datum for parcel in self.parcels for datum in parcel.datums]

    @property
    def numbers(self) -> list[int]:
        return [number for parcel in self.parcels for number in parcel.numbers]

    @property
    def submits(self) -> set[int]:
        return {parcel.submit for parcel in self.parcels}

    def part(self, parcels: Iterable[Parcel]) -> Post:
        """Some of the parcels as a post under a key of its own."""
        return Post(parcels=tuple(parcels), place=self.place)

    def by_submit(self) -> list[Post]:
        """The same parcels, one post a submit."""
        submits: dict[int, list[Parcel]] = {}
        for parcel in self.parcels:
            submits.setdefault(parcel.submit, []).append(parcel)
        return [self.part(parcels) for parcels in submits.values()]

    def halves(self) -> list[Post]:
        """The same parcels in two posts; one that has a single parcel stays whole."""
        middle = (len(self.parcels) + 1) // 2
        cuts = (self.parcels[:middle], self.parcels[middle:])
        return [self.part(parcels) for parcels in cuts if parcels]


def parcels_of(datums: Sequence[WireDatum]) -> list[tuple[Parcel, list[int]]]:
    """(parcel, places of its datums in the list): one a group_id, one a datum without.

    Raises DatumError where the datums of one group cannot share a body.
    """
    groups: dict[object, list[int]] = {}
    for place, datum in enumerate(datums):
        groups.setdefault(place if datum.group_id is None else datum.group_id, []).append(place)
    parcels = []
    for places in groups.values():
        members = tuple(datums[place] for place in places)
        if len(members) > MAX_DATUMS:
            got = f"group {members[0].group_id!r} has {len(members)} datums"
            raise DatumError(f"{got}; one post carries {MAX_DATUMS} at most")
        kinds = kinds_of(members[0])
        for member in members[1:]:
            kinds = merge_kinds(kinds, kinds_of(member))
        nbytes = sum(member.nbytes + OVERHEAD for member in members)
        parcels.append((Parcel(datums=members, kinds=kinds, nbytes=nbytes), places))
    return parcels


class Outbox:
    """See the module's contract. Sizes in bytes, times in seconds."""

    def __init__(
        self, *, post_bytes: int, linger_s: float, outbox_bytes: int, inflight: int
    ) -> None:
        self._post_bytes, self._linger_s = post_bytes, linger_s
        self._outbox_bytes, self._inflight = outbox_bytes, inflight
        self._max_datums = MAX_DATUMS
        self._changed = Monitor()
        self._admitting = False  # one submit at a time, so that their parcels do not mix
        self._pending: deque[Parcel] = deque()
        self._open: dict[int, tuple[Parcel, ...]] = {}  # place of a post -> what is unanswered
        self._bytes = self._pending_bytes = self._pending_datums = 0
        self._numbers = self._submits = self._orders = self._places = self._flushing = 0
        self._sealed = self._stopped = False
        self._end: PostFailed | None = None
        self._submitted = self._accepted = self._dropped = self._failed = 0
        self._news = [0, 0]  # delivered and dropped since the last report
        self._failures: list[tuple[int, PostFailed]] = []

    def admit(self, datums: Sequence[WireDatum], *, block: bool) -> range:
        """Queue `datums`; the range of their numbers. Waits for room, or with `block=False` raises.

        All or nothing unless blocked: then parcels go in as room appears.
        """
        return self._changed.run(self._admit_steps(parcels_of(datums), len(datums), block))

    async def admit_async(self, datums: Sequence[WireDatum], *, block: bool) -> range:
        """As `admit`, waiting in this task."""
        steps = self._admit_steps(parcels_of(datums), len(datums), block)
        return await self._changed.run_async(steps)

    def flush(self, timeout: float | None) -> Report:
        """Wait until what was submitted before this call is answered for; then report."""
        return self._changed.run(self._flush_steps(timeout))

    async def flush_async(self, timeout: float | None) -> Report:
        """As `flush`, waiting in this task."""
        return await self._changed.run_async(self._flush_steps(timeout))

    def take(self) -> Post | None:
        """The next post, as soon as it may be sent; None once stopped."""
        return self._changed.run(self._take_steps())

    def bound(self, *, post_bytes: int, datums: int) -> None:
        """No post taken from now on holds more than that; only ever less than before."""
        with self._changed:
            self._post_bytes = min(self._post_bytes, max(1, post_bytes))
            self._max_datums = min(self._max_datums, max(1, datums))

    def delivered(
        self, post: Post, dropped: int, failures: Sequence[tuple[int, PostFailed]] = ()
    ) -> None:
        """The service took `post`, a taken one or a part of it, all but the `failures` in it."""
        with self._changed:
            count = len(post.numbers) - len(failures)
            self._count_failed(failures)
            self._accepted += count
            self._dropped += dropped
            self._news[0] += count
            self._news[1] += dropped
            self._settle(post)

    def failed(self, post: Post, failures: Iterable[tuple[int, PostFailed]]) -> None:
        """No datum of `post`, a taken one or a part of it, will be delivered."""
        with self._changed:
            self._count_failed(failures)
            self._settle(post)

    def pause(self, seconds: float) -> bool:
        """Wait between two tries; False where the outbox was stopped instead."""
        return self._changed.run(self._pause_steps(seconds))

    def finish(self, error: PostFailed) -> None:
        """The run has ended: what is pending fails with `error`, and so does every later admit."""
        with self._changed:
            self._end = error
            pending, self._pending = list(self._pending), deque()
            self._bytes -= self._pending_bytes
            self._pending_bytes = self._pending_datums = 0
            self._count_failed((n, error) for parcel in pending for n in parcel.numbers)
            self._changed.notify()

    def seal(self) -> None:
        """Take no more; whoever waits for room gets ClientClosed."""
        with self._changed:
            self._sealed = True
            self._changed.notify()

    def stop(self) -> None:
        """End every wait. Posts in flight are finished by their threads, the rest is abandoned."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def statistics(self) -> dict[str, int]:
        with self._changed:
            return {
                "submitted": self._submitted,
                "buffered": self._submitted - self._accepted - self._failed,
                "accepted": self._accepted,
                "dropped": self._dropped,
                "failed": self._failed,
                "outbox": self._bytes,
            }

    def _admit_steps(
        self, parcels: list[tuple[Parcel, list[int]]], count: int, block: bool
    ) -> Steps[range]:
        largest = max((p.nbytes for p, _ in parcels), default=0)
        need = largest if block else sum(p.nbytes for p, _ in parcels)
        if need > self._outbox_bytes:
            raise OutboxFull(
                f"{need} bytes that go together never fit outbox_bytes={self._outbox_bytes}"
            )
        while self._admitting:
            self._check_open()
            yield None
        self._check_open()
        if not block and self._bytes + need > self._outbox_bytes:
            have = f"{self._bytes} of outbox_bytes={self._outbox_bytes} are taken"
            raise OutboxFull(f"no room for {need} bytes: {have}; wait, or use on_full='block'")
        first, self._submits = self._numbers, self._submits + 1
        self._numbers += count
        self._admitting = True
        left = deque(parcels)
        try:
            while left:
                parcel, places = left[0]
                while self._bytes + parcel.nbytes > self._outbox_bytes:
                    yield None
                    self._check_open()
                self._admit(parcel, [first + place for place in places])
                left.popleft()
        finally:
            self._admitting = False
            if left:
                self._lose([first + place for _, places in left for place in places])
            self._changed.notify()
        return range(first, first + count)

    def _lose(self, numbers: list[int]) -> None:
        error = self._end or PostFailed("not sent: its submit ended before the outbox had room")
        self._submitted += len(numbers)
        self._count_failed((number, error) for number in numbers)

    def _take_steps(self) -> Steps[Post | None]:
        while not self._stopped:
            wait = self._wait_before_take()
            if wait is not None and wait <= 0:
                return self._take()
            yield wait
        return None

    def _pause_steps(self, seconds: float) -> Steps[bool]:
        end = time.monotonic() + seconds
        while not self._stopped and (left := end - time.monotonic()) > 0:
            yield left
        return not self._stopped

    def _flush_steps(self, timeout: float | None) -> Steps[Report]:
        last, end = self._orders - 1, time.monotonic() + (timeout or 0.0)
        self._flushing += 1
        self._changed.notify()
        try:
            while not self._stopped and not self._answered(last):
                left = None if timeout is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                yield left
        finally:
            self._flushing -= 1
        unknown = sum(len(p.numbers) for p in self._unanswered() if p.order <= last)
        delivered, dropped = self._news
        failures, self._failures, self._news = self._failures, [], [0, 0]
        failures.sort(key=lambda failure: failure[0])
        return Report(delivered=delivered, failed=failures, unknown=unknown, dropped=dropped)

    def _answered(self, last: int) -> bool:
        # A submit that the seal has cut off still has to say which datums found no room.
        return self._first_open() > last and not (self._sealed and self._admitting)

    def _settle(self, post: Post) -> None:
        answered = set(post.parcels)
        rest = tuple(p for p in self._open.pop(post.place) if p not in answered)
        if rest:
            self._open[post.place] = rest
        self._bytes -= sum(parcel.nbytes for parcel in post.parcels)
        self._changed.notify()

    def _count_failed(self, failures: Iterable[tuple[int, PostFailed]]) -> None:
        for failure in failures:
            self._failed += 1
            if len(self._failures) < MAX_UNREPORTED:
                self._failures.append(failure)

    def _check_open(self) -> None:
        if self._sealed:
            raise ClientClosed("submit: this client is closed; make a new one")
        if self._end is not None:
            raise PostFailed(f"submit: {self._end}", self._end.http_status)

    def _admit(self, parcel: Parcel, numbers: list[int]) -> None:
        entry = Parcel(
            datums=parcel.datums,
            kinds=parcel.kinds,
            nbytes=parcel.nbytes,
            numbers=tuple(numbers),
            submit=self._submits,
            order=self._orders,
            since=time.monotonic(),
        )
        self._orders += 1
        self._submitted += len(numbers)
        self._pending.append(entry)
        self._bytes += entry.nbytes
        self._pending_bytes += entry.nbytes
        self._pending_datums += len(numbers)
        self._changed.notify()

    def _wait_before_take(self) -> float | None:
        """Seconds until a post may be taken; None: not before something changes."""
        if (
            not self._pending
            or self._places - min(self._open, default=self._places) >= self._inflight
        ):
            return None
        full = self._pending_bytes >= self._post_bytes or self._pending_datums >= self._max_datums
        if full or self._flushing:
            return 0.0
        return self._pending[0].since + self._linger_s - time.monotonic()

    def _take(self) -> Post:
        parcels: list[Parcel] = []
        kinds, nbytes, count = self._pending[0].kinds, 0, 0
        while self._pending:
            parcel = self._pending[0]
            size, members = nbytes + parcel.nbytes, count + len(parcel.numbers)
            if parcels and (size > self._post_bytes or members > self._max_datums):
                break
            try:
                kinds = merge_kinds(kinds, parcel.kinds)
            except DatumError:
                break  # another body; whether the run allows it is the service's to say
            parcels.append(self._pending.popleft())
            nbytes, count = size, members
        self._pending_bytes -= nbytes
        self._pending_datums -= count
        post = Post(parcels=tuple(parcels), place=self._places)
        self._open[post.place] = post.parcels
        self._places += 1
        return post

    def _unanswered(self) -> Iterable[Parcel]:
        for parcels in self._open.values():
            yield from parcels
        yield from self._pending

    def _first_open(self) -> int:
        heads = [parcels[0].order for parcels in self._open.values()]
        heads += [parcel.order for parcel in islice(self._pending, 1)]
        return min(heads, default=self._orders)
