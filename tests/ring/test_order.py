"""Index-major publishing cannot deadlock against a barrier per microbatch; rank-major publishing
does.

Two ranks, rings of three records, a step of six microbatches, each freed as the iterator moves on.
Both trainers meet at a barrier after every microbatch, as a collective makes them. Everything is
taken turn by turn in one thread, so that "blocked" is a fact and not a time-out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.client.reader import RingReader

RANKS, COUNT, RECORDS = 2, 6, 3

INDEX_MAJOR = [(rank, index) for index in range(COUNT) for rank in range(RANKS)]
RANK_MAJOR = [(rank, index) for rank in range(RANKS) for index in range(COUNT)]


class Barrier:
    def __init__(self) -> None:
        self.arrived = [0] * RANKS

    def passed(self, turn: int) -> bool:
        return min(self.arrived) >= turn


def pump(writers, order, put) -> Iterator[bool]:
    """Publishes in `order`, each record blocking the rest. Yields whether it moved."""
    for rank, index in order:
        while put(writers[rank], bytes([rank, index]), index=index, count=COUNT) is None:
            yield False
        yield True


def trainer(reader, barrier, seen) -> Iterator[bool]:
    rank = reader.geometry.dp_rank
    for turn in range(1, COUNT + 1):
        while (record := reader.next()) is None:
            yield False
        seen.append(bytes(record.payload))
        barrier.arrived[rank] = turn
        yield True
        while not barrier.passed(turn):
            yield False
        reader.release(record.sequence + 1)
        yield True


def simulate(folder, ring, put, order) -> list[list[bytes]]:
    writers = [
        ring(dp_rank=rank, dp_size=RANKS, records=RECORDS, release="microbatch")
        for rank in range(RANKS)
    ]
    readers = [RingReader.attach(folder, "run", rank, timeout_s=0) for rank in range(RANKS)]
    barrier, seen = Barrier(), [[] for _ in range(RANKS)]
    running = [
        pump(writers, order, put),
        *(trainer(r, barrier, s) for r, s in zip(readers, seen, strict=True)),
    ]
    moved = True
    while running and moved:
        turns = [(one, next(one, None)) for one in running]
        running = [one for one, turn in turns if turn is not None]
        moved = any(turn for _, turn in turns) or len(running) < len(turns)
    for reader in readers:
        reader.close()
    return seen


@pytest.mark.parametrize(
    ("order", "reached"),
    [(INDEX_MAJOR, [COUNT, COUNT]), (RANK_MAJOR, [1, 0])],
    ids=["index-major", "rank-major"],
)
def test_publishing_order(folder, ring, put, order, reached):
    seen = simulate(folder, ring, put, order)
    assert [len(records) for records in seen] == reached
    assert seen == [[bytes([rank, index]) for index in range(n)] for rank, n in enumerate(reached)]
