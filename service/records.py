"""The records that stages exchange, left to right.

    body -> Draft -> Post -> (spool) -> Headers -> Plan -> ring record

`Draft` is a body decoded and checked for form: views into the body, nothing copied. `Post` is what
the spool holds: columns in a segment, meta checked for content. `Headers` are the small fields that
grouping and planning look at; `Plan` is one optimizer step as indices. None of them but Draft and
Post touches payload.

A datum's number is `(post << 16) + index`, unique in the run. Post numbers start at 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import FieldError, SpoolVersion
from headrace.schemas.layout import Sequences, StreamSpec

__all__ = [
    "DATUM_META",
    "SIGNAL_BY_REWARD",
    "SIGNAL_NONE",
    "SIGNAL_SOME",
    "SPLIT_EVAL",
    "SPLIT_TRAIN",
    "Accepted",
    "Axis",
    "Column",
    "Draft",
    "DraftColumn",
    "Headers",
    "Placing",
    "Plan",
    "Post",
    "RunSchema",
    "Spool",
    "datum_numbers",
]

# "token": one value a token; "sample": one a datum; "either": every datum so far has one token, so
# both read the same.
Axis = Literal["token", "sample", "either"]

SPLIT_TRAIN, SPLIT_EVAL = 0, 1
SIGNAL_NONE, SIGNAL_SOME, SIGNAL_BY_REWARD = 0, 1, 2  # all advantages 0; not; not known yet

DATUM_META = np.dtype(
    [
        ("length", "<u4"),  # tokens
        ("loss_tokens", "<u4"),  # positions with weight != 0
        ("loss_weight", "<f8"),  # sum of weights
        ("policy_version", "<i8"),  # -1: none
        ("reward", "<f8"),  # NaN: none
        ("group", "<u8"),  # its number in the run; a datum without group_id has one of its own
        ("rollout", "<u8"),  # xxh3-64 of its id; 0: a rollout of its own
        ("group_size", "<u4"),  # 0: not said
        ("source", "<u4"),  # 0: none; an index into the spool's names
        ("split", "u1"),
        ("signal", "u1"),  # SIGNAL_*: whether the datum's advantages say anything
        ("bytes", "<u4"),  # payload bytes of the datum in its segment
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftColumn:
    """One key of a body: views in datum order that add up to the column."""

    key: str
    axis: Axis
    dtype: np.dtype[Any]  # the widest of the views
    views: Sequence[NDArray[Any]]  # [sum T, ...] together, or [N] together where per sample
    trailing: tuple[int, ...] = ()  # of a named stream

    def take(self, keep: NDArray[np.bool_], lengths: NDArray[np.int64]) -> DraftColumn:
        """The column of the datums where `keep` [N] is true."""
        if len(self.views) == len(keep):
            views: list[NDArray[Any]] = [v for v, k in zip(self.views, keep, strict=True) if k]
        else:
            (whole,) = self.views
            views = [whole[keep if self.axis == "sample" else np.repeat(keep, lengths)]]
        return replace(self, views=views)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A well-formed body. Nothing in it was compared with the run or with other posts yet."""

    actor: str | None
    lengths: NDArray[np.int64]  # [N] tokens
    columns: Mapping[str, DraftColumn]  # "input_ids" and the loss_fn_inputs keys
    policy_versions: NDArray[np.int64]  # [N] -1: none
    rewards: NDArray[np.float64]  # [N] NaN: none
    group_sizes: NDArray[np.int64]  # [N] 0: not said
    ids: Sequence[str | None] | None
    rollout_ids: Sequence[str | None] | None
    group_ids: Sequence[str | None] | None
    sources: Sequence[str | None] | None
    splits: Sequence[str | None] | None
    origin: NDArray[np.int64]  # [N] the datum's place in the body
    last_targets: NDArray[Any] | None = None  # [N] where targets are implied by the ids
    implied_targets: bool = False  # target_tokens[i] = input_ids[i + 1]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def body_bytes(self) -> int:
        """As it came in the body."""
        return sum(view.nbytes for column in self.columns.values() for view in column.views)

    @property
    def payload_bytes(self) -> int:
        """As it will lie in a segment, alignment left out."""
        tokens, total = int(self.lengths.sum()), 0
        for column in self.columns.values():
            count = len(self) if column.axis == "sample" else tokens
            total += count * column.dtype.itemsize * int(np.prod(column.trailing, dtype=np.int64))
        return total

    def take(self, keep: NDArray[np.bool_]) -> Draft:
        """The datums where `keep` [N] is true, in order."""

        def names(values: Sequence[str | None] | None) -> Sequence[str | None] | None:
            return values and [v for v, k in zip(values, keep, strict=True) if k]

        return replace(
            self,
            lengths=self.lengths[keep],
            columns={key: c.take(keep, self.lengths) for key, c in self.columns.items()},
            policy_versions=self.policy_versions[keep],
            rewards=self.rewards[keep],
            group_sizes=self.group_sizes[keep],
            ids=names(self.ids),
            rollout_ids=names(self.rollout_ids),
            group_ids=names(self.group_ids),
            sources=names(self.sources),
            splits=names(self.splits),
            origin=self.origin[keep],
            last_targets=None if self.last_targets is None else self.last_targets[keep],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSchema:
    """The keys that every datum of the run carries, and how each lies. Pinned by the first accepted
    post, but for the streams, which settings name.
    """

    axes: Mapping[str, Axis]  # loss_fn_inputs keys in sorted order; streams are per token
    streams: Mapping[str, StreamSpec] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether every key is known to be per token or per sample."""
        return "either" not in self.axes.values()

    @property
    def per_sample(self) -> frozenset[str]:
        return frozenset(key for key, axis in self.axes.items() if axis == "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Where one key of a post lies in its segment: C order, little-endian, 64-byte aligned."""

    key: str
    axis: Axis
    dtype: str  # np.dtype(...).str
    offset: int  # bytes from the segment's start
    trailing: tuple[int, ...] = ()  # of a named stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A checked post, its columns in a segment: the spool makes it durable or gives the bytes back.

    One without a datum (all were skipped or came before) is recorded for its key's sake.
    """

    segment: int | None  # None: no datum was kept
    offset: int  # bytes
    nbytes: int
    columns: tuple[Column, ...]
    arrays: Mapping[str, NDArray[Any]]  # the columns, as views into the segment
    meta: NDArray[Any]  # DATUM_META [N]
    ids: Sequence[str | None] | None  # the clients' datum ids
    run_values: Mapping[str, Any]  # values of the run that this post settles, as JSON
    new_names: Sequence[
        tuple[str, int, str]
    ]  # ("group" | "source", number in meta, name), first seen here
    actor: str | None
    token: str  # the name of the sender's token; "" without tokens
    key: str | None  # Idempotency-Key
    body_hash: bytes  # xxh3-128 of the body as received; b"" without a key
    dropped: Mapping[str, int] = field(default_factory=dict)  # datums not kept, by reason
    skipped: Sequence[FieldError] = ()  # findings about datums that were left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The part of a 202 that must stay the same when the post comes again."""

    post: int
    accepted: int  # datums
    body_hash: bytes
    dropped: Mapping[str, int]
    skipped: Sequence[FieldError]

    @property
    def first_datum(self) -> int:
        return self.post << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The small fields of one post, as grouping and planning see it."""

    post: int
    meta: NDArray[Any]  # DATUM_META [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How a microbatch's sequences are placed: the planner's settings that a plan depends on."""

    microbatch_tokens: int | None  # cap on slots; None: microbatch_size counts rows
    microbatch_size: int | None = None
    microbatch_multiple: int = 1
    sequence_multiple: int = 1
    pack_multiple: int = 1
    fixed_pack: bool = False
    quadratic_crossover: int = 24576

    def of(
        self, lengths: NDArray[np.int64], layout: str
    ) -> tuple[NDArray[np.int64] | None, int | None]:
        """(slots [N], slots of the row) of a microbatch; None where they are the plain ones."""
        slots = None
        if self.sequence_multiple > 1:
            slots = -(-lengths // self.sequence_multiple) * self.sequence_multiple
        if layout == "padded":
            return slots, None
        if self.fixed_pack:
            return slots, self.microbatch_tokens
        if self.pack_multiple == 1:
            return slots, None
        total = int((lengths if slots is None else slots).sum())
        return slots, -(-total // self.pack_multiple) * self.pack_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One optimizer step for all ranks: complete in itself, written down before anyone acts on it.

    Microbatch `index` of `rank` is bin `index * dp_size + rank`; its datums are
    `items[bins[bin]:bins[bin + 1]]`, indices into the `[N]` arrays. An empty bin is a filler: a
    copy of the step's shortest datum that carries no loss.
    """

    step: int
    dp_size: int
    layout: str
    placing: Placing
    numbers: NDArray[np.uint64]  # [N] datum numbers, in plan order
    lengths: NDArray[np.int64]  # [N] tokens
    loss_tokens: NDArray[np.int64]  # [N]
    loss_weights: NDArray[np.float64]  # [N]
    rollouts: NDArray[np.int64]  # [N] 0-based within the step
    groups: NDArray[np.int64]  # [N] 0-based within the step
    policy_versions: NDArray[np.int64]  # [N]
    advantages: NDArray[np.float32]  # [N] computed from rewards; [0] where datums bring their own
    nbytes: int  # payload bytes in the spool
    bins: NDArray[np.int64]  # [M * R + 1]
    items: NDArray[np.int64]  # [N]

    @property
    def count(self) -> int:
        """Microbatches a rank."""
        return (len(self.bins) - 1) // self.dp_size

    def members(self, index: int, rank: int) -> NDArray[np.int64]:
        """Indices into the `[N]` arrays of one microbatch, in batch order; empty for a filler."""
        at = index * self.dp_size + rank
        return self.items[self.bins[at] : self.bins[at + 1]]

    def pack(self) -> bytes:
        fields: dict[str, Any] = {name: getattr(self, name) for name in PLAN_SCALARS}
        fields["placing"] = asdict(self.placing)
        for name, dtype in PLAN_ARRAYS.items():
            fields[name] = getattr(self, name).astype(dtype, copy=False).tobytes()
        return cast(bytes, msgpack.packb(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> Plan:
        """The plan that `pack` wrote. Raises SpoolVersion where it is not one."""
        fields = msgpack.unpackb(packed)
        if set(fields) != {*PLAN_SCALARS, *PLAN_ARRAYS, "placing"}:
            raise SpoolVersion(
                f"a plan with the fields {sorted(fields)} was written by another version"
            )
        fields["placing"] = Placing(**fields["placing"])
        for name, dtype in PLAN_ARRAYS.items():
            fields[name] = np.frombuffer(fields[name], dtype)
        return cls(**fields)


PLAN_SCALARS = ("step", "dp_size", "layout", "nbytes")
PLAN_ARRAYS = {
    "numbers": "<u8",
    "lengths": "<i8",
    "loss_tokens": "<i8",
    "loss_weights": "<f8",
    "rollouts": "<i8",
    "groups": "<i8",
    "policy_versions": "<i8",
    "advantages": "<f4",
    "bins": "<i8",
    "items": "<i8",
}


class Spool(Protocol):
    """What was accepted, until its step is committed; one file a medium."""

    def stage(self, columns: Mapping[str, DraftColumn]) -> Staged:
        """Copy a draft's columns into a segment, until `append` or `abandon`. Raises SpoolFull."""
        ...

    def abandon(self, staged: Staged) -> None:
        """Give the bytes back; nothing of the post was kept."""
        ...

    def append(self, post: Post) -> Future[Accepted]:
        """Record the post; done when it is as durable as the setting says."""
        ...

    def known(self, token: str, key: str) -> Accepted | None:
        """The answer given to this Idempotency-Key, if it is remembered."""
        ...

    def write_plan(self, plan: Plan) -> None:
        """Write a step down, before anyone acts on it."""
        ...

    def read(self, numbers: NDArray[np.uint64], schema: RunSchema) -> Sequences:
        """The payload of datums as views into segments; valid until their step is committed."""
        ...

    def ids(self, numbers: NDArray[np.uint64]) -> list[str | None]:
        """The clients' ids of datums."""
        ...

    def drop(self, numbers: NDArray[np.uint64], reason: str) -> None:
        """These datums will never be planned: forget them."""
        ...

    def commit(self, step: int) -> None:
        """Every plan up to `step` is in a checkpoint: forget its datums, recycle their segments."""
        ...

    def statistics(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Columns copied into a segment, and not yet recorded."""

    segment: int
    offset: int
    nbytes: int
    columns: tuple[Column, ...]
    arrays: Mapping[str, NDArray[Any]]  # aligned views, for the checks


def datum_numbers(post: int, count: int) -> NDArray[np.uint64]:
    """`[count]` numbers of a post's datums."""
    return (np.uint64(post) << np.uint64(16)) + np.arange(count, dtype=np.uint64)
