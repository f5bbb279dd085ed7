"""Handing records from one process to another: ours against what a trainer would use instead.

    ours      fill a record in the ring; the reader has a tensor that views it
    torch     torch.multiprocessing.Queue: fill a fresh tensor, its storage moves to shared memory
    pickle    multiprocessing.Queue of a numpy array: pickled through a pipe
    memcpy    `np.copyto` into a warm buffer as large as a turn, in one process: the bound

Records of 1, 16 and 64 MiB. The producer runs here, the consumer in a spawned process that reads
one word of every page and gives the record back. The contenders take turns within a round, so that
whatever else the machine does meets all of them; the first round is thrown away, a row gives
medians. A second part measures the wake-up: the consumer sleeps, a small record with a time stamp
comes, microseconds pass until it is in the consumer's hands.

Called by `headrace bench handoff`. Needs torch and 600 MiB of shared memory.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray

from headrace.client.reader import RingReader
from headrace.service.ring import Kind, RingWriter, State

__all__ = ["run"]

MIB = 1 << 20
SIZES_MIB = (1, 16, 64)
BURST_MIB = 128  # bytes of one turn; the ring holds all of it, so that nobody waits for room
ROUNDS = 7  # the first is not counted
WAKE_UPS, PAUSE_S = 300, 0.002  # of each contender
PAGE_WORDS = 4096 // 4
TIMEOUT_S = 60.0

Contender = Callable[[NDArray[np.float32]], None]


def run() -> list[dict[str, Any]]:
    """Rows of throughput (record_mib, gb_per_s, ratios) and of the wake-up (p50_us, p99_us)."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir="/dev/shm"))
    writer = RingWriter.create(
        folder, run="handoff", dp_rank=0, dp_size=1, replicas=1, layout="thd",
        data_bytes=2 * BURST_MIB * MIB, records=1024,
    )  # fmt: skip
    writer.set_state(State.SERVING)
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    queues = {"torch": context.Queue(), "pickle": multiprocessing.get_context("spawn").Queue()}
    consumer = context.Process(target=_consume, args=(folder, there, queues), daemon=True)
    consumer.start()
    try:
        _answer(here)
        contenders: dict[str, Contender] = {
            "ours": lambda source: _into_ring(writer, source),
            "torch": lambda source: queues["torch"].put(torch.from_numpy(source).clone()),
            "pickle": lambda source: queues["pickle"].put(source),
        }
        throughput = [row for mib in SIZES_MIB for row in _throughput(mib, contenders, here)]
        return throughput + _wake_ups(contenders, here)
    finally:
        here.send(None)
        consumer.join(TIMEOUT_S)
        consumer.kill()
        writer.close(unlink=True)
        folder.rmdir()


def _throughput(
    mib: int, contenders: dict[str, Contender], here: Connection
) -> list[dict[str, Any]]:
    source = np.ones(mib * MIB // 4, np.float32)
    count = BURST_MIB // mib
    target = np.zeros((count, len(source)), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in (*contenders, "memcpy")}
    for _ in range(ROUNDS):
        for name, send in contenders.items():
            here.send((name, count))
            _answer(here)
            started = time.perf_counter()
            for _ in range(count):
                send(source)
            _answer(here)
            seconds[name].append(time.perf_counter() - started)
        started = time.perf_counter()
        for slot in target:
            np.copyto(slot, source)
        seconds["memcpy"].append(time.perf_counter() - started)
    rate = {name: BURST_MIB * MIB / median(taken[1:]) / 1e9 for name, taken in seconds.items()}
    return [
        {
            "case": name,
            "record_mib": mib,
            "gb_per_s": round(rate[name], 3),
            "ratio_to_memcpy": round(rate[name] / rate["memcpy"], 3),
            "ours_is_times": round(rate["ours"] / rate[name], 2),
        }
        for name in seconds
    ]


def _wake_ups(contenders: dict[str, Contender], here: Connection) -> list[dict[str, Any]]:
    rows = []
    for name, send in contenders.items():
        here.send((name, WAKE_UPS))
        _answer(here)
        for _ in range(WAKE_UPS):
            time.sleep(PAUSE_S)
            send(np.array([time.perf_counter_ns()], np.int64).view(np.float32))
        microseconds = _answer(here)
        cuts = quantiles(microseconds, n=100)
        rows.append(
            {
                "case": name,
                "wake_up": True,
                "p50_us": round(cuts[49], 1),
                "p99_us": round(cuts[98], 1),
            }
        )
    return rows


def _into_ring(writer: RingWriter, source: NDArray[np.float32]) -> None:
    while (record := writer.reserve(source.nbytes)) is None:
        time.sleep(0.0002)
    np.copyto(np.frombuffer(record, np.float32), source)
    writer.publish(kind=Kind.DATA, step=0, index=0, count=1, length=source.nbytes, meta_offset=0)


def _answer(here: Connection) -> Any:
    if not here.poll(TIMEOUT_S):
        raise TimeoutError(f"handoff: the consumer said nothing for {TIMEOUT_S:g} s")
    return here.recv()


def _consume(folder: Path, there: Connection, queues: dict[str, Any]) -> None:
    """The other process: for each (contender, count), take so many; send the delays, in µs."""
    torch.set_num_threads(1)
    reader = RingReader.attach(folder, "handoff", 0, timeout_s=TIMEOUT_S)
    there.send("ready")
    while (order := there.recv()) is not None:
        name, count = order
        there.send("go")
        delays = []
        for _ in range(count):
            if name == "ours":
                record = reader.next(TIMEOUT_S)
                assert record is not None
                tensor = torch.from_numpy(np.frombuffer(record.payload, np.float32))
            else:
                tensor = torch.as_tensor(queues[name].get(timeout=TIMEOUT_S))
            now = time.perf_counter_ns()
            if len(tensor) == 2:
                delays.append((now - int(tensor.view(torch.int64)[0])) / 1e3)
            else:
                tensor[::PAGE_WORDS].sum()
            if name == "ours":
                reader.release(reader.cursor)
            del tensor
        there.send(delays)
    reader.close()
