"""The long poll for a newer policy, as questions and answers; the clients do the asking.

    poll = PolicyPoll(newer_than, timeout, deadline_s)
    while poll.found is None:
        question = poll.question()          wait question.delay_s, then GET /v1/policy with its
        poll.hear(... an answer ...)        params, tried again as its `retry` says

Invariants: the questions end by the timeout, with PolicyTimeout; without a timeout they go on while
the service can be reached within deadline_s. Holds no connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.client.answers import Answer, PolicyInfo, policy_of
from headrace.client.connection import Connection
from headrace.schemas.errors import ClientError, PolicyTimeout

__all__ = ["POLICY", "PolicyPoll", "Question"]

POLICY = "/v1/policy"
LONG_POLL_S = 5.0  # a thread in one cannot be woken: so long may it outlive a close


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One long poll. Seconds."""

    newer_than: int
    wait: float  # that the service may take to answer
    patience_s: float  # for all tries of this question
    delay_s: float = 0.0  # before the first

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of httpx's `get`."""
        return {
            "url": POLICY,
            "params": {"newer_than": self.newer_than, "wait": round(self.wait, 3)},
            "timeout": httpx.Timeout(self.wait + 5.0, connect=5.0),
        }

    @property
    def retry(self) -> dict[str, Any]:
        """Arguments of stamina's `retry_context`."""
        return {
            "on": _worth_waiting,
            "attempts": None,
            "timeout": self.patience_s,
            "wait_jitter": 0.1,
            "wait_max": 1.0,
        }

    def read(self, response: httpx.Response) -> PolicyInfo | None:
        """None before the first version. Raises HTTPStatusError, ClientError."""
        response.raise_for_status()
        try:
            body = response.json()
            return policy_of(body["version"], body.get("uri"))
        except (ValueError, TypeError, KeyError) as error:
            text = f"GET {POLICY}: got {response.text[:200]!r}, want version and uri"
            raise ClientError(text) from error

    @contextmanager
    def explained(self, connection: Connection) -> Iterator[None]:
        """Turns the last try's httpx error into PolicyTimeout, or ClientError for a refusal."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            answer = Answer.read(error.response)
            if not answer.retried:
                hint = connection.hint(answer.status)
                raise ClientError(f"GET {POLICY}: {answer}{hint}") from error
            text = f"GET {POLICY}, for {self.patience_s:.1f} s: {answer}"
            raise PolicyTimeout(text) from error
        except httpx.TransportError as error:
            hint = f"is the service up at {connection.url}?"
            text = f"GET {POLICY}, for {self.patience_s:.1f} s: {error!r}; {hint}"
            raise PolicyTimeout(text) from error


class PolicyPoll:
    """One `wait_policy`: the questions still to ask, until `found` is set."""

    def __init__(self, newer_than: int, timeout: float | None, deadline_s: float) -> None:
        self._newer_than, self._timeout, self._deadline_s = newer_than, timeout, deadline_s
        self._end = float("inf") if timeout is None else time.monotonic() + timeout
        self._began = self._wait = self._delay = 0.0
        self.found: PolicyInfo | None = None

    def question(self) -> Question:
        left = self._end - time.monotonic()
        self._began = time.monotonic() + self._delay
        self._wait = max(0.0, min(LONG_POLL_S, left - self._delay))
        return Question(
            newer_than=self._newer_than,
            wait=self._wait,
            patience_s=max(0.001, min(self._deadline_s, left)),
            delay_s=self._delay,
        )

    def hear(self, policy: PolicyInfo | None) -> None:
        """Raises PolicyTimeout where that was the last question."""
        if policy is not None and policy.version > self._newer_than:
            self.found = policy
            return
        now = time.monotonic()
        if now >= self._end:
            have = "none" if policy is None else f"version {policy.version}"
            want = f"no policy newer than {self._newer_than} within {self._timeout} s"
            raise PolicyTimeout(f"{want}: the service has {have}; is a trainer publishing?")
        # Only where a service or a proxy cuts the long poll short.
        early = now - self._began < self._wait / 2
        self._delay = min(0.1, self._end - now) if early else 0.0


def _worth_waiting(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return Answer.read(error.response).retried
    return isinstance(error, httpx.TransportError)
