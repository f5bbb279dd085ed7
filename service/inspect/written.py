"""Plans as the service wrote them down, read beside it.

The database is opened read-only, one row is taken, and it is closed again: a running service is not
held up, and a spool that a killed one left is read as well. Plans up to the last commit are gone.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from headrace.schemas.errors import PlanUnknown, SpoolError
from headrace.service.leftovers import spool_directory
from headrace.service.records import Plan

__all__ = ["read_plan"]


def read_plan(queue_dir: Path, run: str, step: int | None = None) -> Plan:
    """The plan of `step`, or of the newest one. Raises PlanUnknown, SpoolError, SpoolVersion."""
    path = spool_directory(queue_dir, run) / "spool.db"
    if not path.is_file():
        raise PlanUnknown(
            f"run {run!r} has no spool under {queue_dir}: got no file {path}; give the queue.dir "
            "and run.name that the service was started with (--queue.dir, --run). A service that "
            "ends with every datum committed leaves no spool"
        )
    try:
        with closing(_open(path)) as database:
            database.execute("BEGIN")  # both reads see the same commit
            first, last = database.execute("SELECT min(step), max(step) FROM plans").fetchone()
            wanted = last if step is None else step
            row = database.execute("SELECT plan FROM plans WHERE step = ?", (wanted,)).fetchone()
    except sqlite3.Error as error:
        raise SpoolError(f"{path} cannot be read: {error}") from error
    if row is not None:
        return Plan.unpack(row[0])
    if last is None:
        raise PlanUnknown(
            f"run {run!r} holds no plan: no step was planned yet, or all are committed, and then "
            "their plans are forgotten; waits_for in GET /v1/status says what the next one needs"
        )
    raise PlanUnknown(
        f"step {step} of run {run!r} is not written down: got {step}, want {first} to {last}; "
        "plans up to the last committed step are forgotten"
    )


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
