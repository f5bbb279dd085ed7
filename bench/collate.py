"""Collation against NeMo AutoModel 0.7.0 and against memcpy, in one process and one run.

64 datums of 256 to 4,096 tokens (int64 ids and targets, float32 weights and logprobs, one advantage
a sample) become one batch, padded and thd. The three contenders take turns, so that whatever else
the machine does meets all of them; a row gives medians in milliseconds. "memcpy" copies as many
bytes as the batch has, in one piece, into an array allocated for it.

Called by `headrace bench collate`. AutoModel's fields are None where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from headrace.schemas.collate import collate_datums
from headrace.schemas.datum import Datum

__all__ = ["run"]

DATUMS, SHORTEST, LONGEST = 64, 256, 4096
ROUNDS = 15  # of all contenders; ours and memcpy take REPEATS turns in each
REPEATS = 5

Pairs = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def run() -> list[dict[str, Any]]:
    """One row a layout: case, datums, tokens, ours_ms, automodel_ms, memcpy_ms, and the ratios."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = _pairs(np.random.default_rng(0))
        return [_row(pairs, packed=packed) for packed in (False, True)]
    finally:
        torch.set_num_threads(threads)


def _pairs(rng: np.random.Generator) -> Pairs:
    pairs: Pairs = []
    for length in rng.integers(SHORTEST, LONGEST, DATUMS, endpoint=True):
        ids = torch.from_numpy(rng.integers(0, 150_000, length))
        inputs = {
            "target_tokens": ids.roll(-1),
            "weights": torch.from_numpy((rng.random(length) < 0.7).astype(np.float32)),
            "logprobs": torch.from_numpy(-rng.random(length, dtype=np.float32)),
            "advantages": torch.tensor(rng.normal()),
        }
        pairs.append((ids, inputs))
    return pairs


def _row(pairs: Pairs, *, packed: bool) -> dict[str, Any]:
    ours = [Datum(ids, inputs) for ids, inputs in pairs]
    batch = collate_datums(ours, packed=packed)
    nbytes = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    block = np.ones(nbytes, dtype=np.uint8)

    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: collate_datums(ours, packed=packed),
        "memcpy": block.copy,
    }
    reference = _automodel()
    if reference is not None:
        theirs = [reference.Datum(ids, inputs) for ids, inputs in pairs]
        contenders["automodel"] = lambda: reference.collate_datums(theirs, packed=packed)

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            for _ in range(1 if name == "automodel" else REPEATS):
                start = perf_counter()
                call()
                times[name].append((perf_counter() - start) * 1e3)
    ms = {name: median(taken) for name, taken in times.items()}
    automodel = ms.get("automodel")
    return {
        "case": "thd" if packed else "padded",
        "datums": len(pairs),
        "tokens": sum(len(ids) for ids, _ in pairs),
        "output_mib": round(nbytes / 2**20, 2),
        "ours_ms": round(ms["ours"], 3),
        "automodel_ms": None if automodel is None else round(automodel, 3),
        "memcpy_ms": round(ms["memcpy"], 3),
        "speedup": None if automodel is None else round(automodel / ms["ours"], 1),
        "ratio_to_memcpy": round(ms["ours"] / ms["memcpy"], 2),
    }


def _automodel() -> Any:
    try:
        return import_module("nemo_automodel.components.datasets.datum")
    except ModuleNotFoundError:
        return None
