"""One writer and its readers: room, wrapping, words, leases, and what is refused."""

from __future__ import annotations

import logging
import mmap
import os
import threading

import numpy as np
import pytest

from headrace.client import reader as reading
from headrace.client.reader import RingReader
from headrace.schemas import futex
from headrace.schemas.errors import (
    LeftoverFound,
    RecordTooLarge,
    RingBusy,
    RingCorrupt,
    RingError,
    RingForeign,
    ServiceGone,
    TopologyMismatch,
)
from headrace.schemas.ring import Kind, State
from headrace.schemas.ring_files import (
    find_leftovers,
    open_ring,
    prepare_directory,
    remove_leftover,
)


@pytest.fixture
def attach(folder):
    made = []

    def make(replica=0, **settings):
        made.append(RingReader.attach(folder, "run", 0, replica, **({"timeout_s": 0} | settings)))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def take(reader):
    record = reader.next()
    content = bytes(record.payload)
    reader.release(record.sequence + 1)
    return content


def test_records_come_out_as_they_went_in(ring, put, attach):
    writer, reader = ring(), attach()
    assert reader.next() is None
    assert put(writer, b"one", step=7, index=1, count=3) == 0
    record = reader.next()
    assert (record.sequence, record.kind, record.generation) == (0, Kind.DATA, 0)
    assert (record.step, record.index, record.count, record.meta_offset) == (7, 1, 3, 0)
    assert bytes(record.payload) == b"one"
    assert reader.next() is None


def test_records_start_at_cache_lines(ring, put, attach):
    writer, reader = ring(), attach()
    for i in range(3):
        put(writer, b"x" * (i + 1))
    addresses = [np.frombuffer(reader.next().payload, np.uint8).ctypes.data for _ in range(3)]
    assert [a % 64 for a in addresses] == [0, 0, 0]
    assert addresses[1] - addresses[0] == 64


def test_a_record_never_wraps_and_the_tail_is_skipped(ring, put, attach):
    """4096 bytes: 3072 and 1024 fill them; then 2000 and 1500, and 1500 again must skip 512."""
    writer, reader = ring(), attach()
    assert put(writer, b"a" * 3072) == 0
    assert put(writer, b"b" * 1024) == 1
    assert writer.statistics()["used_bytes"] == 4096
    assert put(writer, b"c") is None
    assert take(reader) == b"a" * 3072
    assert put(writer, b"c" * 2000) == 2  # wraps exactly at the end: nothing is skipped
    assert writer.statistics()["used_bytes"] == 1024 + 2048
    assert put(writer, b"d" * 1500) is None
    assert take(reader) == b"b" * 1024
    assert put(writer, b"d" * 1500) == 3
    assert put(writer, b"e" * 1500) is None  # 512 are left at the end, 0 at the start
    assert take(reader) == b"c" * 2000
    assert put(writer, b"e" * 1500) == 4  # 512 skipped
    assert writer.statistics()["used_bytes"] == 1536 + 512 + 1536
    assert take(reader) == b"d" * 1500
    assert take(reader) == b"e" * 1500
    assert writer.fits([4096])
    assert writer.statistics()["used_bytes"] == 0


def test_an_empty_record_takes_a_slot_and_no_bytes(ring, put, attach):
    writer, reader = ring(), attach()
    put(writer, b"x" * 4096)
    assert put(writer, b"", step=3) == 1
    assert writer.statistics()["used_bytes"] == 4096
    assert take(reader) == b"x" * 4096
    assert take(reader) == b""


def test_descriptor_slots_run_out_too(ring, put, attach):
    writer, reader = ring(records=3), attach()
    assert [put(writer, b"x") for _ in range(4)] == [0, 1, 2, None]
    assert not writer.fits([0])
    assert take(reader) == b"x"
    assert put(writer, b"y") == 3


