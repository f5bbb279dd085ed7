"""The faults of one post: what a 422 lists, or what is left out under `?on_invalid=skip`.

A finding with an index is about one datum, one without about the post as a whole. A post with
findings is refused as a whole; where the sender asked to skip, only a finding without an index
refuses it, and the datums named by the others are left out.
"""

from __future__ import annotations

from headrace.schemas.errors import FieldError, InvalidDatums

__all__ = ["Findings"]

TEXT = 200  # characters of a got or a want that are kept


class Findings:
    """Collects faults, and lists at most `most` of them; every faulty datum is known by index."""

    def __init__(self, most: int, *, skip: bool = False) -> None:
        self._most = most
        self._skip = skip
        self._fatal = False
        self.errors: list[FieldError] = []
        self.datums: set[int] = set()  # places in the body of the datums that have a fault

    def add(self, index: int | None, field: str, code: str, got: object, want: object) -> None:
        """Note a fault of the datum at `index` of the body; None: of the post."""
        if index is None:
            self._fatal = True
        else:
            self.datums.add(index)
        if len(self.errors) < self._most:
            self.errors.append(
                FieldError(
                    index=index,
                    field=field[:TEXT],
                    code=code,
                    got=str(got)[:TEXT],
                    want=str(want)[:TEXT],
                )
            )

    def settle(self) -> None:
        """Raises InvalidDatums where the post cannot be taken, even in part."""
        if self.errors and (self._fatal or not self._skip):
            raise InvalidDatums(self.errors)
