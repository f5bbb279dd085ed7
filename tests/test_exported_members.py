"""`__all__` is the public surface: what is promised is in it, and every name in it is there."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import headrace.client
import headrace.schemas

PROMISED = {
    "headrace.schemas": {
        "CROSS_ENTROPY_IGNORE_IDX",
        "Datum",
        "PackedSeqParams",
        "collate_datums",
        "packed_seq_params_from_doc_ids",
        "to_flash_attention_kwargs",
    },
    "headrace.client": {
        "Backlog",
        "PolicyInfo",
        "Report",
        "AsyncRolloutClient",
        "RolloutClient",
        "Trainer",
    },
}

MODULES = sorted(
    module.name
    for package in (headrace.schemas, headrace.client)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


@pytest.mark.parametrize("package", sorted(PROMISED))
def test_what_is_promised_is_exported_and_resolves(package: str) -> None:
    module = importlib.import_module(package)
    assert PROMISED[package] <= set(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name), name
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'Dataum'"):
        _ = module.Dataum


@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_says_what_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert len(names) == len(set(names))
    for exported in names:
        assert hasattr(module, exported), exported
