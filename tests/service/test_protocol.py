"""Hostile bytes on a raw socket against a real service, which stays well: it answers or closes, takes the next
good post, and does not grow.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GROWTH_BYTES = 32 << 20
HEAD = b"POST /v1/datums HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self, status: int, code: str) -> dict[str, Any]:
        """The problem document of a refusal that closes."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"] == "application/problem+json"
        assert self.headers["connection"] == "close"
        document: dict[str, Any] = json.loads(self.body)
        assert (document["status"], document["code"]) == (status, code), document
        assert document["detail"]
        return document


class Raw:
    """A connection of bytes."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=15)
        self._held = b""

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def send_until_refused(self, nbytes: int) -> int:
        """Bytes that the other side let through, of `nbytes`."""
        block, sent = b"a" * 65536, 0
        try:
            while sent < nbytes:
                sent += self.socket.send(block)
        except OSError:
            pass
        return sent

    def answer(self) -> Answer:
        head, _, rest = self._until(lambda held: b"\r\n\r\n" in held).partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        self._held = rest
        body = self._until(lambda held: len(held) >= length)[:length]
        self._held = self._held[length:]
        return Answer(int(lines[0].split()[1]), headers, body)

    def is_ended(self) -> bool:
        """The other side ended its half in order: no reset, nothing more to read."""
        return self._held == b"" and self.socket.recv(1) == b""

    def _until(self, enough: Any) -> bytes:
        while not enough(self._held):
            got = self.socket.recv(65536)
            assert got, f"closed after {self._held!r}"
            self._held += got
        return self._held


@contextmanager
def raw(service: Any) -> Iterator[Raw]:
    connection = Raw(service.url)
    with connection.socket:
        yield connection


def rss(service: Any) -> int:
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) << 10


def head(nbytes: int, *more: bytes) -> bytes:
    return HEAD + b"".join(more) + b"Content-Length: %d\r\n\r\n" % nbytes


@contextmanager
def stays_well(service: Any, body: bytes, name: str = "", *, taken: int = 0) -> Iterator[None]:
    """Within it something hostile happens; after it a good post is taken, nothing has grown, and of what was sent
    within it `taken` datums are in the books.
    """
    assert service.post(body).status_code == 202
    before, accepted = rss(service), service.books()["accepted"]
    yield
    grown = rss(service) - before
    assert grown < GROWTH_BYTES, (name, grown)
    assert service.post(body).status_code == 202, name
    assert service.books()["accepted"] == accepted + taken + 1, name
    logged = service.stderr.read_text()
    assert "Traceback" not in logged, (name, logged)


WRONG: list[tuple[str, bytes, int, str]] = [
    ("not HTTP", b"\x16\x03\x01 hello\r\n\r\n", 400, "malformed_head"),
    ("another version", b"GET / HTTP/9.9\r\n\r\n", 400, "malformed_head"),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_head"),
    ("a tunnel", b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n", 400, "malformed_head"),
    ("a URL that is none", b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "malformed_head"),
    ("a header with NUL", b"GET / HTTP/1.1\r\nHost: local\x00host\r\n\r\n", 400, "malformed_head"),
    ("a negative length", HEAD + b"Content-Length: -1\r\n\r\n", 400, "malformed_head"),
    ("two lengths", HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "malformed_head"),
    ("a length beyond 64 bits", HEAD + b"Content-Length: %d\r\n\r\n" % 10**30, 400, "malformed_head"),
    ("length and chunks", HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed_head"),
    ("many headers", b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 20000 + b"\r\n", 431, "head_too_large"),
    ("a long URL", b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\n\r\n", 431, "head_too_large"),
    ("no length", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", 411, "length_missing"),
    ("chunks without end", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000, 411, "length_missing"),
]  # fmt: skip


def test_hostile_bytes_leave_the_service_well(serve, posts):
    """One service for all of them, one after another."""
    service = serve(**{"limits.max_body_bytes": "1MiB"})
    what_is_not_a_request_is_answered_and_closed(service, posts.body(posts.datum()))
    what_is_too_large_is_refused_unread(service, posts.body(posts.datum()))
    pipelined_requests_are_answered_in_order(service, posts.body(posts.datum()))
    expect_100_continue(service, posts.body(posts.datum()))
    large = posts.body(*(posts.datum(1000) for _ in range(40)))
    a_client_that_leaves_amid_its_body_leaves_nothing(service, large, posts.body(posts.datum()))


def what_is_not_a_request_is_answered_and_closed(service: Any, body: bytes) -> None:
    for name, data, status, code in WRONG:
        with stays_well(service, body, name), raw(service) as connection:
            connection.send(data)
            try:
                connection.answer().problem(status, code)
            except AssertionError as error:
                raise AssertionError(name) from error
            assert connection.is_ended(), name
    # A broken body of chunks whose head was taken: the answer is not a second one.
    with stays_well(service, body), raw(service) as connection:
        connection.send(
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        )
        assert connection.answer().status in (400, 404)
        assert connection.is_ended()


def what_is_too_large_is_refused_unread(service: Any, body: bytes) -> None:
    with stays_well(service, body, "16 MB of header"), raw(service) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert connection.send_until_refused(16 << 20) < 16 << 20
        connection.answer().problem(431, "head_too_large")
    with stays_well(service, body, "1 GB announced"), raw(service) as connection:
        connection.send(head(1 << 30))
        connection.answer().problem(413, "body_too_large")
        assert connection.is_ended(), "answered and ended before a byte of the body came"
        assert connection.send_until_refused(1 << 30) < 64 << 20
    with stays_well(service, body, "more than announced is allowed"), raw(service) as connection:
        # All of it is on its way before the answer is read, and still the answer can be read.
        connection.send(head(1_500_000), b"x" * 700_000)
        connection.answer().problem(413, "body_too_large")
        assert connection.is_ended()
        assert connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    with stays_well(service, body, "a body where none is read"), raw(service) as connection:
        connection.send(
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
        )
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (204, "close")
        assert connection.send_until_refused(99_999_999) < 64 << 20


def pipelined_requests_are_answered_in_order(service: Any, body: bytes) -> None:
    post = head(len(body)) + body
    health = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with raw(service) as connection:
        connection.send(post, b"\r\n", health, post)
        assert [connection.answer().status for _ in range(3)] == [202, 204, 202]
        connection.send(post[:70])
        connection.send(post[70:])
        assert connection.answer().status == 202, "the connection is kept"
    with stays_well(service, body, "garbage behind a request"), raw(service) as connection:
        connection.send(health, b"garbage\r\n\r\n", post)
        assert connection.answer().status == 204
        connection.answer().problem(400, "malformed_head")
        assert connection.is_ended()
    with stays_well(service, body, "a refusal, then another post"), raw(service) as connection:
        connection.send(head(8 << 20), post)
        connection.answer().problem(413, "body_too_large")
        assert connection.is_ended()
    with stays_well(service, body, "a flood"), raw(service) as connection:
        connection.send(health * 3000)
        answers = [connection.answer()]
        while answers[-1].status == 204:
            answers.append(connection.answer())
        answers[-1].problem(400, "malformed_head")
        assert len(answers) < 3000


def expect_100_continue(service: Any, body: bytes) -> None:
    expect = b"Expect: 100-continue\r\n"
    with raw(service) as connection:
        connection.send(head(len(body), expect))
        assert connection.answer().status == 100
        connection.send(body)
        assert connection.answer().status == 202
    with stays_well(service, body), raw(service) as connection:
        connection.send(head(8 << 20, expect))
        connection.answer().problem(413, "body_too_large")
        assert connection.is_ended()


def a_client_that_leaves_amid_its_body_leaves_nothing(
    service: Any, large: bytes, small: bytes
) -> None:
    reset = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER on, 0 s
    with stays_well(service, small):
        for sent in (0, 1, 70_000, len(large) - 1):
            for hard in (False, True):
                with raw(service) as connection:
                    if hard:
                        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    connection.send(head(len(large)), large[:sent])
        until(lambda: open_connections(service) <= 1, what="the connections are gone")


def test_connections_beyond_the_most_are_told_and_closed(serve, posts):
    service = serve(**{"server.max_connections": 3})
    body = posts.body(posts.datum())
    with stays_well(service, body):  # holds one connection, kept alive
        first, second = Raw(service.url), Raw(service.url)
        until(lambda: open_connections(service) == 3, what="three are accepted")
        with raw(service) as third:
            answer = third.answer()  # before it sent anything
            answer.problem(503, "too_many_connections")
            assert int(answer.headers["retry-after"]) >= 1
            assert third.is_ended()
        first.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first.answer().status == 204, "those that are open go on"
        first.socket.close()
        second.socket.close()
        until(lambda: open_connections(service) == 1, what="two are gone")
        with raw(service) as again:
            again.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert again.answer().status == 204


def until(condition: Any, *, what: str) -> None:
    bound = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < bound, what
        time.sleep(0.005)


def open_connections(service: Any) -> int:
    """Sockets that the service holds, listening ones aside."""
    inodes = set()
    for fd in Path(f"/proc/{service.process.pid}/fd").iterdir():
        try:
            inodes.add(fd.readlink().name)
        except OSError:
            continue
    port = int(service.url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        row[1].endswith(f":{port:04X}") and row[3] != "0A" and f"socket:[{row[9]}]" in inodes
        for row in rows
    )


@pytest.mark.slow
def test_clients_that_take_their_time(serve, posts):
    """All of them at once, on a service with little patience and on one that minds the rate."""
    hasty = serve(
        **{
            "server.head_timeout_s": 2,
            "server.body_timeout_s": 2,
            "server.min_body_rate_bytes_s": 0,
        }
    )
    strict = serve(**{"run.name": "strict", "server.head_timeout_s": 1})
    body = posts.body(posts.datum())
    poll = b"GET /v1/policy?newer_than=0&wait=4 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    health = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with stays_well(hasty, body, taken=1), stays_well(strict, body):
        began = time.monotonic()
        silent, blank, half, idle, after, polls, ahead = (Raw(hasty.url) for _ in range(7))
        stalled, steady = Raw(strict.url), Raw(strict.url)
        blank.send(b"\r\n\r\n")
        half.send(HEAD)
        for connection in (idle, after):
            connection.send(health)
            assert connection.answer().status == 204
        after.send(health[:-2])
        unread = Raw(hasty.url)
        unread.send(head(len(body)), body[:-1])
        polls.send(poll, health[:-2])
        ahead.send(poll, head(len(body)), body[:-1])
        stalled.send(head(1 << 20), b"x" * 70_000)
        steady.send(head(1 << 20), b"x" * 1_000_000)

        def took(connection: Raw) -> float:
            assert connection.is_ended()
            return time.monotonic() - began

        for connection in (silent, blank):
            assert took(connection) > 1.5
        for connection in (half, after):
            detail = connection.answer().problem(408, "too_slow")["detail"]
            assert "server.head_timeout_s = 2" in detail
            assert took(connection) > 1.5
        detail = unread.answer().problem(408, "too_slow")["detail"]
        assert "server.body_timeout_s = 2" in detail
        assert took(unread) > 1.5
        # What stands behind a request that takes its time is not the client's slowness.
        for connection, rest, status in ((polls, health[-2:], 204), (ahead, body[-1:], 202)):
            assert connection.answer().status == 200
            assert time.monotonic() - began > 3.5
            connection.send(rest)
            assert connection.answer().status == status
        detail = stalled.answer().problem(408, "too_slow")["detail"]
        assert "server.min_body_rate_bytes_s = 65536" in detail
        assert "70000 bytes in" in detail
        assert took(stalled) > 4.5
        # Faster than the least on average, so it still may go on; and an idle connection is no slow one.
        steady.send(b"x" * 48_576)
        assert steady.answer().status in (400, 422)
        idle.send(health)
        assert idle.answer().status == 204
        for connection in (silent, blank, half, idle, after, unread, polls, ahead, stalled, steady):
            connection.socket.close()
