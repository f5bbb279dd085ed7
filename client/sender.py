"""The threads that carry posts from the outbox to the service, one try after another.

    take -> limits -> pack -> try -> 202              delivered, but for the datums it skipped
               |       |      |  ^-- wait -- again    until deadline_s has passed: failed
               |       |      |                       or the client was closed: abandoned
               `-------'------`-> too large           in two, until it fits or is one parcel: failed
                                  refused, with       their submits failed with the findings, the
                                    datums named        others once more, in a post of their own
                                  refused otherwise   422: each submit by itself; else failed

Invariants: all tries of a post carry the same bytes under the same Idempotency-Key, a part of it
has a key of its own; only what `Answer.retried` names, and a connection that failed, is tried
again; a datum is counted once; each round of parts has fewer submits or parcels, so it ends. The
waits grow from 0.1 s to 5 s with jitter, or are Retry-After within 20 %; they are on the outbox's
monitor, so that closing ends them, as it would not end a plain sleep.

Started and joined by the rollout clients. Never raises into a caller: what failed is in the report.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import httpx

from headrace.client.answers import Answer
from headrace.client.body import Body, Encoder
from headrace.client.connection import Connection
from headrace.client.limits import AdvertisedLimits
from headrace.client.outbox import Outbox, Post
from headrace.schemas.errors import FieldError, PostFailed

__all__ = ["Sender"]

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0
TRY_TIMEOUT_S, CONNECT_TIMEOUT_S = 30.0, 5.0
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
MAYBE_TAKEN = frozenset({408, 502, 504})  # a gateway may have passed the post on

Failures = list[tuple[int, PostFailed]]
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
        connection: Connection,
        encode: Encoder,
        skip_invalid: bool,
        deadline_s: float,
        threads: int,
        heard: Callable[[Answer], None],
    ) -> None:
        self._outbox, self._http, self._connection = outbox, http, connection
        self._encode, self._limits = encode, AdvertisedLimits(http)
        self._url = "/v1/datums?on_invalid=skip" if skip_invalid else "/v1/datums"
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
        """`bytes` are those of bodies as sent, each once however often it was tried."""
        with self._counting:
            return {"posts": self._posts, "retries": self._retries, "bytes": self._bytes}

    def _run(self) -> None:
        while (post := self._outbox.take()) is not None:
            deadline = time.monotonic() + self._deadline_s
            parts = [post]
            try:
                while parts:
                    part = parts.pop(0)
                    parts[:0] = self._deliver(part, deadline)
            except _AbandonedError:
                return

    def _deliver(self, post: Post, deadline: float) -> list[Post]:
        """Answer for `post`, or for some of it; the parts that are still to be sent."""
        try:
            limits = self._limits.get()
            self._outbox.bound(post_bytes=limits.max_body_bytes, datums=limits.max_datums_columnar)
            if len(post.numbers) > limits.max_datums_columnar:
                have = f"limits.max_datums_columnar = {limits.max_datums_columnar}"
                return self._divide(post, f"{len(post.numbers)} datums, over {have}")
            body = self._encode(post.datums, max_inflate_ratio=limits.max_inflate_ratio)
            if body.nbytes > limits.max_body_bytes:
                have = f"limits.max_body_bytes = {limits.max_body_bytes}"
                return self._divide(post, f"a body of {body.nbytes} bytes, over {have}")
            answer = self._send(post.key, body, deadline)
        except _AbandonedError:
            raise
        except Exception as error:  # a thread that died here would hang every flush
            failure = error if isinstance(error, PostFailed) else PostFailed(f"not sent: {error!r}")
            self._fail(post, [(number, failure) for number in post.numbers])
            return []
        if answer.taken:
            self._heard(answer)
            self._taken(post, answer)
            return []
        if answer.too_large:
            self._limits.refused(body.nbytes if answer.status == 413 else None)
            return self._divide(post, str(answer), answer)
        if answer.status == 422 and len(post.submits) > 1:
            return self._without_blamed(post, answer)
        if answer.status == 410:  # before the post is settled: a flush that ends says it all
            self._outbox.finish(PostFailed(f"the trainer ended the run ({answer})", 410))
        self._fail(post, _verdicts(post, answer, self._connection.hint(answer.status)))
        return []

    def _taken(self, post: Post, answer: Answer) -> None:
        numbers, named = post.numbers, _by_number(post, answer.skipped)
        failures = [(n, PostFailed(str(named[n][0]), 422, named[n])) for n in numbers if n in named]
        # The service names so many and counts all of them.
        unnamed = min(max(0, answer.invalid - len(failures)), len(numbers) - len(failures))
        if failures:
            log.error("%d datums were skipped as invalid: %s", len(failures), failures[0][1])
        if unnamed:
            log.error("%d more datums were skipped without being named", unnamed)
        self._outbox.delivered(post, answer.dropped + unnamed, failures)

    def _divide(self, post: Post, why: str, answer: Answer | None = None) -> list[Post]:
        if len(post.parcels) > 1:
            return post.halves()
        one = "this datum alone" if len(post.numbers) == 1 else "this group, which is never split,"
        status = 413 if answer is None else answer.status
        failure = PostFailed(f"{one} makes too large a post: {why}", status)
        self._fail(post, [(number, failure) for number in post.numbers])
        return []

    def _without_blamed(self, post: Post, answer: Answer) -> list[Post]:
        named = _by_number(post, answer.errors)
        blamed = {p.submit for p in post.parcels if not named.keys().isdisjoint(p.numbers)}
        if not blamed:
            return post.by_submit()
        sunk = post.part(p for p in post.parcels if p.submit in blamed)
        for submit in sunk.by_submit():
            self._fail(submit, _verdicts(submit, answer, "", post))
        rest = [p for p in post.parcels if p.submit not in blamed]
        return [post.part(rest)] if rest else []

    def _fail(self, post: Post, failures: Failures) -> None:
        number, error = failures[0]
        log.error("%d datums failed, from number %d on: %s", len(failures), number, error)
        self._outbox.failed(post, failures)

    def _send(self, key: str, body: Body, deadline: float) -> Answer:
        """The last answer. Raises PostFailed without one, _AbandonedError when closed."""
        with self._counting:
            self._posts += 1
            self._bytes += len(body.content)
        tries, maybe_taken = 0, False
        while True:
            tries += 1
            retry_after = None
            outcome = self._try(key, body, deadline)
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

    def _try(self, key: str, body: Body, deadline: float) -> Answer | httpx.RequestError:
        left = max(1.0, deadline - time.monotonic())
        timeout = httpx.Timeout(min(TRY_TIMEOUT_S, left), connect=min(CONNECT_TIMEOUT_S, left))
        headers = body.headers | {"Idempotency-Key": key}
        try:
            response = self._http.post(
                self._url, content=body.content, headers=headers, timeout=timeout
            )
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


def _by_number(post: Post, findings: Iterable[FieldError]) -> dict[int, list[FieldError]]:
    """The findings about datums of `post`, with the caller's numbers for its places."""
    numbers = post.numbers
    named: dict[int, list[FieldError]] = {}
    for finding in findings:
        if finding.index is not None and 0 <= finding.index < len(numbers):
            number = numbers[finding.index]
            named.setdefault(number, []).append(replace(finding, index=number))
    return named


def _verdicts(post: Post, answer: Answer, hint: str, sent: Post | None = None) -> Failures:
    """Every datum of a refused post with its own findings, or with those that sank it.

    `sent` is the post that was refused, where `post` is a part of it.
    """
    named = _by_number(sent or post, answer.errors)
    findings = {n: named[n] for n in post.numbers if n in named}
    blamed = [error for errors in findings.values() for error in errors]
    shared = PostFailed(
        f"not taken, because of another datum of its list: {blamed[0]}"
        if blamed
        else f"{answer}{hint}",
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
        for n in post.numbers
    ]
