"""The servers that `headrace bench ingest` compares ours with, each in a process of its own.

    raw    a plain socket read into one reused buffer, a fixed ack: what the machine can carry
    asgi   uvicorn (httptools, uvloop) and an app that walks through the body and drops it
    json   FastAPI with a pydantic model of lists: what one writes first

and the reader that takes ours' steps. `python -m headrace.bench.ingest_servers raw REQUEST_BYTES |
asgi | json | reader QUEUE_DIR` prints its port, or "attached", and goes on until it is killed.
Started by ingest.py, and by nobody else.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from headrace.client.reader import RingReader

__all__ = ["ACK", "main"]

ACK = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}"


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "reader":
        read_steps(Path(rest[0]))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    if kind == "raw":
        serve_raw(listener, int(rest[0]))
    app: Any = bare_asgi if kind == "asgi" else naive_json()
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", log_level="error", lifespan="off", ws="none"
    )
    uvicorn.Server(config).run(sockets=[listener])


def serve_raw(listener: socket.socket, request_bytes: int) -> None:
    """Read requests of a known length, head included, and answer each with ACK."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_read_raw, args=(connection, request_bytes), daemon=True).start()


def _read_raw(connection: socket.socket, request_bytes: int) -> None:
    buffer = memoryview(bytearray(request_bytes))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        at = 0
        while at < request_bytes:
            got = connection.recv_into(buffer[at:])
            if not got:
                return
            at += got
        connection.sendall(ACK)


def read_steps(queue_dir: Path) -> NoReturn:
    """Take every record, look at one word of each page, release it; commit each step at its end."""
    reader = RingReader.attach(queue_dir, "default", 0, timeout_s=60)
    print("attached", flush=True)
    while True:
        record = reader.next(60)
        if record is None or record.step is None:
            continue
        np.frombuffer(record.payload, np.uint8)[::4096].sum()
        last = record.index + 1 == record.count
        if last:
            reader.finish(record.step)
        reader.release(record.sequence + 1)
        if last:
            reader.commit(record.step)


async def bare_asgi(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send(
        {"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"{}"})


class NaiveDatum(BaseModel):
    input_ids: list[int]
    target_tokens: list[int]
    weights: list[float]
    logprobs: list[float]
    advantages: list[float]


class NaivePost(BaseModel):
    policy_version: int
    datums: list[NaiveDatum]


def naive_json() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/datums", status_code=202)
    async def take(post: NaivePost) -> dict[str, int]:
        return {"accepted": len(post.datums)}

    return app


if __name__ == "__main__":
    main()
