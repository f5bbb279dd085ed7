"""`headrace demo`: a policy that learns, through the whole of the service.

    actor-0 ─┐                                         weights/*.safetensors
    actor-1 ─┼── HTTP ──► headrace serve ── ring ──► trainer ──┐
       ▲     ┘                                                 │ version, uri
       └───────────────────────────────────────────────────────┘

This module only starts the processes, watches them and ends them, each as a child of its own; the
code to copy is in policy.py, actor.py and trainer.py.

However the demo ends, its processes and its folder on tmpfs are gone afterwards: at the end (exit
0, or 1 where the reward stays low or the books do not balance), on Ctrl-C (exit 130), when one of
its processes dies (exit 1). After `kill -9` of all of them, the next demo removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from headrace.demo.crew import Crew, DemoError
from headrace.demo.report import Meter, StepReport, balanced, plot, print_books
from headrace.demo.workplace import default_queue_dir, workplace
from headrace.schemas.errors import HeadraceError

__all__ = ["DEFAULT_STEPS", "run"]

DEFAULT_STEPS = 80
TARGET_REWARD = 0.9
LAST_STEPS = 5  # whose mean reward counts
GROUPS_A_STEP = 32
MICROBATCH_TOKENS = 2048  # three microbatches for the 32 x 16 x 10 tokens of a step
SILENCE_S = 120.0  # of the service at start and of the trainer: so long is a failure
MIB = 1 << 20


class InterruptError(Exception):
    """Ctrl-C, SIGTERM or SIGHUP."""


class Signals:
    """Notes them, so that no step of the clean-up is torn: the demo looks whenever it waits."""

    def __init__(self) -> None:
        self._seen = False

    def _note(self, *_: object) -> None:
        self._seen = True

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        if self._seen:
            raise InterruptError


def run(
    *,
    steps: int | None = None,
    actors: int = 2,
    seed: int = 0,
    layout: str = "thd",
    out: Path = Path("out"),
    queue_dir: Path | None = None,
) -> int:
    """Train for `steps` (None: 80, and then the reward must pass 0.9) and return the exit status.

    `layout` is thd or padded; `out` the plot's folder, or its file if it ends in .png; `queue_dir`
    a folder on tmpfs, the default one where it is None.
    """
    for package in ("torch", "safetensors", "matplotlib"):  # before anything starts
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"the demo needs {package}", name=package)
    console, signals = Console(), Signals()
    meter = Meter(console, steps or DEFAULT_STEPS)

    def on_tick() -> None:
        signals.check()
        meter.tick()

    with signals.caught():
        try:
            with (
                workplace(queue_dir or default_queue_dir()) as (folder, lock),
                Crew(folder, lock, on_tick) as crew,
                meter,
            ):
                history, books = _learn(
                    crew, folder, meter, actors=actors, seed=seed, layout=layout
                )
            print_books(console, books)
            signals.check()
            picture = out if out.suffix == ".png" else out / "demo.png"
            plot(history, picture)
            _judge(console, history, books, reward_matters=steps is None)
            console.print(f"plot: {picture}", highlight=False)
        except InterruptError:
            console.print("interrupted: every process has ended, nothing is left behind")
            return 130
        except (HeadraceError, OSError) as error:
            console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
            return 1
    return 0


def _learn(
    crew: Crew, folder: Path, meter: Meter, *, actors: int, seed: int, layout: str
) -> tuple[list[StepReport], Mapping[str, int]]:
    """Everything that runs. Returns the trained steps, and the books when the actors have ended.

    To the service's books it adds `answered`: the datums accepted, by the actors' own count.
    """
    service = crew.start("service", "headrace.service", "serve", *_settings(folder, layout))
    url = next(_urls(crew.lines(service, SILENCE_S)), None)
    if url is None:
        raise DemoError(f"the service ended before it was ready{service.last_words()}")

    trainer = crew.start(
        "trainer", "headrace.demo.trainer",
        "--queue-dir", folder, "--steps", meter.steps, "--seed", seed,
    )  # fmt: skip
    hands = [
        crew.start(
            f"actor-{i}", "headrace.demo.actor",
            "--url", url, "--name", f"actor-{i}", "--seed", seed * 1000 + i + 1,
            # Half a step between two looks at the backlog, however many actors share it.
            "--groups", max(1, GROUPS_A_STEP // (2 * actors)),
        )
        for i in range(actors)
    ]  # fmt: skip

    history: list[StepReport] = []
    with httpx.Client(base_url=url, timeout=15, trust_env=False) as http:
        for line in crew.lines(trainer, SILENCE_S):
            said = json.loads(line)
            fill = said["tokens"] / (said.pop("microbatches") * MICROBATCH_TOKENS)
            history.append(StepReport(**said, fill=fill))
            meter.show(history[-1], backlog=_status(http, crew)["backlog"]["steps"])
        crew.finish(trainer)
        if len(history) < meter.steps:
            raise DemoError(f"the trainer ended after {len(history)} of {meter.steps} steps")
        crew.stop(*hands)
        answered = sum(int(line) for hand in hands for line in crew.lines(hand, SILENCE_S))
        books = _status(http, crew)["books"]
    crew.stop(service)
    return history, {
        **books,
        "dropped": sum(books["dropped"].values()),  # by reason in the service's answer
        "answered": answered,
    }


def _settings(folder: Path, layout: str) -> list[str]:
    flags = {
        "server.port": 0,
        "run.name": "demo",
        "queue.dir": folder,
        "queue.bytes": 32 * MIB,
        "spool.segment_bytes": 8 * MIB,
        "limits.max_body_bytes": 8 * MIB,
        "planner.layout": layout,
        "planner.batch_groups": GROUPS_A_STEP,
        "planner.microbatch_tokens": MICROBATCH_TOKENS,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _urls(lines: Iterator[str]) -> Iterator[str]:
    """From the line `headrace serving on http://127.0.0.1:PORT run=... queue=...`."""
    for line in lines:
        if ready := re.search(r"serving on (http://\S+)", line):
            yield ready[1]


def _status(http: httpx.Client, crew: Crew) -> Mapping[str, Any]:
    try:
        answer: Mapping[str, Any] = http.get("/v1/status").raise_for_status().json()
    except httpx.HTTPError as error:
        crew.look()
        raise DemoError(f"GET /v1/status: {error!r}") from error
    return answer


def _judge(
    console: Console, history: list[StepReport], books: Mapping[str, int], *, reward_matters: bool
) -> None:
    last = history[-LAST_STEPS:]
    reward = sum(report.reward for report in last) / len(last)
    console.print(f"mean reward {history[0].reward:.2f} -> {reward:.2f}", highlight=False)
    if not balanced(books):
        raise DemoError(f"the books do not balance, datums are lost or counted twice: {books}")
    if books["accepted"] < books["answered"]:
        raise DemoError(f"the actors have an answer for more datums than were accepted: {books}")
    if reward_matters and reward <= TARGET_REWARD:
        raise DemoError(f"mean reward of the last {len(last)} steps: got {reward:.2f}, want > 0.9")
