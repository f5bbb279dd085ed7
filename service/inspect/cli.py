"""`headrace inspect`: commands that look at a run from beside it.

    headrace inspect plan [STEP] [--run NAME] [--queue.dir DIR] [--png FILE] [--json] [--strips N]

Nothing is loaded before a command runs. Errors of errors.py become one line on stderr and exit
status 1; a missing package is left to the `headrace` script, which names the extra.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Look at what a run has written down.", no_args_is_help=True)


@app.callback()
def inspect() -> None:
    """Look at what a run has written down."""


@app.command()
def plan(
    step: Annotated[int | None, typer.Argument(help="default: the newest step", min=0)] = None,
    run: Annotated[str, typer.Option(envvar="HEADRACE_RUN__NAME", help="run.name")] = "default",
    queue_dir: Annotated[
        Path | None,
        typer.Option(
            "--queue.dir",
            envvar="HEADRACE_QUEUE__DIR",
            help="default /dev/shm/headrace-{uid}",
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="draw into this file instead")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
    strips: Annotated[
        int, typer.Option(min=0, help="about so many are drawn in the terminal; 0: all")
    ] = 48,
) -> None:
    """Draw a planned step: which datum lies where, what is padding, which rank waits."""
    from headrace.schemas.errors import HeadraceError
    from headrace.service.inspect.figures import Figures
    from headrace.service.inspect.written import read_plan

    try:
        written = read_plan(queue_dir or Path(f"/dev/shm/headrace-{os.geteuid()}"), run, step)
        figures = Figures.of(written)
        if png is not None:
            from headrace.service.inspect.picture import save

            save(figures, png)
    except (HeadraceError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(figures.to_dict(), indent=2))
        return
    from rich.console import Console

    from headrace.service.inspect.terminal import draw, headline

    if png is None:
        draw(figures, Console(highlight=False), most=strips)
    else:
        typer.echo("\n".join((*headline(figures), f"drawn into {png}")))
