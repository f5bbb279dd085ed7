"""The spool on this machine: segments for bytes, SQLite for everything else, one thread that
commits.

    loop, ingest thread       spool thread                      pump
    stage: copy columns       append ─► group commit ─► answer  write_plan, commit: wait for it
           abandon                                              read: views into segments

Everything that changes the database is a job of the spool thread, which takes all waiting jobs into
one transaction (`group commit`) and answers them after its COMMIT. If a transaction fails, every
job in it fails and none of it holds.

In memory stay a few arrays a post and the remembered idempotency keys; payload stays in the
segments. A post's memory and its region end when the last of its datums is committed.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import SpoolBusy, SpoolError
from headrace.schemas.layout import Sequences
from headrace.schemas.locks import RangeLock
from headrace.schemas.tensors import ArraySpec, aligned
from headrace.service.records import Accepted, Column, DraftColumn, Plan, Post, RunSchema, Staged
from headrace.service.spool.database import Database
from headrace.service.spool.segments import Segments

__all__ = ["LocalSpool"]

T = TypeVar("T")
LOCK = "lock"  # byte 0 of it is locked as long as the service lives; it holds the pid, for messages
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """What memory keeps of a post whose payload is still needed."""

    segment: int
    live: int  # datums not yet committed
    bounds: list[int]  # [N + 1] token offsets
    columns: Mapping[str, tuple[bool, NDArray[Any]]]  # key -> (one value a datum?, the column)
    ids: Sequence[str | None] | None


@dataclass(slots=True)
class Job:
    work: Callable[[], Any]
    future: Future[Any]


class LocalSpool:
    """A `Spool` (records.py) in one folder that this process alone writes."""

    def __init__(
        self, directory: Path, *, segment_bytes: int, pool_segments: int, window_s: float
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._lock = _take_lock(directory)
        self._window_s = window_s
        self._database = Database(directory / "spool.db")
        self._segments = Segments(directory, segment_bytes=segment_bytes, pool=pool_segments)
        self._segments.reserve_spare()
        self._posts: dict[int, Held] = {}
        self._plans: dict[int, NDArray[np.uint64]] = {}
        self._keys: dict[tuple[str, str], tuple[float, Accepted]] = {}
        self._next_post = 1
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._committed_posts = self._transactions = 0
        self._thread = threading.Thread(target=self._run, name="headrace-spool", daemon=True)
        self._thread.start()

    def stage(self, columns: Mapping[str, DraftColumn]) -> Staged:
        """Copy a draft's columns into a segment, one pass a column. Raises SpoolFull."""
        specs, nbytes = [], 0
        for column in columns.values():
            size = sum(len(view) for view in column.views)
            shape = (size, *column.trailing)
            spec = ArraySpec(name=column.key, dtype=column.dtype.str, shape=shape)
            specs.append((column, spec, nbytes))
            nbytes += aligned(spec.nbytes)
        segment, offset = self._segments.allocate(nbytes)
        memory = self._segments.view(segment)
        arrays: dict[str, NDArray[Any]] = {}
        placed: list[Column] = []
        for column, spec, at in specs:
            array = spec.view(memory, offset + at)
            np.concatenate(column.views, out=array, casting="same_kind")
            arrays[column.key] = array
            placed.append(
                Column(
                    key=column.key,
                    axis=column.axis,
                    dtype=spec.dtype,
                    offset=offset + at,
                    trailing=column.trailing,
                )
            )
        return Staged(
            segment=segment, offset=offset, nbytes=nbytes, columns=tuple(placed), arrays=arrays
        )

    def abandon(self, staged: Staged) -> None:
        """Nothing of a staged post was kept."""
        self._segments.free(staged.segment)

    def append(self, post: Post) -> Future[Accepted]:
        """Record a post; the future is done when its transaction is."""
        return self._submit(lambda: self._append(post))

    def known(self, token: str, key: str) -> Accepted | None:
        """The answer given to this Idempotency-Key within the window."""
        remembered = self._keys.get((token, key))
        return None if remembered is None else remembered[1]

    def holds(self, post: int) -> bool:
        """Whether any datum of `post` is not committed yet."""
        return post in self._posts

    def write_plan(self, plan: Plan) -> None:
        """Write a step down; returns when it is recorded."""
        self._submit(lambda: self._database.add_plan(plan)).result()
        self._plans[plan.step] = plan.numbers

    def record(self, key: str, value: Any) -> None:
        """Keep one JSON value of the run; returns when it is recorded."""
        self._submit(lambda: self._database.put(key, value)).result()

    def read(self, numbers: NDArray[np.uint64], schema: RunSchema) -> Sequences:
        """Datums by number as views into segments, valid until their step is committed."""
        keys = self._posts[int(numbers[0]) >> 16].columns.keys()
        columns: dict[str, list[NDArray[Any]]] = {key: [] for key in keys}
        lengths = np.empty(len(numbers), np.int64)
        for at, number in enumerate(numbers.tolist()):
            post, index = self._posts[number >> 16], number & 0xFFFF
            first, last = post.bounds[index], post.bounds[index + 1]
            lengths[at] = last - first
            for key, (one, column) in post.columns.items():
                columns[key].append(column[index : index + 1] if one else column[first:last])
        input_ids = columns.pop("input_ids")
        targets = columns.pop("target_tokens", None)
        streams = {key: columns.pop(key) for key in schema.streams if key in columns}
        return Sequences(
            lengths=lengths,
            input_ids=input_ids,
            targets=targets,
            extras=columns,
            per_sample=schema.per_sample,
            streams=streams,
        )

    def ids(self, numbers: NDArray[np.uint64]) -> list[str | None]:
        """The clients' ids of datums, by number."""
        found: list[str | None] = []
        for number in numbers.tolist():
            ids = self._posts[number >> 16].ids
            found.append(None if ids is None else ids[number & 0xFFFF])
        return found

    def commit(self, step: int, groups: Sequence[int] = ()) -> None:
        """Every plan up to `step` is in a checkpoint: forget datums and `groups`, recycle segments.

        Raises SpoolError, and then nothing is forgotten.
        """
        steps = [s for s in self._plans if s <= step]
        counts = _by_post([self._plans[s] for s in steps])
        dead = self._dying(counts)
        self._submit(lambda: self._forget(step, dead, list(groups))).result()
        for step_done in steps:
            del self._plans[step_done]
        self._release(counts)

    def drop(self, numbers: NDArray[np.uint64], reason: str) -> None:
        """These datums will never be planned: forget them. Raises SpoolError; then nothing is."""
        counts = _by_post([numbers])
        dead, listed = self._dying(counts), numbers.tolist()
        self._submit(lambda: self._database.drop(listed, reason, dead)).result()
        self._release(counts)

    def _dying(self, counts: Counter[int]) -> list[int]:
        return [post for post, datums in counts.items() if self._posts[post].live == datums]

    def _release(self, counts: Counter[int]) -> None:
        for post, datums in counts.items():
            self._posts[post].live -= datums
            if not self._posts[post].live:
                self._segments.free(self._posts.pop(post).segment)

    def _forget(self, step: int, dead: list[int], groups: list[int]) -> None:
        keys_before = time.time() - self._window_s
        self._database.forget(step, dead, groups, keys_before)
        old = list(takewhile(lambda key: self._keys[key][0] < keys_before, self._keys))
        for key in old:
            del self._keys[key]

    def statistics(self) -> dict[str, int]:
        return {
            "posts_held": len(self._posts),
            "keys_remembered": len(self._keys),
            "posts_committed": self._committed_posts,
            "transactions": self._transactions,
            "jobs_waiting": self._jobs.qsize(),
            **self._segments.statistics(),
        }

    def close(self, *, remove: bool) -> None:
        """Stop the thread after its waiting jobs; `remove` the folder where nothing in it is
        needed.
        """
        self._jobs.put(None)
        self._thread.join()
        self._database.close()
        if remove:
            shutil.rmtree(self._directory)
        self._lock.close()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if not self._thread.is_alive():
            raise SpoolError("the spool's thread has ended: restart the service; its log says why")
        future: Future[T] = Future()
        self._jobs.put(Job(work, future))
        return future

    def _append(self, post: Post) -> Accepted:
        number = self._next_post
        self._database.add_post(number, post)
        self._next_post += 1
        accepted = Accepted(
            post=number,
            accepted=len(post.meta),
            body_hash=post.body_hash,
            dropped=post.dropped,
            skipped=post.skipped,
        )
        if post.key is not None:
            self._keys[(post.token, post.key)] = (time.time(), accepted)
        if post.segment is None:
            return accepted
        lengths = post.meta["length"].astype(np.int64)
        columns = {c.key: (c.axis == "sample", post.arrays[c.key]) for c in post.columns}
        self._posts[number] = Held(
            segment=post.segment,
            live=len(lengths),
            bounds=[0, *np.cumsum(lengths).tolist()],
            columns=columns,
            ids=post.ids,
        )
        return accepted

    def _run(self) -> None:
        """Take whatever waits into one transaction, then answer."""
        while True:
            waiting = [self._jobs.get()]
            while len(waiting) < 256:
                try:
                    waiting.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            jobs = [job for job in waiting if job is not None]
            if jobs:
                self._group_commit(jobs)
            if None in waiting:
                return
            self._segments.reserve_spare()

    def _group_commit(self, jobs: list[Job]) -> None:
        next_post = self._next_post
        try:
            with self._database.transaction():
                results = [job.work() for job in jobs]
        except Exception as error:
            # The rows are rolled back; so is what `_append` noted in memory. The callers give the
            # bytes back.
            log.error("a group commit of %d jobs failed: %r", len(jobs), error)
            for number in range(next_post, self._next_post):
                self._posts.pop(number, None)
                self._keys = {k: v for k, v in self._keys.items() if v[1].post != number}
            self._next_post = next_post
            for job in jobs:
                job.future.set_exception(SpoolError(f"not recorded: {error!r}"))
            return
        self._transactions += 1
        self._committed_posts += self._next_post - next_post
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)


