"""What the demo shows: a progress line, the books, a plot.

`Meter` draws a bar on a terminal, and prints a line every few steps where there is none.
`print_books` writes the service's books as a table and says whether they balance; `plot` writes the
PNG. Called by `demo.main` alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Meter", "StepReport", "balanced", "plot", "print_books"]

LINE_EVERY_STEPS = 5
RATE_OVER_STEPS = 5
BOOKS = ("buffered", "planned", "delivered", "committed", "dropped")  # what `accepted` is made of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One trained step."""

    step: int
    reward: float  # mean over the step's samples, 0..1
    lag: int  # policy versions between the trainer's and the oldest sample's
    tokens: int
    fill: float  # tokens of the step / slots that its microbatches may have, 0..1


class Meter:
    """The progress display. `tick` keeps the clock going, `show` takes a step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self.steps = console, steps
        self._trained: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], RATE_OVER_STEPS)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=steps, figures="")

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tick(self) -> None:
        self._bar.refresh()

    def show(self, report: StepReport, backlog: float) -> None:
        """`backlog` in steps."""
        (since, before), (_, tokens), now = self._trained[0], self._trained[-1], time.monotonic()
        self._trained.append((now, tokens + report.tokens))
        rate = (tokens + report.tokens - before) / max(now - since, 1e-9)
        figures = (
            f"reward {report.reward:.2f}  {rate:,.0f} tokens/s  lag {report.lag}  "
            f"backlog {backlog:.1f} steps"
        )
        self._bar.update(self._task, advance=1, description="training", figures=figures)
        self._bar.refresh()
        last = report.step + 1 == self.steps
        if not self._console.is_terminal and (last or report.step % LINE_EVERY_STEPS == 0):
            self._console.print(f"step {report.step + 1}/{self.steps}  {figures}", highlight=False)


def balanced(books: Mapping[str, int]) -> bool:
    """accepted = buffered + planned + delivered + committed + dropped, in datums."""
    return books["accepted"] == sum(books[word] for word in BOOKS)


def print_books(console: Console, books: Mapping[str, int]) -> None:
    table = Table("datums", "", title="the books")
    table.columns[1].justify = "right"
    table.add_row("answered, as the actors count", f"{books['answered']:,}")
    table.add_row("accepted", f"{books['accepted']:,}", end_section=True)
    for word in BOOKS:
        table.add_row(f"  {word}", f"{books[word]:,}")
    console.print(table)
    console.print("they balance" if balanced(books) else "[red]they do not balance[/red]")


def plot(history: Sequence[StepReport], path: Path) -> None:
    """Reward, policy lag and fill over the steps, as a PNG."""
    from matplotlib.figure import Figure  # half a second, and not needed before the end

    figure = Figure(figsize=(8, 7), layout="constrained")
    steps = [report.step for report in history]
    reward, lag, fill = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    reward.plot(steps, [report.reward for report in history])
    reward.set(
        ylabel="mean reward",
        ylim=(0, 1.02),
        title="five digits, reversed: share of right positions",
    )
    lag.step(steps, [report.lag for report in history], where="mid")
    lag.set(ylabel="policy lag (steps)", ylim=(0, None))
    fill.plot(steps, [report.fill for report in history])
    fill.set(ylabel="microbatch fill", ylim=(0, 1.02), xlabel="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
