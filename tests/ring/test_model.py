"""Any sequence of publishing, reading, releasing and attaching keeps the ring's invariants."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.client.reader import RingReader
from headrace.schemas.errors import RecordTooLarge, RingBusy
from headrace.schemas.tensors import aligned
from headrace.service.ring import Kind, RingWriter, State

CAPACITY = 4096
SIZES = st.one_of(
    st.integers(0, CAPACITY + 1),
    st.sampled_from([0, 1, 63, 64, 65, 1024, 2048, CAPACITY - 64, CAPACITY]),
)
REPLICA = st.integers(0, 1)


class Ring(RuleBasedStateMachine):
    """The model: every record ever published; for each replica, what it read and released."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
        self.readers: dict[int, RingReader] = {}
        self.contents: list[bytes] = []

    @initialize(
        replicas=st.integers(1, 2), records=st.integers(1, 5), debug=st.booleans(),
        first=st.sampled_from([0, 7, (1 << 32) - 2]),
    )  # fmt: skip
    def create(self, replicas, records, debug, first):
        self.replicas, self.records, self.first = replicas, records, first
        self.writer = RingWriter.create(
            self.folder, run="run", dp_rank=0, dp_size=1, replicas=replicas, layout="thd",
            data_bytes=CAPACITY, records=records, debug=debug, first_sequence=first,
        )  # fmt: skip
        self.writer.set_state(State.SERVING)
        self.released = [first] * replicas
        self.leases: list[list] = [[] for _ in range(replicas)]
        self.version = [None] * replicas
        self.finished = [None] * replicas

    def content(self, sequence: int) -> bytes:
        return self.contents[sequence - self.first]

    @property
    def published(self) -> int:
        return self.first + len(self.contents)

    @rule(size=SIZES, cut=st.integers(0, 3))
    def publish(self, size, cut):
        if aligned(size) > CAPACITY:
            with pytest.raises(RecordTooLarge):
                self.writer.reserve(size)
            return
        fits = self.writer.fits([size])
        held = self.published - min(self.released)
        record = self.writer.reserve(size)
        assert fits == (record is not None)
        if record is None:
            used = self.writer.statistics()["used_bytes"]
            assert held == self.records or used + 2 * aligned(size) - 64 > CAPACITY
            return
        assert held < self.records
        sequence = self.published
        content = bytes((sequence * 31 + i) % 251 for i in range(max(0, size - cut)))
        record[: len(content)] = content
        got = self.writer.publish(
            kind=Kind.DATA,
            step=sequence,
            index=0,
            count=1,
            length=len(content),
            meta_offset=len(content),
        )
        assert got == sequence
        self.contents.append(content)

    @rule(sizes=st.lists(st.integers(0, CAPACITY), max_size=4))
    def several(self, sizes):
        """What `fits` promises for a list holds when it is published one by one."""
        if not self.writer.fits(sizes):
            assert min(self.released) < self.published or not self.writer.can_ever_fit(sizes)
            return
        for size in sizes:
            assert self.writer.reserve(size) is not None
            self.publish(size, 0)

    @rule(replica=REPLICA)
    def attach(self, replica):
        if replica >= self.replicas:
            return
        if replica in self.readers:
            with pytest.raises(RingBusy):
                RingReader.attach(self.folder, "run", 0, replica, timeout_s=0)
            return
        self.readers[replica] = RingReader.attach(self.folder, "run", 0, replica, timeout_s=0)
        assert self.readers[replica].cursor == self.released[replica]

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read(self, data):
        replica = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[replica]
        want = self.released[replica] + len(self.leases[replica])
        record = reader.next()
        assert (record is None) == (want == self.published)
        if record is not None:
            assert (record.sequence, record.step) == (want, want)
            self.leases[replica].append(record)

    @precondition(lambda self: any(self.leases[r] for r in self.readers))
    @rule(data=st.data())
    def release(self, data):
        replica = data.draw(st.sampled_from([r for r in sorted(self.readers) if self.leases[r]]))
        count = data.draw(st.integers(1, len(self.leases[replica])))
        reader = self.readers[replica]
        step = self.leases[replica][count - 1].step
        reader.finish(step)
        self.finished[replica] = max(step, self.finished[replica] or 0)
        self.released[replica] += count
        del self.leases[replica][:count]
        reader.release(self.released[replica])

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), more=st.integers(0, 3))
    def publish_version(self, data, more):
        replica = data.draw(st.sampled_from(sorted(self.readers)))
        version = (self.version[replica] or 0) + more
        self.readers[replica].publish_policy_version(version, {"uri": f"weights/{version}"})
        self.version[replica] = version

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def detach(self, data):
        replica = data.draw(st.sampled_from(sorted(self.readers)))
        self.readers.pop(replica).close()
        self.leases[replica] = []

    @invariant()
    def leased_bytes_are_as_published(self):
        for leases in getattr(self, "leases", []):
            for record in leases:
                assert bytes(record.payload) == self.content(record.sequence)

    @invariant()
    def words_are_as_said(self):
        if not hasattr(self, "writer"):
            return
        lines = self.writer.readers()
        assert [line.released for line in lines] == self.released
        assert [line.attached for line in lines] == [
            r in self.readers for r in range(self.replicas)
        ]
        assert [line.finished_step for line in lines] == self.finished
        assert [line.policy_version for line in lines] == self.version
        for line in lines:
            want = (
                None if line.policy_version is None else {"uri": f"weights/{line.policy_version}"}
            )
            assert line.message == want

    def teardown(self):
        for reader in self.readers.values():
            reader.close()
        if hasattr(self, "writer"):
            assert self.writer.close(unlink=True)
        left = list(self.folder.iterdir())
        shutil.rmtree(self.folder)
        assert left == []


def explore(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Ring,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.slow
def test_any_sequence_of_calls():
    explore(60, 40)


@pytest.mark.soak
def test_any_sequence_of_calls_for_long():
    explore(1000, 100)
