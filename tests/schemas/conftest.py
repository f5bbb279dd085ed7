"""NeMo AutoModel as installed, imported once. Parity is measured by it; absence is an error."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoModel:
    datum: Any
    packed_seq: Any


@pytest.fixture(scope="session")
def automodel() -> AutoModel:
    package = "nemo_automodel.components.datasets"
    return AutoModel(
        datum=import_module(f"{package}.datum"), packed_seq=import_module(f"{package}.packed_seq")
    )


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