def _take_lock(directory: Path) -> RangeLock:
    lock = RangeLock.open(directory / LOCK, create=True)
    if not lock.try_lock(0):
        lock.close()
        raise SpoolBusy(_busy(directory))
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
    return lock


def _busy(directory: Path) -> str:
    pid = (directory / LOCK).read_text().strip() or "unknown"
    return (
        f"{directory} is in use by the service with pid {pid}: stop it, or choose another "
        f"run.name or queue.dir"
    )


def refuse_if_held(directory: Path) -> None:
    """Raises SpoolBusy where a live process holds the spool in `directory`, if there is one."""
    try:
        lock = RangeLock.open(directory / LOCK)
    except OSError:
        return
    try:
        if lock.held_elsewhere(0):
            raise SpoolBusy(_busy(directory))
    finally:
        lock.close()


def _by_post(numbers: Sequence[NDArray[np.uint64]]) -> Counter[int]:
    """How many of these datums each post has."""
    counts: Counter[int] = Counter()
    for some in numbers:
        posts, datums = np.unique(some >> np.uint64(16), return_counts=True)
        counts.update(dict(zip(posts.tolist(), datums.tolist(), strict=True)))
    return counts


def discard(directory: Path) -> None:
    """Remove a spool that an earlier process left."""
    if directory.is_dir() and not directory.is_symlink():
        shutil.rmtree(directory)
    elif directory.exists() or directory.is_symlink():
        os.unlink(directory)
