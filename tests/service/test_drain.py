"""How a service ends while clients are in the middle of something: real signals, raw sockets."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

MSGPACK = {"Content-Type": "application/msgpack"}


def half_post(service: Any, body: bytes) -> socket.socket:
    """A connection that announced a post and holds its last byte back, once the service waits for it."""
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=15)
    connection.sendall(
        b"POST /v1/datums HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert connection.recv(100).startswith(b"HTTP/1.1 100")
    connection.sendall(body[:-1])
    return connection


def said(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and content of the one answer that comes before the end."""
    got = b""
    while chunk := connection.recv(65536):
        got += chunk
    head, _, content = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def is_draining(service: Any, body: bytes) -> httpx.Response:
    """Signal, and post on connections that are open until one is told so."""
    clients = [httpx.Client(base_url=service.url, verify=False) for _ in range(20)]
    for client in clients:
        assert client.get("/healthz").status_code == 204
    service.process.send_signal(signal.SIGTERM)
    try:
        for client in clients:
            answer = client.post("/v1/datums", content=body, headers=MSGPACK)
            if answer.status_code != 202:
                return answer
            time.sleep(0.01)
    finally:
        for client in clients:
            client.close()
    raise AssertionError("every post was taken")


def test_open_posts_are_finished_and_new_ones_are_told(serve, posts):
    service = serve()
    body = posts.body(posts.datum())
    with half_post(service, body) as open_post:
        answer = is_draining(service, body)
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert answer.headers["connection"] == "close"
        with pytest.raises(httpx.TransportError), httpx.Client(verify=False) as late:
            late_until_refused(late, service.url)
        assert service.process.poll() is None
        open_post.sendall(body[-1:])
        status, content = said(open_post)
        assert (status, content["accepted"]) == (202, 1)
    assert service.stop() == 0
    assert "accepted datums are not committed" in service.stderr.read_text()


def late_until_refused(client: httpx.Client, url: str) -> None:
    """Connects anew until nobody listens; what got in before that is answered."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        assert client.get(url + "/readyz").status_code == 503


@pytest.mark.slow
def test_a_body_that_never_ends_does_not_hold_it(serve, posts, queue_dir):
    service = serve(**{"server.drain_timeout_s": 2})
    body = posts.body(posts.datum())
    with half_post(service, body) as held:
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        status, content = said(held)
        assert (status, content["code"]) == (503, "draining")
        assert service.process.wait(15) == 0
        assert time.monotonic() - began > 0.9, "it had its time"
    assert list(queue_dir.iterdir()) == []
    assert "Traceback" not in service.stderr.read_text()


def test_a_second_signal_does_not_wait_for_open_posts(serve, posts, queue_dir):
    service = serve(**{"server.drain_timeout_s": 600})
    body = posts.body(posts.datum())
    with half_post(service, body) as held:
        is_draining(service, body)
        service.process.send_signal(signal.SIGTERM)
        assert said(held)[1]["code"] == "draining"
        assert service.process.wait(15) == 0
    assert not list(Path(queue_dir).glob("*.ring"))
    assert "Traceback" not in service.stderr.read_text()


def test_a_hangup_does_not_end_it(serve):
    service = serve()
    for _ in range(3):
        service.process.send_signal(signal.SIGHUP)
        assert service.client.get("/readyz").status_code == 204
