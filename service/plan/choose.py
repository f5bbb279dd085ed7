"""Which groups the next step takes: whole ones, oldest complete first.

`batch_size`: until there are at least so many datums (at most one group over). `batch_groups`:
exactly so many groups. A step must carry loss: where the chosen groups have no loss token, the next
older-first group that has one takes the place of the last, and where there is none the step is not
formed.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ShortageError", "choose_groups"]


class ShortageError(Exception):
    """The next step cannot be formed yet; the message says what is missing."""


def choose_groups(
    candidates: Iterable[tuple[int, int]], *, batch_size: int | None, batch_groups: int | None
) -> list[int]:
    """Places of the chosen groups among `candidates`, ascending.

    `candidates`: (datums, loss tokens) of the complete groups, oldest first; read only as far as
    needed. Exactly one of `batch_size` and `batch_groups` is set. Raises ShortageError.

    >>> choose_groups([(2, 9), (2, 9), (3, 9), (1, 9)], batch_size=5, batch_groups=None)
    [0, 1, 2]
    >>> choose_groups([(2, 0), (2, 0), (3, 9)], batch_size=None, batch_groups=2)
    [0, 2]
    """
    chosen: list[int] = []
    datums = loss_tokens = 0
    rest = enumerate(candidates)
    for at, (size, loss) in rest:
        chosen.append(at)
        datums, loss_tokens = datums + size, loss_tokens + loss
        if datums >= batch_size if batch_size is not None else len(chosen) == batch_groups:
            break
    else:
        if batch_size is not None:
            raise ShortageError(
                f"{batch_size - datums} more datums of complete groups ({datums} of {batch_size})"
            )
        missing = (batch_groups or 0) - len(chosen)
        raise ShortageError(f"{missing} more complete groups ({len(chosen)} of {batch_groups})")
    if loss_tokens:
        return chosen
    for at, (_, loss) in rest:
        # A step by datums may not fall short of batch_size: the newcomer is added, not exchanged.
        if loss:
            return [*chosen, at] if batch_size is not None else [*chosen[:-1], at]
    raise ShortageError(
        f"a group with a loss token (weight != 0): the {len(chosen)} oldest complete groups have "
        "none"
    )