def test_a_record_larger_than_the_ring_is_refused(ring):
    writer = ring()
    with pytest.raises(
        RecordTooLarge, match=r"a record of 4097 bytes, want at most 4096.*queue\.bytes"
    ):
        writer.reserve(4097)
    assert writer.reserve(4096) is not None


def test_fits_counts_order_skips_and_slots(ring, put, attach):
    writer, reader = ring(), attach()
    put(writer, b"x" * 3072)  # head at 3072
    assert writer.fits([1024])
    assert not writer.fits([1024, 64])
    assert not writer.fits([64] * 8)
    assert writer.fits([64] * 7)
    assert take(reader) == b"x" * 3072
    # empty, head at 3072: the first record may skip for free, a later one pays for what it skips
    assert writer.fits([4096])
    assert writer.fits([2048, 2048])
    assert writer.fits([960, 3072])
    assert not writer.fits([64, 2048, 1984])
    assert writer.fits([1024, 2048, 1024])
    # what fits can be published
    for size in (1024, 2048, 1024):
        assert put(writer, b"y" * size) is not None


def test_can_ever_fit_holds_from_every_head(ring, put, attach):
    writer, reader = ring(records=3), attach()
    cases = [
        (),
        (4096,),
        (1, 4032),
        (1, 1985),
        (1, 2049),
        (2048, 1024),
        (2048, 1088),
        (1024, 1024, 1024),
        (1, 1, 1, 1),
    ]
    always = dict.fromkeys(cases, True)
    for _ in range(64):
        for case in cases:
            always[case] &= writer.fits(case)
        put(writer, b"x")  # one line further
        take(reader)
    assert {case: writer.can_ever_fit(case) for case in always} == always
    assert [case for case in cases if not always[case]] == [
        (1, 4032),
        (1, 2049),
        (2048, 1088),
        (1, 1, 1, 1),
    ]


def test_the_slowest_replica_decides(ring, put, attach):
    writer = ring(replicas=2, records=2)
    first, second = attach(0), attach(1)
    assert [put(writer, b"a"), put(writer, b"b"), put(writer, b"c")] == [0, 1, None]
    assert [take(first), take(first)] == [b"a", b"b"]
    assert put(writer, b"c") is None
    assert take(second) == b"a"
    assert put(writer, b"c") == 2
    assert bytes(second.next().payload) == b"b"  # still as published


def test_a_replica_that_never_attached_holds_everything(ring, put, attach):
    writer = ring(replicas=2, records=1)
    put(writer, b"a")
    assert take(attach(0)) == b"a"
    assert put(writer, b"b") is None
    assert [line.attached for line in writer.readers()] == [True, False]


def test_low_half_of_published_wraps_at_2_to_the_32(ring, put, attach, child, folder):
    """The futex compares 32 bits; sequences are 64."""
    start = (1 << 32) - 2
    writer, reader = ring(first_sequence=start), attach()
    assert reader.next() is None
    for i in range(5):
        assert put(writer, b"%d" % i) == start + i
        assert take(reader) == b"%d" % i
    assert reader.released == start + 5

    def late(say):
        say("go")
        record = RingReader.attach(folder, "run", 0, timeout_s=5).next(timeout_s=10)
        say(f"{record.sequence - (1 << 32)} {bytes(record.payload)}")

    reader.close()
    process = child(late)
    process.line()
    put(writer, b"late")
    assert process.line() == "3 b'late'"


def test_a_waiting_reader_polls_where_there_is_no_futex(ring, put, attach):
    writer, reader = ring(), attach()
    reader._poll = True
    got = []
    thread = threading.Thread(target=lambda: got.append(reader.next(timeout_s=30)))
    thread.start()
    put(writer, b"x")
    thread.join(10)
    assert bytes(got[0].payload) == b"x"


def test_a_futex_is_to_be_had_here():
    assert futex.available()


