"""Runs a benchmark by name and shows its figures: one row a case, with where and when it ran.

A benchmark is a module here with `run() -> list[dict]`, every dict one case with flat values.
Results worth keeping are committed under bench/results/, with hardware, commit and date.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["report", "run_bench"]


def run_bench(name: str) -> dict[str, Any]:
    """`{"bench", "machine", "commit", "date", "results": [...]}` of one run on this machine."""
    results = import_module(f"headrace.bench.{name}").run()
    return {
        "bench": name,
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "results": results,
    }


def report(results: dict[str, Any]) -> None:
    """Print a table of the results."""
    rows: list[dict[str, Any]] = results["results"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=f"{results['bench']} · {results['machine']} · {results['date']}")
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    console = Console()
    Console(width=console.width if console.is_terminal else 160).print(table)


def machine() -> str:
    """CPU model, cores and Python of this machine."""
    info = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    """The commit of the checkout that runs, `+` where it was changed; "unknown" outside one."""
    here = Path(__file__).resolve().parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value)
