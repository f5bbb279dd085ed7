"""A service's side of the contract that can refuse, stall and drop connections, on a real socket."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import zstandard

from headrace.schemas.wire import WirePost, unpack

BOUND_S = 20.0  # of every wait on a condition; reached only by a failing test
INFLATE = {None: bytes, "gzip": gzip.decompress, "zstd": zstandard.decompress}
DROP_BEFORE, DROP_AFTER = "drop-before", "drop-after"  # the post is taken; before or after it


@dataclass
class Received:
    key: str
    body: bytes
    post: WirePost
    token: str | None
    encoding: str | None = None
    nbytes: int = 0  # as received
    query: str = ""


@dataclass
class Standin:
    """The service's side of the contract, in one process with the test, on a real socket."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)  # datum ids in the order of their 202
    keys: dict[str, int] = field(default_factory=dict)
    script: deque[Any] = field(default_factory=deque)  # answers to come, then 202
    judge: Callable[[WirePost], tuple[int, dict[str, Any]] | None] = lambda post: None
    extra: Callable[[WirePost], dict[str, Any]] = lambda post: {}  # for the body of a 202
    limits: dict[str, Any] | int = field(default_factory=dict)  # or the status instead
    limits_asked: int = 0
    version: int | None = None
    polls: int = 0  # long polls that came
    gate: threading.Event = field(default_factory=threading.Event)  # cleared: posts stall
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, reached: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(reached, BOUND_S)

    def publish(self, version: int) -> None:
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def policy(self, newer_than: int, wait: float) -> dict[str, Any]:
        def newer() -> bool:
            return self.version is not None and self.version > newer_than

        with self.changed:
            self.polls += 1
            self.changed.notify_all()
            self.changed.wait_for(newer, wait)
            return {"version": self.version, "uri": f"weights/{self.version}"}

    def answer(self, got: Received) -> tuple[int, dict[str, Any], dict[str, str]] | str:
        with self.changed:
            self.received.append(got)
            step = self.script.popleft() if self.script else None
            self.changed.notify_all()
        self.gate.wait(BOUND_S)
        if step == DROP_BEFORE:
            return DROP_BEFORE
        if isinstance(step, int | tuple):
            status, headers = step if isinstance(step, tuple) else (step, {})
            return status, {"code": "scripted", "detail": f"scripted {status}"}, headers
        if refusal := self.judge(got.post):
            return (*refusal, {})
        with self.changed:
            count, duplicate = len(got.post.datums), got.key in self.keys
            if not duplicate:
                self.keys[got.key] = count
                self.taken += [d.id or "" for d in got.post.datums]
            self.changed.notify_all()
        body = {
            "accepted": count,
            "first_datum": 0,
            "duplicate": duplicate,
            "dropped": {"stale": 1},
        }
        body |= {"policy_version": self.version, "policy_uri": "weights/x", "admission": None}
        body |= {"backlog": {"datums": 5, "tokens": 50, "bytes": 500, "steps": 1.5}}
        body |= self.extra(got.post)
        return DROP_AFTER if step == DROP_AFTER else (202, body, {})


def handler_of(standin: Standin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            url = urlsplit(self.path)
            assert url.path == "/v1/datums"
            assert self.headers["Content-Type"] == "application/msgpack"
            encoding = self.headers.get("Content-Encoding")
            body = INFLATE[encoding](sent)
            got = Received(
                key=self.headers["Idempotency-Key"],
                body=body,
                post=unpack(body),
                token=self.headers.get("Authorization"),
                encoding=encoding,
                nbytes=len(sent),
                query=url.query,
            )
            answer = standin.answer(got)
            if isinstance(answer, str):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.reply(*answer)

        def do_GET(self) -> None:
            if self.path == "/v1/limits":
                with standin.changed:
                    standin.limits_asked += 1
                told = standin.limits
                self.reply(*((told, {}) if isinstance(told, int) else (200, told)), {})
                return
            asked = parse_qs(urlsplit(self.path).query)
            with standin.changed:
                step = standin.script.popleft() if standin.script else None
            if step is not None:
                self.reply(step, {"code": "scripted"}, {})
                return
            body = standin.policy(int(asked["newer_than"][0]), float(asked["wait"][0]))
            self.reply(200, body, {})

        def reply(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was closed meanwhile


@pytest.fixture
def start_standin() -> Iterator[Callable[..., Standin]]:
    """Start stand-ins: `start_standin(context)` speaks TLS."""
    with ExitStack() as stack:

        def start(context: ssl.SSLContext | None = None) -> Standin:
            standin = Standin()
            standin.gate.set()
            server = Server(("127.0.0.1", 0), handler_of(standin))
            if context is not None:
                server.socket = context.wrap_socket(server.socket, server_side=True)
            scheme = "http" if context is None else "https"
            standin.url = f"{scheme}://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join, BOUND_S)
            stack.callback(server.shutdown)
            stack.callback(standin.gate.set)
            return standin

        yield start


@pytest.fixture
def standin(start_standin: Callable[..., Standin]) -> Standin:
    return start_standin()


def datum(name: str | None = None, tokens: int = 3, **more: Any) -> dict[str, Any]:
    ids = np.arange(tokens)
    losses = {"logprobs": np.zeros(tokens, np.float32), "advantages": np.float32([0.5])}
    base = {"input_ids": ids, "loss_fn_inputs": losses, "id": name, "policy_version": 0}
    return base | more


@pytest.fixture(name="datum")
def _datum() -> Callable[..., dict[str, Any]]:
    """Makes a small datum to submit."""
    return datum


@pytest.fixture(name="refuse")
def _refuse() -> Callable[..., Any]:
    """A judge of posts that refuses the datums of these names."""
    return refuse


def refuse(*names: str) -> Callable[[WirePost], tuple[int, dict[str, Any]] | None]:
    def judge(post: WirePost) -> tuple[int, dict[str, Any]] | None:
        errors = [
            {"index": i, "field": "logprobs", "code": "length", "got": "[2]", "want": "[3]"}
            for i, d in enumerate(post.datums)
            if d.id in names
        ]
        return (422, {"code": "invalid", "errors": errors}) if errors else None

    return judge