def test_waiting_ends_in_time_and_at_once_when_ended(ring, put, attach):
    writer, reader = ring(), attach()
    assert reader.next(timeout_s=0.01) is None
    put(writer, b"last")
    writer.set_state(State.ENDED)
    assert bytes(reader.next(timeout_s=30).payload) == b"last"
    assert reader.next(timeout_s=30) is None
    assert reader.state is State.ENDED


def test_leased_records_come_again_after_the_next_attach(ring, put, attach):
    writer, reader = ring(), attach()
    for i in range(4):
        put(writer, b"%d" % i, step=i)
    assert take(reader) == b"0"
    assert [bytes(reader.next().payload) for _ in range(2)] == [b"1", b"2"]
    reader.close()
    again = attach()
    assert again.attach_epoch == 2
    assert [(r.step, bytes(r.payload)) for r in iter(again.next, None)] == [
        (1, b"1"),
        (2, b"2"),
        (3, b"3"),
    ]


def test_words_of_a_reader_reach_the_writer(ring, put, attach):
    writer, reader = ring(), attach()
    (line,) = writer.readers()
    assert (line.released, line.finished_step, line.committed_step, line.policy_version) == (
        0,
        None,
        None,
        None,
    )
    assert line.message is None
    put(writer, b"x", step=0)
    reader.next()
    reader.publish_policy_version(0, {"policy_version": 0, "uri": "weights/0"})
    reader.finish(0)
    reader.commit(0)
    reader.release(1)
    (line,) = writer.readers()
    assert (line.released, line.finished_step, line.committed_step, line.policy_version) == (
        1,
        0,
        0,
        0,
    )
    assert line.message == {"policy_version": 0, "uri": "weights/0"}
    assert (line.attached, line.attach_epoch, line.resume_request, line.generation_seen) == (
        True,
        1,
        0,
        0,
    )
    reader.close()
    assert not writer.readers()[0].attached


def test_words_never_go_back(ring, put, attach):
    writer, reader = ring(), attach()
    for step in range(3):
        put(writer, b"x", step=step)
        reader.next()
    reader.finish(2)
    reader.finish(1)
    reader.commit(1)
    reader.commit(0)
    reader.release(2)
    reader.release(1)
    assert (reader.finished_step, reader.committed_step, reader.released) == (2, 1, 2)
    reader.publish_policy_version(3, {"uri": "a"})
    reader.publish_policy_version(3, {"uri": "b"})
    with pytest.raises(ValueError, match="got 2, want 3 or more"):
        reader.publish_policy_version(2, {})
    assert writer.readers()[0].message == {"uri": "b"}


def test_a_message_too_long_leaves_version_and_message(ring, attach):
    writer, reader = ring(), attach()
    reader.publish_policy_version(1, {"uri": "a"})
    with pytest.raises(ValueError, match="want at most 3064"):
        reader.publish_policy_version(2, {"uri": "x" * 3064})
    (line,) = writer.readers()
    assert (line.policy_version, line.message) == (1, {"uri": "a"})
    with pytest.raises(ValueError, match="want at most 2040"):
        writer.notify({"code": "x" * 2040})


def test_words_of_the_writer_reach_the_reader(ring, attach):
    writer, reader = ring(), attach()
    assert (reader.state, reader.notice, reader.committed_overall) == (State.SERVING, None, None)
    writer.set_committed(4)
    writer.notify({"code": "commit_overdue", "steps": 3})
    writer.set_state(State.OVERDUE)
    assert (reader.state, reader.committed_overall) == (State.OVERDUE, 4)
    assert reader.notice == {"code": "commit_overdue", "steps": 3}


def test_a_record_not_yet_read_cannot_be_released(ring, put, attach):
    writer, reader = ring(), attach()
    put(writer, b"x")
    with pytest.raises(RingError, match="want at most 0: not yet read"):
        reader.release(1)


