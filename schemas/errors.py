"""Every error that headrace raises on purpose, as one tree.

    HeadraceError
    ├── Refused                    the service will not take this request; never repaired
    │   ├── MalformedBody          400  not msgpack, trailing bytes, a length that does not hold
    │   ├── PaddedBody             400  mostly bytes that no field needs
    │   ├── MalformedHead          400  not HTTP/1.1, or too many requests sent ahead
    │   ├── HeadTooLarge           431  more bytes than server.max_head_bytes
    │   ├── TooSlow                408  head or body did not arrive in time
    │   ├── LengthMissing          411  no Content-Length
    │   ├── BodyTooLarge           413  more bytes than limits.max_body_bytes
    │   ├── UnsupportedMedia       415  a content type or encoding that is not spoken here
    │   ├── Unauthorized           401  no token, or one that is not known
    │   │   └── TokenExpired       401  a known token whose time is over
    │   ├── Forbidden              403  a token whose role may not do this
    │   │   └── ForeignOrigin      403  a web page of another origin sent it
    │   ├── NotLoopback            421  a Host header that is not this service's
    │   ├── InvalidDatums          422  `errors` says index, field, code, got, want
    │   ├── KeyConflict            409  the same Idempotency-Key with other bytes
    │   ├── InProgress             409  the first try with this key is still running
    │   ├── GroupUnknown           404  no such group, or another token's
    │   ├── GroupLarger            409  a group cannot end with fewer members than it has
    │   ├── AllStale               409  nothing of the post was fresh enough
    │   ├── BacklogFull            429  accepted and not yet delivered: over the budget
    │   ├── NoCredits              429  no more groups may be started now
    │   └── NotServing             503  starting, disk full, retain full
    │       ├── Draining           503  ending: open posts are finished, new ones are not taken
    │       └── TooManyConnections 503  server.max_connections are open
    ├── DatumError                 a datum that cannot be built or collated; a ValueError
    ├── SettingsError              settings that contradict each other; a ValueError
    ├── LeftoverFound              an earlier process left rings or a spool; no --discard was given
    ├── SpoolError
    │   ├── SpoolBusy              another live process holds the folder
    │   ├── SpoolFull              no segment has room and none may be made
    │   ├── SpoolVersion           written by another major version
    │   └── PlanUnknown            no plan of this step is written down
    ├── RingError
    │   ├── RingBusy               a lock that this process wants is held
    │   ├── RingNoSpace            the tmpfs cannot hold the ring
    │   ├── RingForeign            not a ring of ours: magic, version, size or owner differ
    │   ├── RingCorrupt            a descriptor or a word breaks an invariant
    │   ├── RingGap                records were skipped
    │   └── RecordTooLarge         one record or step can never fit
    ├── TrainerError
    │   ├── ServiceGone            the writer's lock is free, and stayed so beyond the bound
    │   ├── ResumeUnknown          resume_after names what this service cannot resume
    │   ├── TopologyMismatch       dp_rank, dp_size or replicas differ from the ring's
    │   └── CommitOverdue          the retain budget is full of delivered, uncommitted steps
    └── ClientError
        ├── ClientClosed           the client was closed, or is a copy in a forked process
        ├── OutboxFull             on_full="raise" and no room
        ├── PostFailed             a post was refused for good or its deadline passed
        ├── AdmissionTimeout       no credits for more groups within the time
        └── PolicyTimeout          no policy version arrived within the time

A message says what, which field, got, want and what to do. `code` is the word on the wire, `status`
the HTTP status. All of them survive pickling, since trainers move them between processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

__all__ = [
    "AdmissionTimeout",
    "AllStale",
    "BacklogFull",
    "BodyTooLarge",
    "ClientClosed",
    "ClientError",
    "CommitOverdue",
    "DatumError",
    "Draining",
    "FieldError",
    "Forbidden",
    "ForeignOrigin",
    "GroupLarger",
    "GroupUnknown",
    "HeadTooLarge",
    "HeadraceError",
    "InProgress",
    "InvalidDatums",
    "KeyConflict",
    "LeftoverFound",
    "LengthMissing",
    "MalformedBody",
    "MalformedHead",
    "NoCredits",
    "NotLoopback",
    "NotServing",
    "OutboxFull",
    "PaddedBody",
    "PlanUnknown",
    "PolicyTimeout",
    "PostFailed",
    "RecordTooLarge",
    "Refused",
    "ResumeUnknown",
    "RingBusy",
    "RingCorrupt",
    "RingError",
    "RingForeign",
    "RingGap",
    "RingNoSpace",
    "ServiceGone",
    "SettingsError",
    "SpoolBusy",
    "SpoolError",
    "SpoolFull",
    "SpoolVersion",
    "TokenExpired",
    "TooManyConnections",
    "TooSlow",
    "TopologyMismatch",
    "TrainerError",
    "Unauthorized",
    "UnsupportedMedia",
]


class HeadraceError(Exception):
    """Root of the tree. `code` is stable and machine-readable; the message is for people."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One finding about one datum of a post.

    `index` is the datum's place in the body (None: the post as a whole), `field` the key as the
    sender wrote it, `code` a stable word, `got` and `want` short texts.
    """

    index: int | None
    field: str
    code: str
    got: str
    want: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = "post" if self.index is None else f"datum {self.index}"
        return f"{where}, {self.field}: {self.code}: got {self.got}, want {self.want}"


class Refused(HeadraceError):
    """The service will not take this request. `retry_after` in seconds, where waiting helps."""

    code = "refused"
    status = 400
    retry_after: int | None = None

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(*((message,) if retry_after is None else (message, retry_after)))
        if retry_after is not None:
            self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


class MalformedBody(Refused):
    code, status = "malformed", 400


class PaddedBody(Refused):
    code, status = "padding", 400


class MalformedHead(Refused):
    code, status = "malformed_head", 400


class HeadTooLarge(Refused):
    code, status = "head_too_large", 431


class TooSlow(Refused):
    code, status = "too_slow", 408


class LengthMissing(Refused):
    code, status = "length_missing", 411


class BodyTooLarge(Refused):
    code, status = "body_too_large", 413


class UnsupportedMedia(Refused):
    code, status = "unsupported_media", 415


class Unauthorized(Refused):
    code, status = "unauthorized", 401


class TokenExpired(Unauthorized):
    code, status = "token_expired", 401


class Forbidden(Refused):
    code, status = "forbidden", 403


class ForeignOrigin(Forbidden):
    code, status = "foreign_origin", 403


class NotLoopback(Refused):
    code, status = "foreign_host", 421


class InvalidDatums(Refused):
    """At least one datum cannot be taken, so none of the post was. `errors` lists the findings."""

    code, status = "invalid", 422

    def __init__(self, errors: list[FieldError]) -> None:
        Exception.__init__(self, errors)
        self.errors = errors

    def __str__(self) -> str:
        more = "" if len(self.errors) <= 1 else f" (and {len(self.errors) - 1} more)"
        first = str(self.errors[0]) if self.errors else "no finding given"
        return f"nothing of the post was taken: {first}{more}"


class KeyConflict(Refused):
    code, status = "conflict", 409


class GroupUnknown(Refused):
    code, status = "group_unknown", 404


class GroupLarger(Refused):
    code, status = "group_larger", 409


class AllStale(Refused):
    code, status = "stale", 409


class InProgress(Refused):
    code, status = "in_progress", 409
    retry_after = 1


class BacklogFull(Refused):
    code, status = "backlog_full", 429
    retry_after = 1


class NoCredits(Refused):
    code, status = "no_credits", 429
    retry_after = 1


class NotServing(Refused):
    code, status = "not_serving", 503
    retry_after = 1


class Draining(NotServing):
    code = "draining"


class TooManyConnections(NotServing):
    code = "too_many_connections"


class DatumError(HeadraceError, ValueError):
    code, status = "datum", 422


class SettingsError(HeadraceError, ValueError):
    code = "settings"


class LeftoverFound(HeadraceError):
    code = "leftover"


class SpoolError(HeadraceError):
    code = "spool"


class SpoolBusy(SpoolError):
    code = "spool_busy"


class SpoolFull(SpoolError):
    code, status = "spool_full", 503


class SpoolVersion(SpoolError):
    code = "spool_version"


class PlanUnknown(SpoolError):
    code = "plan_unknown"


class RingError(HeadraceError):
    code = "ring"


class RingBusy(RingError):
    code = "ring_busy"


class RingNoSpace(RingError):
    code = "ring_no_space"


class RingForeign(RingError):
    code = "ring_foreign"


class RingCorrupt(RingError):
    code = "ring_corrupt"


class RingGap(RingError):
    code = "ring_gap"


class RecordTooLarge(RingError):
    code = "record_too_large"


class TrainerError(HeadraceError):
    code = "trainer"


class ServiceGone(TrainerError):
    code = "service_gone"


class ResumeUnknown(TrainerError):
    code = "resume_unknown"


class TopologyMismatch(TrainerError):
    code = "topology_mismatch"


class CommitOverdue(TrainerError):
    code = "commit_overdue"


class ClientError(HeadraceError):
    code = "client"


class ClientClosed(ClientError):
    code = "client_closed"


class OutboxFull(ClientError):
    code = "outbox_full"


class PostFailed(ClientError):
    """A post that will not be retried. `status` is the last HTTP status (0: no answer), `errors`
    the 422 findings.
    """

    code = "post_failed"

    def __init__(
        self, message: str, http_status: int = 0, errors: list[FieldError] | None = None
    ) -> None:
        super().__init__(message, http_status, errors or [])
        self.http_status = http_status
        self.errors = errors or []

    def __str__(self) -> str:
        return str(self.args[0])


class AdmissionTimeout(ClientError, TimeoutError):
    code = "admission_timeout"


class PolicyTimeout(ClientError, TimeoutError):
    code = "policy_timeout"
