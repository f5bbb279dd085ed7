"""Losses of one microbatch: formulas and aggregates by hand, slots, what is never read.

That they add up over microbatches, layouts and ranks is tests/gradients' to show.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.client.losses import (
    aggregate_loss,
    cross_entropy_loss,
    per_token,
    policy_gradient_loss,
    ppo_clip_loss,
)
from headrace.client.step import Microbatch
from headrace.schemas.layout import Sequences, array_specs, constants, fill
from headrace.schemas.step import MicrobatchInfo

LENGTHS = [2, 1, 4]
LOSSES = [policy_gradient_loss, ppo_clip_loss, cross_entropy_loss]


def batch_of(
    layout="thd", *, lengths=LENGTHS, multiple=1, row=None, per_sample=("advantages",), **columns
):
    """A microbatch that is the whole step: a rollout a datum, the first two in one group.

    `columns`: N lists each.
    """
    sizes = np.array(lengths)
    slots = -(-sizes // multiple) * multiple
    extras = {
        k: [np.asarray(v, np.float32).reshape(-1) for v in values] for k, values in columns.items()
    }
    samples = frozenset(per_sample) & extras.keys()
    specs = array_specs(
        sizes, extras, layout=layout, targets=True, per_sample=samples, slots=slots, row=row
    )
    arrays = {spec.name: spec.empty() for spec in specs}
    tokens = [np.arange(n) for n in lengths]
    fill(
        arrays,
        Sequences(
            lengths=sizes, input_ids=tokens, targets=[t + 1 for t in tokens], extras=extras,
            per_sample=samples,
        ),
        layout=layout,
        slots=slots,
    )  # fmt: skip
    ones = [np.ones(1)] * len(lengths)
    weights = [
        np.broadcast_to(w, n) for w, n in zip(extras.get("weights", ones), lengths, strict=True)
    ]
    loss = np.array([np.count_nonzero(w) for w in weights])
    group = np.maximum(np.arange(len(lengths)) - 1, 0)
    by_group = np.bincount(group, weights=loss).astype(np.int64)
    info = MicrobatchInfo(
        step=0, index=0, count=1, dp_rank=0, dp_size=1, layout=layout, num_datums=len(lengths),
        is_filler=False, policy_version_min=0, policy_version_max=0,
        step_loss_tokens=int(loss.sum()), step_loss_weight=float(sum(w.sum() for w in weights)),
        step_datums=int((loss > 0).sum()), step_rollouts=int((loss > 0).sum()),
        step_groups=int((by_group > 0).sum()), datum_ids=[None] * len(lengths),
        datum_numbers=np.arange(len(lengths), dtype=np.uint64), datum_loss_tokens=loss,
        rollout_loss_tokens=loss, group_loss_tokens=by_group[group],
        group_rollouts=np.bincount(group)[group], group_index=group,
    )  # fmt: skip
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Microbatch(tensors | constants(sizes, layout, slots=slots, row=row), info)


def spread(batch, values, fill=math.nan):
    """float64, shaped as the labels: N lists of values at the datums' positions, `fill` at pads."""
    rows = torch.full(batch["labels"].shape, fill, dtype=torch.float64)
    starts = [0] * len(values)
    if batch.info.layout == "thd":
        starts = batch["cu_seqlens"].tolist()
    for number, mine in enumerate(values):
        if batch.info.layout == "neat":
            rows[batch["doc_ids"] == number + 1] = torch.tensor(mine).double()
            continue
        row = rows[number if batch.info.layout == "padded" else 0]
        row[starts[number] : starts[number] + len(mine)] = torch.tensor(mine).double()
    return rows


PADDINGS = [
    ("padded", {}),
    ("padded", {"multiple": 4}),
    ("thd", {}),
    ("thd", {"multiple": 2}),
    ("thd", {"multiple": 2, "row": 12}),
    ("neat", {}),
    ("neat", {"row": 9}),
    ("neat", {"multiple": 4, "row": 16}),
]


