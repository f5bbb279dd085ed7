"""Fixtures that several parts share: a folder on tmpfs, a real service process, datums to post."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

MSGPACK = {"Content-Type": "application/msgpack"}


@pytest.fixture
def queue_dir() -> Iterator[Path]:
    """A folder on tmpfs of this test's own, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def wait_until(condition: Callable[[], Any], *, bound_s: float = 10.0, what: str = "") -> Any:
    """The first true value of `condition`, looked at every 5 ms; fails after `bound_s` seconds."""
    until = time.monotonic() + bound_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, f"not within {bound_s} s: {what or condition}"
        time.sleep(0.005)


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[..., Any]:
    return wait_until


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["runpy", "pytest", "headrace.service.server", "headrace.service.cli"])


class ServiceProcess:
    """`headrace ...` as a process of its own, with the face of a Popen.

    Forked from a server that has imported the service already, since most of a start is imports.
    What runs in it is the `headrace` script's `main`, from its first line on.
    """

    def __init__(self, argv: list[str], cwd: Path, stdout: Path, stderr: Path) -> None:
        stdout.touch()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        wanted = {
            "ARGV": argv, "CWD": str(cwd), "STDOUT": str(stdout), "STDERR": str(stderr),
            "ENVIRONMENT": environment,
        }  # fmt: skip
        script = Path(__file__).with_name("service_process.py")
        self._process = FORKS.Process(
            target=runpy.run_path, args=(str(script),), kwargs={"init_globals": wanted}
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("headrace", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


@dataclass
class Service:
    """A running `headrace serve`: its process, address and a client for it."""

    process: ServiceProcess
    url: str
    queue_dir: Path
    stderr: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=10)

    def post(self, body: bytes, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post("/v1/datums", content=body, headers=MSGPACK | named)

    def status(self) -> dict[str, Any]:
        answer = self.client.get("/v1/status")
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status

    def books(self) -> dict[str, Any]:
        """The books, which balance."""
        books: dict[str, Any] = self.status()["books"]
        places = ("buffered", "planned", "delivered", "committed")
        assert books["accepted"] == sum(books[p] for p in places) + sum(books["dropped"].values())
        return books

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; the exit status."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(15)


SMALL = {
    "server.port": "0",
    "queue.bytes": "8MiB",
    "queue.records": "64",
    "spool.segment_bytes": "4MiB",
    "limits.max_body_bytes": "4MiB",
    "planner.microbatch_tokens": "4096",
}


@pytest.fixture
def serve(queue_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Start services: `serve(**{"planner.batch_size": 4})`; `flags` are passed on as they are."""
    started: list[Service] = []

    def start(*flags: str, **settings: object) -> Service:
        named = SMALL | {"queue.dir": str(queue_dir)} | settings
        chosen = {name: str(value) for name, value in named.items() if value is not None}
        arguments = [word for name, value in chosen.items() for word in (f"--{name}", value)]
        stderr = tmp_path / f"service-{len(started)}.stderr"
        stdout = tmp_path / f"service-{len(started)}.stdout"
        process = ServiceProcess(["serve", *arguments, *flags], tmp_path, stdout, stderr)
        found = wait_until(
            lambda: re.search(r"https?://\S+", stdout.read_text()) or process.poll() is not None,
            bound_s=30,
            what="the service's ready line",
        )
        if found is True:
            raise RuntimeError(f"exit {process.returncode}: {stderr.read_text()}")
        service = Service(process, found.group(0), Path(chosen["queue.dir"]), stderr)
        started.append(service)
        return service

    yield start
    for service in started:
        if service.process.poll() is None:
            service.stop(signal.SIGKILL)
        service.client.close()


def tensor(values: Any) -> dict[str, Any]:
    """The wire's tensor of an array."""
    array = np.asarray(values)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


class Posts:
    """Makes wire datums and bodies with plain `msgpack.packb`, as another language would."""

    tensor = staticmethod(tensor)

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)

    def datum(self, tokens: int = 5, **fields: Any) -> dict[str, Any]:
        random = self.random
        made = {
            "input_ids": tensor(random.integers(0, 1000, tokens, dtype=np.int32)),
            "loss_fn_inputs": {
                "target_tokens": tensor(random.integers(0, 1000, tokens, dtype=np.int32)),
                "weights": tensor(np.ones(tokens, np.float32)),
                "logprobs": tensor(-random.random(tokens, dtype=np.float32)),
                "advantages": tensor(np.float32([0.5])),
            },
        }
        return made | fields

    def body(self, *datums: dict[str, Any], **header: Any) -> bytes:
        packed: bytes = msgpack.packb(
            {"version": 1, "policy_version": 0, "datums": list(datums)} | header
        )
        return packed


@pytest.fixture
def posts() -> Posts:
    return Posts()
