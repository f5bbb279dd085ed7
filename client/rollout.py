"""RolloutClient: rollouts in, over HTTP, without making the sampler wait for the network.

    submit(datum) -> copy, check -> outbox -> sender threads -> POST /v1/datums -> 202
                     (caller's thread)        (`inflight` of them, daemons)

The caller's thread pays for the copy and the checks; what the checks refuse is a DatumError there
and then. Everything later (no connection, 429, 422, the end of the run) is retried or reported by
`flush()` and `close()`, never raised into the sampling loop. `policy`, `backlog` and `admission`
are those of the last answer, None before the first.

Waiting: `submit` waits only while the outbox is full, `flush` and `wait_policy` for their timeout,
`close` for `close_deadline_s`. A client belongs to the process that made it: a fork gets
ClientClosed. Loads no torch. Proxies and .netrc of the environment are not consulted.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any, Self

import httpx
import stamina

from headrace.client.admit import AdmissionAsk
from headrace.client.answers import PolicyInfo, Report
from headrace.client.core import RolloutCore, given_datums
from headrace.client.policy import PolicyPoll, Question
from headrace.client.snapshot import snapshot
from headrace.schemas.errors import ClientClosed

__all__ = ["RolloutClient"]


class RolloutClient(RolloutCore):
    """A client of one service, safe to use from several threads; its arguments: core.py."""

    def _prepare(self) -> None:
        self._closing = threading.Lock()

    def submit(self, datums: Any, policy_version: int | None = None) -> range:
        """Send a Datum, a mapping, or a list of them; returns once they are copied.

        The members of a group in one list travel in one post. `policy_version` is that of every
        datum which names none. Returns the numbers under which a Report names them.

        Raises DatumError (nothing of the list was taken), OutboxFull, ClientClosed, or PostFailed
        with `http_status` 410 after the end of the run.
        """
        self._check_process()
        copies = [snapshot(datum, policy_version) for datum in given_datums(datums)]
        return self._outbox.admit(copies, block=self._block)

    def flush(self, timeout: float | None = None) -> Report:
        """Wait until what was submitted so far is answered for, at most `timeout` seconds.

        Without a timeout the wait ends by itself: no post outlives its `deadline_s`.
        """
        self._check_open()
        return self._outbox.flush(timeout)

    def close(self) -> Report:
        """Flush within `close_deadline_s`, then stop. A second call returns the same report."""
        self._check_process()
        with self._closing:
            if self._report is None:
                self._outbox.seal()
                try:
                    self._report = self._outbox.flush(self._close_deadline_s)
                finally:
                    self._stop()
                    self._release()
                self._tell(self._report)
            return self._report

    def wait_policy(self, newer_than: int = -1, timeout: float | None = None) -> PolicyInfo:
        """Block until a policy version above `newer_than` is published.

        Raises PolicyTimeout after `timeout` seconds, or, with None, once the service has not been
        reachable for `deadline_s`; ClientError where it refuses to say; ClientClosed within some
        seconds of a `close` in another thread.
        """
        self._check_open()
        poll = PolicyPoll(newer_than, timeout, self._deadline_s)
        while poll.found is None:
            poll.hear(self._ask(poll.question()))
        self._policy = poll.found
        return poll.found

    def admit(self, groups: int = 1, timeout: float | None = None) -> None:
        """Reserve credits for `groups` groups that are about to be started, or wait for them.

        While every group is admitted before it is sampled, none comes to exceed the service's
        `eligibility.max_policy_lag`; without one it never waits. Raises AdmissionTimeout after
        `timeout` seconds, ClientError where the service refuses, ClientClosed as `wait_policy`.
        """
        self._check_open()
        ask = AdmissionAsk(groups, timeout, self._deadline_s, self._connection)
        while not ask.granted:
            if not self._outbox.pause(ask.delay_s):
                raise ClientClosed("admit: this client was closed")
            try:
                response = self._http.post(**ask.request)
            except httpx.TransportError as error:
                ask.missed(error)
            else:
                ask.hear(response)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A forked child leaves the block too, and has nothing to close.
        if os.getpid() == self._pid:
            self.close()

    def _ask(self, question: Question) -> PolicyInfo | None:
        with question.explained(self._connection):
            for attempt in stamina.retry_context(**question.retry):
                with attempt:
                    if not self._outbox.pause(question.delay_s):
                        raise ClientClosed("wait_policy: this client was closed")
                    return question.read(self._http.get(**question.request))
        raise AssertionError("retry_context yields at least once")
