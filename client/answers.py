"""What the service answers, as small values: policy, backlog, admission, and what became of datums.

Owns the reading of a 202's JSON and of `application/problem+json`, and the decision which answers
are worth another try:

    again       no connection, connection lost, no answer in time; 408, 429, 502, 503, 504;
                409 `in_progress`: the first try still runs
    for good    everything else; 410 ends the client

and of those for good, which are about the size of the post and which may be about one datum in it.

Called by the sender and by RolloutClient. Holds no state and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from headrace.schemas.errors import FieldError, PostFailed

__all__ = ["Admission", "Answer", "Backlog", "PolicyInfo", "Report"]

RETRIED = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """The newest policy that the trainer published. `uri` names its weights and is never opened."""

    version: int
    uri: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What the service has accepted and not yet delivered."""

    datums: int = 0
    tokens: int = 0
    bytes: int = 0
    steps: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How many more groups may be started."""

    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the datums submitted so far and not yet reported.

    Each datum is in one report as delivered or failed; `unknown` ones may be in a later one.
    """

    delivered: int  # datums that the service answered for with 202
    failed: list[tuple[int, PostFailed]]  # (number of the datum in submit order from 0, why)
    unknown: int  # datums not yet answered for when the time was up
    dropped: int = 0  # of the delivered, those the service counted as dropped and did not name


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP answer, read. `code` and `detail` are the problem's, "" for a success."""

    status: int
    retry_after: float | None = None  # seconds
    code: str = ""
    detail: str = ""
    errors: tuple[FieldError, ...] = ()  # at most 100; index = place in the body
    skipped: tuple[FieldError, ...] = ()  # of a 202 under on_invalid=skip; at most 100 as well
    invalid: int = 0  # datums that were skipped
    dropped: int = 0  # stale, late, duplicate; without the invalid ones
    policy: PolicyInfo | None = None
    backlog: Backlog | None = None
    admission: Admission | None = None

    @property
    def taken(self) -> bool:
        return self.status == 202

    @property
    def retried(self) -> bool:
        return self.status in RETRIED or (self.status == 409 and self.code == "in_progress")

    @property
    def too_large(self) -> bool:
        """A smaller post may be taken."""
        return self.status == 413 or (
            self.status == 422 and any(e.code == "count" and e.index is None for e in self.errors)
        )

    @classmethod
    def read(cls, response: httpx.Response) -> Answer:
        """Never raises: an answer of another shape has its status and its first words."""
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            body = {"detail": response.text[:200]}
        if response.status_code == 202:
            dropped = dict(_mapping(body.get("dropped")))
            return cls(
                status=202,
                skipped=_findings(body.get("skipped")),
                invalid=_count(dropped.pop("invalid", 0)),
                dropped=sum(map(_count, dropped.values())),
                policy=policy_of(body.get("policy_version"), body.get("policy_uri")),
                backlog=_backlog(body.get("backlog")),
                admission=_admission(body.get("admission")),
            )
        return cls(
            status=response.status_code,
            retry_after=_seconds(response.headers.get("retry-after")),
            code=str(body.get("code") or ""),
            detail=str(body.get("detail") or body.get("title") or ""),
            errors=_findings(body.get("errors")),
        )

    def __str__(self) -> str:
        head = f"HTTP {self.status} {self.code}".rstrip()
        return f"{head}: {self.detail}" if self.detail else head


def policy_of(version: Any, uri: Any) -> PolicyInfo | None:
    """None before the first version is published."""
    if type(version) is not int:
        return None
    return PolicyInfo(version=version, uri=uri if isinstance(uri, str) else None)


def _findings(value: Any) -> tuple[FieldError, ...]:
    return tuple(
        FieldError(
            index=e["index"] if type(e.get("index")) is int else None,
            **{k: str(e.get(k, "")) for k in ("field", "code", "got", "want")},
        )
        for e in (value if isinstance(value, list) else ())
        if isinstance(e, dict)
    )


def _backlog(value: Any) -> Backlog | None:
    if not isinstance(value, dict):
        return None
    counts = {k: _count(value.get(k)) for k in ("datums", "tokens", "bytes")}
    steps = value.get("steps")
    return Backlog(**counts, steps=steps if isinstance(steps, int | float) else 0)


def _admission(value: Any) -> Admission | None:
    groups = _mapping(value).get("groups")
    return Admission(groups=groups) if type(groups) is int else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if type(value) is int else 0


def _seconds(header: str | None) -> float | None:
    # Only the whole-seconds form: the service speaks no other, and a proxy's date is not trusted.
    return float(header) if header is not None and header.isdecimal() else None
