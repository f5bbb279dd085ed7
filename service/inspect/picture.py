"""A plan as a PNG, by matplotlib (the extra `demo`).

     microbatch 0          microbatch 1          cost a rank
    0 |aaaaaa|bbbbb|cc..|  |ggggg|hhhhhhh|....|  |████████|███████ |
    1 |ddd|eeeeeeeee|fff|  |iiiiiiii|jjjj|kkkk|  |████████|██████  |

All columns stand on one grid of rows. The strips of an index are one block, a rank a row; blocks
fill a column from the top before the next one begins. The last column has a bar a rank, a shade an
index; what is missing to the dashed line is waiting. Rows get thinner until 512 stand in a column;
what does not fit then is left out, and the title says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from headrace.service.inspect.figures import Figures, Strip
from headrace.service.inspect.terminal import headline

__all__ = ["save"]

COLOURS = (
    "#7ba4d0", "#f0b060", "#6aa56e", "#d98880", "#a593cc", "#c9c15a", "#5fb0b7", "#c29a85",
)  # fmt: skip
PADDING, FILLER, EMPTY = "#c4c4c4", "#e4e4e4", "#f6f6f6"
OTHERS = {"padding": PADDING, "filler": FILLER}
BUSY = ("#3f6d9b", "#86abcf")
DPI = 120
MOST_ROWS, MOST_COLUMNS = 512, 6  # of strips
GOOD_ROWS = 40  # more columns are tried until a column is no longer
STRIP_INCHES = (8.2, 5.2, 4.2, 3.6, 3.0, 2.7)  # by the number of columns
BAR_INCHES = 3.2
LEFT, BETWEEN, RIGHT, ABOVE, BELOW = 0.6, 0.5, 0.2, 0.8, 0.8  # inches
HATCH = "////"
TITLE_INCHES = 0.24  # above a block
TEXT_POINTS = 7.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where blocks go. Rows are counted from the top; a block is `ranks` rows after its title."""

    ranks: int  # drawn of each index
    indices: int  # drawn
    columns: int
    row_inches: float
    title_rows: float  # above each block

    @classmethod
    def of(cls, count: int, ranks: int) -> Grid:
        ranks_drawn = min(ranks, MOST_ROWS)
        block = ranks_drawn + (ranks > 1)
        columns = next(
            (c for c in range(1, MOST_COLUMNS) if -(-count // c) * block <= GOOD_ROWS), MOST_COLUMNS
        )
        columns = min(columns, count)
        deep = min(-(-count // columns), max(1, MOST_ROWS // block))
        row_inches = min(0.3, max(0.035, 8 / (deep * block)))
        return cls(
            ranks=ranks_drawn,
            indices=min(count, columns * deep),
            columns=columns,
            row_inches=row_inches,
            title_rows=TITLE_INCHES / row_inches if ranks > 1 else 0.0,
        )

    @property
    def deep(self) -> int:
        """Blocks of the first column."""
        return -(-self.indices // self.columns)

    @property
    def rows(self) -> float:
        return self.deep * (self.ranks + self.title_rows)

    def top(self, index: int) -> float:
        """The row of rank 0 of an index, in its column."""
        return index % self.deep * (self.ranks + self.title_rows) + self.title_rows


def save(figures: Figures, path: Path) -> None:
    """Draw the step into a PNG file; its folder is made where it is missing."""
    grid = Grid.of(figures.plan.count, figures.plan.dp_size)
    wide = STRIP_INCHES[grid.columns - 1]
    width = LEFT + grid.columns * (wide + BETWEEN) + BAR_INCHES + RIGHT
    height = ABOVE + grid.rows * grid.row_inches + BELOW
    figure = Figure(figsize=(width, height), dpi=DPI)

    def axes(column: int, inches: float, rows: float) -> Any:
        deep = rows * grid.row_inches
        left, bottom = LEFT + column * (wide + BETWEEN), height - ABOVE - deep
        ax = figure.add_axes((left / width, bottom / height, inches / width, deep / height))
        ax.set_ylim(rows, 0)
        return ax

    for column in range(grid.columns):
        _strips(axes(column, wide, grid.rows), figures, grid, column, wide)
    _costs(axes(grid.columns, BAR_INCHES, grid.top(0) + grid.ranks), figures, grid)
    what, well = headline(figures)
    at = 0.15 / width
    figure.text(at, 1 - 0.13 / height, what, size=12, weight="bold", va="top")
    figure.text(at, 1 - 0.38 / height, well + _left_out(figures, grid), size=10, va="top")
    _legend(figure, figures, at, 0.08 / height)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _left_out(figures: Figures, grid: Grid) -> str:
    count, ranks = figures.plan.count, figures.plan.dp_size
    words = []
    if grid.indices < count:
        words.append(f"microbatches {grid.indices:,} to {count - 1:,}")
    if grid.ranks < ranks:
        words.append(f"ranks {grid.ranks:,} to {ranks - 1:,}")
    return f" · not drawn: {' and '.join(words)}" if words else ""


def _legend(figure: Figure, figures: Figures, left: float, bottom: float) -> None:
    marks: list[Any] = [
        Patch(color=COLOURS[0], label="sequence"),
        Patch(color=PADDING, label="padding"),
    ]
    if figures.fillers:
        marks.append(Patch(facecolor=FILLER, hatch=HATCH, label="filler", edgecolor=PADDING))
    marks += [
        Patch(color=BUSY[0], label="cost, a shade a microbatch"),
        Patch(color=PADDING, label="waiting for the slowest rank"),
    ]
    figure.legend(
        handles=marks, loc="lower left", bbox_to_anchor=(left, bottom), ncols=len(marks),
        frameon=False, fontsize=8, borderpad=0, borderaxespad=0,
    )  # fmt: skip


def _strips(ax: Any, figures: Figures, grid: Grid, column: int, inches: float) -> None:
    wide = max(figures.capacity, int(figures.slots.max()))
    indices = range(column * grid.deep, min(grid.indices, (column + 1) * grid.deep))
    places = [(figures.strip(i, r), grid.top(i) + r) for i in indices for r in range(grid.ranks)]
    boxes = _Boxes(grid)
    for strip, row in places:
        boxes.add(0, wide, row, EMPTY)
        for piece in strip.pieces():
            # Shifted by row, so that what lies above and below differs too.
            colour = COLOURS[(piece.position + 3 * (strip.rank + strip.index)) % len(COLOURS)]
            boxes.add(piece.start, piece.stop, row, OTHERS.get(piece.kind, colour))
    boxes.draw(ax, edges=True)
    names = _Names(ax, points_a_slot=inches * 72 / wide, row_points=grid.row_inches * 72)
    for strip, row in places:
        names.write(strip, row)
    if figures.plan.dp_size > 1:
        for index in indices:
            _title(ax, grid, grid.top(index), f"microbatch {index}")
        rows = [(row, strip.rank) for strip, row in places]
    else:
        rows = [(row, strip.index) for strip, row in places]
    _rows(ax, grid, rows)
    _axis(ax, "slots", wide, max(2, int(inches / 0.9)))
    if column == 0:
        ax.set_ylabel("dp rank" if figures.plan.dp_size > 1 else "microbatch", size=9)
    if figures.capacity_is != "largest":
        ax.axvline(figures.capacity, color="black", linewidth=0.8, linestyle="--", clip_on=False)


def _costs(ax: Any, figures: Figures, grid: Grid) -> None:
    wall, first = figures.wall, grid.top(0)
    costs = figures.costs[:, : grid.ranks]
    stops = np.cumsum(costs, axis=0)
    boxes = _Boxes(grid)
    for rank in range(grid.ranks):
        boxes.add(0, wall, first + rank, PADDING)
        for index in range(figures.plan.count):
            stop = float(stops[index, rank])
            boxes.add(stop - float(costs[index, rank]), stop, first + rank, BUSY[index % 2])
        if grid.row_inches >= 0.12:
            busy = f"{stops[-1, rank] / wall:.1%}"
            ax.text(wall * 1.02, first + rank + 0.52, busy, size=8, va="center")
    boxes.draw(ax, edges=False)
    ax.plot([wall, wall], [first, first + grid.ranks], color="black", linewidth=0.8, linestyle="--")
    _title(ax, grid, first, "cost of a rank" if figures.plan.dp_size > 1 else "cost of rank 0")
    _rows(ax, grid, [(first + r, r) for r in range(grid.ranks)] if grid.ranks > 1 else [])
    _axis(ax, f"n + n²/{figures.rule.quadratic_crossover:,.0f} a slot", wall * 1.2, 3)


class _Boxes:
    """Rectangles of a row each, drawn as one collection: thousands are one artist."""

    def __init__(self, grid: Grid) -> None:
        self._thick = grid.row_inches > 0.08
        self._corners: list[list[tuple[float, float]]] = []
        self._colours: list[str] = []

    def add(self, start: float, stop: float, row: float, colour: str) -> None:
        gap = 0.06 if self._thick else 0  # thin rows touch: a gap of half a pixel would shimmer
        top, bottom = row + gap, row + 1 - gap
        self._corners.append([(start, top), (stop, top), (stop, bottom), (start, bottom)])
        self._colours.append(colour)

    def draw(self, ax: Any, *, edges: bool) -> None:
        width = 0.5 if edges and self._thick else 0
        ax.add_collection(
            PolyCollection(
                self._corners, facecolors=self._colours, edgecolors="white", linewidths=width
            )
        )
        fillers = [c for c, k in zip(self._corners, self._colours, strict=True) if k == FILLER]
        if fillers:
            ax.add_collection(
                PolyCollection(
                    fillers, facecolors="none", edgecolors=PADDING, linewidths=0, hatch=HATCH
                )
            )


class _Names:
    """Writes a sequence's number into its box where both are large enough."""

    def __init__(self, ax: Any, *, points_a_slot: float, row_points: float) -> None:
        self._ax, self._points_a_slot = ax, points_a_slot
        self._fits = row_points >= TEXT_POINTS + 1.5

    def write(self, strip: Strip, row: float) -> None:
        if not self._fits:
            return
        for piece in strip.pieces():
            name = "filler" if piece.kind == "filler" else str(piece.datum)
            room = (piece.stop - piece.start) * self._points_a_slot
            if piece.kind != "padding" and room > 0.65 * TEXT_POINTS * len(name) + 2:
                self._ax.text(
                    (piece.start + piece.stop) / 2, row + 0.52, name, size=TEXT_POINTS,
                    ha="center", va="center",
                )  # fmt: skip


def _title(ax: Any, grid: Grid, row: float, words: str) -> None:
    ax.text(0, row - 0.05 / grid.row_inches, words, size=9, weight="bold", va="bottom")


def _rows(ax: Any, grid: Grid, rows: list[tuple[float, int]]) -> None:
    """Number the rows; where they are thin, every second, fourth, ..."""
    every = next(n for n in (1, 2, 4, 8, 16) if n * grid.row_inches >= 0.14)
    shown = [(row + 0.5, str(number)) for row, number in rows if number % every == 0]
    ax.set_yticks([row for row, _ in shown], [number for _, number in shown], size=8)
    ax.tick_params(axis="y", length=0, pad=2)


def _axis(ax: Any, label: str, stop: float, ticks: int) -> None:
    ax.set_xlim(0, stop)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    ax.set_xlabel(label, size=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.spines[["top", "right", "left"]].set_visible(False)
