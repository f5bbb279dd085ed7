"""Any lengths under any settings: what pack_step promises, checked from its answer alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.service.plan.pack import longest_datum, pack_step

PACKED = ("thd", "neat")


def next_fit(sizes, layout, options):
    """Arrival-order greedy: a bin takes the next datum until it would go over."""
    cap, rows = options.get("microbatch_tokens"), options.get("microbatch_size")
    if layout in PACKED:
        cap -= cap % options.get("pack_multiple", 1)
    bins = []
    for at, _ in enumerate(sizes):
        longer = [*bins[-1], at] if bins else [at]
        taken = [sizes[i] for i in longer]
        slots = sum(taken) if layout in PACKED else len(taken) * max(taken)
        over = len(taken) > rows if rows else slots > cap
        if not bins or over:
            bins.append([at])
        else:
            bins[-1] = longer
    return bins


def cost_of(members, slots, layout, crossover):
    """Of one microbatch, a filler being the shortest datum, in 1/crossover tokens."""
    taken = [slots[i] for i in members] or [min(slots)]
    if layout not in PACKED:
        taken = [max(taken)] * len(taken)
    return sum(n * crossover + n * n for n in taken)


def step_cost(costs, ranks):
    return sum(max(costs[at : at + ranks]) for at in range(0, len(costs), ranks))


def check(lengths, layout, ranks, options):
    """Every promise of pack_step. Returns its bins as lists."""
    given = np.array(lengths, np.int64)
    edges, items = pack_step(given, layout=layout, dp_size=ranks, **options)
    again = pack_step(given, layout=layout, dp_size=ranks, **options)
    assert (edges.tolist(), items.tolist()) == (again[0].tolist(), again[1].tolist())
    assert edges.dtype == items.dtype == np.int64
    assert edges[0] == 0

    # Every datum exactly once.
    assert sorted(items.tolist()) == list(range(len(lengths)))
    bins = [items[a:b].tolist() for a, b in pairwise(edges)]

    # As many for every rank, and a multiple.
    multiple = options.get("microbatch_multiple", 1)
    assert len(bins) % (ranks * multiple) == 0

    # Never over the cap, pads included.
    unit = options.get("sequence_multiple", 1)
    slots = [-(-n // unit) * unit for n in lengths]
    cap, rows = options.get("microbatch_tokens"), options.get("microbatch_size")
    for members in bins:
        taken = [slots[i] for i in members]
        if layout in PACKED:
            pack = options.get("pack_multiple", 1)
            assert -(-sum(taken) // pack) * pack <= cap
            assert members == sorted(members)
        else:
            assert len(taken) <= rows if rows else len(taken) * max(taken, default=0) <= cap
            assert members == sorted(members, key=lambda i: (-lengths[i], i))

    # Split before filled: a filler stands only where each datum has a microbatch of its own.
    if not all(bins):
        assert max(map(len, bins)) == 1
        assert len(bins) - len(lengths) < ranks * multiple

    # Heavy first, and the ranks close: no step costs more than the mean rank and one microbatch.
    crossover = options.get("quadratic_crossover", 24576)
    costs = [cost_of(members, slots, layout, crossover) for members in bins]
    by_index = [costs[at : at + ranks] for at in range(0, len(costs), ranks)]
    assert all(min(a) >= max(b) for a, b in pairwise(by_index))
    ours = step_cost(costs, ranks)
    assert ours * ranks <= sum(costs) + ranks * (max(costs) - min(costs))

    # Never more microbatches than arrival-order greedy.
    greedy = next_fit(slots, layout, options)
    wanted = -(-len(greedy) // (ranks * multiple)) * ranks * multiple
    assert len(bins) <= wanted
    if layout in PACKED and len(greedy) == wanted:
        # Without fillers greedy's mean is the mean of any packing: its step is never cheaper than
        # ours by more than our heaviest microbatch less our lightest.
        theirs = step_cost([cost_of(m, slots, layout, crossover) for m in greedy], ranks)
        if all(bins):
            assert ours <= theirs + max(costs) - min(costs)
    return bins


@st.composite
def steps(draw, most):
    """(lengths, layout, ranks, options)."""
    layout = draw(st.sampled_from(["thd", "neat", "padded"]))
    options = {
        "microbatch_multiple": draw(st.integers(1, 3)),
        "sequence_multiple": draw(st.sampled_from([1, 1, 2, 8])),
        "quadratic_crossover": draw(st.sampled_from([1, 30, 24576])),
    }
    ranks = draw(st.integers(1, 9))
    if layout == "padded" and draw(st.booleans()):
        options["microbatch_size"], longest = draw(st.integers(1, 9)), 60
    else:
        cap = options["microbatch_tokens"] = draw(st.integers(16, 60))
        if layout != "padded":
            options["pack_multiple"] = draw(st.sampled_from([1, 1, 4, 16]))
            if draw(st.booleans()):
                options["fixed_pack"] = True
                cap = options["microbatch_tokens"] = 16 * draw(st.integers(1, 4))
        longest = longest_datum(
            layout=layout, microbatch_tokens=cap, pack_multiple=options.get("pack_multiple", 1),
            sequence_multiple=options["sequence_multiple"],
        )  # fmt: skip
    half = longest // 2
    length = st.one_of(
        st.integers(1, longest),
        st.sampled_from([longest, max(1, half), min(longest, half + 1), 1]),
    )
    return draw(st.lists(length, min_size=1, max_size=most)), layout, ranks, options


@given(steps(60))
@settings(max_examples=150, deadline=None)
def test_every_step_keeps_every_promise(step):
    check(*step)


@pytest.mark.soak
@given(steps(500))
@settings(max_examples=10_000, deadline=None)
def test_every_step_keeps_every_promise_long(step):
    check(*step)


CAP = 1024
SHAPES = {
    "lognormal": lambda rng, n: np.clip(np.rint(rng.lognormal(4, 1, n)), 1, CAP // 2),
    "up to the cap": lambda rng, n: np.clip(np.rint(rng.lognormal(5, 1.3, n)), 1, CAP),
    "uniform": lambda rng, n: rng.integers(1, CAP // 2, n),
    "all equal": lambda _, n: np.full(n, 300),
    "half at the cap": lambda rng, n: np.where(np.arange(n) % 2, CAP, rng.integers(1, CAP // 2, n)),
    "two that just do not fit": lambda _, n: np.where(np.arange(n) % 2, CAP // 2, CAP // 2 + 1),
    "three that just do not fit": lambda _, n: np.full(n, CAP // 3 + 1),
    "long and tiny": lambda rng, n: np.where(rng.random(n) < 0.1, CAP - 7, rng.integers(1, 20, n)),
}


@pytest.mark.parametrize("layout", ["thd", "padded"])
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_adversarial_steps_keep_every_promise(shape, ranks, layout):
    lengths = SHAPES[shape](np.random.default_rng(5), 600).astype(np.int64)
    check(lengths.tolist(), layout, ranks, {"microbatch_tokens": CAP})


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["thd", "neat", "padded"])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("ranks", [1, 3, 8, 64, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_adversarial_steps_keep_every_promise_long(shape, ranks, multiple, layout):
    for seed, count in enumerate([100, 2000, 9000]):
        lengths = SHAPES[shape](np.random.default_rng(seed), count).astype(np.int64)
        options = {"microbatch_tokens": CAP, "microbatch_multiple": multiple}
        check(lengths.tolist(), layout, ranks, options)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_any_draw_like_the_benchmarks_meets_its_bounds(seed):
    lengths = lognormal(seed)
    spread(lengths, 64, imbalance=1.005)
    one_rank(lengths)


@pytest.mark.parametrize("seed", [11, 25, 98])  # the last two fill 0.98 of their bins
def test_the_benchmarks_draw_meets_its_bounds(seed):
    lengths = lognormal(seed)
    spread(lengths, 64, imbalance=1.005)
    one_rank(lengths)


def lognormal(seed):
    draw = np.random.default_rng(seed).lognormal(np.log(1500), 1.0, 4096)
    return np.clip(np.rint(draw), 1, 16384).astype(np.int64)


def spread(lengths, ranks, imbalance):
    edges, items = pack_step(lengths, layout="thd", dp_size=ranks, microbatch_tokens=32768)
    total = -(-int(lengths.sum()) // 32768)
    assert len(edges) - 1 == -(-total // ranks) * ranks
    cost = lengths * 24576 + lengths * lengths
    loads = np.add.reduceat(cost[items], edges[:-1]).reshape(-1, ranks)
    assert loads.max(axis=1).sum() <= imbalance * loads.sum() / ranks


def one_rank(lengths):
    edges, _ = pack_step(lengths, layout="thd", dp_size=1, microbatch_tokens=32768)
    assert len(edges) - 1 <= 1.005 * -(-int(lengths.sum()) // 32768)
