"""A plan as text: a strip a microbatch, a bar a rank, in whatever width the terminal has.

    microbatch 0                                        slots    fill    cost
      0 |0██████████3▓▓▓▓▓▓▓▓5███████7▓▓▓▓▓▓▓:::       4,000   97.7%  100.0%
      1 |1██████████2▓▓▓▓▓▓▓▓4███████6▓▓▓▓▓▓▓▓▓▓       4,096  100.0%   99.1%

A cell shows what lies at its middle. Neighbouring sequences differ in colour and in shade, so it
reads without colour too; a sequence's number in the step stands at its start where there is room.
`fill` is tokens over capacity; `cost` is that of the microbatch over the slowest of its index, or,
with one rank, over the slowest of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from headrace.service.inspect.figures import Figures, Strip

__all__ = ["draw"]

COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "red")
GREY = "bright_black"
SIDE = 7 + 8 + 8  # cells of the figures beside a strip
LEAST_RANKS = 4  # drawn of an index, where there are more strips than wanted
BARS = 16  # ranks whose cost is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    shades: tuple[str, str]  # of neighbouring sequences
    padding: str
    filler: str
    busy: str
    waiting: str
    edge: str
    between: str  # the figures of a headline


UNICODE = Glyphs(
    shades=("█", "▓"), padding="·", filler="░", busy="█", waiting="·", edge="▏", between="·"
)
ASCII = Glyphs(
    shades=("#", "="), padding=".", filler="~", busy="#", waiting=".", edge="|", between="-"
)


def draw(figures: Figures, console: Console, *, most: int) -> None:
    """Print the whole picture. `most`: about so many strips are drawn; 0: all."""
    _Drawing(figures, console).print(most)


class _Drawing:
    def __init__(self, figures: Figures, console: Console) -> None:
        self._figures, self._console = figures, console
        self._glyphs = ASCII if console.options.ascii_only else UNICODE
        ranks, count = figures.plan.dp_size, figures.plan.count
        self._label = len(str(max(ranks, count) - 1)) + 1
        self._width = max(10, console.width - self._label - 2 - SIDE)
        self._scale = max(figures.capacity, int(figures.slots.max())) / self._width

    def print(self, most: int) -> None:
        figures, plan = self._figures, self._figures.plan
        indices, ranks = _drawn(plan.count, plan.dp_size, most)
        for line in headline(figures):
            self._line(Text(line.replace("·", self._glyphs.between)))
        self._legend()
        if plan.dp_size == 1:
            self._line()
            self._header("microbatch")
        for index in range(indices):
            if plan.dp_size > 1:
                self._line()
                self._header(f"microbatch {index}, by rank")
            for rank in range(ranks):
                self._strip(figures.strip(index, rank))
            if ranks < plan.dp_size:
                rest = figures.slots[index, ranks:]
                fill = figures.tokens[index, ranks:].mean() / figures.capacity
                self._left_out(f"ranks {ranks} to {plan.dp_size - 1}", rest, fill)
        if indices < plan.count:
            rest = figures.slots[indices:]
            fill = figures.tokens[indices:].mean() / figures.capacity
            self._left_out(f"microbatches {indices} to {plan.count - 1}", rest, fill)
        self._costs()

    def _line(self, text: Text | None = None) -> None:
        self._console.print(text or Text(), no_wrap=True, overflow="crop", crop=True)

    def _legend(self) -> None:
        glyphs = self._glyphs
        text = Text()
        text.append(glyphs.shades[0] * 2, COLOURS[0]).append(glyphs.shades[1] * 2, COLOURS[1])
        text.append(" sequences  ").append(glyphs.padding * 3, GREY).append(" padding")
        if self._figures.fillers:
            text.append("  ").append(glyphs.filler * 3, GREY).append(" filler")
        text.append(f"  one cell = {self._scale:,.1f} slots")
        self._line(text)

    def _header(self, title: str) -> None:
        line = title.ljust(self._label + 2 + self._width)
        self._line(Text(f"{line}{'slots':>7}{'fill':>8}{'cost':>8}", "bold"))

    def _strip(self, strip: Strip) -> None:
        figures = self._figures
        number = strip.rank if figures.plan.dp_size > 1 else strip.index
        text = Text(f"{number:>{self._label}} {self._glyphs.edge}")
        text.append_text(self._cells(strip))
        rivals = figures.costs[strip.index] if figures.plan.dp_size > 1 else figures.costs
        share = strip.cost / rivals.max()
        fill = strip.tokens / figures.capacity
        text.append(f"{strip.total:>7,}{fill:>8.1%}{share:>8.1%}")
        self._line(text)

    def _cells(self, strip: Strip) -> Text:
        glyphs, width = self._glyphs, self._width
        pieces = list(strip.pieces())
        stops = np.array([piece.stop for piece in pieces])
        at = np.searchsorted(stops, (np.arange(width) + 0.5) * self._scale, side="right")
        text, drawn = Text(), 0
        for which, piece in enumerate(pieces):
            cells = int((at == which).sum())
            if piece.kind == "padding":
                text.append(glyphs.padding * cells, GREY)
            elif piece.kind == "filler":
                text.append("filler"[:cells].ljust(cells, glyphs.filler), GREY)
            else:
                # By what is seen, so that neighbours differ where others fell between two cells.
                colour, shade = COLOURS[drawn % len(COLOURS)], glyphs.shades[drawn % 2]
                drawn += cells > 0
                name = str(piece.datum)
                if len(name) >= cells:
                    name = ""
                text.append(name, f"bold black on {colour}")
                text.append(shade * (cells - len(name)), colour)
        return text.append(" " * int((at == len(pieces)).sum()))

    def _left_out(self, what: str, slots: NDArray[np.int64], fill: float) -> None:
        self._line(
            Text(
                f"{'':>{self._label}} {what} not drawn: {slots.min():,} to {slots.max():,} slots, "
                f"fill {fill:.1%}",
                "italic",
            )
        )

    def _costs(self) -> None:
        figures, glyphs = self._figures, self._glyphs
        costs, wall = figures.costs.sum(axis=0), figures.wall
        order = np.argsort(-costs, kind="stable")
        shown: Sequence[int] = range(len(costs))
        title = "cost of a rank"
        if len(costs) > BARS:
            half = BARS // 2
            shown = [*order[:half].tolist(), *order[-half:].tolist()]
            title = f"the {half} ranks that wait least, the {half} that wait most"
        self._line()
        line = title.ljust(self._label + 2 + self._width)
        self._line(Text(f"{line}{'cost':>15}{'busy':>8}", "bold"))
        for at, rank in enumerate(shown):
            if len(costs) > BARS and at == BARS // 2:
                self._line(Text(f"{'':>{self._label}} {len(costs) - BARS} ranks between", "italic"))
            busy = round(costs[rank] / wall * self._width)
            text = Text(f"{rank:>{self._label}} {glyphs.edge}")
            text.append(glyphs.busy * busy, "blue")
            text.append(glyphs.waiting * (self._width - busy), GREY)
            text.append(f"{costs[rank]:>15,.0f}{costs[rank] / wall:>8.1%}")
            self._line(text)
        self._line(
            Text(
                f"{'':>{self._label}} a full bar: the slowest rank of each index, {wall:,.0f} in "
                "all"
            )
        )


def headline(figures: Figures) -> tuple[str, str]:
    """What was planned, and how well."""
    plan = figures.plan
    ranks = f"{plan.dp_size:,} rank{'s' * (plan.dp_size > 1)}"
    each = f"{plan.count:,} microbatch{'es' * (plan.count > 1)}"
    datums = f"{len(plan.lengths):,} datum{'s' * (len(plan.lengths) > 1)}"
    what = (
        f"step {plan.step} · {plan.layout} · {ranks} x {each} · {datums}, "
        f"{int(figures.tokens.sum()):,} tokens"
    )
    well = (
        f"fill {figures.fill:.1%} of the {figures.capacity_is} ({figures.capacity:,}) · padding "
        f"{figures.padding:.1%} · imbalance {figures.imbalance:.4f} · fillers {figures.fillers:,}"
    )
    return what, well


def _drawn(count: int, ranks: int, most: int) -> tuple[int, int]:
    """(indices, ranks of each) to draw: all, or fewer ranks of each index, then fewer indices."""
    if not most or count * ranks <= most:
        return count, ranks
    each = min(ranks, max(LEAST_RANKS, most // count))
    return min(count, max(1, most // each)), each
