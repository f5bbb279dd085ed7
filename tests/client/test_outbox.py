"""The outbox by itself: what goes together, in which order, and the books."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.outbox import MAX_DATUMS, OVERHEAD, Outbox, Post, parcels_of
from headrace.schemas.errors import ClientClosed, OutboxFull, PostFailed
from headrace.schemas.wire import WireDatum

BOUND_S = 20.0


def datum(group: str | None = None, *, tokens: int = 1, key: str = "x") -> WireDatum:
    losses = {key: np.zeros(tokens, np.float32)}
    ids = np.zeros(tokens, np.int32)
    return WireDatum(input_ids=ids, loss_fn_inputs=losses, group_id=group, policy_version=0)


ONE = datum().nbytes + OVERHEAD


def outbox(**changes: Any) -> Outbox:
    base = {"post_bytes": 10 * ONE, "linger_s": 0.0, "outbox_bytes": 1000 * ONE, "inflight": 1000}
    return Outbox(**(base | changes))


def take_all(box: Outbox) -> list[Post]:
    posts: list[Post] = []
    while (count := sum(len(p.numbers) for p in posts)) < box.statistics()["submitted"]:
        post = box.take()
        assert post is not None
        assert len(post.numbers) > 0, count
        posts.append(post)
    return posts


def test_members_of_a_group_are_one_parcel_wherever_they_stand() -> None:
    parcels = parcels_of([datum("a"), datum(), datum("b"), datum("a"), datum(), datum("b")])
    assert [places for _, places in parcels] == [[0, 3], [1], [2, 5], [4]]


def test_numbers_follow_the_list_not_the_parcels() -> None:
    box = outbox()
    assert box.admit([datum("a"), datum("b"), datum("a")], block=True) == range(3)
    assert box.admit([datum()], block=True) == range(3, 4)
    [post] = take_all(box)
    assert post.numbers == [0, 2, 1, 3]


def test_a_post_is_full_at_its_bytes_and_at_its_datums() -> None:
    box = outbox(post_bytes=3 * ONE)
    box.admit([datum() for _ in range(7)], block=True)
    assert [len(p.numbers) for p in take_all(box)] == [3, 3, 1]
    box = outbox(post_bytes=1 << 40, outbox_bytes=1 << 40)
    box.admit([datum()] * (MAX_DATUMS + 5), block=True)
    assert [len(p.numbers) for p in take_all(box)] == [MAX_DATUMS, 5]


def test_keys_and_kinds_decide_what_shares_a_post() -> None:
    box = outbox()
    box.admit([datum(tokens=2), datum(tokens=1), datum(key="y"), datum(tokens=2)], block=True)
    sample = WireDatum(
        input_ids=np.zeros(2, np.int32), loss_fn_inputs={"x": np.zeros(1)}, policy_version=0
    )
    box.admit([sample], block=True)
    assert [p.numbers for p in take_all(box)] == [[0, 1], [2], [3], [4]]


def test_no_post_is_taken_beyond_the_window() -> None:
    box = outbox(post_bytes=1, inflight=2)
    box.admit([datum() for _ in range(4)], block=True)
    first, second = box.take(), box.take()
    assert first is not None
    assert second is not None
    box.delivered(second, 0)
    got: list[Post | None] = []
    thread = threading.Thread(target=lambda: got.append(box.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()  # the first is open, so the third waits, though the second is done
    box.delivered(first, 0)
    thread.join(BOUND_S)
    assert [p.numbers for p in got if p] == [[2]]


def test_lingering_ends_with_a_flush() -> None:
    box = outbox(linger_s=60.0)
    box.admit([datum()], block=True)

    def send() -> None:
        post = box.take()
        assert post is not None
        box.delivered(post, 1)

    thread = threading.Thread(target=send)
    thread.start()
    report = box.flush(BOUND_S)
    thread.join(BOUND_S)
    assert (report.delivered, report.unknown, report.dropped) == (1, 0, 1)


def test_flush_does_not_wait_for_what_comes_after_it() -> None:
    box = outbox(post_bytes=1)
    box.admit([datum()], block=True)
    post = box.take()
    assert post is not None
    reports = []
    thread = threading.Thread(target=lambda: reports.append(box.flush(BOUND_S)))
    thread.start()
    box.delivered(post, 0)
    thread.join(BOUND_S)
    box.admit([datum()], block=True)
    assert reports[0].delivered == 1
    assert box.flush(0.0).unknown == 1


def test_a_part_of_a_post_is_answered_for_by_itself() -> None:
    box = outbox()
    for _ in range(3):
        box.admit([datum(), datum()], block=True)
    post = box.take()
    assert post is not None
    one, two, three = post.by_submit()
    assert len({post.key, one.key, two.key, three.key}) == 4
    error = PostFailed("refused", 422)
    box.delivered(one, 0)
    box.failed(two, [(n, error) for n in two.numbers])
    report = box.flush(0.0)
    assert (report.delivered, report.failed, report.unknown) == (2, [(2, error), (3, error)], 2)
    assert box.statistics()["outbox"] == 2 * ONE
    box.delivered(three, 0)
    assert box.flush(0.0).delivered == 2
    statistics = box.statistics()
    assert (statistics["outbox"], statistics["buffered"]) == (0, 0)
    assert (statistics["submitted"], statistics["accepted"], statistics["failed"]) == (6, 4, 2)


def test_the_end_of_the_run() -> None:
    box = outbox(post_bytes=1)
    box.admit([datum() for _ in range(3)], block=True)
    post = box.take()
    assert post is not None
    error = PostFailed("ended", 410)
    box.failed(post, [(0, error)])
    box.finish(error)
    assert [n for n, _ in box.flush(0.0).failed] == [0, 1, 2]
    assert box.statistics()["outbox"] == 0
    with pytest.raises(PostFailed, match="ended"):
        box.admit([datum()], block=True)


def test_stop_and_seal_end_every_wait() -> None:
    box = outbox(outbox_bytes=ONE, inflight=1, post_bytes=1)
    box.admit([datum()], block=True)
    post = box.take()
    ends: list[Any] = []

    def admit() -> None:
        with pytest.raises(ClientClosed):
            box.admit([datum()], block=True)
        ends.append("admit")

    waits = [
        admit,
        lambda: ends.append(box.take()),
        lambda: ends.append(box.pause(60.0)),
        lambda: ends.append(box.flush(60.0).unknown),
    ]
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    box.seal()
    threads[0].join(BOUND_S)
    box.stop()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert post is not None
    assert sorted(map(str, ends)) == ["1", "False", "None", "admit"]


def test_a_lowered_bound_shrinks_the_posts_to_come_and_never_grows() -> None:
    box = outbox(post_bytes=10 * ONE)
    box.admit([datum() for _ in range(7)], block=True)
    box.bound(post_bytes=3 * ONE, datums=100)
    first = box.take()
    box.bound(post_bytes=100 * ONE, datums=2)
    assert first is not None
    assert len(first.numbers) == 3
    assert [len(post.numbers) for post in (box.take(), box.take()) if post] == [2, 2]


def test_parts_of_a_post_hold_its_parcels_once() -> None:
    box = outbox()
    for size in (1, 2, 2):
        box.admit([datum() for _ in range(size)], block=True)
    post = box.take()
    assert post is not None
    one, two = post.halves()
    assert (one.numbers, two.numbers) == ([0, 1, 2], [3, 4])
    assert [part.numbers for part in one.part(one.parcels[:1]).halves()] == [[0]]
    assert [part.numbers for part in post.by_submit()] == [[0], [1, 2], [3, 4]]
    box.delivered(one, 1, [(1, PostFailed("skipped", 422))])
    box.delivered(two, 0)
    report = box.flush(0.0)
    assert (report.delivered, report.dropped, [n for n, _ in report.failed]) == (4, 1, [1])


def test_a_cancelled_submit_leaves_no_datum_unaccounted_for() -> None:
    async def cancelled() -> None:
        box = outbox(outbox_bytes=2 * ONE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await box.admit_async([datum() for _ in range(5)], block=True)
        post = box.take()
        assert post is not None
        assert post.numbers == [0, 1]
        box.delivered(post, 0)
        report = await box.flush_async(BOUND_S)
        assert (report.delivered, [n for n, _ in report.failed]) == (2, [2, 3, 4])
        statistics = box.statistics()
        assert (statistics["submitted"], statistics["buffered"], statistics["outbox"]) == (5, 0, 0)
        assert await box.admit_async([datum()], block=True) == range(5, 6)

    asyncio.run(cancelled())


def test_a_closing_flush_waits_for_the_submit_that_it_cut_off() -> None:
    async def closing() -> None:
        box = outbox(outbox_bytes=ONE)
        task = asyncio.create_task(box.admit_async([datum(), datum()], block=True))
        await asyncio.sleep(0)
        post = box.take()
        assert post is not None
        box.seal()
        box.delivered(post, 0)
        report = await box.flush_async(BOUND_S)  # looks before the submit has looked
        assert (report.delivered, [n for n, _ in report.failed], report.unknown) == (1, [1], 0)
        with pytest.raises(ClientClosed):
            await task

    asyncio.run(closing())


def test_raising_is_all_or_nothing() -> None:
    box = outbox(outbox_bytes=3 * ONE)
    box.admit([datum(), datum()], block=False)
    with pytest.raises(OutboxFull, match="no room"):
        box.admit([datum(), datum()], block=False)
    with pytest.raises(OutboxFull, match="never fit"):
        box.admit([datum() for _ in range(4)], block=False)
    assert box.statistics()["submitted"] == 2
    assert box.admit([datum()], block=False) == range(2, 3)


SUBMITS = st.lists(
    st.lists(
        st.builds(
            datum,
            st.sampled_from([None, None, "a", "b"]),
            tokens=st.integers(1, 40),
            key=st.just("x"),
        ),
        min_size=1,
        max_size=8,
    ),
    max_size=12,
)


def check_posts(submits: list[list[WireDatum]], post_bytes: int) -> None:
    """Each datum in one post; posts in order; groups whole; only a lone group over the bound."""
    box = outbox(post_bytes=post_bytes, outbox_bytes=1 << 30)
    ranges = [box.admit(submit, block=True) for submit in submits]
    posts = take_all(box)
    where = {n: place for place, post in enumerate(posts) for n in post.numbers}
    assert sorted(n for post in posts for n in post.numbers) == list(range(sum(map(len, submits))))
    for post in posts:
        nbytes = sum(parcel.nbytes for parcel in post.parcels)
        assert nbytes <= post_bytes or len(post.parcels) == 1
        for one, number in zip(post.datums, post.numbers, strict=True):
            submit = next(i for i, numbers in enumerate(ranges) if number in numbers)
            assert submits[submit][number - ranges[submit].start] is one
    for numbers, submit in zip(ranges, submits, strict=True):
        for group in ("a", "b"):
            members = {
                where[n] for n, d in zip(numbers, submit, strict=True) if d.group_id == group
            }
            assert len(members) <= 1
    firsts = [min(where[n] for n in numbers) for numbers in ranges]
    lasts = [max(where[n] for n in numbers) for numbers in ranges]
    assert all(last <= first for last, first in zip(lasts, firsts[1:], strict=False))
    for post in posts:
        box.delivered(post, 0)
    assert box.statistics()["outbox"] == 0


@settings(max_examples=50, deadline=None)
@given(SUBMITS, st.integers(1, 3000))
def test_posts_hold_every_datum_once_in_order(
    submits: list[list[WireDatum]], post_bytes: int
) -> None:
    check_posts(submits, post_bytes)


@pytest.mark.soak
@settings(max_examples=3000, deadline=None)
@given(SUBMITS, st.integers(1, 3000))
def test_posts_hold_every_datum_once_in_order_long(
    submits: list[list[WireDatum]], post_bytes: int
) -> None:
    check_posts(submits, post_bytes)