@pytest.mark.parametrize(
    ("word", "value", "name"),
    [
        (0, 3, "released"),
        (8, 3, "finished_step"),
        (9, 3, "committed_step"),
        (10, 1 << 63, "policy_version"),
    ],
)
def test_a_reader_line_that_cannot_be_is_corruption(ring, put, word, value, name):
    writer = ring()
    put(writer, b"x", step=0)
    put(writer, b"x", step=1)
    line = writer.geometry.line(0)
    with open(writer.path, "r+b") as file:
        file.seek(line + 8 * word)
        file.write(value.to_bytes(8, "little"))
    with pytest.raises(RingCorrupt, match=f"reader 0, {name}: got"):
        writer.readers()


def test_a_released_word_that_goes_back_is_corruption(ring, put, attach):
    writer, reader = ring(), attach()
    put(writer, b"x")
    take(reader)
    writer.readers()
    with open(writer.path, "r+b") as file:
        file.seek(writer.geometry.line(0))
        file.write(bytes(8))
    with pytest.raises(RingCorrupt, match=r"released: got 0, want 1 \.\. 1"):
        writer.reserve(1)


def test_a_step_word_that_goes_back_is_corruption(ring, put, attach):
    writer, reader = ring(), attach()
    put(writer, b"x", step=5)
    reader.next()
    reader.finish(5)
    writer.readers()
    with open(writer.path, "r+b") as file:
        file.seek(writer.geometry.line(0) + 64)
        file.write((3).to_bytes(8, "little"))
    with pytest.raises(RingCorrupt, match=r"finished_step: got 2, want 5 \.\. 5"):
        writer.readers()


@pytest.mark.parametrize("value", [0, 99])
def test_a_published_word_that_cannot_be_is_corruption(ring, put, attach, value):
    writer, reader = ring(), attach()
    put(writer, b"x")
    reader.next()
    with open(writer.path, "r+b") as file:
        file.seek(1536)
        file.write(value.to_bytes(8, "little"))
    with pytest.raises(RingCorrupt, match=rf"published: got {value}, want 1 \.\. 8"):
        reader.next()


def test_publishing_needs_a_reservation_of_that_size(ring):
    writer = ring()
    words = {"kind": Kind.DATA, "step": 0, "index": 0, "count": 1, "meta_offset": 0}
    with pytest.raises(RingError, match="nothing reserved"):
        writer.publish(length=1, **words)
    writer.reserve(10)
    with pytest.raises(RingError, match="publish of 11 bytes, 10 bytes reserved"):
        writer.publish(length=11, **words)
    assert writer.publish(length=5, **words) == 0  # shorter than reserved is fine
    with pytest.raises(RingError, match="nothing reserved"):
        writer.publish(length=5, **words)


def test_checksums_report_a_write_in_place_and_freed_bytes_are_poisoned(ring, put, attach, caplog):
    writer, reader = ring(debug=True), attach()
    put(writer, b"aaaa")
    put(writer, b"bbbb")
    first, second = reader.next(), reader.next()
    second.payload[0] = 0
    with caplog.at_level(logging.ERROR):
        reader.release(1)
    assert reader.damaged == 0
    assert caplog.text == ""
    with caplog.at_level(logging.ERROR):
        reader.release(2)
    assert reader.damaged == 1
    assert "record 1 (step 0, microbatch 0): written to in place" in caplog.text
    writer.reserve(1)
    assert bytes(first.payload) == b"\xa5" * 4


def test_a_checksum_that_differs_is_corruption_on_the_way_in(ring, put, attach):
    writer, reader = ring(debug=True), attach()
    put(writer, b"aaaa")
    reader.next().payload[0] = 0
    reader.close()
    with pytest.raises(RingCorrupt, match="record 0: checksum differs"):
        attach().next()


def test_views_outlive_the_reader_that_made_them(ring, put, attach):
    writer, reader = ring(), attach()
    put(writer, b"still here")
    view = np.frombuffer(reader.next().payload, np.uint8)
    reader.close()
    reader.close()
    writer.close(unlink=True)
    assert view.tobytes() == b"still here"