@pytest.mark.parametrize(("layout", "padding"), PADDINGS)
@pytest.mark.parametrize(
    ("aggregate", "value"),
    [
        ("token_mean", 37 / 7),
        ("sequence_mean", 14 / 3),
        ("rollout_mean", 14 / 3),
        ("group_mean", 5),
        ("sum", 37),
    ],
)
def test_aggregates_by_hand(layout, padding, aggregate, value):
    batch = batch_of(layout, **padding)
    losses = spread(batch, [[1, 3], [5], [7, 7, 7, 7]])
    assert aggregate_loss(losses, batch, aggregate).item() == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize(
    ("aggregate", "value"),
    [
        ("token_mean", 20 / 3),
        ("sequence_mean", (6 + 7) / 2),
        ("group_mean", (6 + 7) / 2),
        ("sum", 20),
    ],
)
def test_a_weight_multiplies_and_counts_once(aggregate, value):
    batch = batch_of(weights=[[0, 2], [0], [1, 1, 0, 0]])
    losses = spread(batch, [[100, 3], [100], [5, 9, 100, 100]])
    assert aggregate_loss(losses, batch, aggregate).item() == pytest.approx(value, rel=1e-14)


def test_weights_may_be_one_a_sample():
    batch = batch_of(per_sample=["weights"], weights=[[2], [0], [0.5]])
    losses = spread(batch, [[1, 3], [100], [7, 7, 7, 7]])
    assert aggregate_loss(losses, batch, "sequence_mean").item() == (4 + 3.5) / 2


def test_the_mean_by_weight_is_the_sum_over_step_loss_weight():
    batch = batch_of(weights=[[1, 3], [0], [0, 0, 0, 4]])
    losses = spread(batch, [[1, 3], [100], [0, 0, 0, 7]])
    mean = aggregate_loss(losses, batch, "sum") / batch.info.step_loss_weight
    assert mean.item() == (1 + 9 + 28) / 8


def test_values_are_spread_over_slots():
    values = torch.tensor([5.0, 6.0, 7.0])
    rows = per_token(values, batch_of("padded"))
    assert rows.tolist() == [[5] * 4, [6] * 4, [7] * 4]
    assert per_token(values, batch_of("thd")).tolist() == [[5, 5, 6, 7, 7, 7, 7]]
    slots = per_token(values, batch_of("thd", multiple=2, row=10))
    assert slots.tolist() == [[5, 5, 6, 6, 7, 7, 7, 7, 0, 0]]
    neat = per_token(values, batch_of("neat", multiple=2, row=10))
    assert neat.tolist() == [[5, 5, 6, 0, 7, 7, 7, 7, 0, 0]]
    assert per_token(rows, batch_of("padded")) is rows


def test_a_batch_of_one_token_datums_is_spread_by_shape():
    batch = batch_of("padded", lengths=[1, 1], per_sample=[], advantages=[[2], [3]])
    loss = policy_gradient_loss(torch.tensor([[-1.0], [-1.0]]), batch, aggregate="sum")
    assert loss.item() == 5


