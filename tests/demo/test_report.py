"""What the demo shows: the progress line on a terminal and without one, the books, the plot."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headrace.demo.report import Meter, StepReport, balanced, plot, print_books

BOOKS = {"buffered": 128, "planned": 512, "delivered": 512, "committed": 384, "dropped": 0}
BOOKS |= {"accepted": 1536, "answered": 1536}


def report(step: int) -> StepReport:
    return StepReport(step=step, reward=0.1 + step / 100, lag=2, tokens=5120, fill=0.83)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_names_its_four_figures(terminal: bool) -> None:
    screen = io.StringIO()
    with Meter(Console(file=screen, force_terminal=terminal, width=140), 12) as meter:
        meter.tick()
        for step in range(12):
            meter.show(report(step), backlog=1.5)
    shown = screen.getvalue()
    for figure in ("reward 0.21", "tokens/s", "lag 2", "backlog 1.5 steps"):
        assert figure in shown
    if not terminal:
        assert [line.split()[1] for line in shown.splitlines()] == [
            "1/12",
            "6/12",
            "11/12",
            "12/12",
        ]


@pytest.mark.parametrize("buffered", [128, 129])
def test_books_balance_or_it_is_said(buffered: int) -> None:
    books = BOOKS | {"buffered": buffered}
    screen = io.StringIO()
    print_books(Console(file=screen, width=80), books)
    assert balanced(books) == (buffered == 128)
    assert ("they balance" in screen.getvalue()) == (buffered == 128)
    assert "1,536" in screen.getvalue()


@pytest.mark.slow  # loads matplotlib
def test_the_plot_is_a_png_in_a_folder_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "out" / "demo.png"
    plot([report(step) for step in range(12)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
