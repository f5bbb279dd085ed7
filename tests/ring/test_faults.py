"""`kill -9` at the points that matter, races, forks and a full tmpfs, with real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from headrace.client import reader as reading
from headrace.client.reader import RingReader
from headrace.schemas.errors import RingBusy, RingError, RingNoSpace
from headrace.schemas.ring import State
from headrace.service.ring import RingWriter

SETTINGS = {
    "run": "run", "dp_rank": 0, "dp_size": 1, "replicas": 1, "layout": "thd",
    "data_bytes": 1 << 16, "records": 16,
}  # fmt: skip


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


class DiesBeforePublished(RingWriter):
    """Lives through record 0."""

    def _store_published(self, published):
        if published > 1:
            die()
        super()._store_published(published)


class DiesBeforeWake(RingWriter):
    def _wake(self):
        if self._published > 1:
            die()
        super()._wake()


def drain(reader):
    return [(r.sequence, bytes(r.payload)) for r in iter(reader.next, None)]


@pytest.fixture
def attach(folder):
    made = []

    def make(**settings):
        made.append(
            RingReader.attach(folder, "run", 0, timeout_s=settings.pop("timeout_s", 20), **settings)
        )
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def test_writer_killed_mid_payload(folder, child, put, attach):
    def write(say):
        writer = RingWriter.create(folder, **SETTINGS)
        put(writer, b"whole")
        say("go")
        record = writer.reserve(1000)
        record[:500] = b"x" * 500
        die()

    process = child(write)
    process.line()
    assert process.wait() == -signal.SIGKILL
    reader = attach()
    assert drain(reader) == [(0, b"whole")]
    assert not reader.writer_alive()


def test_writer_killed_between_descriptor_and_published(folder, child, put, attach):
    def write(say):
        writer = DiesBeforePublished.create(folder, **SETTINGS)
        put(writer, b"whole")
        say("go")
        put(writer, b"never", step=1)

    process = child(write)
    process.line()
    assert process.wait() == -signal.SIGKILL
    reader = attach()
    assert drain(reader) == [(0, b"whole")]
    assert reader.published == 1
    assert not reader.writer_alive()


def test_writer_killed_before_the_wake(folder, child, put, attach):
    """The reader sleeps on the word, for 30 s but for the cap of 250 ms; nobody wakes it."""
    inbox, outbox = os.pipe()

    def write(say):
        writer = DiesBeforeWake.create(folder, **SETTINGS)
        put(writer, b"whole")
        say("go")
        os.read(inbox, 1)
        put(writer, b"unannounced", step=1)

    process = child(write)
    process.line()
    reader = attach()
    assert bytes(reader.next().payload) == b"whole"
    got = []
    thread = threading.Thread(target=lambda: got.append(reader.next(timeout_s=30)))
    thread.start()
    wait_until(lambda: sleeps_on(thread, reader._address))
    os.write(outbox, b"x")
    assert process.wait() == -signal.SIGKILL
    thread.join(10)
    assert bytes(got[0].payload) == b"unannounced"
    assert reading.WAIT_CAP_S == 0.25
    os.close(inbox)
    os.close(outbox)


def wait_until(condition, bound_s=20):
    limit = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < limit
        os.sched_yield()


def sleeps_on(thread, address):
    """Whether the kernel has it in a system call whose first argument is `address`."""
    with open(f"/proc/self/task/{thread.native_id}/syscall") as file:
        return f"{address:#x}" in file.read().split()[1:2]


@pytest.mark.parametrize("first", [0, (1 << 32) - 1])
@pytest.mark.parametrize("end", [False, True])
def test_a_sleeping_reader_is_woken(ring, put, attach, monkeypatch, first, end):
    """By a record, also where the low half of `published` wraps to 0, and by the end of the run."""
    monkeypatch.setattr(reading, "WAIT_CAP_S", 60)
    writer, reader = ring(first_sequence=first), attach()
    got = []
    thread = threading.Thread(target=lambda: got.append(reader.next(timeout_s=60)))
    thread.start()
    wait_until(lambda: sleeps_on(thread, reader._address))
    if end:
        writer.set_state(State.ENDED)
    else:
        put(writer, b"x")
    thread.join(20)
    assert [None if one is None else bytes(one.payload) for one in got] == [None if end else b"x"]


def test_reader_killed_with_a_lease(folder, child, ring, put, attach):
    writer = ring(data_bytes=1 << 16)
    for i in range(5):
        put(writer, b"%d" % i * 1000, step=i)

    def read(say):
        reader = RingReader.attach(folder, "run", 0)
        for _ in range(3):
            record = reader.next()
        reader.release(1)
        say(f"{record.sequence}")
        die()

    process = child(read)
    assert process.line() == "2"
    assert process.wait() == -signal.SIGKILL
    (line,) = writer.readers()
    assert (line.attached, line.released) == (False, 1)
    assert drain(attach()) == [(i, b"%d" % i * 1000) for i in range(1, 5)]


def test_reader_killed_between_last_use_and_release(folder, child, ring, put, attach):
    writer = ring()
    put(writer, b"zero", step=0)
    put(writer, b"one", step=1)

    def read(say):
        reader = RingReader.attach(folder, "run", 0)
        reader.next()
        reader.finish(0)
        die()

    assert child(read).wait() == -signal.SIGKILL
    again = attach()
    assert again.finished_step == 0
    assert drain(again) == [(0, b"zero"), (1, b"one")]


def test_reader_killed_while_it_writes_a_message(folder, child, ring, attach):
    writer = ring()

    def read(say):
        reader = RingReader.attach(folder, "run", 0)
        reader.publish_policy_version(1, {"uri": "one"})
        reader._message._data = Dies(reader._message._data)
        reader.publish_policy_version(2, {"uri": "two"})

    assert child(read).wait() == -signal.SIGKILL
    (line,) = writer.readers()
    assert (line.policy_version, line.message) == (1, None)  # changing, for ever
    attach().publish_policy_version(2, {"uri": "two"})
    (line,) = writer.readers()
    assert (line.policy_version, line.message) == (2, {"uri": "two"})


class Dies:
    """A buffer whose writer does not survive the first store."""

    def __init__(self, data):
        self.data = data

    def __setitem__(self, where, what):
        die()


def test_of_racing_creators_exactly_one_wins(folder, child):
    start, go = os.pipe()
    done, finish = os.pipe()

    def create(say):
        os.close(go)
        os.close(finish)
        os.read(start, 1)
        try:
            writer = RingWriter.create(folder, **SETTINGS)
        except RingBusy as error:
            say("busy" if "held by writer" in str(error) else str(error))
        else:
            say("won")
            os.read(done, 1)
            writer.close(unlink=True)

    racers = [child(create) for _ in range(6)]
    os.close(go)  # every read returns
    assert sorted(racer.line() for racer in racers) == ["busy"] * 5 + ["won"]
    assert [p.name for p in folder.iterdir()] == ["run.0.ring"]
    os.close(finish)
    assert [racer.wait() for racer in racers] == [0] * 6
    os.close(start)
    os.close(done)
    assert list(folder.iterdir()) == []


def test_a_writer_and_a_reader_elsewhere_are_named(folder, child):
    inbox, outbox = os.pipe()

    def hold(say):
        os.close(outbox)
        writer = RingWriter.create(folder, **SETTINGS)
        reader = RingReader.attach(folder, "run", 0)
        say("held")
        os.read(inbox, 1)
        reader.close()
        writer.close(unlink=True)

    process = child(hold)
    process.line()
    with pytest.raises(
        RingBusy, match=rf"held by writer \(pid {process.pid}\), reader 0 \(pid {process.pid}\)"
    ):
        RingWriter.create(folder, **SETTINGS)
    with pytest.raises(RingBusy, match=rf"reader 0 is taken; .*reader 0 \(pid {process.pid}\)"):
        RingReader.attach(folder, "run", 0)
    os.close(outbox)
    assert process.wait() == 0
    os.close(inbox)


def test_a_fork_that_lives_on_holds_no_lock_and_may_not_write(folder, child, ring, put, attach):
    writer = ring()
    put(writer, b"x")
    reader = attach()
    reader.next()
    inbox, outbox = os.pipe()

    def forked(say):
        os.close(outbox)
        writer.reserve(1)
        with pytest.raises(RingError, match="forked child"):
            put(writer, b"y")
        for write in (
            lambda: reader.release(1),
            lambda: reader.finish(0),
            lambda: reader.commit(0),
        ):
            with pytest.raises(RingError, match="forked child"):
                write()
        with pytest.raises(RingError, match="forked child"):
            reader.publish_policy_version(1, {})
        assert writer.close(unlink=True) is False
        reader.close()
        say("tried")
        os.read(inbox, 1)

    process = child(forked)
    assert process.line() == "tried"
    assert writer.path.exists()
    assert reader.writer_alive()
    assert writer.readers()[0].attached
    reader.close()
    assert not writer.readers()[0].attached
    assert writer.close(unlink=True)
    os.close(outbox)
    assert process.wait() == 0
    os.close(inbox)


def test_an_unrelated_process_leaves_the_ring_alone(folder, ring, put):
    """It attaches, reads without releasing, and exits as any script does."""
    writer = ring()
    put(writer, b"hello")
    script = (
        "import sys; from pathlib import Path; from headrace.client.reader import RingReader\n"
        "reader = RingReader.attach(Path(sys.argv[1]), 'run', 0, timeout_s=5)\n"
        "print(bytes(reader.next().payload))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'hello'\n", "")
    assert writer.path.exists()
    (line,) = writer.readers()
    assert (line.attached, line.released) == (False, 0)


@pytest.fixture
def tiny_tmpfs(folder):
    mount = folder / "tiny"
    mount.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_tmpfs_is_named_at_creation(tiny_tmpfs):
    with pytest.raises(RingNoSpace) as caught:
        RingWriter.create(tiny_tmpfs, **(SETTINGS | {"data_bytes": 2 << 20}))
    for part in ("need 2.0 MiB", "free 1.0 MiB", str(tiny_tmpfs), "queue.bytes", "--shm-size"):
        assert part in str(caught.value)
    assert list(tiny_tmpfs.iterdir()) == []
    writer = RingWriter.create(tiny_tmpfs, **(SETTINGS | {"data_bytes": 512 << 10}))
    assert writer.close(unlink=True)


def test_creation_killed_before_the_name_leaves_nothing(folder, child, monkeypatch):
    def create(say):
        monkeypatch.setattr(os, "link", die)
        RingWriter.create(folder, **SETTINGS)

    assert child(create).wait() == -signal.SIGKILL
    assert list(folder.iterdir()) == []


def body(sequence):
    return random.Random(sequence).randbytes(sequence * 37 % 3000)


def read_until_killed(folder, delay):
    def read(say):
        reader = RingReader.attach(folder, "run", 0)
        record = reader.next(timeout_s=10)
        first = True
        while record is not None:
            if bytes(record.payload) != body(record.sequence):
                say(f"damaged {record.sequence}")
                return
            if first:
                say(f"from {record.sequence}")
                first = False
                signal.signal(signal.SIGALRM, die)
                signal.setitimer(signal.ITIMER_REAL, delay)
            reader.release(record.sequence + 1)
            record = reader.next(timeout_s=10)
        say("ended")

    return read


def kill_readers(folder, child, put, kills, random_):
    """Whenever a reader dies, the next one starts at what it had not released, same bytes."""
    writer = RingWriter.create(folder, **SETTINGS)
    writer.set_state(State.SERVING)
    for _ in range(kills):
        process = child(read_until_killed(folder, random_.uniform(0.0005, 0.02)))
        first = None
        while True:
            put(
                writer,
                body(writer.statistics()["published"]),
                step=writer.statistics()["published"],
            )
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    process._status = os.waitstatus_to_exitcode(status)
                    break
        first = process.line()
        assert first.startswith("from "), first
        assert int(first.split()[1]) <= writer.readers()[0].released
        assert process.wait() == -signal.SIGKILL
        before = writer.readers()[0].released
    reader = RingReader.attach(folder, "run", 0)
    left = drain(reader)
    assert left == [(s, body(s)) for s in range(before, writer.statistics()["published"])]
    reader.close()
    assert writer.close(unlink=True)


def test_readers_killed_at_any_moment(folder, child, put):
    kill_readers(folder, child, put, kills=5, random_=random.Random(1))


@pytest.mark.soak
def test_readers_killed_at_any_moment_for_long(folder, child, put):
    kill_readers(folder, child, put, kills=500, random_=random.Random())
