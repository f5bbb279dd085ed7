"""The field table: the arrays of a batch, their order, dtypes and pad values; and a datum's keys.

One declaration. `layout.py` makes and fills arrays from it, `collate.py` checks datums by it, the
service pins a run's keys by it. Nothing here computes; numpy is not even imported.

    layout    array            dtype     shape     pad    holds
    padded    input_ids        int64     [B, T]       0   token ids
              attention_mask   int64     [B, T]       0   1 at a token, 0 at a pad
              labels           int64     [B, T]    -100   targets; left out without target_tokens
              padding_mask     bool      [B, T]    True   the opposite of attention_mask
              extras           float32   [B, T]       0   every other key, sorted; [B] per sample
    thd       input_ids        int64     [1, S]       0   the sequences one after another
              labels           int64     [1, S]    -100   targets; without them ignore_index
              position_ids     int64     [1, S]       -   0, 1, ... from each slot's start
              seq_lens         int64     [1, N]       -   real lengths
              seq_lens_padded  int64     [1, N]       -   slots: lengths and what pads them
              extras           float32   [1, S]       0   every other key, sorted; [N] per sample
              cu_seqlens       int32     [K+1]        -   where each segment starts, then S
    neat      input_ids        int64     [1, S]       0   as in thd
              labels           int64     [1, S]    -100   as in thd
              position_ids     int64     [1, S]       -   as in thd
              doc_ids          int64     [1, S]       0   1 to N: the sequence a token belongs to
              extras           float32   [1, S]       0   every other key, sorted; [N] per sample
              cu_seqlens       int32     [K+1]        -   where each run of doc_ids starts, then S

K, the segments of a packed row, is N where nothing is padded; `layout.py` draws the rest. Each
layout has arrays that datums may not name: `reserved_names`. Named streams, where a caller has
them, stand among the extras in sorted order and keep dtype and trailing shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "BOUNDARIES",
    "CROSS_ENTROPY_IGNORE_IDX",
    "EXTRA",
    "FIELDS",
    "INPUTS",
    "LAYOUTS",
    "TARGETS",
    "WEIGHTS",
    "Field",
    "InputKey",
    "Layout",
    "reserved_names",
]

Layout = Literal["padded", "thd", "neat"]
Axis = Literal["token", "sequence", "boundary"]
Kind = Literal["int", "number"]

LAYOUTS: Final[tuple[Layout, ...]] = ("padded", "thd", "neat")
CROSS_ENTROPY_IGNORE_IDX: Final = -100
TARGETS: Final = "target_tokens"
WEIGHTS: Final = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One array of a batch. `axis`: an entry a token, a sequence, or a boundary of a segment."""

    name: str
    dtype: str  # as np.dtype(...).str
    axis: Axis
    pad: int = 0  # what stands where a row has no token
    needs_targets: bool = False  # left out when the datums have no target_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class InputKey:
    """A key of `Datum.loss_fn_inputs` that has a meaning here. Others are numbers, see EXTRA."""

    name: str
    accepts: Kind
    becomes: str  # the array of the batch
    dtype: str
    per_sample: bool  # whether [1] or [] is allowed beside [T]
    meaning: str


FIELDS: Final[Mapping[Layout, tuple[Field, ...]]] = {
    "padded": (
        Field(name="input_ids", dtype="<i8", axis="token"),
        Field(name="attention_mask", dtype="<i8", axis="token"),
        Field(
            name="labels",
            dtype="<i8",
            axis="token",
            pad=CROSS_ENTROPY_IGNORE_IDX,
            needs_targets=True,
        ),
        Field(name="padding_mask", dtype="|b1", axis="token", pad=1),
    ),
    "thd": (
        Field(name="input_ids", dtype="<i8", axis="token"),
        Field(name="labels", dtype="<i8", axis="token", pad=CROSS_ENTROPY_IGNORE_IDX),
        Field(name="position_ids", dtype="<i8", axis="token"),
        Field(name="seq_lens", dtype="<i8", axis="sequence"),
        Field(name="seq_lens_padded", dtype="<i8", axis="sequence"),
    ),
    "neat": (
        Field(name="input_ids", dtype="<i8", axis="token"),
        Field(name="labels", dtype="<i8", axis="token", pad=CROSS_ENTROPY_IGNORE_IDX),
        Field(name="position_ids", dtype="<i8", axis="token"),
        Field(name="doc_ids", dtype="<i8", axis="token"),
    ),
}

EXTRA: Final = Field(name="*", dtype="<f4", axis="token")
BOUNDARIES: Final = Field(name="cu_seqlens", dtype="<i4", axis="boundary")

INPUTS: Final[tuple[InputKey, ...]] = (
    InputKey(
        name=TARGETS,
        accepts="int",
        becomes="labels",
        dtype="<i8",
        per_sample=False,
        meaning="already shifted: position i is trained to predict target_tokens[i]",
    ),
    InputKey(
        name=WEIGHTS,
        accepts="number",
        becomes=WEIGHTS,
        dtype="<f4",
        per_sample=True,
        meaning="loss weight, >= 0; 0 disables the position and its label",
    ),
    InputKey(
        name="logprobs",
        accepts="number",
        becomes="logprobs",
        dtype="<f4",
        per_sample=False,
        meaning="the behaviour policy's logprob of target_tokens[i]",
    ),
    InputKey(
        name="advantages",
        accepts="number",
        becomes="advantages",
        dtype="<f4",
        per_sample=True,
        meaning="advantage, one a token or one a sample",
    ),
)

_CONSTANTS: Final[Mapping[Layout, frozenset[str]]] = {
    "padded": frozenset(),
    "thd": frozenset({"qkv_format", "max_seqlen"}),
    "neat": frozenset({"max_seqlen"}),
}


def reserved_names(layout: Layout) -> frozenset[str]:
    """Names that a datum's own keys may not take in this layout: the batch has them already."""
    names = {field.name for field in FIELDS[layout]} | _CONSTANTS[layout]
    return frozenset(names if layout == "padded" else names | {BOUNDARIES.name})
