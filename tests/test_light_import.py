"""An environment worker pays for httpx, msgpack, numpy and stamina, and for nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "fastapi", "starlette", "uvicorn", "pydantic", "msgspec", "typer", "transformers"]


def loaded_by(code: str) -> list[str]:
    look = f"import sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{look}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import headrace.schemas",
        "import headrace.client",
        "from headrace.client import RolloutClient, PolicyInfo, Report",
        "import headrace.schemas.wire, headrace.schemas.errors, headrace.schemas.step",
        "import headrace.schemas.layout, headrace.schemas.fields, headrace.schemas.ring",
        "from headrace.client import RolloutClient\n"
        "c = RolloutClient('http://127.0.0.1:9', deadline_s=0)\n"
        "c.submit({'input_ids': [1]}, policy_version=0)\n"
        "assert len(c.close().failed) == 1",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert loaded_by(code) == []


@pytest.mark.slow
def test_naming_a_torch_bound_name_loads_torch() -> None:
    assert "torch" in loaded_by("from headrace.schemas import Datum")
