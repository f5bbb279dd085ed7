"""Trainer against a real ring whose writer is another process, as the service is."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import tempfile
import traceback
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.client.trainer import Microbatch, Trainer
from headrace.schemas.collate import collate_datums
from headrace.schemas.datum import Datum
from headrace.schemas.errors import (
    RecordTooLarge,
    ResumeUnknown,
    RingBusy,
    RingCorrupt,
    RingGap,
    ServiceGone,
    TopologyMismatch,
    TrainerError,
)
from headrace.schemas.layout import Sequences, array_specs, constants, fill
from headrace.schemas.ring import Kind, State
from headrace.schemas.step import MicrobatchInfo, RecordLayout
from headrace.service.ring import RingWriter

torch.set_num_threads(1)
KEYS = ("advantages", "logprobs", "weights")


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def lengths_of(step, index):
    return [1 + (step * 7 + index * 3 + i) % 11 for i in range(3)]


def datums(step, index):
    """Three datums whose every number follows from (step, index)."""
    random = np.random.default_rng([step, index])
    return [
        Datum(
            input_ids=torch.from_numpy(random.integers(0, 1000, n)),
            loss_fn_inputs={
                "target_tokens": torch.from_numpy(random.integers(0, 1000, n)),
                "weights": torch.from_numpy((random.random(n) > 0.3).astype(np.float32)),
                "logprobs": torch.from_numpy(random.random(n).astype(np.float32)),
                "advantages": torch.from_numpy(random.random(1).astype(np.float32)),
            },
        )
        for n in lengths_of(step, index)
    ]


def info_of(step, index, count, layout, dp_rank=0, dp_size=1, is_filler=False):
    ones = np.full(3, index + 1, np.int64)
    return MicrobatchInfo(
        step=step, index=index, count=count, dp_rank=dp_rank, dp_size=dp_size, layout=layout,
        num_datums=3, is_filler=is_filler, policy_version_min=step, policy_version_max=step + 1,
        step_loss_tokens=100 + step, step_loss_weight=99.5, step_datums=3 * count, step_rollouts=3,
        step_groups=1, datum_ids=["a", None, f"{step}.{index}"],
        datum_numbers=np.arange(3, dtype=np.uint64) << np.uint64(16), datum_loss_tokens=ones,
        rollout_loss_tokens=ones, group_loss_tokens=ones, group_rollouts=ones, group_index=ones,
    )  # fmt: skip


def publish(writer, step, index, count, *, kind=Kind.DATA, info=None):
    """One microbatch, laid out in place; False where there is no room."""
    layout = writer.geometry.layout
    batch = datums(step, index)
    columns = {key: [d.loss_fn_inputs[key].numpy() for d in batch] for key in KEYS}
    lengths = np.array(lengths_of(step, index), np.int64)
    per_sample = frozenset({"advantages"})
    specs = array_specs(lengths, KEYS, layout=layout, targets=True, per_sample=per_sample)
    record = RecordLayout(
        specs,
        constants(lengths, layout),
        info or info_of(step, index, count, layout, is_filler=kind is Kind.FILLER),
    )
    memory = writer.reserve(record.nbytes)
    if memory is None:
        return False
    fill(
        record.write(memory),
        Sequences(
            lengths=lengths,
            input_ids=[d.input_ids.numpy() for d in batch],
            targets=[d.loss_fn_inputs["target_tokens"].numpy() for d in batch],
            extras=columns,
            per_sample=per_sample,
        ),
        layout=layout,
    )
    writer.publish(
        kind=kind,
        step=step,
        index=index,
        count=count,
        length=record.nbytes,
        meta_offset=record.meta_offset,
    )
    return True


def equal(batch, step, index, layout="thd"):
    want = collate_datums(datums(step, index), packed=layout == "thd", per_sample=("advantages",))
    if layout == "thd":
        ends = np.cumsum([0, *lengths_of(step, index)])
        want |= {
            "cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
            "max_seqlen": max(lengths_of(step, index)),
        }
    assert set(batch) == set(want)
    for key, value in want.items():
        got = batch[key]
        assert type(got) is type(value), key
        if isinstance(value, torch.Tensor):
            assert (got.dtype, got.shape) == (value.dtype, value.shape), key
            assert torch.equal(got, value), key
        else:
            assert got == value, key


DEFAULTS = {
    "run": "default", "dp_rank": 0, "dp_size": 1, "replicas": 1, "layout": "thd",
    "data_bytes": 1 << 18, "records": 16,
}  # fmt: skip


class Service:
    """A writer in another process that does as it is told, one line at a time, and answers each."""

    def __init__(self, folder, **settings):
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._orders)
                with os.fdopen(orders) as inbox, os.fdopen(answers, "w") as outbox:
                    serve(folder, settings, inbox, outbox)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(orders)
        os.close(answers)
        self.inbox = os.fdopen(self._answers)
        self.answer()

    def answer(self):
        line = self.inbox.readline()
        assert line, "the writing process is gone"
        return eval(line)

    def ask(self, *command):
        os.write(self._orders, f"{command!r}\n".encode())
        return self.answer()

    def reader(self, replica=0):
        return self.ask("readers")[replica]

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = None

    def close(self):
        os.close(self._orders)
        self.inbox.close()
        if self.pid is not None:
            assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0


def serve(folder, settings, inbox, outbox):
    """The body of the other process."""
    signal.alarm(60)
    writer = RingWriter.create(folder, **(DEFAULTS | settings))
    writer.set_state(State.SERVING)
    print("True", file=outbox, flush=True)
    for line in inbox:
        name, *arguments = eval(line)
        match name:
            case "step":
                step, count = arguments
                answer = [publish(writer, step, index, count) for index in range(count)]
            case "publish":
                answer = publish(writer, *arguments)
            case "readers":
                answer = [asdict(reader) for reader in writer.readers()]
            case "state":
                answer = writer.set_state(State[arguments[0]])
        print(repr(answer), file=outbox, flush=True)
    writer.close(unlink=True)


@pytest.fixture
def service(folder):
    made = []

    def start(**settings):
        made.append(Service(folder, **settings))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def writer(folder):
    """In this process, for what needs no second one."""
    made = []

    def start(**settings):
        made.append(RingWriter.create(folder, **(DEFAULTS | settings)))
        made[-1].set_state(State.SERVING)
        return made[-1]

    yield start
    for one in made:
        one.close(unlink=True)


def publish_step(writer, step, count=2):
    for index in range(count):
        assert publish(writer, step, index, count)


@pytest.fixture
def attach(folder):
    made = []

    def start(**settings):
        made.append(Trainer.attach(**({"queue_dir": folder, "attach_timeout_s": 20} | settings)))
        return made[-1]

    yield start
    for one in made:
        one._leave()


@pytest.mark.parametrize("layout", ["thd", "padded"])
def test_tensors_from_another_process_equal_collate_datums(service, attach, layout):
    other = service(layout=layout)
    trainer = attach()
    for step in range(3):
        other.ask("step", step, 2)
    other.ask("state", "ENDED")
    seen = []
    with trainer:
        for step in trainer.steps():
            assert (len(step), step.info.step, step.info.step_loss_tokens) == (
                2,
                step.index,
                100 + step.index,
            )
            for epoch in range(2):
                for index, batch in enumerate(step):
                    equal(batch, step.index, index, layout)
                    seen.append((epoch, batch.info.step, batch.info.index))
    assert seen == [
        (epoch, step, index) for step in range(3) for epoch in range(2) for index in range(2)
    ]
    line = other.reader()
    assert (line["finished_step"], line["released"], line["attached"]) == (2, 6, False)
    assert line["committed_step"] is None


def test_info_is_as_the_service_wrote_it(writer, attach):
    ring, trainer = writer(), attach()
    assert publish(ring, 0, 0, 2)
    assert publish(ring, 0, 1, 2, kind=Kind.FILLER)
    batches = list(next(trainer.steps()))
    want = info_of(0, 1, 2, "thd", is_filler=True)
    got = batches[1].info
    for name in MicrobatchInfo.__dataclass_fields__:
        value = getattr(want, name)
        if isinstance(value, np.ndarray):
            assert getattr(got, name).dtype == value.dtype
            np.testing.assert_array_equal(getattr(got, name), value)
        else:
            assert getattr(got, name) == value, name
    assert [b.info.is_filler for b in batches] == [False, True]
    assert got.loss_scale("ddp") == 1


def test_tensors_are_views_into_the_ring(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only arrays
        (batch, _) = next(trainer.steps())
    start = torch.from_numpy(np.frombuffer(trainer._reader._data, np.uint8)).data_ptr()
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert start <= value.data_ptr() < start + ring.capacity, key
            assert value.data_ptr() % 64 == 0, key


def test_a_microbatch_is_a_mapping(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0, count=1)
    (batch,) = next(trainer.steps())
    assert isinstance(batch, Microbatch)
    assert "input_ids" in batch
    assert "nothing" not in batch
    assert len(batch) == len(list(batch)) == len(dict(batch))
    assert batch["qkv_format"] == "thd"
    assert isinstance(batch["max_seqlen"], int)
    with pytest.raises(KeyError):
        batch["nothing"]


def test_microbatches_come_as_they_are_published(writer, attach):
    """The first can be used before the second exists."""
    ring, trainer = writer(), attach()
    publish(ring, 0, 0, 2)
    step = next(trainer.steps())
    batches = iter(step)
    equal(next(batches), 0, 0)
    publish(ring, 0, 1, 2)
    equal(next(batches), 0, 1)
    assert next(batches, None) is None
    assert [b.info.index for b in step] == [0, 1]
    assert [id(b) for b in step] == [id(b) for b in step]  # what was read is held


def test_finish_is_written_when_the_next_step_is_asked_for(writer, attach):
    ring, trainer = writer(), attach()
    for k in range(2):
        publish_step(ring, k)
    steps = trainer.steps()
    next(steps)
    assert ring.readers()[0].finished_step is None
    assert next(steps).index == 1
    (line,) = ring.readers()
    assert (line.finished_step, line.released) == (0, 2)
    assert trainer.finished_step == 0


def test_a_step_nobody_looked_at_is_finished_whole(writer, attach):
    ring, trainer = writer(), attach()
    for k in range(2):
        publish_step(ring, k, count=4)
    steps = trainer.steps()
    next(iter(next(steps)))
    assert next(steps).index == 1
    assert ring.readers()[0].released == 4


def test_step_release_finishes_at_once(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    step = next(trainer.steps())
    list(step)
    step.release()
    step.release()
    (line,) = ring.readers()
    assert (line.finished_step, line.released) == (0, 2)
    with pytest.raises(TrainerError, match="step 0: released"):
        iter(step)
    with pytest.raises(TrainerError, match="step 0: released"):
        list(step)


def test_a_step_of_the_past_cannot_be_iterated(writer, attach):
    ring, trainer = writer(), attach()
    for k in range(2):
        publish_step(ring, k)
    steps = trainer.steps()
    first = next(steps)
    going = iter(first)
    next(going)
    next(steps)
    assert first.released
    with pytest.raises(TrainerError, match="released"):
        next(going)
    first.release()  # does nothing to step 1
    assert ring.readers()[0].finished_step == 0


def test_break_finishes_the_step(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    with trainer:
        for step in trainer.steps():
            next(iter(step))
            break
    (line,) = ring.readers()
    assert (line.finished_step, line.released, line.attached) == (0, 2, False)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_step_unfinished_and_it_comes_again(writer, attach, error):
    ring, trainer = writer(), attach()
    for k in range(2):
        publish_step(ring, k)

    def train():
        with trainer:
            for step in trainer.steps():
                if step.index == 1:
                    next(iter(step))
                    raise error

    with pytest.raises(error):
        train()
    (line,) = ring.readers()
    assert (line.finished_step, line.released, line.attached) == (0, 2, False)
    again = attach()
    step = next(again.steps())
    assert step.index == 1
    for index, batch in enumerate(step):
        equal(batch, 1, index)


def test_losing_the_trainer_does_not_finish(writer, folder):
    ring = writer()
    publish_step(ring, 0)
    trainer = Trainer.attach(queue_dir=folder)
    next(trainer.steps())
    del trainer
    gc.collect()
    (line,) = ring.readers()
    assert (line.finished_step, line.released, line.attached) == (None, 0, False)


def test_close_without_a_block_finishes(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    next(trainer.steps())
    trainer.close()
    trainer.close()
    assert ring.readers()[0].finished_step == 0
    assert trainer.finished_step == 0
    assert trainer.statistics()["steps"] == 1
    with pytest.raises(TrainerError, match="closed"):
        next(trainer.steps())


def test_steps_may_be_asked_for_again(writer, attach):
    ring, trainer = writer(), attach()
    for k in range(2):
        publish_step(ring, k)
    assert next(trainer.steps()).index == 0
    assert next(trainer.steps()).index == 1
    assert ring.readers()[0].finished_step == 0


def test_commit_is_explicit(writer, attach):
    ring, trainer = writer(), attach()
    for k in range(3):
        publish_step(ring, k)
    with pytest.raises(ValueError, match=r"got step 0, want 0 \.\. -1"):
        trainer.commit(0)
    for step in trainer.steps():
        if step.index == 1:
            trainer.commit(step)
        if step.index == 2:
            trainer.commit(0)
            with pytest.raises(ValueError, match=r"got step 3, want 0 \.\. 2"):
                trainer.commit(3)
            break
    assert ring.readers()[0].committed_step == 1
    assert trainer.committed_step == 1


def test_commit_on_next_step(writer, attach):
    ring, trainer = writer(), attach(commit="on_next_step")
    for k in range(2):
        publish_step(ring, k)
    steps = trainer.steps()
    next(steps)
    assert ring.readers()[0].committed_step is None
    next(steps)
    assert ring.readers()[0].committed_step == 0
    ring.set_state(State.ENDED)
    assert next(steps, None) is None
    assert ring.readers()[0].committed_step == 1


def test_policy_versions_go_with_their_uri(writer, attach):
    ring, trainer = writer(), attach()
    assert trainer.policy_version is None
    trainer.publish_policy_version(0, uri="weights/0", reward=0.5)
    trainer.publish_policy_version(1, "weights/1")
    (line,) = ring.readers()
    assert line.policy_version == trainer.policy_version == 1
    assert line.message == {"policy_version": 1, "uri": "weights/1", "metadata": {}}
    with pytest.raises(ValueError, match="got 0, want 1 or more"):
        trainer.publish_policy_version(0)


def test_ended_ends_steps_after_what_was_published(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    ring.set_state(State.ENDED)
    assert [step.index for step in trainer.steps()] == [0]
    assert list(trainer.steps()) == []
    assert ring.readers()[0].finished_step == 0


def test_an_end_record_ends_steps(writer, attach):
    ring, trainer = writer(), attach()
    ring.reserve(0)
    ring.publish(kind=Kind.END, step=None, index=0, count=0, length=0, meta_offset=0)
    assert list(trainer.steps()) == []


@pytest.mark.parametrize(
    ("code", "kind"), [("record_too_large", RecordTooLarge), ("out of the blue", TrainerError)]
)
def test_what_ended_the_run_is_raised(writer, attach, code, kind):
    ring, trainer = writer(), attach()
    ring.notify({"code": code, "message": "raise queue.bytes"})
    ring.set_state(State.REFUSED)
    with pytest.raises(kind, match=r"the service ended the run: raise queue\.bytes"):
        next(trainer.steps())


def test_a_killed_service_is_gone_at_once_with_zero(service, attach, caplog):
    """What it had published is delivered first."""
    other = service()
    trainer = attach(service_gone_s=0)
    other.ask("step", 0, 2)
    other.kill()
    steps = trainer.steps()
    with caplog.at_level(logging.WARNING):
        step = next(steps)
        for index, batch in enumerate(step):
            equal(batch, 0, index)
        with pytest.raises(ServiceGone, match=r"default\.0\.ring since 20.*service_gone_s is 0"):
            next(steps)
    assert "no service holds" in caplog.text
    assert trainer.finished_step == 0


def test_a_service_killed_within_a_step_is_gone_too(service, attach):
    other = service()
    trainer = attach(service_gone_s=0)
    other.ask("publish", 0, 0, 2)
    other.kill()
    seen = []

    def train():
        with trainer:
            for step in trainer.steps():
                for batch in step:
                    seen.append(batch.info.index)

    with pytest.raises(ServiceGone):
        train()
    assert seen == [0]
    assert trainer.finished_step is None


def test_a_trainer_killed_with_a_lease_gets_it_again(service, folder, attach):
    other = service()
    for step in range(3):
        other.ask("step", step, 2)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            trainer = Trainer.attach(queue_dir=folder, attach_timeout_s=20)
            for step in trainer.steps():
                batches = list(step)
                if step.index == 1 and len(batches) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    line = other.reader()
    assert (line["attached"], line["finished_step"], line["released"]) == (False, 0, 2)
    other.ask("state", "ENDED")
    got = []
    with attach() as trainer:
        for step in trainer.steps():
            for index, batch in enumerate(step):
                equal(batch, step.index, index)
                got.append((step.index, index))
    assert got == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_tensors_outlive_the_trainer(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    (batch, _) = next(trainer.steps())
    kept = batch["input_ids"]
    trainer.close()
    ring.close(unlink=True)
    assert torch.equal(kept, collate_datums(datums(0, 0), packed=True)["input_ids"])


def test_release_microbatch_frees_as_the_iterator_moves_on(writer, attach):
    """A step of eight records through a ring of three."""
    ring, trainer = writer(release="microbatch", records=3), attach()
    assert trainer.release == "microbatch"
    published = 0
    while publish(ring, 0, published, 8):
        published += 1
    assert published == 3
    step = next(trainer.steps())
    assert len(step) == 8
    for index, batch in enumerate(step):
        equal(batch, 0, index)
        assert ring.readers()[0].released == index
        while published < 8 and publish(ring, 0, published, 8):
            published += 1
        assert published == min(8, index + 3)
    (line,) = ring.readers()
    assert (line.released, line.finished_step) == (8, None)
    with pytest.raises(TrainerError, match="step 0: gone through already"):
        list(step)
    trainer.close()
    assert ring.readers()[0].finished_step == 0


def test_a_step_that_was_freed_in_part_does_not_begin_in_the_middle(writer, attach):
    ring, trainer = writer(release="microbatch"), attach()
    publish_step(ring, 0, count=3)

    def train():
        with trainer:
            for step in trainer.steps():
                for batch in step:
                    if batch.info.index == 1:
                        raise KeyError

    with pytest.raises(KeyError):
        train()
    with pytest.raises(RingGap, match="first record is microbatch 1 of 3"):
        next(attach().steps())


def test_a_step_that_is_missing_is_a_gap(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    publish_step(ring, 2)
    steps = trainer.steps()
    next(steps)
    with pytest.raises(RingGap, match="step 2: want 1"):
        next(steps)


def test_a_microbatch_that_is_missing_is_corruption(writer, attach):
    ring, trainer = writer(), attach()
    publish(ring, 0, 0, 3)
    publish(ring, 0, 2, 3)
    with pytest.raises(
        RingCorrupt, match="got step 0, microbatch 2 of 3, want step 0, microbatch 1 of 3"
    ):
        list(next(trainer.steps()))


def test_a_head_that_contradicts_its_descriptor_is_corruption(writer, attach):
    ring, trainer = writer(), attach()
    publish(ring, 0, 0, 1, info=replace(info_of(0, 0, 1, "thd"), step=5))
    with pytest.raises(
        RingCorrupt, match="the head says step 5, microbatch 0, the descriptor step 0"
    ):
        next(trainer.steps())


def test_a_record_of_other_bytes_is_corruption(writer, attach):
    ring, trainer = writer(), attach()
    ring.reserve(100)[:] = b"x" * 100
    ring.publish(kind=Kind.DATA, step=0, index=0, count=1, length=100, meta_offset=50)
    with pytest.raises(RingCorrupt, match="record head at byte 50 of 100"):
        next(trainer.steps())


def test_a_reset_that_nobody_asked_for_is_a_gap(writer, attach):
    ring, trainer = writer(), attach()
    ring.reserve(0)
    ring.publish(kind=Kind.RESET, step=None, index=0, count=0, length=0, meta_offset=0)
    with pytest.raises(RingGap, match="starts generation 1"):
        next(trainer.steps())


@pytest.mark.parametrize("resume_after", [-1, 3, "committed"])
def test_resuming_is_refused_by_name(folder, resume_after):
    with pytest.raises(ResumeUnknown, match=f"resume_after: got {resume_after!r}"):
        Trainer.attach(queue_dir=folder, resume_after=resume_after)


def test_topology_is_checked(writer, folder):
    writer()
    with pytest.raises(TopologyMismatch, match=r"dp_rank: got 2, want 0 \.\. 1"):
        Trainer.attach(queue_dir=folder, dp_rank=2, dp_size=2)
    with pytest.raises(TopologyMismatch, match="dp_size: this trainer says 2"):
        Trainer.attach(queue_dir=folder, dp_size=2)
    with pytest.raises(TopologyMismatch, match="run 'default' has 1 ranks"):
        Trainer.attach(queue_dir=folder, dp_rank=1, dp_size=2)


def test_one_trainer_a_place(writer, attach):
    writer()
    attach()
    with pytest.raises(RingBusy, match=f"pid {os.getpid()}"):
        attach()


def test_replicas_read_the_same_records(writer, attach):
    ring = writer(replicas=2)
    publish_step(ring, 0)
    for replica in (0, 1):
        with attach(replica=replica, replicas=2) as trainer:
            for index, batch in enumerate(next(trainer.steps())):
                equal(batch, 0, index)
    assert [line.finished_step for line in ring.readers()] == [0, 0]


def test_the_folder_comes_from_the_environment(writer, folder, monkeypatch):
    writer()
    monkeypatch.setenv("HEADRACE_QUEUE__DIR", str(folder))
    Trainer.attach(attach_timeout_s=0).close()
    monkeypatch.delenv("HEADRACE_QUEUE__DIR")
    with pytest.raises(
        ServiceGone, match=rf"/dev/shm/headrace-{os.geteuid()}/nobody-has-this-run\.0\.ring"
    ):
        Trainer.attach("nobody-has-this-run", attach_timeout_s=0)


def test_an_unknown_commit_mode_leaves_the_place_free(writer, attach):
    writer()
    with pytest.raises(ValueError, match="commit: got 'sometimes'"):
        attach(commit="sometimes")
    attach()


def test_statistics_count(writer, attach):
    ring, trainer = writer(), attach()
    for k in range(2):
        publish_step(ring, k)
    steps = trainer.steps()
    list(next(steps))
    found = trainer.statistics()
    assert {k: found[k] for k in ("steps", "microbatches", "ready_records", "leased_records", "state")} == {
        "steps": 1, "microbatches": 2, "ready_records": 2, "leased_records": 2, "state": "SERVING",
    }  # fmt: skip
    assert found["bytes"] > 0
    assert found["waited_s"] >= 0


def test_a_forked_child_may_not_use_the_trainer(writer, attach):
    ring, trainer = writer(), attach()
    publish_step(ring, 0)
    pid = os.fork()
    if pid == 0:
        try:
            next(trainer.steps())
        except TrainerError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert next(trainer.steps()).index == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_are_copies(writer, attach):
    ring, trainer = writer(), attach(device="cuda")
    publish_step(ring, 0)
    (batch, _) = next(trainer.steps())
    assert batch["input_ids"].device.type == "cuda"
    assert torch.equal(
        batch["input_ids"].cpu(), collate_datums(datums(0, 0), packed=True)["input_ids"]
    )
