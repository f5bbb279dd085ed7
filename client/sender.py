"""The threads that carry posts from the outbox to the service, one try after another.

    take -> pack -> try -> 202                      delivered
                    |  ^-- wait -- again, until     failed: deadline_s has passed
                    |              deadline_s       abandoned: the client was closed
                    `-> refused -> several submits  each submit once more, in its own post
                                   one submit       failed, with the finding about each datum

Invariants: all tries of a post carry the same bytes under the same Idempotency-Key; only what
`Answer.retried` names, and a connection that failed, is tried again; a datum is counted once. The
waits grow from 0.1 s to 5 s with jitter, or are Retry-After within 20 %; they are on the outbox's
condition, so that closing ends them, as it would not end a plain sleep.

Started and joined by RolloutClient. Never raises into a caller: what failed is in the report.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import httpx

from headrace.client.answers import Answer
from headrace.client.outbox import Outbox, Post
from headrace.schemas.errors import FieldError, PostFailed
from headrace.schemas.wire import pack_columnar

__all__ = ["Sender"]

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0
TRY_TIMEOUT_S, CONNECT_TIMEOUT_S = 30.0, 5.0
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
MAYBE_TAKEN = frozenset({408, 502, 504})  # a gateway may have passed the post on
SPLIT = frozenset({413, 422})  # refusals that one submit can cause for all others in the post

log = logging.getLogger(__name__)


class _AbandonedError(Exception):
    """The client was closed before the post was answered for."""


class Sender:
    """`threads` of them, each with one post at a time. `heard` gets the Answer of every 202."""

    def __init__(
        self,
        outbox: Outbox,
        http: httpx.Client,
        *,
        actor: str,
        deadline_s: float,
        threads: int,
        heard: Callable[[Answer], None],
    ) -> None:
        self._outbox, self._http, self._actor = outbox, http, actor
        self._deadline_s, self._heard = deadline_s, heard
        self._counting = threading.Lock()
        self._posts = self._retries = self._bytes = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"headrace-sender-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads after `Outbox.stop`; one inside a request may outlive this."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def statistics(self) -> dict[str, int]:
        """`bytes` are those of bodies, each once however often it was tried."""
        with self._counting:
            return {"posts": self._posts, "retries": self._retries, "bytes": self._bytes}

    def _run(self) -> None:
        while (post := self._outbox.take()) is not None:
            try:
                self._deliver(post, time.monotonic() + self._deadline_s, last=False)
            except _AbandonedError:
                return

    def _deliver(self, post: Post, deadline: float, *, last: bool) -> None:
        try:
            answer = self._send(post, deadline)
        except _AbandonedError:
            raise
        except Exception as error:  # a thread that died here would hang every flush
            failure = error if isinstance(error, PostFailed) else PostFailed(f"not sent: {error!r}")
            self._fail(post, [(number, failure) for number in post.numbers])
            return
        if answer.taken:
            self._heard(answer)
            self._outbox.delivered(post, answer.dropped)
            return
        parts = post.by_submit()
        if answer.status in SPLIT and len(parts) > 1 and not last:
            for part in parts:
                self._deliver(part, deadline, last=True)
            return
        self._fail(post, _verdicts(post, answer))
        if answer.status == 410:
            self._outbox.finish(PostFailed(f"the trainer ended the run ({answer})", 410))

    def _fail(self, post: Post, failures: list[tuple[int, PostFailed]]) -> None:
        number, error = failures[0]
        log.error("%d datums failed, from number %d on: %s", len(failures), number, error)
        self._outbox.failed(post, failures)

    def _send(self, post: Post, deadline: float) -> Answer:
        """The last answer. Raises PostFailed without one, _AbandonedError when closed."""
        body = pack_columnar(post.datums, actor=self._actor)
        with self._counting:
            self._posts += 1
            self._bytes += len(body)
        tries, maybe_taken = 0, False
        while True:
            tries += 1
            retry_after = None
            outcome = self._try(post.key, body, deadline)
            if isinstance(outcome, Answer):
                if not outcome.retried:
                    return outcome
                retry_after = outcome.retry_after
                maybe_taken |= outcome.status in MAYBE_TAKEN
            else:
                maybe_taken |= not isinstance(outcome, NEVER_SENT)
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(tries, outcome, maybe_taken)
            wait = _wait_s(tries, retry_after)
            level = logging.INFO if isinstance(outcome, Answer) or tries > 1 else logging.WARNING
            log.log(level, "try %d of a post: %s; again in %.1f s", tries, _text(outcome), wait)
            if not self._outbox.pause(min(wait, left)):
                raise _AbandonedError
            with self._counting:
                self._retries += 1

    def _try(self, key: str, body: bytes, deadline: float) -> Answer | httpx.RequestError:
        left = max(1.0, deadline - time.monotonic())
        timeout = httpx.Timeout(min(TRY_TIMEOUT_S, left), connect=min(CONNECT_TIMEOUT_S, left))
        headers = {"Content-Type": "application/msgpack", "Idempotency-Key": key}
        try:
            response = self._http.post("/v1/datums", content=body, headers=headers, timeout=timeout)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise PostFailed(f"the request is not one that HTTP can carry: {error!r}") from error
        except httpx.RequestError as error:
            return error
        except RuntimeError as error:
            if self._outbox.stopped:  # httpx refuses to send on a closed client
                raise _AbandonedError from error
            raise
        return Answer.read(response)

    def _late(
        self, tries: int, outcome: Answer | httpx.RequestError, maybe_taken: bool
    ) -> PostFailed:
        status = outcome.status if isinstance(outcome, Answer) else 0
        message = f"no 202 in {tries} tries within deadline_s={self._deadline_s}: {_text(outcome)}"
        if maybe_taken:
            message += "; a try may have been taken: sent again, only a datum `id` tells it apart"
        return PostFailed(message, status)


def _wait_s(tries: int, retry_after: float | None) -> float:
    if retry_after:
        return retry_after * random.uniform(0.8, 1.2)
    return min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(tries - 1, 10)) * random.uniform(0.5, 1.5)


def _text(outcome: Answer | httpx.RequestError) -> str:
    return str(outcome) if isinstance(outcome, Answer) else repr(outcome)


def _verdicts(post: Post, answer: Answer) -> list[tuple[int, PostFailed]]:
    """Every datum of a refused post with its own findings, or with those that sank it."""
    numbers = post.numbers
    findings: dict[int, list[FieldError]] = {}
    for error in answer.errors:
        if error.index is not None and 0 <= error.index < len(numbers):
            number = numbers[error.index]
            findings.setdefault(number, []).append(replace(error, index=number))
    blamed = [error for errors in findings.values() for error in errors]
    shared = PostFailed(
        f"not taken, because of another datum of its post: {blamed[0]}" if blamed else str(answer),
        answer.status,
        blamed or list(answer.errors),
    )
    return [
        (
            n,
            PostFailed(str(findings[n][0]), answer.status, findings[n])
            if n in findings
            else shared,
        )
        for n in numbers
    ]
