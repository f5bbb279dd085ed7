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

import atexit
import logging
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import stamina

from headrace.client.answers import Admission, Answer, Backlog, PolicyInfo, Report, policy_of
from headrace.client.outbox import Outbox
from headrace.client.sender import Sender
from headrace.client.snapshot import snapshot
from headrace.schemas.errors import ClientClosed, ClientError, PolicyTimeout, SettingsError

__all__ = ["RolloutClient"]

MIB = 1 << 20
LONG_POLL_S = 30.0
ACTOR = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")

log = logging.getLogger(__name__)
_open_clients: weakref.WeakSet[RolloutClient] = weakref.WeakSet()


class RolloutClient:
    """A client of one service, safe to use from several threads.

    Args:
        base_url: as "http://host:8421".
        actor: who sends, for the books; `host-pid-4hex` by default. A claim, not a proof.
        token: sent as `Authorization: Bearer`.
        post_bytes: payload bytes at which a post is full.
        linger_s: seconds that a datum waits for company before a post that is not full goes.
        outbox_bytes: bytes held between `submit` and the answer, at most.
        on_full: what `submit` does without room: "block", or "raise" OutboxFull.
        deadline_s: seconds from a post's first try to giving up.
        close_deadline_s: seconds that `close` waits for what is still on its way.
        inflight: posts under way at once; one overtakes another by at most `inflight - 1` places.
        keepalive_s: seconds after which an idle connection is not used again; below the service's.
    """

    def __init__(
        self,
        base_url: str,
        *,
        actor: str | None = None,
        token: str | None = None,
        post_bytes: int = 2 * MIB,
        linger_s: float = 0.01,
        outbox_bytes: int = 256 * MIB,
        on_full: Literal["block", "raise"] = "block",
        deadline_s: float = 300.0,
        close_deadline_s: float = 30.0,
        inflight: int = 2,
        keepalive_s: float = 30.0,
    ) -> None:
        if on_full not in ("block", "raise"):
            raise SettingsError(f'on_full: got {on_full!r}, want "block" or "raise"')
        for name, value, least in (
            ("post_bytes", post_bytes, 1),
            ("outbox_bytes", outbox_bytes, 1),
            ("inflight", inflight, 1),
            ("linger_s", linger_s, 0),
            ("deadline_s", deadline_s, 0),
            ("close_deadline_s", close_deadline_s, 0),
            ("keepalive_s", keepalive_s, 0),
        ):
            if not value >= least:
                raise SettingsError(f"{name}: got {value!r}, want at least {least}")
        self.actor = _actor() if actor is None else actor
        if not ACTOR.fullmatch(self.actor):
            raise SettingsError(f"actor: got {actor!r}, want a name like {ACTOR.pattern}")
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise SettingsError(f'base_url: got {base_url!r}, want one like "http://host:8421"')

        self._block = on_full == "block"
        self._deadline_s, self._close_deadline_s = deadline_s, close_deadline_s
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._report: Report | None = None
        self._policy: PolicyInfo | None = None
        self._backlog: Backlog | None = None
        self._admission: Admission | None = None
        self._http = httpx.Client(
            base_url=url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            limits=httpx.Limits(keepalive_expiry=keepalive_s),
            trust_env=False,
        )
        self._outbox = Outbox(
            post_bytes=post_bytes, linger_s=linger_s, outbox_bytes=outbox_bytes, inflight=inflight
        )
        self._sender = Sender(
            self._outbox,
            self._http,
            actor=self.actor,
            deadline_s=deadline_s,
            threads=inflight,
            heard=self._hear,
        )
        _open_clients.add(self)

    def submit(self, datums: Any, policy_version: int | None = None) -> range:
        """Send a Datum, a mapping, or a list of them; returns once they are copied.

        The members of a group in one list travel in one post. `policy_version` is that of every
        datum which names none. Returns the numbers under which a Report names them.

        Raises DatumError (nothing of the list was taken), OutboxFull, ClientClosed, or PostFailed
        with `http_status` 410 after the end of the run.
        """
        self._check_process()
        given = datums if isinstance(datums, list | tuple) else [datums]
        copies = [snapshot(datum, policy_version) for datum in given]
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
            if self._report is not None:
                return self._report
            self._outbox.seal()
            try:
                self._report = self._outbox.flush(self._close_deadline_s)
            finally:
                self._outbox.stop()
                self._sender.join(0.5)
                self._http.close()
                _open_clients.discard(self)
            if self._report.failed or self._report.unknown:
                lost = (len(self._report.failed), self._report.unknown)
                log.error("closed with %d datums failed and %d not answered for", *lost)
            return self._report

    def wait_policy(self, newer_than: int = -1, timeout: float | None = None) -> PolicyInfo:
        """Block until a policy version above `newer_than` is published.

        Raises PolicyTimeout after `timeout` seconds, or, with None, once the service has not been
        reachable for `deadline_s`; ClientError where it refuses to say.
        """
        self._check_open()
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            wait = max(0.0, min(LONG_POLL_S, end - began))
            policy = self._ask_policy(newer_than, wait, end)
            if policy is not None and policy.version > newer_than:
                self._policy = policy
                return policy
            now = time.monotonic()
            if now >= end:
                have = "none" if policy is None else f"version {policy.version}"
                want = f"no policy newer than {newer_than} within {timeout} s"
                raise PolicyTimeout(f"{want}: the service has {have}; is a trainer publishing?")
            # Only where a service or a proxy cuts the long poll short.
            early = now - began < wait / 2
            if early and not self._outbox.pause(min(0.1, end - now)):
                raise ClientClosed("wait_policy: this client was closed")

    @property
    def policy(self) -> PolicyInfo | None:
        return self._policy

    @property
    def backlog(self) -> Backlog | None:
        return self._backlog

    @property
    def admission(self) -> Admission | None:
        return self._admission

    def statistics(self) -> Mapping[str, int]:
        """Counts over the client's life; submitted = buffered + accepted + failed, in datums.

        `dropped` of the accepted were stale, late or duplicate; `outbox` is in bytes; `posts`,
        `retries`, `bytes` are of the network.
        """
        self._check_process()
        return self._outbox.statistics() | self._sender.statistics()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (
            os.getpid() == self._pid
        ):  # a forked child leaves the block too, and has nothing to close
            self.close()

    def __repr__(self) -> str:
        return f"RolloutClient({str(self._http.base_url)!r}, actor={self.actor!r})"

    def _ask_policy(self, newer_than: int, wait: float, end: float) -> PolicyInfo | None:
        params = {"newer_than": newer_than, "wait": round(wait, 3)}
        timeout = httpx.Timeout(wait + 5.0, connect=5.0)
        patience = max(0.001, min(self._deadline_s, end - time.monotonic()))
        try:
            for attempt in stamina.retry_context(
                on=_worth_waiting, attempts=None, timeout=patience, wait_jitter=0.1, wait_max=1.0
            ):
                with attempt:
                    if self._outbox.stopped:
                        raise ClientClosed("wait_policy: this client was closed")
                    response = self._http.get("/v1/policy", params=params, timeout=timeout)
                    response.raise_for_status()
                    return _policy_in(response)
        except httpx.HTTPStatusError as error:
            answer = Answer.read(error.response)
            if not answer.retried:
                raise ClientError(f"GET /v1/policy: {answer}") from error
            raise PolicyTimeout(f"GET /v1/policy, for {patience:.1f} s: {answer}") from error
        except httpx.TransportError as error:
            hint = f"is the service up at {self._http.base_url}?"
            text = f"GET /v1/policy, for {patience:.1f} s: {error!r}; {hint}"
            raise PolicyTimeout(text) from error
        raise AssertionError("retry_context yields at least once")

    def _hear(self, answer: Answer) -> None:
        self._policy, self._backlog = answer.policy, answer.backlog
        self._admission = answer.admission

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            made = f"this client was made in process {self._pid}, and this is a fork of it"
            raise ClientClosed(f"{made}: its threads are not here; make a client after the fork")

    def _check_open(self) -> None:
        self._check_process()
        if self._report is not None:
            raise ClientClosed("this client is closed; make a new one")


def _policy_in(response: httpx.Response) -> PolicyInfo | None:
    try:
        body = response.json()
        return policy_of(body["version"], body.get("uri"))
    except (ValueError, TypeError, KeyError) as error:
        text = f"GET /v1/policy: got {response.text[:200]!r}, want version and uri"
        raise ClientError(text) from error


def _worth_waiting(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return Answer.read(error.response).retried
    return isinstance(error, httpx.TransportError)


def _actor() -> str:
    host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower()).strip("-")[:40] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


@atexit.register
def _warn_at_exit() -> None:
    for client in list(_open_clients):
        if client._pid == os.getpid() and (left := client.statistics()["buffered"]):
            log.warning("%d datums of %r were never answered for: close() it", left, client)
