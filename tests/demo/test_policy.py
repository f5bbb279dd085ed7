"""The task, the model in both layouts, and the loss: all in this process, on tiny models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.demo.actor import rollouts
from headrace.demo.policy import (
    GROUP_SIZE,
    PROMPT_LENGTH,
    Policy,
    Slots,
    advantages_of,
    prompts,
    rewards_of,
    sample,
    token_losses,
)
from headrace.schemas import Datum, collate_datums

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(2)
    return Policy(width=16, layers=2, heads=2)


def thd(datums: list[Datum]) -> dict[str, Tensor]:
    """What the trainer gets: collate_datums' mapping and cu_seqlens."""
    batch = collate_datums(datums, packed=True)
    ends = batch["seq_lens_padded"][0].cumsum(0)
    return {**batch, "cu_seqlens": torch.cat([ends.new_zeros(1), ends]).to(torch.int32)}


def uneven(generator: torch.Generator) -> list[Datum]:
    """Five datums of random tokens, 2 to 9 positions long; a third of each is its prompt."""
    datums = []
    for length in (4, 9, 2, 7, 3):
        logprobs = -3 * torch.rand(length + 1, generator=generator)
        datums.append(
            Datum.from_tokens(
                torch.randint(11, (length + 1,), generator=generator),
                logprobs=logprobs,
                advantages=torch.randn((), generator=generator).item(),
                prompt_len=1 + length // 3,
            )
        )
    return datums


def test_a_reward_is_the_share_of_right_positions() -> None:
    tokens = torch.tensor(
        [
            [3, 1, 4, 1, 5, 10, 5, 1, 4, 1, 3],
            [3, 1, 4, 1, 5, 10, 5, 1, 4, 1, 5],
            [3, 1, 4, 1, 5, 10, 9, 9, 9, 9, 9],
        ]
    )
    assert rewards_of(tokens).tolist() == pytest.approx([1.0, 0.8, 0.0])


def test_advantages_are_normalised_within_each_group() -> None:
    split = torch.tensor([0.0, 1.0]).repeat(GROUP_SIZE // 2)
    alike = torch.full((GROUP_SIZE,), 0.6)
    advantages = advantages_of(torch.cat([split, alike])).view(2, GROUP_SIZE)
    assert advantages[0].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[0].std().item() == pytest.approx(1, abs=1e-3)
    assert (advantages[0] > 0).tolist() == (split > 0).tolist()
    assert advantages[1].abs().max().item() < 1e-2  # nothing to be learnt from equals


def test_logprobs_of_the_sampling_pass_are_those_of_the_policy(
    policy: Policy, generator: torch.Generator
) -> None:
    questions = prompts(7, generator)
    tokens, logprobs = sample(policy, questions, generator)
    assert tokens[:, :PROMPT_LENGTH].equal(questions)
    assert tokens.shape == (7, 11)
    again = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs, again[:, PROMPT_LENGTH - 1 :].detach())


def test_slots_of_a_row_of_three_and_two_tokens() -> None:
    slots = Slots.of(torch.tensor([0, 3, 5], dtype=torch.int32))
    assert slots.row.tolist() == [0, 0, 0, 1, 1]
    assert slots.column.tolist() == [0, 1, 2, 0, 1]
    assert slots.shape == (2, 3)


def test_both_layouts_give_the_same_logits(policy: Policy, generator: torch.Generator) -> None:
    datums = uneven(generator)
    padded, packed = collate_datums(datums), thd(datums)
    rows = policy(padded["input_ids"])
    row = policy(packed["input_ids"], packed["cu_seqlens"])[0]
    torch.testing.assert_close(rows[padded["attention_mask"].bool()], row)


def test_a_sequence_does_not_see_its_neighbours(policy: Policy, generator: torch.Generator) -> None:
    datums = uneven(generator)
    packed = thd(datums)
    before = policy(packed["input_ids"], packed["cu_seqlens"])[0, 4:]
    packed["input_ids"][0, :4] = (packed["input_ids"][0, :4] + 1) % 11
    after = policy(packed["input_ids"], packed["cu_seqlens"])[0, 4:]
    torch.testing.assert_close(before, after)


def test_the_loss_is_the_clipped_weighted_ratio(policy: Policy, generator: torch.Generator) -> None:
    datums = uneven(generator)
    batch = thd(datums)
    losses = token_losses(policy, batch)
    assert losses.shape == batch["labels"].shape
    at = 0
    for datum in datums:
        inputs = datum.loss_fn_inputs
        logits = policy(datum.input_ids[None])[0].log_softmax(-1)
        for i in range(datum.seq_len):
            advantage = inputs["advantages"].item()
            ratio = (logits[i, inputs["target_tokens"][i]] - inputs["logprobs"][i]).exp().item()
            bounded = min(max(ratio, 0.8), 1.2)
            want = -min(ratio * advantage, bounded * advantage) * inputs["weights"][i].item()
            assert losses[0, at + i].item() == pytest.approx(want, rel=1e-4, abs=1e-6)
        at += datum.seq_len


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_add_up_over_microbatches(
    policy: Policy, generator: torch.Generator, packed: bool
) -> None:
    """However a step is cut, the loss over the step's tokens has one gradient."""
    policy.double()
    datums = uneven(generator)
    total = sum(int((d.loss_fn_inputs["weights"] != 0).sum()) for d in datums)

    def gradient(parts: list[list[Datum]]) -> Tensor:
        policy.zero_grad()
        for part in parts:
            batch = thd(part) if packed else collate_datums(part)
            (token_losses(policy, batch).sum() / total).backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    whole = gradient([datums])
    cut = gradient([datums[:2], datums[2:3], datums[3:]])
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)


def test_rollouts_speak_about_the_next_token(policy: Policy, generator: torch.Generator) -> None:
    datums = rollouts(policy, 2, generator)
    assert len(datums) == 2 * GROUP_SIZE
    assert [datum.group_size for datum in datums] == [GROUP_SIZE] * len(datums)
    groups = [datum.group_id for datum in datums]
    assert groups == [groups[0]] * GROUP_SIZE + [groups[-1]] * GROUP_SIZE
    assert groups[0] != groups[-1]
    for datum in datums:
        inputs = datum.loss_fn_inputs
        assert datum.input_ids[1:].equal(inputs["target_tokens"][:-1])
        assert inputs["weights"].tolist() == [0] * 5 + [1] * 5
        tokens = torch.cat([datum.input_ids, inputs["target_tokens"][-1:]])
        assert rewards_of(tokens[None]).tolist() == [datum.reward] == inputs["reward"].tolist()
        logprobs = policy(datum.input_ids[None])[0].log_softmax(-1)
        own = logprobs.gather(-1, inputs["target_tokens"][:, None])[:, 0].detach()
        torch.testing.assert_close(inputs["logprobs"], own * inputs["weights"])


@pytest.mark.slow  # the first optimizer of a process loads much of torch
def test_a_few_steps_make_good_samples_likelier(generator: torch.Generator) -> None:
    torch.manual_seed(3)
    policy = Policy(width=16, layers=1, heads=2)
    batch = thd(rollouts(policy, 4, generator))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    before = token_losses(policy, batch).sum().item()
    for _ in range(3):
        optimizer.zero_grad()
        token_losses(policy, batch).sum().backward()
        optimizer.step()
    assert token_losses(policy, batch).sum().item() < before - 0.1
