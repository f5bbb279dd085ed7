"""What a post must keep to, as `GET /v1/limits` tells it; asked for lazily, never insisted on.

    unknown --ask--> known          a service that does not say has the defaults of settings.md
       ^  `--no answer: again at the next post, not within 5 s
       `--forget-- known            a refusal says otherwise: another service, or a proxy before it

Invariants: asking raises nothing and takes at most 5 s; `max_body_bytes` never exceeds what a 413
has shown to be too much. One for a client, shared by the sender's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import httpx

__all__ = ["AdvertisedLimits", "Limits"]

ASK_TIMEOUT_S = ASK_AGAIN_S = 5.0
DEFINITE = frozenset({404, 405, 501})  # no such route: there will be no answer later either

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The service's defaults, or what it says."""

    max_body_bytes: int = 64 << 20  # of a body, before it is compressed
    max_datums_columnar: int = 16_384
    max_inflate_ratio: int = 200

    @classmethod
    def read(cls, told: Any) -> Limits:
        """From the JSON of `GET /v1/limits`; what is missing or no count keeps its default."""
        given = told if isinstance(told, dict) else {}
        values = {f.name: given.get(f.name) for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if type(v) is int and v > 0})


class AdvertisedLimits:
    """See the module's contract."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._asking = threading.Lock()
        self._limits: Limits | None = None
        self._ask_at = 0.0  # monotonic seconds
        self._refused_bytes: int | None = None  # of the smallest body that was too large

    def get(self) -> Limits:
        """The limits as far as they are known."""
        with self._asking:
            if self._limits is None and time.monotonic() >= self._ask_at:
                self._limits = self._ask()
                self._ask_at = time.monotonic() + ASK_AGAIN_S
            limits = self._limits or Limits()
            if self._refused_bytes is None:
                return limits
            return replace(
                limits, max_body_bytes=min(limits.max_body_bytes, self._refused_bytes - 1)
            )

    def refused(self, nbytes: int | None) -> None:
        """A body that kept to the limits was too large: of `nbytes`, or, with None, in datums."""
        with self._asking:
            if nbytes is not None:
                self._refused_bytes = min(nbytes, self._refused_bytes or nbytes)
            self._limits, self._ask_at = None, 0.0

    def _ask(self) -> Limits | None:
        try:
            response = self._http.get("/v1/limits", timeout=ASK_TIMEOUT_S)
            if response.status_code in DEFINITE:
                return Limits()
            response.raise_for_status()
            return Limits.read(response.json())
        except (httpx.HTTPError, RuntimeError, ValueError) as error:  # RuntimeError: closed
            log.info("GET /v1/limits: %r; posts keep to the defaults until it answers", error)
            return None
