"""The bytes: where each word is, what is refused, and that neither words nor messages tear."""

from __future__ import annotations

import mmap
import os

import pytest

from headrace.client.reader import RingReader
from headrace.schemas import ring as layout
from headrace.schemas.errors import RingCorrupt, RingForeign
from headrace.schemas.ring import Descriptor, GuardedArea, Kind, State
from headrace.schemas.ring_header import Geometry


def geometry(**changes):
    settings = {
        "run": "run", "layout": "thd", "release": "step", "kinds": {}, "streams": {},
        "dp_rank": 1, "dp_size": 2, "replicas": 2, "records": 3, "data_bytes": 5000, "debug": 0,
    }  # fmt: skip
    return Geometry.plan(**(settings | changes))


def parse(header, file_bytes):
    return Geometry.parse(header.ljust(4096, b"\0"), file_bytes=file_bytes, name="run.1.ring")


def test_parts_follow_each_other():
    made = geometry()
    assert made.lines_offset == 4096
    assert made.descriptors_offset == 4096 + 2 * 4096
    assert made.data_offset == 4 * 4096  # three descriptors fill a part of one page
    assert made.data_bytes == 8192  # rounded up to pages
    assert made.file_bytes == 4 * 4096 + 8192


def test_header_words_stand_where_the_page_says():
    header = geometry().pack()
    word = lambda at: int.from_bytes(header[at : at + 8], "little")  # noqa: E731
    assert header[:8] == b"HEADRACE"
    assert [word(8 + 8 * i) for i in range(14)] == [
        1, 0, 4 * 4096 + 8192, 4096, 4096, 2, 12288, 128, 3, 16384, 8192, 1, 2, 0
    ]  # fmt: skip
    assert header[256:1536].rstrip(b"\0").startswith(b'{"run":"run"')
    assert len(header) == 1536


def test_word_indices_stand_where_the_page_says():
    assert layout.PUBLISHED * 8 == 1536
    assert layout.GENERATION * 8 == 1600
    assert layout.RELEASED == 0
    assert layout.FINISHED * 8 == 64
    assert (layout.READER_PID + 1) * 8 == 128
    # generation to writer_pid end before the notice begins
    assert (layout.WRITER_PID + 1) * 8 <= layout.NOTICE


def test_header_round_trip():
    made = geometry(kinds={"logprobs": "token"}, debug=1)
    assert parse(made.pack(), made.file_bytes) == made


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 7, "not a ring"),
        (8, 2, "version 2.0, want 1.x"),
        (24, 1, "contradict"),  # file_bytes
        (40, 64, "contradict"),  # line_bytes
        (48, 0, "contradict"),  # replicas
        (48, 100, "contradict"),
        (56, 12290, "contradict"),  # descriptors_offset
        (72, 1 << 40, "contradict"),  # records
        (80, 1 << 63, "contradict"),  # data_offset
        (88, 8191, "contradict"),  # data_bytes
        (96, 2, "contradict"),  # dp_rank = dp_size
        (256, 0, "description"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(at, value, says):
    made = geometry()
    header = bytearray(made.pack())
    header[at : at + 8] = value.to_bytes(8, "little")
    with pytest.raises(RingForeign, match=says):
        parse(bytes(header), made.file_bytes)


def test_another_minor_version_is_read():
    made = geometry()
    header = bytearray(made.pack())
    header[16:24] = (9).to_bytes(8, "little")
    assert parse(bytes(header), made.file_bytes).minor == 9


def test_another_file_size_is_refused():
    made = geometry()
    with pytest.raises(RingForeign, match="truncated"):
        parse(made.pack(), made.file_bytes - 4096)


def test_kinds_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="want at most 1280"):
        geometry(kinds={f"key{i}" * 20: "token" for i in range(20)}).pack()


@pytest.mark.parametrize("changes", [{"replicas": 0}, {"records": 0}, {"data_bytes": 0}])
def test_a_ring_has_at_least_one_of_each(changes):
    with pytest.raises(ValueError, match="at least 1"):
        geometry(**changes)


