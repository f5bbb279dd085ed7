"""Posts into the real service, against what the machine can carry and what one writes first.

    raw        a plain socket read into one reused buffer: the limit
    asgi       uvicorn and an app that drops the body
    json       FastAPI, JSON lists, pydantic
    per_datum  ours, the friendly form                          20 bytes a token
    columnar   ours, the fast form                              20 bytes a token
    slim       ours: implied targets, uint8 weights, float16
               logprobs, one advantage a datum                   7 bytes a token
    to_trainer columnar while a reader takes the steps out of the ring at the same time, touching
               every page and committing; largest body only

Bodies of 1 x 256, 64 x 1024 and 64 x 4096 tokens, made before the clock starts. The same client for
all: CONNECTIONS threads, each sending one precomputed request after another on one kept-alive
connection, with an Idempotency-Key that differs. The contenders take turns within a round; the
first round is thrown away; a row gives medians of rounds, ratios being taken within a round.

Ours is `headrace serve` with its defaults but for sizes: every body is checked, copied into the
spool, recorded by a commit and answered in the timed part. What follows (planning, layout, the
trainer) is not in it, except in `to_trainer`: a step takes one post more than a burst has, that
post is sent after the clock has stopped, a reader process then takes and commits the step, and the
next burst waits until nothing is held. So nothing piles up, and segments are reused as they are in
a run.

server_cpu_us is CPU time of the server process a post, all threads. ratio_to_limit compares bytes a
second. Called by `headrace bench ingest`. Needs 1.5 GiB of shared memory.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgpack
import numpy as np

__all__ = ["run"]

ROUNDS = 9  # the first is not counted
CONNECTIONS = 4
TIMEOUT_S = 120.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One size of body."""

    datums: int
    tokens: int  # of each datum
    posts: int  # a burst
    json_posts: int

    @property
    def name(self) -> str:
        return f"{self.datums}x{self.tokens}"


SHAPES = (
    Shape(datums=1, tokens=256, posts=600, json_posts=200),
    Shape(datums=64, tokens=1024, posts=80, json_posts=2),
    Shape(datums=64, tokens=4096, posts=24, json_posts=2),
)
KEY = b"%032x"  # an Idempotency-Key; every request has its own, of this length


@dataclass(slots=True, kw_only=True)
class Contender:
    """A server that runs, and what it is sent."""

    case: str
    port: int
    pid: int
    head: bytes  # with a place for KEY
    body: bytes
    posts: int
    ours: httpx.Client | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)

    def burst(self, connections: list[socket.socket], first: int) -> None:
        """Send `posts` requests over the connections; keys count from `first`."""
        shares = [range(i, self.posts, len(connections)) for i in range(len(connections))]
        failures: list[BaseException] = []

        def send(connection: socket.socket, share: range) -> None:
            try:
                for number in share:
                    self.post(connection, first + number)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=send, args=pair)
            for pair in zip(connections, shares, strict=True)
        ]
        before, started = _cpu_s(self.pid), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        seconds, cpu = time.perf_counter() - started, _cpu_s(self.pid) - before
        if failures:
            raise failures[0]
        self.rounds.append({"post_s": seconds / self.posts, "cpu_s": cpu / self.posts})

    def post(self, connection: socket.socket, number: int) -> None:
        connection.sendall(self.head % (KEY % number))
        connection.sendall(self.body)
        answer = connection.recv(1 << 16)
        while b"\r\n\r\n" not in answer:
            answer += _more(connection)
        head, _, rest = answer.partition(b"\r\n\r\n")
        if b" 202 " not in head.partition(b"\r\n")[0] + b" ":
            raise RuntimeError(f"{self.case}: {(head + rest)[:500].decode(errors='replace')}")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        while len(rest) < int(length):
            rest += _more(connection)

    def settle(self) -> None:
        """Wait until nothing is held."""
        if self.ours is None:
            return
        until = time.monotonic() + TIMEOUT_S
        while True:
            status = self.ours.get("/v1/status").json()
            if status["books"]["accepted"] == status["books"]["committed"]:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"{self.case}: {status['waits_for']}")
            time.sleep(0.02)


def run() -> list[dict[str, Any]]:
    """Rows {case, body, mtok_per_s, gb_per_s, ratio_to_limit, server_cpu_us, times_json}."""
    return [row for shape in SHAPES for row in _measure(shape)]


def _measure(shape: Shape) -> list[dict[str, Any]]:
    forms = encodings(shape)
    with ExitStack() as stack:
        contenders = [stack.enter_context(_other(shape, forms, c)) for c in ("raw", "asgi", "json")]
        cases = ["per_datum", "columnar", "slim"]
        if shape is SHAPES[-1]:
            cases.append("to_trainer")
        contenders += [stack.enter_context(_ours(shape, forms, case)) for case in cases]
        number = 0
        for _ in range(ROUNDS):
            for contender in contenders:
                with _connections(contender.port) as connections:
                    contender.burst(connections, number)
                    number += contender.posts
                    if contender.ours is not None and contender.case != "to_trainer":
                        contender.post(connections[0], number)
                        number += 1
                    contender.settle()
    return _rows(shape, contenders)


