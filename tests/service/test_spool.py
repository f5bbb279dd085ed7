"""The local spool: columns come back as they were staged, segments are recycled, the database says what is held."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from headrace.schemas.errors import SpoolBusy, SpoolError, SpoolFull
from headrace.service.plan.step import plan_step
from headrace.service.records import (
    DATUM_META,
    DraftColumn,
    Placing,
    Post,
    RunSchema,
    datum_numbers,
)
from headrace.service.spool.local import LocalSpool, discard, refuse_if_held
from headrace.service.spool.segments import Segments

SEGMENT = 1 << 16
SCHEMA = RunSchema(axes={"weights": "token", "advantages": "sample"})


@pytest.fixture
def spool(queue_dir):
    made = LocalSpool(queue_dir / "s", segment_bytes=SEGMENT, pool_segments=2, window_s=3600)
    yield made
    made.close(remove=True)
    assert not (queue_dir / "s").exists()


def columns(lengths, seed=0):
    random = np.random.default_rng(seed)
    total = sum(lengths)
    ids = [random.integers(0, 99, n, dtype=np.int64) for n in lengths]
    return {
        "input_ids": DraftColumn(key="input_ids", axis="token", dtype=np.dtype("<i4"), views=ids),
        "weights": DraftColumn(
            key="weights", axis="token", dtype=np.dtype("<f2"), views=[random.random(total).astype("<f2")]
        ),
        "advantages": DraftColumn(
            key="advantages", axis="sample", dtype=np.dtype("<f8"), views=[random.random(len(lengths))]
        ),
    }  # fmt: skip


def append(spool, lengths, *, seed=0, key=None, ids=None):
    made = columns(lengths, seed)
    staged = spool.stage(made)
    meta = np.zeros(len(lengths), DATUM_META)
    meta["length"] = meta["loss_tokens"] = lengths
    meta["group"] = seed + 1
    accepted = spool.append(
        Post(
            segment=staged.segment, offset=staged.offset, nbytes=staged.nbytes, columns=staged.columns, arrays=staged.arrays, meta=meta,
            ids=ids, run_values={}, new_names=[("group", seed + 1, f"g{seed}")], actor="a", token="", key=key, body_hash=b"h",
        )
    ).result(5)  # fmt: skip
    return accepted, made, meta


def commit_all(spool, accepted, meta, step):
    numbers = datum_numbers(accepted.post, len(meta))
    spool.write_plan(
        plan_step(
            step, numbers, meta, layout="thd", dp_size=1, placing=Placing(microbatch_tokens=SEGMENT)
        )
    )
    spool.commit(step)


def test_datums_come_back_by_number(spool):
    first, made, _ = append(spool, [3, 1, 4], ids=["x", None, "z"])
    second, other, _ = append(spool, [2], seed=1)
    numbers = np.array([(second.post << 16), (first.post << 16) + 2, first.post << 16], np.uint64)
    read = spool.read(numbers, SCHEMA)
    assert read.lengths.tolist() == [2, 4, 3]
    assert read.targets is None
    assert [a.tolist() for a in read.input_ids] == [
        other["input_ids"].views[0].tolist(), made["input_ids"].views[2].tolist(), made["input_ids"].views[0].tolist(),
    ]  # fmt: skip
    weights = made["weights"].views[0]
    assert np.array_equal(read.extras["weights"][1], weights[4:8])
    assert read.extras["weights"][1].dtype == np.float16
    assert read.extras["advantages"][2].tolist() == made["advantages"].views[0][:1].tolist()
    assert spool.ids(numbers) == [None, "z", "x"]


def test_columns_lie_aligned_in_their_segment(spool):
    staged = spool.stage(columns([5, 7]))
    assert all(column.offset % 64 == 0 for column in staged.columns)
    assert staged.arrays["input_ids"].dtype == np.int32
    spool.abandon(staged)
    assert spool.statistics()["live_regions"] == 0


def test_segments_are_recycled_on_commit(spool):
    big = SEGMENT // 4 // 2  # half a segment of int32
    seen = set()
    for step in range(20):
        accepted, _, meta = append(spool, [big], seed=step)
        commit_all(spool, accepted, meta, step)
        seen.add(spool.statistics()["segments"])
    assert max(seen) <= 4
    assert spool.statistics()["live_regions"] == 0
    assert spool.statistics()["posts_held"] == 0


def test_a_region_is_kept_until_its_last_datum_is_committed(spool):
    accepted, _, meta = append(spool, [4, 4])
    numbers = datum_numbers(accepted.post, 2)
    for step in (0, 1):
        spool.write_plan(
            plan_step(step, numbers[step : step + 1], meta[step : step + 1], layout="thd", dp_size=1, placing=Placing(microbatch_tokens=8))
        )  # fmt: skip
    spool.commit(0)
    assert spool.statistics()["live_regions"] == 1
    assert spool.read(numbers[1:], SCHEMA).lengths.tolist() == [4]
    spool.commit(1)
    assert spool.statistics()["live_regions"] == 0


def test_the_database_is_the_truth(spool, queue_dir):
    accepted, _, meta = append(spool, [3, 2], key="k")
    assert spool.known("", "k") == accepted
    assert spool.known("other token", "k") is None
    reader = sqlite3.connect(queue_dir / "s" / "spool.db")
    row = reader.execute("SELECT count, key, meta, segment FROM posts").fetchone()
    assert row[:2] == (2, "k")
    assert np.frombuffer(row[2], DATUM_META)["length"].tolist() == [3, 2]
    assert reader.execute("SELECT kind, name FROM names").fetchall() == [("group", "g0")]
    commit_all(spool, accepted, meta, 0)
    assert reader.execute("SELECT meta, segment FROM posts").fetchone() == (None, None)
    assert spool.known("", "k") == accepted
    reader.close()


def test_a_failed_transaction_keeps_nothing_of_any_of_its_jobs(spool):
    append(spool, [3], key="k")
    with pytest.raises(SpoolError, match="UNIQUE"):
        append(spool, [3], seed=1, key="k")
    assert spool.statistics()["posts_held"] == 1
    after, _, _ = append(spool, [3], seed=2, key="other")
    assert after.post == 2


def test_a_post_larger_than_a_segment_is_refused(spool):
    with pytest.raises(SpoolFull, match=r"spool\.segment_bytes is 65536"):
        spool.stage(columns([SEGMENT]))


def test_no_room_for_a_segment_is_an_answer(queue_dir):
    segments = Segments(queue_dir, segment_bytes=1 << 50, pool=1)
    segments.reserve_spare()
    with pytest.raises(SpoolFull, match="cannot be made"):
        segments.allocate(1)
    assert list(queue_dir.iterdir()) == []


def test_a_held_spool_names_its_process(queue_dir):
    script = (
        "import sys, pathlib\n"
        "from headrace.service.spool.local import LocalSpool\n"
        "spool = LocalSpool(pathlib.Path(sys.argv[1]), segment_bytes=65536, pool_segments=1, window_s=1)\n"
        "print('up', flush=True); sys.stdin.read()\n"
    )
    place = queue_dir / "s"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        for attempt in (
            refuse_if_held,
            lambda path: LocalSpool(path, segment_bytes=65536, pool_segments=1, window_s=1),
        ):
            with pytest.raises(SpoolBusy, match=f"pid {process.pid}"):
                attempt(place)
        process.kill()
    refuse_if_held(place)
    discard(place)
    assert not place.exists()