def test_closing_without_views_unmaps(ring, attach):
    writer, reader = ring(), attach()
    mapping = reader._mapping
    assert f"{writer.path}" in maps()
    reader.close()
    writer.close(unlink=False)
    assert mapping.closed
    assert f"{writer.path}" not in maps()
    remove_leftover(find_leftovers(writer.path.parent, "run")[0])


def maps():
    with open("/proc/self/maps") as file:
        return file.read()


def test_the_file_goes_only_when_no_reader_holds_it(ring, attach):
    writer, reader = ring(), attach()
    assert writer.close(unlink=True) is False
    assert writer.path.exists()
    reader.close()
    assert writer.close(unlink=True) is False  # it is not ours any more
    (left,) = find_leftovers(writer.path.parent, "run")
    assert (left.path, left.dp_rank, left.held) == (writer.path, 0, False)
    remove_leftover(left)
    assert not writer.path.exists()


def test_only_the_owner_of_the_name_unlinks_it(ring, folder):
    writer = ring()
    os.rename(writer.path, folder / "elsewhere")
    writer.path.write_text("another file")
    assert writer.close(unlink=True) is False
    assert writer.path.read_text() == "another file"


def test_a_second_writer_is_refused_and_named(ring):
    ring()
    with pytest.raises(RingBusy, match=rf"held by writer \(pid {os.getpid()}\)"):
        ring()


def test_a_ring_that_a_reader_still_holds_is_busy_too(ring, attach):
    writer = ring()
    attach()
    writer.close(unlink=True)
    with pytest.raises(RingBusy, match=rf"held by reader 0 \(pid {os.getpid()}\)"):
        ring()


def test_a_dead_ring_is_a_leftover(ring, folder):
    ring().close(unlink=False)
    with pytest.raises(LeftoverFound, match=r"run\.0\.ring: .*--discard"):
        ring()
    assert [p.name for p in folder.iterdir()] == ["run.0.ring"]


def test_leftovers_are_those_of_the_run(ring, folder):
    assert find_leftovers(folder / "nothing", "run") == []
    ring(dp_rank=1, dp_size=2)
    ring(dp_rank=0, dp_size=2).close(unlink=False)
    ring(run="run.0")
    (folder / "run.2.ring").write_text("no ring at all")
    (folder / "run.3.ring").symlink_to("/etc/passwd")
    found = find_leftovers(folder, "run")
    assert [(f.dp_rank, f.held) for f in found] == [(0, False), (1, True), (2, False), (3, False)]
    assert found[1].holders == (f"writer (pid {os.getpid()})",)
    with pytest.raises(RingBusy, match=r"run\.1\.ring: held by writer"):
        remove_leftover(found[1])
    for one in (found[0], found[2], found[3]):
        remove_leftover(one)
    assert sorted(p.name for p in folder.iterdir()) == ["run.0.0.ring", "run.1.ring"]


def test_a_second_reader_on_one_line_is_refused_and_named(ring, attach):
    ring()
    attach()
    with pytest.raises(RingBusy, match=rf"reader 0 is taken; .*reader 0 \(pid {os.getpid()}\)"):
        attach()


def test_a_line_can_be_taken_again(ring, attach):
    ring()
    attach().close()
    assert attach().attach_epoch == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dp_size": 2}, "dp_size: this trainer says 2"),
        ({"replicas": 2}, "replicas: this trainer says 2"),
        ({"replica": 1}, r"replica: got 1, want 0 \.\. 0"),
    ],
)
def test_another_topology_is_refused(ring, attach, settings, says):
    ring()
    with pytest.raises(TopologyMismatch, match=says):
        attach(**settings)


