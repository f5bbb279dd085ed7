"""The README is true: its arrays are what comes out, its programs run, its settings exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.client import RolloutClient, Trainer
from headrace.schemas import Datum
from headrace.schemas.errors import Refused
from headrace.service.settings import load_settings, settings_table

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def block(marker: str) -> str:
    """The fenced block that follows a marker."""
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert found, marker
    return found.group(1)


DATUMS = [
    Datum(
        [10, 11, 12], {"target_tokens": [11, 12, 13], "weights": [0.0, 1, 1], "advantages": [0.5]}
    ),
    Datum([20, 21], {"target_tokens": [21, 22], "weights": [1.0, 0], "advantages": [2.0]}),
    Datum([30], {"target_tokens": [31], "weights": [1.0], "advantages": [-1.0]}),
]
ROWS = (
    "input_ids", "attention_mask", "padding_mask", "labels", "weights", "advantages", "position_ids", "seq_lens",
    "cu_seqlens", "max_seqlen",
)  # fmt: skip


def taken(serve, layout: str) -> dict[str, object]:
    """What a Trainer yields for DATUMS, through a real service."""
    service = serve(
        **{
            "planner.layout": layout, "planner.batch_size": 3, "run.name": layout,
            "limits.max_body_bytes": "1MiB", "queue.bytes": "1MiB",
        }
    )  # fmt: skip
    with (
        RolloutClient(service.url) as client,
        Trainer.attach(layout, queue_dir=service.queue_dir) as trainer,
    ):
        client.submit(DATUMS, policy_version=0)
        (batch,) = next(trainer.steps())
        return {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }


def rendered(value: object) -> list[str]:
    if isinstance(value, list) and value and isinstance(value[0], list):
        rows = [str(row) for row in value]
        last = len(rows) - 1
        return [
            ("[" if at == 0 else " ") + row + ("]" if at == last else ",")
            for at, row in enumerate(rows)
        ]
    return ["" if value is None else str(value)]


def test_the_batch_is_what_comes_out(serve):
    padded, thd = taken(serve, "padded"), taken(serve, "thd")
    lines = [f"{'':16}{'padded (planner.layout = padded)':36}thd (planner.layout = thd)"]
    for key in ROWS:
        left, right = rendered(padded.get(key)), rendered(thd.get(key))
        for at in range(max(len(left), len(right))):
            cells = [part[at] if at < len(part) else "" for part in (left, right)]
            lines.append(f"{key if at == 0 else '':16}{cells[0]:36}{cells[1]}".rstrip())
    assert block("batch") == "\n".join(lines) + "\n"
    assert not (padded.keys() | thd.keys()) - {*ROWS, "seq_lens_padded", "qkv_format"}


ACTOR_SETTING = """
from types import SimpleNamespace
prompts = [[1, 2], [3, 4, 5]]
def sample(prompt, uri, n):
    assert uri == "weights/0"
    for k in range(n):
        tokens = prompt + [7, 8 + k]
        yield SimpleNamespace(tokens=tokens, logprobs=[-0.5, -0.25], advantage=float(k), group=str(prompt))
"""

TRAINER_SETTING = """
import json, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Embedding(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = []
def save(model):
    steps.append(model.weight.detach().sum().item())
    return f"weights/{len(steps) - 1}"
def token_losses(model, batch):
    from torch.nn.functional import cross_entropy
    return cross_entropy(model(batch["input_ids"][0]), batch["labels"][0], reduction="none")
"""


@pytest.mark.slow
def test_the_actor_and_the_trainer_run_as_they_stand(serve):
    service = serve(**{"planner.batch_groups": 1})
    port = service.url.rpartition(":")[2]
    environment = os.environ | {"HEADRACE_QUEUE__DIR": str(service.queue_dir)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER_SETTING + block("trainer") + "print(json.dumps(steps))"],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    actor = block("actor").replace(":8421", f":{port}")
    assert len(block("actor").strip().splitlines()) <= 12
    assert len(block("trainer").strip().splitlines()) <= 12
    subprocess.run([sys.executable, "-c", ACTOR_SETTING + actor], check=True, timeout=60)
    while service.books()["committed"] < 16:
        assert trainer.poll() is None
    assert service.stop() == 0
    output, _ = trainer.communicate(timeout=30)
    assert trainer.returncode == 0
    sums = json.loads(output)
    assert len(sums) == 3
    assert len(set(sums)) == 3, "each step changed the weights"


def test_the_settings_page_is_what_the_code_has():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page.endswith(settings_table() + "\n"), "run: headrace settings"


def test_settings_that_the_pages_name_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings([])
    sections = {"schema": settings.run_schema} | {
        name: getattr(settings, name) for name in type(settings).model_fields
    }
    for page in (README, *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))):
        for section, key in re.findall(r"`(?:--)?([a-z_]+)\.([a-z_]+)[` ]", page):
            if section in sections and (section, key) != ("trainer", "commit"):
                assert hasattr(sections[section], key), f"{section}.{key}"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def test_every_refusal_is_documented():
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("http.md", "security.md"))
    waiting = [Refused]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind is not Refused:
            assert f"`{kind.code}`" in pages, kind
            assert str(kind.status) in pages, kind