def test_readers_take_the_geometry_from_the_header(ring, put, folder):
    """A ring whose descriptors are wider and stand elsewhere than this version would put them."""
    made = geometry(dp_rank=0, dp_size=1, replicas=1)
    wide = {f: getattr(made, f) for f in made.__dataclass_fields__} | {
        "descriptors_offset": made.descriptors_offset + 4096,
        "descriptor_bytes": 256,
        "data_offset": made.data_offset + 4096,
        "file_bytes": made.file_bytes + 4096,
        "minor": 3,
    }
    made = Geometry(**wide)
    content = bytearray(made.file_bytes)
    content[:1536] = made.pack()
    words = memoryview(content).cast("Q")
    Descriptor(
        sequence=1,
        offset=64,
        length=5,
        kind=Kind.DATA,
        generation=0,
        step=4,
        index=0,
        count=1,
        meta_offset=0,
    ).write(words, made)
    words[layout.PUBLISHED], words[made.line(0) // 8] = 2, 1
    content[made.data_offset + 64 : made.data_offset + 69] = b"hello"
    words.release()
    (folder / "run.0.ring").write_bytes(content)
    reader = RingReader.attach(folder, "run", 0, timeout_s=0)
    record = reader.next()
    assert (record.sequence, record.step, bytes(record.payload)) == (1, 4, b"hello")
    reader.close()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, 5),  # sequence
        (1, 32),  # offset: not aligned
        (2, 1 << 40),  # length
        (3, 0),  # kind: never written
        (3, 9),
        (5, 0),  # step unset
        (6, 1),  # index = count
        (8, 65),  # head behind the record's end
    ],
)
def test_a_broken_descriptor_is_corruption(ring, put, folder, word, value):
    writer = ring()
    put(writer, b"x" * 64)
    reader = RingReader.attach(folder, "run", 0, timeout_s=0)
    with open(writer.path, "r+b") as file:
        file.seek(writer.geometry.descriptors_offset + 8 * word)
        file.write(value.to_bytes(8, "little"))
    with pytest.raises(RingCorrupt, match="descriptor 0"):
        reader.next()
    reader.close()


def test_state_goes_along_its_arrows(ring):
    writer = ring()
    writer.set_state(State.OVERDUE)
    writer.set_state(State.SERVING)
    with pytest.raises(ValueError, match="SERVING cannot become STARTING"):
        writer.set_state(State.STARTING)
    writer.set_state(State.ENDED)
    writer.set_state(State.ENDED)
    with pytest.raises(ValueError, match="ENDED cannot become SERVING"):
        writer.set_state(State.SERVING)


def area(size=64):
    data = memoryview(mmap.mmap(-1, 4096))
    words = data.cast("Q")
    return GuardedArea(data, words, sequence=0, offset=64, size=size), words


def test_guarded_area_round_trip():
    guarded, words = area()
    assert guarded.read() == (0, None)
    guarded.write({"uri": "weights/ä"})
    assert guarded.read() == (2, {"uri": "weights/ä"})
    guarded.write({})
    assert guarded.read() == (4, {})
    words[0] += 1  # a writer died halfway
    assert guarded.read() == (5, None)
    guarded.write({"a": 1})
    assert guarded.read() == (6, {"a": 1})


def test_what_exceeds_its_area_is_refused_and_changes_nothing():
    guarded, _ = area(size=24)
    guarded.write({"a": 1})
    with pytest.raises(ValueError, match="18 bytes of JSON, want at most 16"):
        guarded.write({"a": "0123456789"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        guarded.write({"a": float("nan")})
    assert guarded.read() == (2, {"a": 1})


@pytest.mark.parametrize("text", [b"[1]", b"{]"])
def test_a_settled_area_without_an_object_is_corruption(text):
    guarded, words = area()
    words[8] = len(text)
    words.obj[72 : 72 + len(text)] = text
    words[0] = 2
    with pytest.raises(RingCorrupt, match="want"):
        guarded.read()


def test_words_do_not_tear(child):
    """Another process flips a word between all zeros and all ones; no load sees a mixture."""
    words = memoryview(mmap.mmap(-1, 4096)).cast("Q")
    ones = (1 << 64) - 1

    def flip(say):
        say("ready")
        while words[1] == 0:
            words[0] = ones
            words[0] = 0

    process = child(flip)
    process.line()
    seen, loads, changes, before = set(), 0, 0, 0
    while changes < 100 or loads < 100_000:
        value = words[0]
        seen.add(value)
        loads += 1
        changes += value != before
        before = value
    words[1] = 1
    assert process.wait() == 0
    assert seen == {0, ones}


def test_messages_do_not_tear(child):
    data = memoryview(mmap.mmap(-1, 8192))
    words = data.cast("Q")
    guarded = GuardedArea(data, words, sequence=0, offset=64, size=3072)

    def write(say):
        i = 0
        while words[4] == 0:
            i += 1
            guarded.write({"n": i, "text": chr(97 + i % 26) * (i % 2000)})

    process = child(write)
    whole, last = 0, 0
    while whole < 2000:
        _, content = guarded.read()
        if content is not None:
            whole += 1
            n = content["n"]
            assert n >= last
            assert content["text"] == chr(97 + n % 26) * (n % 2000)
            last = n
    words[4] = 1
    assert process.wait() == 0
    assert last > 1


def test_name_of_this_process_is_in_the_header(ring):
    writer = ring()
    header = writer.path.read_bytes()[:4096]
    at = layout.WRITER_PID * 8
    assert int.from_bytes(header[at : at + 8], "little") == os.getpid()
