"""Settings: sources and their order, and every pair that cannot both hold."""

from __future__ import annotations

import pytest

from headrace.schemas.errors import SettingsError
from headrace.service.settings import load_settings


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_flags_before_environment_before_file_before_defaults(tmp_path, monkeypatch):
    (tmp_path / "headrace.toml").write_text(
        '[run]\nname = "file"\n[queue]\nbytes = "16MiB"\nmode = 0o640\n[planner]\nmicrobatch_tokens = 512\n'
    )
    monkeypatch.setenv("HEADRACE_QUEUE__BYTES", "24MiB")
    monkeypatch.setenv("HEADRACE_PLANNER__BATCH_SIZE", "5")
    settings = load_settings(["--planner.batch_size", "7", "--queue.replicas", "2"])
    assert settings.run.name == "file"
    assert settings.queue.bytes == 24 << 20
    assert settings.queue.mode == 0o640
    assert (settings.batch_size, settings.queue.replicas) == (7, 2)
    assert settings.max_sequence_tokens == 512
    assert load_settings(["--queue.mode", "0660"]).queue.mode == 0o660


def test_a_step_is_measured_by_64_datums_unless_told_otherwise():
    assert load_settings([]).batch_size == 64
    assert load_settings(["--planner.batch_groups", "4"]).batch_size is None


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--planner.batch_size=3", "--planner.batch_groups=3"], ["planner.batch_size", "planner.batch_groups"]),
        (["--spool.segment_bytes=8MiB"], ["spool.segment_bytes", "limits.max_body_bytes"]),
        (["--limits.max_sequence_tokens=9", "--planner.microbatch_tokens=8"], ["limits.max_sequence_tokens", "planner.microbatch_tokens"]),
        (["--queue.bytes=1MiB"], ["queue.bytes", "planner.microbatch_tokens"]),
        (["--server.host=0.0.0.0"], ["server.host", "loopback"]),
        (["--run.name=../x"], ["run.name"]),
        (["--planner.layout=flat"], ["planner.layout", "'thd'"]),
        (["--queue.bytes=lots"], ["queue.bytes", "lots"]),
    ],
)  # fmt: skip
def test_contradictions_name_both_settings(flags, names):
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    for name in names:
        assert name in str(caught.value)


def test_unknown_names_are_errors(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        load_settings(["--queue.bites", "1MiB"])
    assert ended.value.code == 2
    assert "--queue.bites" in capsys.readouterr().err
    (tmp_path / "own.toml").write_text("[queue]\nbites = 3\n")
    with pytest.raises(SettingsError, match=r"queue\.bites: no such setting"):
        load_settings([], tmp_path / "own.toml")
    monkeypatch.setenv("HEADRACE_RUN__NOM", "x")
    with pytest.raises(SettingsError, match=r"run\.nom: no such setting"):
        load_settings([])


def test_a_named_file_must_be_there(tmp_path):
    with pytest.raises(SettingsError, match="no such file"):
        load_settings([], tmp_path / "missing.toml")
