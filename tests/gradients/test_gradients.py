"""However a step is cut, laid out and spread over ranks, its gradient is its datums' one by one.

A Hugging Face transformer in float64; the real planner, layouts and losses; ranks that are
processes, with gloo, DDP and FSDP2. `steps.py` draws, `transformer.py` has the model and the losses
by the book, `world.py` measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("world.py")
BOUND = 1e-10
KINDS = [("plain", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)]
LAYOUTS = {"padded", "thd", "neat"}
LOSSES = {"policy_gradient", "importance", "ppo_clip", "dual_clip", "cross_entropy"}
AGGREGATES = {"token_mean", "sequence_mean", "rollout_mean", "group_mean", "sum"}
DRAWS = 3

Lines = dict[tuple[str, int], list[dict]]


def measured(out: Path, *, draws: int, seed: int, longest: int, bound_s: int) -> Lines:
    """The lines of world.py by (what, world)."""
    argv = [sys.executable, str(SCRIPT), str(draws), str(seed), str(longest), str(out)]
    threads = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        argv, env=os.environ | threads, capture_output=True, text=True, timeout=bound_s
    )
    assert done.returncode == 0, done.stderr
    lines: Lines = defaultdict(list)
    for text in out.read_text().splitlines():
        line = json.loads(text)
        lines[line["what"], line["world"]].append(line)
    return lines


def check(lines: list[dict]) -> None:
    assert lines
    for line in lines:
        assert line["gradient"] < BOUND, line
        assert line["loss_value"] < BOUND, line


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    out = tmp_path_factory.mktemp("gradients") / "lines.jsonl"
    return measured(out, draws=DRAWS, seed=16, longest=16, bound_s=300)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "world"), KINDS)
def test_the_gradient_is_that_of_the_datums_one_by_one(small: Lines, what: str, world: int) -> None:
    check(small[what, world])


@pytest.mark.slow
@pytest.mark.parametrize(("what", "world"), KINDS)
def test_the_draw_holds_what_can_go_wrong(small: Lines, what: str, world: int) -> None:
    lines = small[what, world]
    seen = {(line["loss"], line["aggregate"], line["layout"]) for line in lines}
    assert [set(column) for column in zip(*seen, strict=True)] == [LOSSES, AGGREGATES, LAYOUTS]
    if what != "fsdp":
        assert {(loss, how) for loss, how, _ in seen} == set(product(LOSSES, AGGREGATES))
    if world < 4 and what != "fsdp":
        assert seen == set(product(LOSSES, AGGREGATES, LAYOUTS))
    assert {line["partition"] for line in lines} == {"planned", "random"}
    assert {line["sync"] for line in lines} == {"each", "last"}
    assert any(line["count"] > 2 for line in lines)
    assert any(line["microbatch_size"] for line in lines)
    for layout in LAYOUTS:
        of = [line for line in lines if line["layout"] == layout]
        assert any(line["sequence_multiple"] > 1 for line in of)
        if what == "fsdp":
            continue
        assert any(line["fillers"] for line in of)
        assert any(line["fillers"] == 0 for line in of)
        if world > 1:
            assert any(line["fillers"] and line["partition"] == "planned" for line in of)
        if layout != "padded":
            assert any(line["fixed_pack"] and line["partition"] == "planned" for line in of)
            assert any(line["pack_multiple"] > line["sequence_multiple"] for line in of)
    assert any(line["fillers"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["a mean of means", "no blocks", "a loud filler"])
def test_a_mistake_shows(small: Lines, mistake: str) -> None:
    lines = small[f"spoiled: {mistake}", 1]
    assert lines
    assert all(line["gradient"] > 1e-3 for line in lines)


@pytest.mark.soak
def test_the_gradient_is_that_of_the_datums_one_by_one_long(tmp_path: Path) -> None:
    lines = measured(tmp_path / "lines.jsonl", draws=30, seed=2, longest=48, bound_s=3600)
    for what, world in KINDS:
        check(lines[what, world])
        each = 5 if what == "fsdp" else 10 if world == 4 else 25
        assert len(lines[what, world]) == 30 * each
