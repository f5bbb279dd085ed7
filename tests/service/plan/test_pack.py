"""Packing: the cap is never exceeded, every datum is placed once, every rank gets equally many."""

from __future__ import annotations

import doctest
from itertools import pairwise

import numpy as np
import pytest

from headrace.service.plan import balance, choose, fits, pack, padded, rows
from headrace.service.plan.choose import Candidate, ShortageError, choose_groups
from headrace.service.plan.pack import pack_step

CAP = 40


def bins_of(lengths, layout, ranks, cap=CAP, **options):
    edges, items = pack_step(
        np.array(lengths, np.int64), layout=layout, dp_size=ranks, microbatch_tokens=cap, **options
    )
    return [items[a:b].tolist() for a, b in pairwise(edges)], items.tolist()


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


def test_equal_counts_are_a_multiple():
    for layout in ("thd", "neat", "padded"):
        bins, _ = bins_of([10] * 30, layout, 2, microbatch_multiple=4)
        assert len(bins) == 8
        assert all(len(members) in (3, 4) for members in bins)


def test_slots_count_against_the_cap_not_tokens():
    # 9 tokens take a slot of 16: two fit 40 slots, where four would by tokens.
    bins, _ = bins_of([9] * 4, "thd", 1, sequence_multiple=16)
    assert [len(members) for members in bins] == [2, 2]
    # Rows come in 32 slots: two slots of 16, not 40 / 16.
    bins, _ = bins_of([9] * 4, "thd", 1, sequence_multiple=8, pack_multiple=32)
    assert [len(members) for members in bins] == [2, 2]
    # T is 16 as well: B x T = 2 x 16.
    bins, _ = bins_of([9] * 4, "padded", 1, sequence_multiple=16)
    assert [len(members) for members in bins] == [2, 2]


def test_padded_by_rows():
    bins, _ = bins_of([5, 90, 4, 80, 3], "padded", 1, cap=None, microbatch_size=2)
    assert bins == [[1, 3], [0, 2], [4]]


def test_heavy_first_and_the_same_index_on_every_rank():
    # One index of long datums, then one of short; rank by rank they cost the same.
    lengths = [40, 4, 4, 40, 4, 4, 4, 40, 4, 4]
    bins, _ = bins_of(lengths, "thd", 3, quadratic_crossover=10)
    assert [[lengths[i] for i in members] for members in bins[:3]] == [[40], [40], [40]]
    assert sorted(len(members) for members in bins[3:]) == [2, 2, 3]


def test_long_datums_cost_more_than_their_tokens():
    # By tokens both ranks get 36; by cost the long one is alone with less beside it.
    lengths = [24, *[3] * 16]
    loads = {}
    for crossover in (10**9, 24):
        bins, _ = bins_of(lengths, "thd", 2, quadratic_crossover=crossover)
        loads[crossover] = sorted(sum(lengths[i] for i in members) for members in bins)
    assert loads[10**9] == [36, 36]
    assert loads[24] == [33, 39]


def test_an_index_that_one_datum_slows_is_filled_up_on_every_rank():
    # A datum of 100 paces the first index on two ranks: the other rank takes as much there, and
    # little is left for the second index.
    lengths = [100, *[10] * 14]
    bins, _ = bins_of(lengths, "thd", 2, cap=100, quadratic_crossover=10**9)
    assert [sum(lengths[i] for i in members) for members in bins] == [100, 100, 20, 20]


