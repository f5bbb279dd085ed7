"""The error tree: its drawing is the classes, codes are unique, and every error survives pickling."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from headrace.schemas import errors
from headrace.schemas.errors import FieldError, HeadraceError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, HeadraceError)
]


def test_the_drawing_is_the_tree():
    assert errors.__doc__ is not None
    drawn: list[tuple[str, str]] = []
    parents: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^    ((?:│   |    )*)([├└]── )?(\w+)", line)
        if found is None or found[3] not in vars(errors):
            continue
        depth = len(found[1]) // 4 + (1 if found[2] else 0)
        parents[depth:] = [found[3]]
        if depth:
            drawn.append((found[3], parents[depth - 1]))
    real = {(c.__name__, c.__bases__[0].__name__) for c in CLASSES if c is not HeadraceError}
    assert set(drawn) == real
    assert len(drawn) == len(real)


def test_statuses_in_the_drawing_are_the_classes():
    for name, status in re.findall(r"── (\w+) +(\d{3})  ", errors.__doc__ or ""):
        assert vars(errors)[name].status == int(status), name


def test_codes_are_unique_and_everything_is_exported():
    codes = [c.__dict__["code"] for c in CLASSES]
    assert len(codes) == len(set(codes))
    assert {c.__name__ for c in CLASSES} | {"FieldError"} == set(errors.__all__)


FINDING = FieldError(index=3, field="weights", code="length", got="4", want="5")
ARGUMENTS = {
    "InvalidDatums": ([FINDING],),
    "BacklogFull": ("full", 7),
    "NotServing": ("down", 7),
    "InProgress": ("wait", 7),
    "PostFailed": ("no", 422, [FINDING]),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling(kind):
    error = kind(*ARGUMENTS.get(kind.__name__, ("what happened",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
