"""Packing: the cap is never exceeded, every datum is placed once, every rank gets equally many."""

from __future__ import annotations

import doctest
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.service.plan import choose, pack
from headrace.service.plan.choose import ShortageError, choose_groups
from headrace.service.plan.pack import pack_step

CAP = 40
lengths_of = st.lists(st.integers(1, CAP), min_size=1, max_size=60)


def bins_of(lengths, layout, ranks, cap=CAP):
    edges, items = pack_step(
        np.array(lengths, np.int64), layout=layout, dp_size=ranks, microbatch_tokens=cap
    )
    return [items[a:b].tolist() for a, b in pairwise(edges)], items.tolist()


def slots(members, lengths, layout):
    if not members:
        return 0
    sizes = [lengths[i] for i in members]
    return sum(sizes) if layout == "thd" else len(sizes) * max(sizes)


def check(lengths, layout, ranks):
    bins, items = bins_of(lengths, layout, ranks)
    assert sorted(items) == list(range(len(lengths)))
    assert len(bins) % ranks == 0
    assert all(slots(members, lengths, layout) <= CAP for members in bins)
    # Bins are split before a filler is made: one is empty only where each datum has its own bin.
    if any(not members for members in bins):
        assert all(len(members) <= 1 for members in bins)
        assert len(bins) - len(lengths) < ranks
    for members in bins:
        assert members == (
            sorted(members) if layout == "thd" else sorted(members, key=lambda i: (-lengths[i], i))
        )


@given(lengths_of, st.sampled_from(["thd", "padded"]), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_every_step_is_sound(lengths, layout, ranks):
    check(lengths, layout, ranks)


@pytest.mark.soak
@given(st.lists(st.integers(1, CAP), min_size=1, max_size=600), st.sampled_from(["thd", "padded"]),
       st.integers(1, 16))  # fmt: skip
@settings(max_examples=5000, deadline=None)
def test_every_step_is_sound_long(lengths, layout, ranks):
    check(lengths, layout, ranks)


def test_ranks_get_equal_loads_from_equal_datums():
    bins, _ = bins_of([10] * 16, "thd", 4)
    assert [len(members) for members in bins] == [4, 4, 4, 4]


def test_a_split_comes_before_a_filler():
    # Two bins would do; four ranks make four of them, and no filler.
    bins, _ = bins_of([10] * 8, "thd", 4)
    assert [len(members) for members in bins] == [2, 2, 2, 2]
    padded, _ = bins_of([10] * 8, "padded", 4)
    assert [len(members) for members in padded] == [2, 2, 2, 2]


def test_fewer_datums_than_ranks_leave_fillers_to_the_last_ranks():
    bins, _ = bins_of([7, 9], "thd", 4)
    assert bins == [[1], [0], [], []]


def test_a_datum_over_the_cap_is_an_error_and_never_cut():
    with pytest.raises(ValueError, match="41 tokens exceeds microbatch_tokens = 40"):
        bins_of([3, 41], "thd", 1)


def test_padded_rows_of_a_bin_are_nearly_as_long_as_each_other():
    lengths = [40, 1, 39, 2, 38, 1, 2, 1]
    bins, _ = bins_of(lengths, "padded", 1)
    assert [[lengths[i] for i in members] for members in bins] == [
        [40],
        [39],
        [38],
        [2, 2, 1, 1, 1],
    ]


def test_whole_groups_oldest_first():
    groups = [(4, 1), (4, 1), (4, 1)]
    assert choose_groups(groups, batch_size=5, batch_groups=None) == [0, 1]
    assert choose_groups(groups, batch_size=8, batch_groups=None) == [0, 1]
    assert choose_groups(groups, batch_size=None, batch_groups=3) == [0, 1, 2]
    with pytest.raises(ShortageError, match=r"1 more datums .* \(12 of 13\)"):
        choose_groups(groups, batch_size=13, batch_groups=None)
    with pytest.raises(ShortageError, match=r"1 more complete groups \(3 of 4\)"):
        choose_groups(groups, batch_size=None, batch_groups=4)


def test_a_step_without_a_loss_token_is_not_formed():
    with pytest.raises(ShortageError, match="a group with a loss token"):
        choose_groups([(4, 0), (4, 0)], batch_size=8, batch_groups=None)
    assert choose_groups([(4, 0), (4, 0), (4, 3)], batch_size=8, batch_groups=None) == [0, 1, 2]
    assert choose_groups([(4, 0), (4, 0), (4, 3)], batch_size=None, batch_groups=2) == [0, 2]


@pytest.mark.parametrize("module", [choose, pack])
def test_worked_examples(module):
    assert doctest.testmod(module).failed == 0
