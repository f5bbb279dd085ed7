"""Bodies that are read straight into their buffer arrive byte for byte, whatever the pieces they come in.

The protocol alone, on both loops, in front of an app that answers with what it got; and real services with the
fast path and without it.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from headrace.service.protocol import READ_INTO, DoorProtocol, Gate
from headrace.service.settings import Server

HEAD = b"POST /v1/datums HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER on, 0 s


def post(body: bytes, *more: bytes) -> bytes:
    return head(len(body), *more) + body


def head(nbytes: int, *more: bytes) -> bytes:
    return HEAD + b"".join(more) + b"Content-Length: %d\r\n\r\n" % nbytes


class Raw:
    """A connection of bytes; each `send` is a segment of its own."""

    def __init__(self, url: str) -> None:
        host, _, port = url.partition("://")[2].rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=15)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def answer(self) -> tuple[int, bytes]:
        while b"\r\n\r\n" not in self._held:
            self._more()
        top, _, self._held = self._held.partition(b"\r\n\r\n")
        lines = top.decode().lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:])
        length = int(fields.get("content-length", 0))
        while len(self._held) < length:
            self._more()
        body, self._held = self._held[:length], self._held[length:]
        return int(lines[0].split()[1]), body

    def is_ended(self) -> bool:
        return self._held == b"" and self.socket.recv(1) == b""

    def _more(self) -> None:
        got = self.socket.recv(65536)
        assert got, f"closed after {self._held!r}"
        self._held += got


class Echo:
    """The protocol on a loop in a thread, in front of an app that answers with length and hash."""

    def __init__(
        self,
        loop_factory: Callable[[], Any],
        settings: Server,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.settings, self.context = settings, context
        self.refused: list[str] = []
        self.cut_off: list[int] = []  # bytes that came of bodies that are not whole
        self.fast = self.slow = 0  # bodies read
        self.made: list[weakref.ref[DoorProtocol]] = []
        self._loop_factory = loop_factory
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Echo:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on the loop, after everything that stood before it."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        config = uvicorn.Config(self._app, ws="none", lifespan="off", log_config=None)
        config.load()
        config.loaded_app = self._app
        self.gate = Gate(self.settings, lambda refused, _: self.refused.append(refused.code))
        self.state = ServerState()

        def make() -> DoorProtocol:
            made = DoorProtocol(config, self.state, {}, self._loop, gate=self.gate)
            self.made.append(weakref.ref(made))
            return made

        server = await self._loop.create_server(make, "127.0.0.1", 0, ssl=self.context)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._ended.wait()
        server.close()
        for connection in list(self.state.connections):
            connection.transport.abort()
        while self.state.connections:
            await asyncio.sleep(0.001)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        announced = int(dict(scope["headers"])[b"content-length"])
        read_into = scope.get("extensions", {}).get(READ_INTO)
        if read_into is not None:
            buffer = bytearray(announced)
            at, whole = await read_into(memoryview(buffer))
            if not whole:
                self.cut_off.append(at)
                return
            assert at == announced
            body = bytes(buffer)
            self.fast += 1
        else:
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return
                body += message["body"]
                more = message["more_body"]
            self.slow += 1
        said = said_of(body)
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})


def said_of(body: bytes) -> bytes:
    return b"%d %s" % (len(body), hashlib.sha256(body).hexdigest().encode())


@pytest.fixture(params=LOOPS)
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], Any]:
    factory: Callable[[], Any] = LOOPS[request.param]
    return factory


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def echo(loop_factory: Callable[[], Any], request: pytest.FixtureRequest) -> Iterator[Echo]:
    with Echo(loop_factory, Server(fast_protocol=request.param)) as made:
        yield made
        count = made.fast if request.param else made.slow
        assert count > 0
        assert made.fast + made.slow == count, "the flag says which path is taken"


def wait_for(condition: Callable[[], Any], what: str) -> None:
    bound = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < bound, what
        time.sleep(0.002)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    cuts = [0, *sorted(at), len(data)]
    return [data[a:b] for a, b in pairwise(cuts) if a < b]


def test_a_small_body_is_cut_at_every_place(echo):
    """One connection, two posts behind each other, cut once anywhere: in a head, a body, between them."""
    one, two = b"0123456789", bytes(range(256))
    data = post(one) + post(two) + post(b"")
    with Raw(echo.url) as connection:
        for cut in range(1, len(data)):
            connection.send(data[:cut])
            echo.on_loop(int)  # the loop may have taken the first part alone
            connection.send(data[cut:])
            for body in (one, two, b""):
                assert connection.answer() == (200, said_of(body)), cut


def test_bodies_in_random_pieces(echo):
    draw = random.Random(5)
    with Raw(echo.url) as connection:
        for round_ in range(30):
            sizes = [int(2 ** draw.uniform(0, 20)) for _ in range(draw.randint(1, 4))]
            bodies = [draw.randbytes(size) for size in sizes]
            data = b"".join(post(body) for body in bodies)
            cuts = [draw.randrange(len(data)) for _ in range(draw.randint(0, 6))]
            # A sender of its own: what is not read yet must not hold back the answers.
            sender = threading.Thread(target=send_all, args=(connection, pieces(data, cuts), echo))
            sender.start()
            answers = [connection.answer() for _ in bodies]
            sender.join()
            assert answers == [(200, said_of(body)) for body in bodies], (round_, sizes, cuts)


def send_all(connection: Raw, parts: list[bytes], echo: Echo) -> None:
    for part in parts:
        connection.send(part)
        echo.on_loop(int)


def test_the_end_of_one_body_and_the_next_posts_are_one_segment(echo):
    """Behind a body that is being read: whole posts, a half head, a half body, an empty line."""
    first, second = random.Random(1).randbytes(3 << 20), b"second" * 50
    with Raw(echo.url) as connection:
        for rest in (1, 10, 70_000):
            connection.send(head(len(first)), first[:-rest])
            connection.send(first[-rest:], post(second), b"\r\n", post(first), post(second)[:-7])
            connection.send(post(second)[-7:])
            for body in (first, second, first, second):
                assert connection.answer() == (200, said_of(body)), rest


def test_100_continue_is_said_in_its_turn(echo):
    body = b"b" * 200_000
    expect = b"Expect: 100-continue\r\n"
    with Raw(echo.url) as connection:
        for _ in range(2):
            connection.send(head(len(body), expect))
            assert connection.answer() == (100, b"")
            connection.send(body)
            assert connection.answer() == (200, said_of(body))
        connection.send(post(b"before"), head(len(body), expect))
        assert connection.answer() == (200, said_of(b"before"))
        assert connection.answer() == (100, b"")
        connection.send(body)
        assert connection.answer() == (200, said_of(body))


def test_a_client_that_leaves_amid_its_body(loop_factory):
    body = b"b" * 300_000
    with Echo(loop_factory, Server()) as echo:
        expected = []
        for sent in (0, 1, 100_000, len(body) - 1):
            for way in ("close", "reset", "half"):
                with Raw(echo.url) as connection:
                    if way == "reset":
                        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    connection.send(head(len(body), b"Expect: 100-continue\r\n"))
                    assert connection.answer() == (100, b"")
                    connection.send(body[:sent])
                    if way == "half":
                        connection.socket.shutdown(socket.SHUT_WR)
                        assert connection.is_ended()
                expected.append((way, sent))
                wait_for(lambda: len(echo.cut_off) == len(expected), str(expected[-1]))
        for (way, sent), at in zip(expected, echo.cut_off, strict=True):
            assert at == sent or (way == "reset" and at < len(body)), (way, sent, at)
        with Raw(echo.url) as connection:
            connection.send(post(body))
            assert connection.answer() == (200, said_of(body))


def test_a_slow_body_is_refused_and_what_comes_late_is_no_post(loop_factory):
    """Refused amid its body, and the rest arrives before the request could be told."""
    body = b"b" * 100_000
    with Echo(loop_factory, Server(body_timeout_s=0.3, min_body_rate_bytes_s=0)) as echo:
        with Raw(echo.url) as connection:
            connection.send(head(len(body), b"Expect: 100-continue\r\n"))
            assert connection.answer() == (100, b"")
            connection.send(body[:-1])
            status, said = connection.answer()
            assert (status, b"server.body_timeout_s = 0.3" in said) == (408, True)
            assert b": 99999 bytes in" in said
            connection.send(body[-1:], post(b"another"))
            assert connection.is_ended()
        assert echo.refused == ["too_slow"]
        with Raw(echo.url) as connection:
            connection.send(head(len(body), b"Expect: 100-continue\r\n"))
            assert connection.answer() == (100, b"")
            connection.send(body[:-1])

            def refuse_and_fill() -> None:
                (door,) = echo.state.connections
                reader = door.transport.get_protocol()
                door.end()
                reader.get_buffer(-1)[:1] = body[-1:]
                reader.buffer_updated(1)

            wait_for(lambda: is_filled(echo, 99_999), "the service has all but the last byte")
            echo.on_loop(refuse_and_fill)
            assert connection.answer()[0] == 503
            assert connection.is_ended()
            connection.send(post(b"another"))
        wait_for(lambda: not echo.state.connections, "both are closed")
        assert echo.cut_off == [99_999, 100_000]
        assert echo.fast == 0, "no post was taken that was refused"


def is_filled(echo: Echo, nbytes: int) -> bool:
    def look() -> bool:
        return any(
            getattr(c.transport.get_protocol(), "nbytes", -1) == nbytes
            for c in echo.state.connections
        )

    return bool(echo.on_loop(look))


def test_a_request_given_up_amid_its_body_takes_the_connection_with_it(loop_factory):
    with Echo(loop_factory, Server()) as echo, Raw(echo.url) as connection:
        connection.send(head(1000, b"Expect: 100-continue\r\n"))
        assert connection.answer() == (100, b"")
        connection.send(b"b" * 999)
        wait_for(lambda: is_filled(echo, 999), "it is being read")
        echo.on_loop(lambda: [task.cancel() for task in echo.state.tasks])
        assert connection.is_ended(), "without a word: what follows could be taken for a request"


def test_connections_end_without_the_collector(loop_factory):
    """Full collections are rare in a service; what ended must not wait for one."""
    body = b"b" * 100_000
    gc.collect()
    gc.disable()
    try:
        with Echo(loop_factory, Server()) as echo:
            for _ in range(5):
                with Raw(echo.url) as connection:
                    for _ in range(2):
                        connection.send(head(len(body)), body[:-1])
                        connection.send(body[-1:])
                        assert connection.answer() == (200, said_of(body))
            wait_for(lambda: not echo.state.connections, "all are closed")
            wait_for(lambda: not any(made() for made in echo.made), "none is held")
            assert len(echo.made) == 5
    finally:
        gc.enable()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
def test_https_takes_the_other_path(loop_factory, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    body = random.Random(2).randbytes(1 << 20)
    with Echo(loop_factory, Server(), context) as echo, Raw(echo.url) as connection:
        trusting = ssl.create_default_context(cafile=str(certificate))
        connection.socket = trusting.wrap_socket(connection.socket, server_hostname="127.0.0.1")
        connection.send(post(body), post(b"small"))
        assert connection.answer() == (200, said_of(body))
        assert connection.answer() == (200, said_of(b"small"))
        assert (echo.fast, echo.slow) == (0, 2)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_a_service_knows_the_same_body_again(serve, posts, fast):
    """A post that is sent again under its key is a duplicate if it is the same bytes, else a conflict."""
    service = serve(**{"server.fast_protocol": str(fast).lower(), "planner.batch_size": 10_000})
    large = posts.body(*(posts.datum(4096) for _ in range(63)))
    assert 4_000_000 < len(large) < 4 << 20
    draw = random.Random(3)
    for number, body in enumerate((posts.body(posts.datum()), large)):
        key = b"Idempotency-Key: same-%d\r\n" % number
        other = bytearray(body)
        other[-3] ^= 1
        with Raw(service.url) as connection:
            connection.send(post(body, key))
            status, first = connection.answer()
            assert status == 202
            for _ in range(4):
                cuts = [draw.randrange(len(body)) for _ in range(5)]
                for part in pieces(post(body, key), cuts):
                    connection.send(part)
                status, again = connection.answer()
                assert status == 202
                assert json.loads(again) == json.loads(first) | {"duplicate": True}
            assert json.loads(first)["duplicate"] is False
            connection.send(post(bytes(other), key))
            assert connection.answer()[0] == 409, "one bit is another body"
    with Raw(service.url) as left:
        left.send(head(len(large)), large[:1_000_000])
    assert service.post(large).status_code == 202
    assert service.books()["accepted"] == 1 + 63 + 63
    wait_for(lambda: service.status()["bodies"]["in_flight"] == 0, "what was left is given back")
    bodies = service.status()["bodies"]
    assert bodies["viewed"] == 0, "nothing holds on to a buffer"
    assert (bodies["made"], bodies["reused"]) in ((1, 7), (2, 6)), "those of the large posts"
