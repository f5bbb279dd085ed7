"""Refusals: all are counted, few lines are logged, and nothing a client sent gets into them raw."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from datetime import datetime
from itertools import pairwise

import pytest

from headrace.service import refusals as module
from headrace.service.refusals import Refusals, shown

LINE = re.compile(r"refused (\d+) requests?, code (\w+); the last from (.*?): (.*)")


def test_shown_is_ascii_quoted_and_cut():
    assert shown("plain") == "'plain'"
    assert shown("a\n\x1b[2J\u202e\x00é") == r"'a\n\x1b[2J\u202e\x00\xe9'"
    assert shown("x" * 81) == f"'{'x' * 80}'..."
    assert shown("\U0001f600" * 1000).isascii()


def test_a_burst_is_two_lines_and_all_of_it_is_counted(caplog, monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.05)

    async def burst() -> Refusals:
        refusals = Refusals()
        for number in range(500):
            refusals.note("foreign_host", f"Host: {number}", client="127.0.0.1")
        refusals.note("forbidden", "no", "actors")
        assert len(caplog.records) == 2
        async with asyncio.timeout(10):
            while len(caplog.records) < 3:
                await asyncio.sleep(0.005)
        refusals.close()
        return refusals

    refusals = asyncio.run(burst())
    assert [record.getMessage() for record in caplog.records] == [
        "refused 1 request, code foreign_host; the last from '127.0.0.1': 'Host: 0'",
        "refused 1 request, code forbidden; the last from 'unknown' with token 'actors': 'no'",
        "refused 499 requests, code foreign_host; the last from '127.0.0.1': 'Host: 499'",
    ]
    assert refusals.counts() == {
        "codes": {"foreign_host": 500, "forbidden": 1},
        "tokens": {"actors": {"forbidden": 1}},
    }


def test_after_a_quiet_second_the_next_is_said_at_once(caplog, monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.01)

    async def twice() -> None:
        refusals = Refusals()
        refusals.note("too_slow", "first")
        await asyncio.sleep(0.05)
        assert len(caplog.records) == 1
        refusals.note("too_slow", "second")
        assert len(caplog.records) == 2
        refusals.close()

    asyncio.run(twice())
    assert len(caplog.records) == 2


def test_closing_says_the_rest(caplog):
    async def end() -> None:
        refusals = Refusals()
        for _ in range(3):
            refusals.note("malformed", "x")
        refusals.close()
        refusals.close()
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(end())
    assert [LINE.match(record.getMessage())[1] for record in caplog.records] == ["1", "2"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_long_detail_is_cut(caplog):
    async def one() -> None:
        refusals = Refusals()
        refusals.note("malformed", "\x1b[31m" * 100_000, client="c" * 1000)
        refusals.close()

    asyncio.run(one())
    (record,) = caplog.records
    assert len(record.getMessage()) < 4 * module.DETAIL_CHARS + 300
    assert record.getMessage().isascii()
    assert "\x1b" not in record.getMessage()


def lines(service, code: str) -> list[tuple[float, int]]:
    """When each line of a code was logged, in seconds, and the refusals that it counts."""
    found = []
    for text in service.stderr.read_text().splitlines():
        entry = json.loads(text)
        match = LINE.match(entry["event"])
        if match is not None and match[2] == code:
            found.append((datetime.fromisoformat(entry["timestamp"]).timestamp(), int(match[1])))
    return found


@pytest.mark.slow
def test_a_service_logs_one_line_a_second_a_code(serve, wait_until):
    service = serve()
    for _ in range(60):
        assert service.client.get("/v1/limits", headers={"Host": "evil"}).status_code == 421
        assert service.client.get("/nothing").status_code == 404
    wait_until(lambda: sum(count for _, count in lines(service, "foreign_host")) == 60)
    for _ in range(5):
        assert service.client.get("/v1/limits?", headers={"Host": "evil"}).status_code == 421
        assert service.client.get("/v1/policy?wait=x").status_code == 422
    counts = service.client.get("/v1/status").json()["refused"]
    assert counts == {"codes": {"foreign_host": 65, "not_found": 60, "invalid": 5}, "tokens": {}}
    assert service.stop() == 0
    for code, total in counts["codes"].items():
        said = lines(service, code)
        assert sum(count for _, count in said) == total
        for (earlier, _), (later, _) in pairwise(said[:-1]):  # the last: said at the end
            assert later - earlier > 0.9


def ask(service, request: bytes) -> bytes:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_hostile_strings_do_not_reach_the_log_raw(serve, posts):
    service = serve(**{"log.format": "human"})
    end = b"\r\nConnection: close\r\n\r\n"
    local = b"\r\nHost: localhost" + end
    asked = {
        b"GET /v1/limits HTTP/1.1\r\nHost: " + b"\x9b31mHOST\xff'\"" * 1500 + end: b"421",
        b"GET /%0AINJECTED%1B%5B2J" + b"%41" * 5000 + b" HTTP/1.1" + local: b"404",
        b"GET /v1/policy?wait=%0AINJECTED%1B%5B2J" + b"A" * 9000 + b" HTTP/1.1" + local: b"422",
        b"GET /v1/policy?%0AINJECTED%1B%5B2J=1&wait=-1 HTTP/1.1" + local: b"422",
        b"%s /healthz HTTP/1.1" % b"REPORT" + local: b"405",
    }
    for request, status in asked.items():
        assert ask(service, request).startswith(b"HTTP/1.1 " + status), request[:60]
    body = posts.body(posts.datum(), actor="\nINJECTED\x1b[2J" + "A" * 9000)
    assert service.post(body).status_code < 500
    bad = {"Content-Type": b"text/\x9binjected" + b"A" * 9000}
    assert service.client.post("/v1/datums", content=b"", headers=bad).status_code == 415
    assert service.stop() == 0
    text = service.stderr.read_text(encoding="utf-8", errors="surrogateescape")
    assert "foreign_host" in text
    assert "not_found" in text
    assert "\x1b[2J" not in text
    assert not re.search(r"[^\x00-\x7f]", text)
    assert not re.search(r"^INJECTED", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines()) < 2000