def test_a_rank_that_will_never_be_is_refused_at_once(ring, folder):
    ring()
    with pytest.raises(TopologyMismatch, match="dp_rank 1 of dp_size 2: run 'run' has 1 ranks"):
        RingReader.attach(folder, "run", 1, dp_size=2, timeout_s=600)


def test_attach_waits_for_the_ring(ring, put, folder):
    """The folder does not exist yet when the reader starts to wait."""
    got = []

    def wait():
        reader = RingReader.attach(folder / "later", "run", 0, timeout_s=20)
        got.append(reader.geometry.run)
        reader.close()

    thread = threading.Thread(target=wait)
    thread.start()
    from headrace.service.ring import RingWriter

    writer = RingWriter.create(
        folder / "later",
        run="run",
        dp_rank=0,
        dp_size=1,
        replicas=1,
        layout="thd",
        data_bytes=1,
        records=1,
    )
    thread.join(10)
    assert got == ["run"]
    assert writer.close(unlink=True)


def test_a_ring_removed_while_a_reader_attaches_is_not_taken(ring, folder, monkeypatch):
    """The writer leaves after the reader has opened the file and before it has the lock."""
    writer = ring()

    def open_and_lose(name, directory):
        found = open_ring(name, directory)
        writer.close(unlink=True)
        return found

    monkeypatch.setattr(reading, "open_ring", open_and_lose)
    with pytest.raises(ServiceGone):
        RingReader.attach(folder, "run", 0, timeout_s=0)


def test_attach_gives_up_in_time(folder):
    with pytest.raises(
        ServiceGone, match=r"no ring .*run\.0\.ring within 0\.01 s: start `headrace serve`"
    ):
        RingReader.attach(folder, "run", 0, timeout_s=0.01)


def foreign(path, content):
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(b"x" * 8192), "not a ring"),
        (lambda path: path.write_bytes(b""), "not a ring"),
        (lambda path: os.truncate(path, path.stat().st_size - 4096), "truncated"),
        (lambda path: os.truncate(path, 100), "not a ring"),
        (lambda path: (path.rename(f"{path}.real"), path.symlink_to(f"{path}.real")), "no link"),
        (lambda path: (path.unlink(), path.mkdir()), "want a regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "want a regular file"),
    ],
)
def test_what_is_not_a_ring_of_ours_is_refused(ring, attach, spoil, says):
    writer = ring()
    writer.close(unlink=False)
    spoil(writer.path)
    with pytest.raises(RingForeign, match=says):
        attach()


def test_a_folder_that_others_may_write_to_is_refused(ring, folder):
    folder.chmod(0o777)
    with pytest.raises(RingForeign, match="no write permission for others"):
        ring()
    folder.chmod(0o700)


def test_a_folder_behind_a_link_is_refused(folder):
    (folder / "real").mkdir()
    (folder / "link").symlink_to(folder / "real")
    with pytest.raises(RingForeign, match="want a real folder"):
        prepare_directory(folder / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(folder):
    (folder / "theirs").mkdir()
    os.chown(folder / "theirs", 12345, -1)
    with pytest.raises(RingForeign, match="got uid 12345"):
        prepare_directory(folder / "theirs")


def test_a_folder_is_made_private_with_its_parents(folder):
    os.close(prepare_directory(folder / "a" / "b"))
    assert [oct((folder / p).stat().st_mode & 0o777) for p in ("a", "a/b")] == ["0o700", "0o700"]


def test_the_file_has_the_mode_it_was_given(ring):
    assert oct(ring().path.stat().st_mode & 0o777) == "0o600"
    before = os.umask(0o077)
    try:
        shared = ring(run="shared", mode=0o660)
    finally:
        os.umask(before)
    assert oct(shared.path.stat().st_mode & 0o777) == "0o660"


def test_every_page_is_taken_at_creation(ring):
    found = os.stat(ring(data_bytes=1 << 20).path)
    assert found.st_blocks * 512 >= found.st_size > 1 << 20
    assert found.st_size % mmap.PAGESIZE == 0