def test_other_methods_come_before_a_third_bin():
    # Longest first makes 7 + 2 and 6 + 3, and has no room for the other 2 in bins of 10.
    lengths = [7, 6, 3, 2, 2]
    costs = balance.slot_costs(np.array(lengths), 24576).tolist()
    assert fits.longest_first(lengths, costs, [10, 10])[0] is None
    # Best fit makes 7 + 3 and 6 + 2 + 2.
    bins, _ = bins_of(lengths, "thd", 2, cap=10)
    assert [[lengths[i] for i in members] for members in bins] == [[7, 3], [6, 2, 2]]
    # Three that fill a bin as they come, which no method that sorts them finds.
    assert fits.best_fit(sorted([18, 12, 10, 20, 11, 9] * 5, reverse=True), CAP)[1] == 11
    bins, _ = bins_of([18, 12, 10, 20, 11, 9] * 5, "thd", 2)
    assert len(bins) == 10


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "microbatch_tokens = None and microbatch_size = None: set exactly one"),
        ({"microbatch_tokens": 4, "microbatch_size": 4}, "set exactly one"),
        ({"microbatch_size": 4}, "counts rows of the padded layout: got layout = 'thd'"),
        ({"microbatch_tokens": 40, "fixed_pack": True, "pack_multiple": 16}, "no multiple of pack"),
        ({"microbatch_tokens": 40, "fixed_pack": True, "sequence_multiple": 16}, "of sequence_mul"),
        ({"microbatch_tokens": 40, "sequence_multiple": 16}, "at most 32 fit"),
        ({"microbatch_tokens": 40, "pack_multiple": 24}, "at most 24 fit"),
    ],
)
def test_settings_that_exclude_each_other_are_errors(options, what):
    with pytest.raises(ValueError, match=what):
        pack_step(np.array([33]), layout="thd", dp_size=1, **options)


def test_no_datums_make_no_step():
    with pytest.raises(ValueError, match="at least one datum"):
        pack_step(np.array([], np.int64), layout="thd", dp_size=1, microbatch_tokens=4)


def test_the_bound_on_bins_is_never_above_the_least_count():
    def least(sizes, cap):
        """By trying every bin for every datum."""
        best = len(sizes)

        def place(at, rooms):
            nonlocal best
            if len(rooms) >= best:
                return
            if at == len(sizes):
                best = len(rooms)
                return
            for where, room in enumerate(rooms):
                if room >= sizes[at] and room not in rooms[:where]:
                    place(at + 1, [*rooms[:where], room - sizes[at], *rooms[where + 1 :]])
            place(at + 1, [*rooms, cap - sizes[at]])

        place(0, [])
        return best

    random, tight = np.random.default_rng(3), 0
    for _ in range(200):
        sizes = np.sort(random.integers(1, 21, random.integers(1, 9)))[::-1]
        bound, least_count = rows.fewest_bins(sizes, 20), least(sizes.tolist(), 20)
        assert bound <= least_count
        tight += bound == least_count
    assert tight > 150


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
    groups = [Candidate(4, 1)] * 3
    assert choose_groups(groups, batch_size=5, batch_groups=None) == [0, 1]
    assert choose_groups(groups, batch_size=8, batch_groups=None) == [0, 1]
    assert choose_groups(groups, batch_size=None, batch_groups=3) == [0, 1, 2]
    with pytest.raises(ShortageError, match=r"1 more datums .* \(12 of 13\)"):
        choose_groups(groups, batch_size=13, batch_groups=None)
    with pytest.raises(ShortageError, match=r"1 more complete groups \(3 of 4\)"):
        choose_groups(groups, batch_size=None, batch_groups=4)


def test_a_step_without_a_loss_token_is_not_formed():
    with pytest.raises(ShortageError, match="a group with a loss token"):
        choose_groups([Candidate(4, 0), Candidate(4, 0)], batch_size=8, batch_groups=None)
    assert choose_groups(
        [Candidate(4, 0), Candidate(4, 0), Candidate(4, 3)], batch_size=8, batch_groups=None
    ) == [0, 1, 2]
    assert choose_groups(
        [Candidate(4, 0), Candidate(4, 0), Candidate(4, 3)], batch_size=None, batch_groups=2
    ) == [0, 2]


@pytest.mark.parametrize("module", [balance, choose, pack, padded, rows])
def test_worked_examples(module):
    assert doctest.testmod(module).failed == 0
