"""How often requests are refused and why, and the one log line a second that says so.

A hostile or broken client may be refused thousands of times a second, so refusals are counted one
by one and logged together: the first of a code at once, then at most one line a second a code, with
the count since the line before and the last detail. What a client sent is shown escaped and cut:
no line break, no terminal sequence, no megabyte of it reaches a log.

Lives on the event loop; `note` is called by the routes and the protocol, `close` by the app.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Refusals", "shown"]

log = logging.getLogger(__name__)

EVERY_S = 1.0
DETAIL_CHARS = 300


def shown(text: str, most: int = 80) -> str:
    """`text` as it may stand in a message or a log: ASCII, quoted, escaped, its first `most`
    characters.

    >>> shown("a\\x1b[2Jb", most=3)
    "'a\\\\x1b['..."
    """
    return ascii(text) if len(text) <= most else f"{text[:most]!a}..."


@dataclass(slots=True)
class _Tally:
    """Of one code. `unsaid` is what no line has counted yet."""

    count: int = 0
    unsaid: int = 0
    detail: str = ""
    token: str = ""
    client: str | None = None
    timer: asyncio.TimerHandle | None = None
    tokens: Counter[str] = field(default_factory=Counter)


class Refusals:
    """Counts refusals by code and by token, and logs them."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def note(self, code: str, detail: str, token: str = "", *, client: str | None = None) -> None:
        """One refusal. `code` is a word of errors.py, `token` the name of a known token or empty,
        `client` the peer's address.
        """
        tally = self._tallies.setdefault(code, _Tally())
        tally.count += 1
        tally.unsaid += 1
        tally.detail, tally.token, tally.client = detail[: DETAIL_CHARS + 1], token, client
        if token:
            tally.tokens[token] += 1
        if tally.timer is None:
            self._say(code, tally)

    def counts(self) -> dict[str, Any]:
        """`codes`: {code: refusals}; `tokens`: {token: {code: refusals}}."""
        tokens: dict[str, dict[str, int]] = {}
        for code, tally in self._tallies.items():
            for token, count in tally.tokens.items():
                tokens.setdefault(token, {})[code] = count
        return {"codes": {c: t.count for c, t in self._tallies.items()}, "tokens": tokens}

    def close(self) -> None:
        """Say what no line has said yet; no timer is left."""
        for code, tally in self._tallies.items():
            if tally.timer is not None:
                tally.timer.cancel()
                tally.timer = None
            if tally.unsaid:
                self._log(code, tally)

    def _say(self, code: str, tally: _Tally) -> None:
        self._log(code, tally)
        loop = asyncio.get_running_loop()
        tally.timer = loop.call_later(EVERY_S, self._a_second_later, code, tally)

    def _a_second_later(self, code: str, tally: _Tally) -> None:
        tally.timer = None
        if tally.unsaid:
            self._say(code, tally)

    @staticmethod
    def _log(code: str, tally: _Tally) -> None:
        count, tally.unsaid = tally.unsaid, 0
        log.warning(
            "refused %d %s, code %s; the last from %s%s: %s",
            count,
            "request" if count == 1 else "requests",
            code,
            shown(tally.client or "unknown", most=45),
            f" with token {shown(tally.token)}" if tally.token else "",
            shown(tally.detail, most=DETAIL_CHARS),
        )