def test_policy_gradient_by_hand():
    batch = batch_of("thd", advantages=[2, -1, 0], logprobs=[[-1, -2], [-3], [-1] * 4])
    logp = spread(batch, [[-1, -1], [-2], [-1] * 4]).float().requires_grad_()
    loss = policy_gradient_loss(logp, batch, aggregate="sum")
    assert loss.item() == 2 * 1 + 2 * 1 - 1 * 2
    capped = policy_gradient_loss(logp, batch, aggregate="sum", importance_cap=1.5)
    # Ratios 1, e and e; the weight that they make carries no gradient.
    assert capped.item() == pytest.approx(2 + 2 * 1.5 - 2 * 1.5)
    capped.backward()
    assert logp.grad[0].tolist() == [-2, -3, 1.5, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient"),
    [
        (1.0, 2.0, {}, -2.0, -2.0),
        (1.1, 2.0, {}, -2.2, -2.2),
        (1.5, 2.0, {}, -2.4, 0.0),  # better than it may look: clipped
        (0.5, 2.0, {}, -1.0, -1.0),  # worse is always seen
        (0.5, -2.0, {}, 1.6, 0.0),
        (1.5, -2.0, {}, 3.0, 3.0),
        (1.5, 2.0, {"clip_high": 0.28}, -2.56, 0.0),
        (0.5, -2.0, {"clip_low": 0.3}, 1.4, 0.0),
        (9.0, -2.0, {}, 18.0, 18.0),
        (9.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
        (2.0, -2.0, {"dual_clip": 3.0}, 4.0, 4.0),
        (9.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, options, loss, gradient):
    batch = batch_of(lengths=[1], advantages=[advantage], logprobs=[[-2.0]])
    logp = torch.tensor([[-2.0 + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    value = ppo_clip_loss(logp, batch, **options)
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logp.grad.item() == pytest.approx(gradient)


def test_old_logprobs_take_the_place_of_the_samplers():
    batch = batch_of(lengths=[2], advantages=[1.0], logprobs=[[-5.0, -5.0]])
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = ppo_clip_loss(logp, batch, old_logprobs=logp)
    loss.backward()
    assert loss.item() == -1
    assert logp.grad.tolist() == [[-0.5, -0.5]]


def test_cross_entropy_equals_torch():
    batch = batch_of("padded", weights=[[1, 1], [1], [1, 0, 0, 1]])
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(1))
    labels = batch["labels"]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    assert cross_entropy_loss(-nll.view_as(labels), batch).item() == pytest.approx(want.item())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("layout", "padding"), PADDINGS)
def test_what_stands_at_a_pad_is_never_read(loss, junk, layout, padding):
    columns = {
        "weights": [[1, 0], [1], [1] * 4],
        "advantages": [1, 2, 3],
        "logprobs": [[-1, -1], [-1], [-2] * 4],
    }
    batch = batch_of(layout, **padding, **columns)
    values = [[-1, junk], [-2], [-1, -2, -3, -4]]
    logp = spread(batch, values, fill=junk).requires_grad_()
    loss(logp, batch).backward()
    live = batch["labels"] != -100
    assert live.sum() == 6
    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[~live] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "aggregate", ["token_mean", "sequence_mean", "rollout_mean", "group_mean", "sum"]
)
def test_a_filler_is_zero_with_a_graph(loss, aggregate):
    batch = batch_of(lengths=[3], weights=[[1, 1, 0]], advantages=[2.0], logprobs=[[-1] * 3])
    batch["labels"].fill_(-100)
    for key in ("weights", "advantages", "logprobs"):
        batch[key].zero_()
    weight = torch.tensor(-4.0, requires_grad=True)
    value = loss(weight.expand(1, 3), batch, aggregate=aggregate)
    value.backward()
    assert (value.item(), weight.grad.item()) == (0, 0)


@pytest.mark.parametrize("aggregate", ["sequence_mean", "rollout_mean", "group_mean"])
def test_a_datum_without_a_loss_token_divides_nothing(aggregate):
    batch = batch_of(weights=[[0, 0], [0], [1, 1, 1, 1]])
    logp = spread(batch, [[-1, -1], [-1], [-3] * 4], fill=0.0)
    assert cross_entropy_loss(logp, batch, aggregate=aggregate).item() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_narrow_logprobs_are_summed_in_float32(dtype):
    batch = batch_of(lengths=[5000])
    logp = torch.full((1, 5000), -1.0, dtype=dtype, requires_grad=True)
    loss = cross_entropy_loss(logp, batch, aggregate="sum")
    assert loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert loss.item() == 5000
    loss.backward()
    assert logp.grad.dtype == dtype


def test_what_does_not_fit_is_named():
    batch = batch_of()
    logp = torch.zeros(1, 7)
    with pytest.raises(ValueError, match=r"batch\['advantages'\]: got a batch of .* want the key"):
        policy_gradient_loss(logp, batch)
    with pytest.raises(ValueError, match=r"aggregate: got 'mean', want one of \['token_mean'"):
        cross_entropy_loss(logp, batch, aggregate="mean")
    with pytest.raises(ValueError, match=r"logprobs: got shape \(1, 7, 9\), want \(1, 7\)"):
        cross_entropy_loss(torch.zeros(1, 7, 9), batch)
    with pytest.raises(ValueError, match=r"old_logprobs: got shape \(7,\), want \(1, 7\)"):
        ppo_clip_loss(logp, batch, old_logprobs=logp[0])
    with pytest.raises(ValueError, match=r"values: got shape \(2,\), want \(3,\), one a datum"):
        per_token(torch.zeros(2), batch)
    with pytest.raises(ValueError, match=r"dual_clip: got 1\.0, want more than 1"):
        ppo_clip_loss(logp, batch, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"clip_low, clip_high: got 1.2, 1.2, want 0 <="):
        ppo_clip_loss(logp, batch, clip_low=1.2)
