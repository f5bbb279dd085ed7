"""`headrace inspect plan`: what a service wrote down, counted and drawn from beside it."""

from __future__ import annotations

import json
import signal
import sqlite3
import struct
import subprocess
import sys
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from headrace.service.inspect.cli import app
from headrace.service.inspect.figures import Figures, SlotRule
from headrace.service.inspect.terminal import draw
from headrace.service.records import Placing, Plan

LENGTHS = [9, 4, 7, 5, 12, 3, 8, 6, 2, 11]


def run(*words: object):
    return CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "80"})


def made(lengths: list[int], bins: list[list[int]], *, layout: str = "thd", ranks: int) -> Plan:
    """A plan of these bins; what no picture looks at is 1."""
    count = len(lengths)
    known = {
        "step": 3, "dp_size": ranks, "layout": layout, "lengths": np.array(lengths),
        "numbers": np.arange(count, dtype=np.uint64), "groups": np.arange(count),
        "bins": np.cumsum([0, *map(len, bins)]), "items": np.array([i for b in bins for i in b]),
    }  # fmt: skip
    plain = {field.name: 1 for field in fields(Plan)} | {"placing": Placing(microbatch_tokens=None)}
    return Plan(**plain | known)


def picture(figures: Figures, *, width: int = 80, most: int = 0, encoding: str = "utf-8") -> str:
    out = StringIO()
    file = SimpleNamespace(write=out.write, flush=out.flush, encoding=encoding)
    draw(figures, Console(file=file, width=width, highlight=False), most=most)  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["thd", "padded"])
def test_a_step_of_a_running_service_is_counted_and_drawn(
    serve, posts, wait_until, tmp_path, layout
):
    service = serve(
        **{
            "planner.layout": layout, "planner.dp_size": 2, "planner.batch_size": len(LENGTHS),
            "planner.microbatch_tokens": 24, "run.name": "pictures",
        }
    )  # fmt: skip
    where = ("--queue.dir", service.queue_dir, "--run", "pictures")
    nothing = run(*where)
    assert nothing.exit_code == 1
    assert "no step was planned yet" in nothing.stderr

    body = posts.body(*map(posts.datum, LENGTHS))
    for step in range(2):
        assert service.post(body).status_code == 202
        wait_until(lambda step=step: service.status()["steps"]["delivered_step"] == step)

    spool = f"file:{service.queue_dir}/pictures.spool/spool.db?mode=ro"
    database = sqlite3.connect(spool, uri=True)
    (packed,) = database.execute("SELECT plan FROM plans WHERE step = 1").fetchone()
    database.close()
    plan = Plan.unpack(packed)
    bins = [plan.lengths[plan.members(i, r)] for i in range(plan.count) for r in range(2)]
    if layout == "thd":
        slots = [b.sum() for b in bins]
        costs = [(b + b**2 / 24576).sum() for b in bins]
    else:
        slots = [len(b) * b.max() for b in bins]
        costs = [len(b) * (b.max() + b.max() ** 2 / 24576) for b in bins]
    by_rank = np.reshape(costs, (plan.count, 2))

    answer = run(*where, "--json")
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    assert (told["step"], told["layout"], told["dp_size"]) == (1, layout, 2)
    assert (told["datums"], told["tokens"], told["fillers"]) == (10, sum(LENGTHS), 0)
    assert told["microbatches_per_rank"] == plan.count > 1
    assert [m["total_slots"] for m in told["microbatches"]] == slots
    assert told["slots"] == sum(slots)
    assert told["fill"] == pytest.approx(sum(LENGTHS) / (len(bins) * told["capacity"]))
    assert told["padding"] == pytest.approx(1 - sum(LENGTHS) / sum(slots))
    assert told["rank_costs"] == pytest.approx(by_rank.sum(axis=0))
    assert told["imbalance"] == pytest.approx(
        by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum()
    )
    numbers = [number for m in told["microbatches"] for number in m["datum_numbers"]]
    assert sorted(numbers) == sorted(plan.numbers.tolist())

    text = run(*where).stdout
    assert f"step 1 · {layout} · 2 ranks x {plan.count} microbatches · 10 datums, 67 tokens" in text
    assert f"padding {told['padding']:.1%} · imbalance {told['imbalance']:.4f}" in text
    assert run(0, *where).stdout.startswith("step 0 ")

    png = tmp_path / "out" / "step.png"
    assert run(*where, "--png", png).exit_code == 0
    head = png.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert 1000 < width < 4000
    assert 300 < height < 2000

    missing = run(7, *where)
    assert missing.exit_code == 1
    assert "got 7, want 0 to 1" in missing.stderr

    service.stop(signal.SIGKILL)  # what it left is read as well
    assert run(*where, "--json").stdout == answer.stdout


def test_a_run_without_a_spool_is_named_with_the_file_that_was_looked_for(queue_dir):
    ended = run("--queue.dir", queue_dir, "--run", "nobody")
    assert ended.exit_code == 1
    assert f"got no file {queue_dir}/nobody.spool/spool.db" in ended.stderr
    assert "--queue.dir" in ended.stderr


def test_a_file_that_is_no_database_is_an_error_and_no_traceback(queue_dir):
    (queue_dir / "default.spool").mkdir()
    (queue_dir / "default.spool" / "spool.db").write_bytes(b"x" * 5000)
    ended = run("--queue.dir", queue_dir)
    assert ended.exit_code == 1
    assert "spool.db cannot be read" in ended.stderr


WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from headrace.service.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named(serve, posts, wait_until, tmp_path):
    service = serve(**{"planner.batch_size": 1})
    service.post(posts.body(posts.datum()))
    wait_until(lambda: service.status()["steps"]["delivered_step"] == 0)
    words = ["inspect", "plan", "--queue.dir", str(service.queue_dir), "--png", str(tmp_path / "p")]
    ended = subprocess.run([sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert "pip install 'headrace[demo]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_slots_and_tails_are_padding():
    """Worked by hand: slots are multiples of 4, rows of 8; the cap is 24."""
    plan = made([5, 3, 9, 4], [[0, 1, 2], [3]], ranks=2)
    rule = SlotRule(sequence_multiple=4, pack_multiple=8, cap=24, quadratic_crossover=8)
    figures = Figures.of(plan, rule)
    assert [strip.slots.tolist() for strip in figures.strips] == [[8, 4, 12], [4]]
    assert figures.slots.tolist() == [[24, 8]]
    assert figures.costs.tolist() == [[8 + 8 + 4 + 2 + 12 + 18, 4 + 2]]
    assert figures.fill == 21 / 48
    assert figures.padding == 1 - 21 / 32
    assert figures.imbalance == 52 / 29
    pieces = [[(p.kind, p.start, p.stop, p.datum) for p in s.pieces()] for s in figures.strips]
    assert pieces == [
        [
            ("sequence", 0, 5, 0), ("padding", 5, 8, 0), ("sequence", 8, 11, 1),
            ("padding", 11, 12, 1), ("sequence", 12, 21, 2), ("padding", 21, 24, 2),
        ],
        [("sequence", 0, 4, 3), ("padding", 4, 8, -1)],
    ]  # fmt: skip


def test_a_filler_has_slots_and_a_cost_and_no_tokens():
    figures = Figures.of(made([5, 3], [[0], [1], [], []], ranks=2), SlotRule(row=8))
    assert figures.slots.tolist() == [[8, 8], [8, 8]]
    assert figures.tokens.tolist() == [[5, 3], [0, 0]]
    assert figures.fillers == 2
    assert figures.fill == 8 / 32
    assert (figures.costs[1] == figures.costs[0, 1]).all()
    assert [p.kind for p in figures.strip(1, 0).pieces()] == ["filler", "padding"]


def test_the_rule_is_the_plans_where_it_tells_one():
    placing = Placing(microbatch_tokens=128, sequence_multiple=16, pack_multiple=64)
    rule = SlotRule(sequence_multiple=16, pack_multiple=64, cap=128)
    assert SlotRule.of(replace(made([1], [[0]], ranks=1), placing=placing)) == rule
    fixed = Placing(microbatch_tokens=128, fixed_pack=True)
    assert SlotRule.of(replace(made([1], [[0]], ranks=1), placing=fixed)) == SlotRule(
        row=128, cap=128
    )


def test_a_strip_reads_without_colour():
    """A cell a slot: neighbours differ in shade, numbers stand where there is room."""
    plan = made([6, 3, 1, 4], [[0, 1], [2, 3]], layout="neat", ranks=1)
    rule = SlotRule(sequence_multiple=2, row=18, cap=18)
    lines = picture(Figures.of(plan, rule), width=18 + 2 + 2 + 23).splitlines()
    assert lines[5:7] == [
        " 0 ▏0█████1▓▓·········     18   50.0%  100.0%",
        " 1 ▏█·3▓▓▓············     18   27.8%   60.0%",
    ]
    plain = picture(Figures.of(plan, rule), width=18 + 2 + 2 + 23, encoding="ascii")
    assert " 0 |0#####1==.........     18" in plain
    assert plain.isascii()


def test_a_large_step_stays_readable_and_says_what_is_left_out():
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(np.log(1500), 1, 4096), 1, 16384).astype(int).tolist()
    bins = [list(range(at, 4096, 320)) for at in range(320)]
    figures = Figures.of(made(lengths, bins, ranks=64))
    for width in (60, 80):
        lines = picture(figures, width=width, most=48).splitlines()
        assert len(lines) < 100
        assert max(map(cell_len, lines)) <= width
        assert sum("ranks 9 to 63 not drawn" in line for line in lines) == 5
        assert any("48 ranks between" in line for line in lines)
    assert len(picture(figures, width=120, most=0).splitlines()) > 320


@pytest.mark.slow
def test_a_large_step_becomes_one_picture(tmp_path: Path):
    from headrace.service.inspect.picture import Grid, save

    for count, ranks in [(1, 1), (5, 64), (400, 1), (30, 8), (2, 512), (3, 4096), (20_000, 1)]:
        grid = Grid.of(count, ranks)
        assert grid.rows * grid.row_inches < 26
        assert grid.indices == count or grid.deep * grid.ranks > 400
        assert grid.ranks == min(ranks, 512)
    bins = [list(range(at, 1024, 320)) for at in range(320)]
    save(Figures.of(made([7] * 1024, bins, ranks=64)), tmp_path / "large.png")
    width, height = struct.unpack(">II", (tmp_path / "large.png").read_bytes()[16:24])
    assert 2000 < width < 3000
    assert 1000 < height < 1500
