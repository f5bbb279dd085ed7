"""The `headrace` command: the composition root, and the only module that may import every part.

Commands import what they need when they run, so that `headrace serve` loads no torch. Errors of
errors.py become one line on stderr and exit status 1; settings and flags that are wrong, exit
status 2.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace.schemas.errors import HeadraceError, SettingsError
from headrace.service.inspect.cli import app as inspect_app

__all__ = ["app"]

app = typer.Typer(
    help="Rollouts in over HTTP, training batches out over shared memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(inspect_app, name="inspect")

PASS_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_FLAGS)
def serve(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="a TOML file; default headrace.toml")] = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="remove what an earlier process left")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="listen beyond loopback without tokens")
    ] = False,
) -> None:
    """Run the service; every setting is a flag --section.name (see headrace serve --help)."""
    from headrace.service.logs import configure_logs
    from headrace.service.server import serve as run_server
    from headrace.service.settings import load_settings

    if {"-h", "--help"} & set(context.args):
        typer.echo(
            "  --config FILE         a TOML file with the settings below; default headrace.toml"
        )
        typer.echo("  --discard             remove what an earlier process of the run left")
        typer.echo("  --insecure            listen beyond loopback without tokens\n")
    try:
        flags = [*context.args, *(["--server.insecure", "true"] if insecure else [])]
        settings = load_settings(flags, config)
        configure_logs(settings.log, run=settings.run.name)
        run_server(settings, discard=discard)
    except SettingsError as error:
        _end(error, 2)
    except (HeadraceError, OSError) as error:
        _end(error, 1)


@app.command()
def demo(
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="optimizer steps; default 80, and then the reward must be reached"
        ),
    ] = None,
    actors: Annotated[int, typer.Option(min=1, help="rollout actor processes")] = 2,
    seed: Annotated[int, typer.Option(help="of weights, prompts and sampling")] = 0,
    layout: Annotated[str, typer.Option(help="thd or padded")] = "thd",
    out: Annotated[Path, typer.Option(help="folder of the plot")] = Path("out"),
    queue_dir: Annotated[
        Path | None,
        typer.Option("--queue.dir", envvar="HEADRACE_QUEUE__DIR", help="a folder on tmpfs"),
    ] = None,
) -> None:
    """Watch a small policy learn through the service, on the CPU."""
    from headrace.demo.main import run

    if layout not in ("thd", "padded"):
        _end(SettingsError(f"--layout: got {layout!r}, want thd or padded"), 2)
    raise typer.Exit(
        run(steps=steps, actors=actors, seed=seed, layout=layout, out=out, queue_dir=queue_dir)
    )


@app.command()
def bench(
    name: Annotated[
        Literal["collate", "handoff", "hostile", "ingest", "plan"],
        typer.Argument(help="which benchmark"),
    ],
    json_file: Annotated[Path | None, typer.Option("--json", help="write results here")] = None,
) -> None:
    """Run one benchmark; figures are medians of interleaved runs on this machine."""
    from headrace.bench.report import report, run_bench

    results = run_bench(name)
    report(results)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


@app.command()
def settings() -> None:
    """Print every setting of the service with its default, as a Markdown table."""
    from headrace.service.settings import settings_table

    typer.echo(settings_table())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"headrace {version_of('headrace')}")


def _end(error: Exception, status: int) -> None:
    for line in str(error).splitlines() or [repr(error)]:
        print(f"headrace: {line}", file=sys.stderr)
    raise typer.Exit(status)
