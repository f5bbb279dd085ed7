"""A rollout actor: samples from the newest policy, scores, and posts. One process of several.

    wait while enough is queued  ->  take the newest weights  ->  sample groups of 16  ->  submit

A datum carries what the loss needs beside its tokens: which positions count, the logprobs of the
policy that sampled them, the advantage, and here the reward too, so that the trainer can report it.
`Datum.from_tokens` shifts all of them by one, so that entry i speaks about the token after token i.

It ends at SIGTERM, when what it has submitted is delivered, and then prints how many datums the
service has answered for.
"""

from __future__ import annotations

import argparse
import signal
import threading
import uuid

import torch
from safetensors.torch import load_file

from headrace.client import PolicyInfo, RolloutClient
from headrace.demo.policy import (
    GROUP_SIZE,
    PROMPT_LENGTH,
    Policy,
    advantages_of,
    prompts,
    rewards_of,
    sample,
)
from headrace.schemas import Datum
from headrace.schemas.errors import PolicyTimeout

ENOUGH_STEPS = 2  # whole steps waiting to be trained on: more rollouts would only grow stale


def rollouts(policy: Policy, groups: int, generator: torch.Generator) -> list[Datum]:
    """Sixteen samples of each of `groups` prompts: datums of 10 tokens."""
    questions = prompts(groups, generator).repeat_interleave(GROUP_SIZE, dim=0)
    tokens, logprobs = sample(policy, questions, generator)
    rewards = rewards_of(tokens)
    advantages = advantages_of(rewards)
    group_ids = [uuid.uuid4().hex for _ in range(groups)]
    datums = []
    for i in range(len(tokens)):
        datum = Datum.from_tokens(
            tokens[i],
            logprobs=logprobs[i],
            advantages=advantages[i],
            prompt_len=PROMPT_LENGTH,
            group_id=group_ids[i // GROUP_SIZE],
            group_size=GROUP_SIZE,
            reward=rewards[i].item(),
            source="reverse",
        )
        datum.loss_fn_inputs["reward"] = rewards[i : i + 1]
        datums.append(datum)
    return datums


def act(client: RolloutClient, *, groups: int, seed: int, stop: threading.Event) -> None:
    """The loop, until `stop` is set."""
    generator = torch.Generator().manual_seed(seed)
    policy = Policy()
    version = -1
    while not stop.is_set():
        newest, backlog = client.policy, client.backlog  # as the last answer said
        if version < 0 or (backlog is not None and backlog.steps >= ENOUGH_STEPS):
            newest = next_policy(client, version)  # a newer one: a step has been used up
            if newest is None:
                continue
        if newest is not None and newest.version > version:
            policy.load_state_dict(load_file(str(newest.uri)))
            version = newest.version
        client.submit(rollouts(policy, groups, generator), policy_version=version)


def next_policy(client: RolloutClient, version: int) -> PolicyInfo | None:
    """The first policy newer than `version`; None if there is none within a second."""
    try:
        return client.wait_policy(newer_than=version, timeout=1.0)
    except PolicyTimeout:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace.demo.actor")
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--groups", type=int, required=True, help="sampled between two looks at the backlog"
    )
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with RolloutClient(arguments.url, actor=arguments.name, close_deadline_s=10) as client:
        act(client, groups=arguments.groups, seed=arguments.seed, stop=stop)
    print(client.statistics()["accepted"], flush=True)


if __name__ == "__main__":
    main()
