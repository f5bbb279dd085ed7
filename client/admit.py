"""The reservation of groups, as tries and answers; the clients do the asking.

    ask = AdmissionAsk(groups, timeout, deadline_s)
    while not ask.granted:
        wait ask.delay_s, then POST /v1/admission with ask.request
        ask.hear(response)              or ask.missed(error) where none came

The service holds the credits that are granted until this token has opened so many groups, or they
expire. Invariants: the tries end by the timeout, with AdmissionTimeout; without one they go on
while the service answers, or can be reached again within deadline_s. Holds no connection.
"""

from __future__ import annotations

import random
import time
from typing import Any

import httpx

from headrace.client.answers import Answer
from headrace.client.connection import Connection
from headrace.schemas.errors import AdmissionTimeout, ClientError

__all__ = ["ADMISSION", "AdmissionAsk"]

ADMISSION = "/v1/admission"
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0


class AdmissionAsk:
    """One `admit`. `delay_s`: to wait before the next try."""

    def __init__(
        self, groups: int, timeout: float | None, deadline_s: float, connection: Connection
    ) -> None:
        if groups < 1:
            raise ValueError(f"groups: got {groups}, want at least 1")
        self._groups, self._timeout, self._deadline_s = groups, timeout, deadline_s
        self._connection = connection
        now = time.monotonic()
        self._end = float("inf") if timeout is None else now + timeout
        self._heard_at = now
        self._next_s = FIRST_DELAY_S
        self.delay_s = 0.0
        self.granted = False

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of httpx's `post`."""
        return {"url": ADMISSION, "json": {"groups": self._groups}, "timeout": 10.0}

    def hear(self, response: httpx.Response) -> None:
        """Raises AdmissionTimeout where that was the last try, ClientError for a refusal."""
        self._heard_at = time.monotonic()
        if response.status_code == 200:
            self.granted = True
            return
        answer = Answer.read(response)
        if not answer.retried:
            hint = self._connection.hint(answer.status)
            raise ClientError(f"POST {ADMISSION}: {answer}{hint}")
        self._later(str(answer))

    def missed(self, error: httpx.TransportError) -> None:
        """No answer came. Raises AdmissionTimeout once that has gone on for `deadline_s`."""
        if time.monotonic() - self._heard_at >= self._deadline_s:
            self._end = 0.0
        self._later(f"{error!r}; is the service up at {self._connection.url}?")

    def _later(self, why: str) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise AdmissionTimeout(
                f"no credits for {self._groups} groups within {self._timeout} s: {why}"
            )
        self.delay_s = min(self._next_s * random.uniform(0.8, 1.2), left)
        self._next_s = min(2 * self._next_s, LONGEST_DELAY_S)
