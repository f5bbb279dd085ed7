"""Which groups the next step takes: whole ones, oldest complete first.

    batch_size      until there are at least so many datums (at most one group over); exactly so
                    many under `exact`, where a group that would go over waits for its turn
    batch_groups    exactly so many groups
    shares          the part of the step (of its datums, or its groups) that each source has; what
                    no share names competes for the rest
    partial         whatever there is, when a step is due that cannot be full

A step must carry loss: where the chosen groups have no loss token, the next oldest group that has
one joins (by datums) or takes the place of the last (by groups); where there is none, no step is
formed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Candidate", "ShortageError", "choose_groups"]


class ShortageError(Exception):
    """The next step cannot be formed yet; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete group as the choice sees it."""

    datums: int
    loss_tokens: int
    source: int = 0


def choose_groups(
    candidates: Iterable[Candidate],
    *,
    batch_size: int | None,
    batch_groups: int | None,
    exact: bool = False,
    shares: Mapping[int, float] | None = None,
    partial: bool = False,
) -> list[int]:
    """Places of the chosen groups among `candidates`, ascending.

    `candidates`: the complete groups, oldest first; read only as far as needed. Exactly one of
    `batch_size` and `batch_groups` is set. `shares`: source -> part of the step, summing to at most
    1. Raises ShortageError.

    >>> groups = [Candidate(2, 9), Candidate(2, 9), Candidate(3, 9), Candidate(1, 9)]
    >>> choose_groups(groups, batch_size=5, batch_groups=None)
    [0, 1, 2]
    >>> choose_groups(groups, batch_size=5, batch_groups=None, exact=True)
    [0, 1, 3]
    """
    target = batch_size if batch_size is not None else batch_groups or 0
    by_datums = batch_size is not None
    quota = _Quota(target, shares or {})
    chosen: list[int] = []
    filled = loss_tokens = 0
    rest = enumerate(candidates)
    for at, group in rest:
        size = group.datums if by_datums else 1
        if exact and filled + size > target:
            continue
        if not quota.take(group.source, size):
            continue
        chosen.append(at)
        filled, loss_tokens = filled + size, loss_tokens + group.loss_tokens
        if filled >= target:
            break
    if filled < target and not (partial and chosen):
        unit = "datums of complete groups" if by_datums else "complete groups"
        missing = f"{target - filled} more {unit} ({filled} of {target})"
        raise ShortageError(missing + quota.missing())
    if loss_tokens:
        return chosen
    for at, group in rest:
        if group.loss_tokens:
            # By datums a step may not fall short: the newcomer is added, not exchanged.
            return [*chosen, at] if by_datums and not exact else [*chosen[:-1], at]
    raise ShortageError(
        f"a group with a loss token (weight != 0): the {len(chosen)} oldest complete groups have "
        f"none"
    )


class _Quota:
    """How much of a step each source may still fill."""

    def __init__(self, target: int, shares: Mapping[int, float]) -> None:
        self._left = {source: round(share * target) for source, share in shares.items()}
        self._free = target - sum(self._left.values())
        self._shared = bool(shares)

    def take(self, source: int, size: int) -> bool:
        if not self._shared:
            return True
        if source not in self._left:
            if self._free <= 0:
                return False
            self._free -= size
            return True
        if self._left[source] <= 0:
            return False
        self._left[source] -= size
        return True

    def missing(self) -> str:
        short = [source for source, left in self._left.items() if left > 0]
        if not short:
            return ""
        return f"; planner.source_shares lacks groups of {len(short)} sources"
