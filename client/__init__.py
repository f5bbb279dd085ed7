"""What users import: the rollout side, light, and the trainer side, which brings torch.

    from headrace.client import RolloutClient          httpx, msgpack, numpy, stamina
    from headrace.client import AsyncRolloutClient     the same, for asyncio
    from headrace.client import Trainer                torch as well, loaded when first named

Owns no code but the lazy look-up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.client.answers import Admission, Backlog, PolicyInfo, Report
from headrace.client.async_rollout import AsyncRolloutClient
from headrace.client.rollout import RolloutClient

if TYPE_CHECKING:
    from headrace.client.trainer import Microbatch, Step, Trainer

__all__ = [
    "Admission",
    "AsyncRolloutClient",
    "Backlog",
    "Microbatch",
    "PolicyInfo",
    "Report",
    "RolloutClient",
    "Step",
    "Trainer",
]

TRAINER_SIDE = frozenset({"Microbatch", "Step", "Trainer"})


def __getattr__(name: str) -> Any:
    if name in TRAINER_SIDE:
        try:
            return getattr(import_module("headrace.client.trainer"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"headrace.client.{name} needs torch, which is not installed: "
                "pip install 'headrace[torch]'"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
