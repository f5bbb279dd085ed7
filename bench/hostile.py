"""How long a hostile body takes to be refused, and what it does to the others meanwhile.

Bodies of up to 20 MB that cost a naive server seconds and gigabytes, one after another, to one real
service. For each: the answer's status; milliseconds from the last byte sent to the first byte
answered; how far the process grew; and the longest that another connection waited for `/healthz`
meanwhile, which is how long the event loop was held up.

The one body that is known to hold it is the one that repeats keys: each repetition is decoded
before anybody can count them. It is bounded by limits.max_body_bytes.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

__all__ = ["corpus", "run"]

MIB = 1 << 20
ROUNDS = 5


def _array_head(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


def _tensor(values: Any) -> dict[str, Any]:
    array = np.asarray(values)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def _datums(*datums: Any) -> bytes:
    packed: bytes = msgpack.packb({"version": 1, "policy_version": 0, "datums": list(datums)})
    return packed


def _columns(lengths: Any) -> bytes:
    five = _tensor(np.zeros(5, np.int32))
    body = {"version": 1, "policy_version": 0, "lengths": _tensor(lengths)}
    packed: bytes = msgpack.packb(body | {"columns": {"input_ids": five, "target_tokens": five}})
    return packed


def corpus() -> list[tuple[str, bytes]]:
    """(name, body): what was tried on naive servers, and its variants."""
    one = {"dtype": "int32", "shape": [1], "data": b"\x00" * 4}
    least = {"input_ids": one, "loss_fn_inputs": {"target_tokens": one}}
    sixteen = {"input_ids": one, "loss_fn_inputs": dict.fromkeys(map(str, range(16)), one)}
    prefix = _datums()[:-1]  # up to the head of the list of datums
    packed, packed16 = msgpack.packb(least), msgpack.packb(sixteen)
    many = 20 * MIB // len(packed)
    lists = _array_head(20000) + b"\x90" * 20000
    split = b"".join(msgpack.packb(str(key)) + lists for key in range(1000))
    repeated = msgpack.packb("input_ids") + msgpack.packb(one)
    huge = {"dtype": "int8", "shape": [2**32, 2**32], "data": b""}
    none = {"dtype": "int8", "shape": [0, 2**40], "data": b""}
    return [
        ("20 MB of empty lists", _array_head(20 * MIB) + b"\x90" * (20 * MIB)),
        ("empty lists as datums", prefix + _array_head(20 * MIB) + b"\x90" * (20 * MIB)),
        ("empty maps as datums", prefix + _array_head(20 * MIB) + b"\x80" * (20 * MIB)),
        ("nested lists", prefix + b"\x91" * (20 * MIB)),
        ("nested maps", prefix + b"\x91" + b"\x81\xa0" * (2 * MIB)),
        ("empty lists split over keys", b"\xdf" + struct.pack(">I", 1000) + split),
        ("minimal datums", prefix + _array_head(many) + packed * many),
        ("minimal tensors", prefix + _array_head(4096) + packed16 * 4096),
        ("minimal tensors, as many as may be", prefix + _array_head(1024) + packed16 * 1024),
        ("a list longer than the body", prefix + _array_head(2**32 - 1)),
        ("a string longer than the body", b"\xdb" + struct.pack(">I", 2**32 - 1) + b"x"),
        ("repeated keys", prefix + b"\x91\xdf" + struct.pack(">I", 60000) + repeated * 60000),
        ("an ext type", _datums(msgpack.ExtType(5, b"x" * 100))),
        ("a timestamp", b"\xd6\xff\x00\x00\x00\x00"),
        ("a shape of 2**64", _datums({"input_ids": huge})),
        ("a shape that multiplies to 0", _datums({"input_ids": none})),
        ("keys that are not strings", msgpack.packb({1: 2, b"version": 1})),
        ("a key that is not utf-8", b"\x81\xa2\xff\xfe\x01"),
        (
            "surrogates in an id",
            _datums(least | {"id": "x"}).replace(b"\xa1x", b"\xa3\xed\xa0\x80"),
        ),
        ("negative lengths", _columns(np.array([-5, 10], np.int64))),
        ("lengths that wrap", _columns(np.array([2**63, 2**63, 5], np.uint64))),
        ("a NaN length", _columns(np.array([np.nan], np.float32))),
    ]


def run() -> list[dict[str, Any]]:
    """One row a body: medians of five rounds, the worst growth and the worst wait."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir="/dev/shm") as queue_dir:
        command = [
            sys.executable, "-m", "headrace.service", "serve", "--server.port", "0",
            "--queue.dir", queue_dir, "--queue.bytes", "8MiB", "--log.level", "error",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"http://([^: ]+):(\d+)", process.stdout.readline())
                assert found is not None, "the service did not start"
                where = (found[1], int(found[2]))
                _post(where, b"\x90" * (24 * MIB))  # fills the body pool
                return [_row(process.pid, where, name, body) for name, body in corpus()]
            finally:
                process.terminate()


def _row(pid: int, where: tuple[str, int], name: str, body: bytes) -> dict[str, Any]:
    times, growth, waits, status = [], [], [], 0
    for _ in range(ROUNDS):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts at what there is
        before = _memory(pid, "VmRSS")
        stop, longest = threading.Event(), [0.0]
        watcher = threading.Thread(target=_watch, args=(where, stop, longest))
        watcher.start()
        status, seconds = _post(where, body)
        stop.set()
        watcher.join()
        times.append(seconds)
        growth.append(_memory(pid, "VmHWM") - before)
        waits.append(longest[0])
    return {
        "case": name,
        "body_mib": round(len(body) / MIB, 2),
        "status": status,
        "answer_ms": round(1e3 * float(np.median(times)), 2),
        "worst_growth_mib": round(max(growth) / MIB, 1),
        "median_wait_of_others_ms": round(1e3 * float(np.median(waits)), 1),
    }


def _post(where: tuple[str, int], body: bytes) -> tuple[int, float]:
    """(status, seconds from the last byte sent to the first byte answered)."""
    head = (
        f"POST /v1/datums HTTP/1.1\r\nHost: {where[0]}\r\nContent-Type: application/msgpack\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(where, timeout=60) as connection:
        connection.sendall(head.encode() + body)
        sent = time.perf_counter()
        answer = connection.recv(65536)
        return int(answer.split()[1]), time.perf_counter() - sent


def _watch(where: tuple[str, int], stop: threading.Event, longest: list[float]) -> None:
    connection = http.client.HTTPConnection(*where, timeout=60)
    while not stop.is_set():
        asked = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        longest[0] = max(longest[0], time.perf_counter() - asked)
    connection.close()


def _memory(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} of process {pid}")