def _rows(shape: Shape, contenders: list[Contender]) -> list[dict[str, Any]]:
    by_case = {c.case: c for c in contenders}
    tokens = shape.datums * shape.tokens

    def rates(case: str, amount: float) -> list[float]:
        return [amount / turn["post_s"] for turn in by_case[case].rounds[1:]]

    limit = rates("raw", len(by_case["raw"].body))
    naive = rates("json", tokens)
    rows = []
    for case, contender in by_case.items():
        bytes_s, tokens_s = rates(case, len(contender.body)), rates(case, tokens)
        ratio = median(got / most for got, most in zip(bytes_s, limit, strict=True))
        times = median(got / base for got, base in zip(tokens_s, naive, strict=True))
        cpu = median(turn["cpu_s"] for turn in contender.rounds[1:])
        rows.append(
            {
                "case": case,
                "body": shape.name,
                "mtok_per_s": round(median(tokens_s) / 1e6, 3),
                "gb_per_s": round(median(bytes_s) / 1e9, 4),
                "ratio_to_limit": round(ratio, 4),
                "server_cpu_us": round(cpu * 1e6, 1),
                "times_json": round(times, 1),
            }
        )
    return rows


def encodings(shape: Shape) -> dict[str, bytes]:
    """The same datums (but for their advantages in slim) in every form: case -> body."""
    rng = np.random.default_rng(0)
    size = (shape.datums, shape.tokens)
    tokens = rng.integers(0, 150_000, (shape.datums, shape.tokens + 1), dtype=np.int32)
    columns = {
        "input_ids": np.ascontiguousarray(tokens[:, :-1]),
        "target_tokens": np.ascontiguousarray(tokens[:, 1:]),
        "weights": (np.arange(shape.tokens) >= shape.tokens // 4) * np.ones(size, np.float32),
        "logprobs": -rng.random(size, dtype=np.float32),
        "advantages": np.broadcast_to(rng.normal(size=(shape.datums, 1)), size).astype(np.float32),
    }
    head = {"version": 1, "policy_version": 0, "actor": "bench"}
    datums = [
        {
            "input_ids": _tensor(columns["input_ids"][i]),
            "loss_fn_inputs": {k: _tensor(v[i]) for k, v in columns.items() if k != "input_ids"},
        }
        for i in range(shape.datums)
    ]
    lengths = {"lengths": _tensor(np.full(shape.datums, shape.tokens, np.int32))}
    slim = {
        "input_ids": columns["input_ids"],
        "weights": columns["weights"].astype(np.uint8),
        "logprobs": columns["logprobs"].astype(np.float16),
        "advantages": columns["advantages"][:, 0],
    }
    implied = {"targets": "implied", "last_targets": _tensor(columns["target_tokens"][:, -1])}
    lists = [{k: v[i].tolist() for k, v in columns.items()} for i in range(shape.datums)]
    return {
        "json": json.dumps({"policy_version": 0, "datums": lists}).encode(),
        "per_datum": msgpack.packb(head | {"datums": datums}),
        "columnar": msgpack.packb(head | lengths | {"columns": _flat(columns)}),
        "slim": msgpack.packb(head | lengths | implied | {"columns": _flat(slim)}),
    }


def _flat(columns: dict[str, Any]) -> dict[str, Any]:
    return {key: _tensor(array.reshape(-1)) for key, array in columns.items()}


def _tensor(array: Any) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def _head(body: bytes, media: str) -> bytes:
    return (
        "POST /v1/datums HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/{media}\r\nContent-Length: {len(body)}\r\n"
        "Idempotency-Key: %b\r\n\r\n"
    ).encode()


@contextmanager
def _other(shape: Shape, forms: dict[str, bytes], case: str) -> Iterator[Contender]:
    body = forms["json" if case == "json" else "per_datum"]
    head = _head(body, "json" if case == "json" else "msgpack")
    request_bytes = len(head % (KEY % 0)) + len(body)
    process = _start("-m", "headrace.bench.ingest_servers", case, str(request_bytes))
    # Bursts of about as long as ours, so that what else the machine does meets all alike.
    posts = {"raw": 4 * shape.posts, "asgi": shape.posts, "json": shape.json_posts}[case]
    try:
        port = int(_line(process))
        yield Contender(case=case, port=port, pid=process.pid, head=head, body=body, posts=posts)
    finally:
        _end(process)


@contextmanager
def _ours(shape: Shape, forms: dict[str, bytes], case: str) -> Iterator[Contender]:
    through = case == "to_trainer"
    body = forms["columnar" if through else case]
    posts = 1 if through else shape.posts + 1  # of a step
    settings = {
        "server.port": 0,
        "planner.batch_size": posts * shape.datums,
        "trainer.release": "step" if through else "microbatch",
        "queue.bytes": 64 * MIB if through else 32 * MIB,
        "spool.backlog_bytes": 512 * MIB,
        "spool.retain_bytes": 512 * MIB,
        "spool.pool_segments": 4,
        "log.level": "warning",
    }
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir="/dev/shm"))
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        serve = ("-m", "headrace.service", "serve", "--queue.dir", str(folder), *flags)
        service = _start(*serve)
        stack.callback(_end, service)
        address = _line(service).partition("http://")[2].split()[0]
        reader = _start("-m", "headrace.bench.ingest_servers", "reader", str(folder))
        stack.callback(_end, reader)
        _line(reader)
        client = stack.enter_context(httpx.Client(base_url=f"http://{address}", timeout=TIMEOUT_S))
        yield Contender(
            case=case, port=int(address.rpartition(":")[2]), pid=service.pid,
            head=_head(body, "msgpack"), body=body, posts=shape.posts, ours=client,
        )  # fmt: skip


@contextmanager
def _connections(port: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            for _ in range(CONNECTIONS)
        ]
        for connection in opened:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield opened


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait(TIMEOUT_S)}")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(TIMEOUT_S)
    if process.stdout is not None:
        process.stdout.close()


def _more(connection: socket.socket) -> bytes:
    got = connection.recv(1 << 16)
    if not got:
        raise ConnectionError("the server closed the connection within an answer")
    return got


def _cpu_s(pid: int) -> float:
    """CPU seconds of another process, all its threads: its CPU clock, as clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)
