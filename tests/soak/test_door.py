"""The door under load: hundreds of clients, one post in ten hostile, and the books at the trainer.

The clients run in processes of their own (door_clients.py); the trainer is a real one, on a thread
here, and notes the id of every datum that it is given. What the run measured is written to
bench/results/door-soak.json.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from headrace.bench.report import commit, machine
from headrace.client import Trainer

CLIENTS, PROCESSES, SECONDS = 200, 4, 60.0
DATUMS = 64  # a good post
MIB = 1 << 20
INFLIGHT = 64 * MIB
BYTES_A_DATUM = (
    1024  # of memory: its id and its share of a group and a key, all remembered for an hour
)
HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "bench" / "results" / "door-soak.json"

# kind of hostility -> the answers it may get
ANSWERS = {
    "half_head": {"408"},
    "half_body": {"left"},
    "trickle": {"408"},
    "garbage_bytes": {"400"},
    "garbage_body": {"400"},
    "empty_lists": {"422"},
    "nan": {"422"},
    "positive_logprob": {"422"},
    "negative_id": {"422"},
    "short_weights": {"422"},
    "oversized": {"413"},
    "no_length": {"411"},
    "wrong_length": {"400", "422"},
    "other_bytes": {"409"},
    "odd_encoding": {"415"},
    "long_head": {"431"},
}


@pytest.mark.soak
def test_two_hundred_clients_some_of_them_hostile(serve, queue_dir, tmp_path, wait_until):
    service = serve(
        **{
            "limits.inflight_body_bytes": INFLIGHT,
            "planner.batch_size": DATUMS,
            "planner.microbatch_tokens": 8192,
            "server.head_timeout_s": 2,
        }
    )
    trainer = DoorTrainer(queue_dir)
    memory = Memory(service.process.pid)
    port = service.url.rpartition(":")[2]
    share = CLIENTS // PROCESSES
    outs = [tmp_path / f"clients-{i}.json" for i in range(PROCESSES)]
    processes = [
        subprocess.Popen([sys.executable, HERE / "door_clients.py", port, str(i * share), str(share), str(SECONDS), out])
        for i, out in enumerate(outs)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + SECONDS + 180
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < deadline, "the clients do not come to an end"
            assert service.process.poll() is None, service.stderr.read_text()[-2000:]
            memory.look()
            time.sleep(0.25)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = [json.loads(out.read_text()) for out in outs]
    statuses = sum((Counter(t["statuses"]) for t in told), Counter())
    hostile = sum((Counter(t["hostile"]) for t in told), Counter())
    good = [post for t in told for post in t["good"]]

    # every datum that was answered for, once
    wanted = {f"{client}-{post}-{i}" for client, post, _ in good for i in range(DATUMS)}
    wait_until(lambda: len(trainer.seen) >= len(wanted), bound_s=60, what="the trainer has all")
    books = service.books()
    assert service.stop(signal.SIGTERM) == 0
    trainer.join()
    twice = [name for name, count in trainer.seen.items() if count != 1]
    assert not twice, twice[:10]
    assert trainer.seen.keys() == wanted
    assert books["accepted"] == len(wanted)

    # every answer a right one
    assert set(statuses) <= {"202", "429", "no answer"}, statuses
    for outcome in hostile:
        kind, _, answer = outcome.partition(": ")
        assert answer in ANSWERS[kind], hostile
    assert {outcome.partition(":")[0] for outcome in hostile} == set(ANSWERS)
    log = service.stderr.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]

    measured = report(good, statuses, hostile, memory)
    print(json.dumps(measured, indent=2))
    assert memory.grown < INFLIGHT + 64 * MIB + BYTES_A_DATUM * len(wanted), memory.grown
    RESULTS.write_text(json.dumps(measured, indent=2) + "\n")


class DoorTrainer:
    """A trainer on a thread that only notes which datums it gets."""

    def __init__(self, queue_dir):
        self.seen = Counter()
        self._trainer = Trainer.attach(
            queue_dir=queue_dir, commit="on_next_step", service_gone_s=30
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        torch.set_num_threads(1)
        with self._trainer:
            for step in self._trainer.steps():
                for batch in step:
                    self.seen.update(batch.info.datum_ids)

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()


class Memory:
    """Anonymous memory of a process, in bytes: at the start, and the most of all looks."""

    def __init__(self, pid):
        self._path = Path(f"/proc/{pid}/status")
        self.start = self.most = self._now()

    def _now(self):
        return int(re.search(r"RssAnon:\s+(\d+) kB", self._path.read_text())[1]) * 1024

    def look(self):
        self.most = max(self.most, self._now())

    @property
    def grown(self):
        return self.most - self.start


def report(good, statuses, hostile, memory):
    seconds = sorted(s for _, _, s in good if s is not None)
    at = {f"p{p}_ms": round(seconds[int(len(seconds) * p / 100)] * 1e3, 1) for p in (50, 90, 99)}
    return {
        "bench": "door-soak",
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "results": [
            {
                "case": f"{CLIENTS} clients, {SECONDS:g} s, a tenth hostile",
                "good_posts": len(good),
                "datums": len(good) * DATUMS,
                **at,
                "max_ms": round(seconds[-1] * 1e3, 1),
                "grown_mib": round(memory.grown / MIB, 1),
                "grown_bytes_a_datum": round(memory.grown / (len(good) * DATUMS)),
                "answers": dict(sorted(statuses.items())),
                "hostile": dict(sorted(hostile.items())),
            }
        ],
    }
