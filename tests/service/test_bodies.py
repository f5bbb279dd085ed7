"""Buffers for bodies: the budget, the pool, and that no view ever sees another body's bytes."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from headrace.schemas.errors import BacklogFull, SettingsError
from headrace.service.bodies import Bodies
from headrace.service.settings import load_settings

KIB, MIB = 1 << 10, 1 << 20


def address(body):
    return ctypes.addressof(ctypes.c_char.from_buffer(body.buffer))


def test_a_lease_is_as_long_as_its_body_and_comes_back_for_the_next_of_its_class():
    bodies = Bodies(64 * MIB, 16 * MIB)
    with bodies.lease(5 * MIB) as first:
        assert (len(first.buffer), first.buffer.readonly, first.buffer.format) == (
            5 * MIB,
            False,
            "B",
        )
        where = address(first)
    assert (
        bodies.statistics() | {"made": 1, "pooled_bytes": 5 * MIB, "in_flight": 0}
        == bodies.statistics()
    )
    for nbytes in (5 * MIB - 1, 4 * MIB + 1):
        with bodies.lease(nbytes) as again:
            assert (len(again.buffer), address(again)) == (nbytes, where)
    with bodies.lease(4 * MIB) as other:
        assert address(other) != where
    assert bodies.statistics() | {"made": 2, "reused": 2} == bodies.statistics()


@pytest.mark.parametrize("nbytes", [0, 1, 32 * KIB - 1])
def test_small_bodies_are_not_pooled(nbytes):
    bodies = Bodies(MIB, MIB)
    with bodies.lease(nbytes) as body:
        assert len(body.buffer) == nbytes
    assert (
        bodies.statistics() | {"made": 0, "pooled_bytes": 0, "in_flight_bytes": 0}
        == bodies.statistics()
    )


def test_beyond_the_budget_the_answer_is_429_until_something_is_released():
    bodies = Bodies(10 * MIB, 0)
    first, second = bodies.lease(6 * MIB), bodies.lease(4 * MIB)
    with pytest.raises(
        BacklogFull, match=r"2 bodies of 10485760 bytes.*inflight_body_bytes.* 1 more"
    ) as caught:
        bodies.lease(1)
    assert (caught.value.code, caught.value.status, caught.value.retry_after) == (
        "backlog_full",
        429,
        1,
    )
    second.release()
    second.release()
    with bodies.lease(4 * MIB):
        assert bodies.statistics()["in_flight_bytes"] == 10 * MIB
    first.release()
    assert (
        bodies.statistics() | {"in_flight": 0, "in_flight_bytes": 0, "refused": 1}
        == bodies.statistics()
    )


def test_an_error_inside_gives_the_bytes_back():
    bodies = Bodies(MIB, MIB)
    with pytest.raises(ZeroDivisionError), bodies.lease(MIB):
        raise ZeroDivisionError
    assert bodies.statistics() | {"in_flight": 0, "pooled_bytes": MIB} == bodies.statistics()


class Tensor(msgspec.Struct):
    data: memoryview


def test_a_buffer_that_is_still_viewed_is_never_reused():
    bodies = Bodies(64 * MIB, 64 * MIB)
    packed = msgspec.msgpack.encode({"data": b"x" * 100_000})
    body = bodies.lease(len(packed))
    body.buffer[:] = packed
    kept = np.frombuffer(msgspec.msgpack.decode(body.buffer, type=Tensor).data, np.uint8)
    body.release()
    assert bodies.statistics() | {"viewed": 1, "pooled_bytes": 0} == bodies.statistics()
    with bodies.lease(len(packed)) as other:
        other.buffer[:] = bytes(len(packed))
    assert kept.tobytes() == b"x" * 100_000

    body = bodies.lease(MIB)
    straight = np.frombuffer(body.buffer, np.uint8)  # without a memoryview of its own between
    body.release()
    assert bodies.statistics() | {"viewed": 2, "in_flight": 0} == bodies.statistics()
    assert straight.size == MIB


def test_the_pool_keeps_its_bound_and_lets_the_oldest_class_go_first():
    bodies = Bodies(64 * MIB, 10 * MIB)
    for nbytes in (4 * MIB, 3 * MIB, 2 * MIB, 4 * MIB):  # 4 MiB was asked for last
        bodies.lease(nbytes).release()
    bodies.lease(2 * MIB + 1).release()  # 2.5 MiB more: 3 MiB go
    assert (
        bodies.statistics() | {"pooled_bytes": 8 * MIB + MIB // 2, "reused": 1}
        == bodies.statistics()
    )
    before = bodies.statistics()["made"]
    for nbytes in (4 * MIB, 2 * MIB):
        bodies.lease(nbytes).release()
    assert bodies.statistics()["made"] == before
    bodies.lease(3 * MIB).release()
    assert bodies.statistics()["made"] == before + 1
    bodies.lease(11 * MIB).release()  # larger than the whole pool: nothing is thrown out for it
    assert 0 < bodies.statistics()["pooled_bytes"] <= 10 * MIB


def test_bounds_hold_over_many_leases_of_any_size_and_order():
    draw = random.Random(3)
    bodies = Bodies(12 * MIB, 8 * MIB)
    held = []
    for turn in range(3000):
        if held and draw.random() < 0.45:
            body, mark = held.pop(draw.randrange(len(held)))
            assert bytes([body.buffer[0], body.buffer[-1]]) == mark
            body.release()
        else:
            nbytes = int(2 ** draw.uniform(0, 23))
            try:
                body = bodies.lease(nbytes)
            except BacklogFull:
                assert sum(len(b.buffer) for b, _ in held) + nbytes > 12 * MIB
                continue
            body.buffer[0] = body.buffer[-1] = turn % 256
            held.append((body, bytes([turn % 256]) * 2))
        told = bodies.statistics()
        assert told["in_flight_bytes"] == sum(len(b.buffer) for b, _ in held) <= 12 * MIB
        assert told["pooled_bytes"] <= 8 * MIB
        assert told["in_flight"] == len(held)
    assert bodies.statistics()["reused"] > 50
    assert bodies.statistics()["refused"] > 10


LEASE = """
import re
from headrace.service.bodies import Bodies
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
bodies = Bodies(1 << 30, 0)
before = resident()
body = bodies.lease(512 << 20)
print(resident() - before)
"""


def test_what_is_announced_takes_no_memory_before_it_arrives():
    told = subprocess.run([sys.executable, "-c", LEASE], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 8 * KIB  # KiB, of 512 MiB


MALLOC = """
import resource
from headrace.service.malloc import tune_malloc
if {tuned}:
    assert tune_malloc()
def faults(nbytes=8 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(nbytes)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
sizes = [(8 << 20) + 4096 * turn for turn in range(10)]  # each a little larger: glibc alone unmaps
print(sum(map(faults, sizes)))
"""


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc only")
def test_tuned_malloc_keeps_large_blocks():
    faults = {
        tuned: int(
            subprocess.run(
                [sys.executable, "-c", MALLOC.format(tuned=tuned)], capture_output=True, text=True, check=True
            ).stdout
        )
        for tuned in (True, False)
    }  # fmt: skip
    assert faults[True] < 200 < 2000 < faults[False]


def test_the_largest_body_fits_the_budget_or_the_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"limits\.inflight_body_bytes.*limits\.max_body_bytes"):
        load_settings(["--limits.inflight_body_bytes=32MiB"])
    assert load_settings([]).limits.inflight_body_bytes == 256 * MIB
