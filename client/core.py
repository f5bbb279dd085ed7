"""What both rollout clients are made of; they differ only in how a caller waits.

    RolloutClient         waits in its thread    | both: snapshot -> outbox -> senders -> HTTP
    AsyncRolloutClient    waits in its task      |

Owns the arguments and their checks, the outbox, the senders, what the last answer said, the warning
at exit, and the rule that a client belongs to the process that made it. Never used by itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import socket
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from headrace.client.answers import Admission, Answer, Backlog, PolicyInfo, Report
from headrace.client.body import Compress, Encoder
from headrace.client.connection import Connection, Verify
from headrace.client.outbox import Outbox
from headrace.client.sender import Sender
from headrace.schemas.errors import ClientClosed, SettingsError

__all__ = ["RolloutCore", "given_datums"]

MIB = 1 << 20
JOIN_S = 0.5
ACTOR = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")

log = logging.getLogger(__name__)
_open_clients: weakref.WeakSet[RolloutCore] = weakref.WeakSet()


class RolloutCore:
    """See the module's contract; subclasses say how a caller waits."""

    def __init__(
        self,
        base_url: str,
        *,
        actor: str | None = None,
        token: str | None = None,
        verify: Verify = True,
        cert: str | PathLike[str] | tuple[str | PathLike[str], str | PathLike[str]] | None = None,
        compress: Compress = None,
        float16_logprobs: bool = False,
        on_invalid: Literal["refuse", "skip"] = "refuse",
        post_bytes: int = 2 * MIB,
        linger_s: float = 0.01,
        outbox_bytes: int = 256 * MIB,
        on_full: Literal["block", "raise"] = "block",
        deadline_s: float = 300.0,
        close_deadline_s: float = 30.0,
        inflight: int = 2,
        keepalive_s: float = 30.0,
    ) -> None:
        """Starts the sender threads; connects when there is something to send.

        Args:
            base_url: as "http://host:8421".
            actor: who sends, for the books; `host-pid-4hex` by default. A claim, not a proof.
            token: sent as `Authorization: Bearer`.
            verify: whom to trust under https: True, CA certificates (a file or folder), an
                ssl.SSLContext, or False for whoever answers.
            cert: (certificate, key) files of this client, where the service wants one.
            compress: "zstd" (needs the zstandard package), "gzip", or None. Pays on slow networks.
            float16_logprobs: send logprobs as float16; the largest error is about 3.5e-3.
            on_invalid: "refuse": a datum that the service refuses takes the list that it was
                submitted in with it; "skip": it fails alone, and its group closes one short.
            post_bytes: payload bytes at which a post is full; the service's own limits lower it.
            linger_s: seconds that a datum waits for company before a post that is not full goes.
            outbox_bytes: bytes held between `submit` and the answer, at most.
            on_full: what `submit` does without room: "block", or "raise" OutboxFull.
            deadline_s: seconds from a post's first try to giving up.
            close_deadline_s: seconds that `close` waits for what is still on its way.
            inflight: posts under way at once; one overtakes another by at most `inflight - 1`
                places.
            keepalive_s: seconds after which an idle connection is not used again; below the
                service's.

        Raises SettingsError for arguments that make no sense.
        """
        if on_full not in ("block", "raise"):
            raise SettingsError(f'on_full: got {on_full!r}, want "block" or "raise"')
        if on_invalid not in ("refuse", "skip"):
            raise SettingsError(f'on_invalid: got {on_invalid!r}, want "refuse" or "skip"')
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
        encode = Encoder(actor=self.actor, compress=compress, float16_logprobs=float16_logprobs)
        self._connection = Connection(
            base_url, token=token, verify=verify, cert=cert, keepalive_s=keepalive_s
        )
        self._block = on_full == "block"
        self._deadline_s, self._close_deadline_s = deadline_s, close_deadline_s
        self._pid = os.getpid()
        self._report: Report | None = None
        self._policy: PolicyInfo | None = None
        self._backlog: Backlog | None = None
        self._admission: Admission | None = None
        self._http = self._connection.client()
        self._outbox = Outbox(
            post_bytes=post_bytes, linger_s=linger_s, outbox_bytes=outbox_bytes, inflight=inflight
        )
        self._sender = Sender(
            self._outbox,
            self._http,
            connection=self._connection,
            encode=encode,
            skip_invalid=on_invalid == "skip",
            deadline_s=deadline_s,
            threads=inflight,
            heard=self._hear,
        )
        _open_clients.add(self)
        self._prepare()

    def _prepare(self) -> None:
        """What a subclass holds besides; called once, at the end of `__init__`."""
        raise NotImplementedError

    @property
    def policy(self) -> PolicyInfo | None:
        """The newest that the service told of; None before the first."""
        return self._policy

    @property
    def backlog(self) -> Backlog | None:
        """As of the last 202; None before the first."""
        return self._backlog

    @property
    def admission(self) -> Admission | None:
        """As of the last 202; None where the service does not pace."""
        return self._admission

    def statistics(self) -> Mapping[str, int]:
        """Counts over the client's life; submitted = buffered + accepted + failed, in datums.

        `dropped` of the accepted were stale, late, duplicate, or skipped without being named (the
        service names so many a post, and counts all); `outbox` is in bytes; `posts`,
        `retries`, `bytes` are of the network.
        """
        self._check_process()
        return self._outbox.statistics() | self._sender.statistics()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._connection.url)!r}, actor={self.actor!r})"

    def _hear(self, answer: Answer) -> None:
        self._policy, self._backlog = answer.policy, answer.backlog
        self._admission = answer.admission

    def _stop(self) -> None:
        """End every wait and let the threads go; waits for none of them."""
        self._outbox.stop()
        _open_clients.discard(self)

    def _release(self) -> None:
        """After `_stop`: wait a moment for the threads, and give the connections back."""
        self._sender.join(JOIN_S)
        self._http.close()

    def _tell(self, report: Report) -> None:
        if report.failed or report.unknown:
            lost = (len(report.failed), report.unknown)
            log.error("closed with %d datums failed and %d not answered for", *lost)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            made = f"this client was made in process {self._pid}, and this is a fork of it"
            raise ClientClosed(f"{made}: its threads are not here; make a client after the fork")

    def _check_open(self) -> None:
        self._check_process()
        if self._report is not None:
            raise ClientClosed("this client is closed; make a new one")


def given_datums(datums: Any) -> list[Any]:
    """What `submit` was given, as a list."""
    return list(datums) if isinstance(datums, list | tuple) else [datums]


def _actor() -> str:
    host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower()).strip("-")[:40] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


@atexit.register
def _warn_at_exit() -> None:
    for client in list(_open_clients):
        if client._pid == os.getpid() and (left := client.statistics()["buffered"]):
            log.warning("%d datums of %r were never answered for: close() it", left, client)
