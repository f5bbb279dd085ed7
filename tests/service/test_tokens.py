"""Tokens files and HEADRACE_TOKENS: what they may say, and that no error repeats it."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.schemas.errors import SettingsError
from headrace.service.settings import load_settings
from headrace.service.tokens import MOST_TOKENS, Token, find_token, load_tokens

A, B, C = "alpha-" + "a" * 20, "beta-" + "b" * 20, "gamma-" + "c" * 20


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes, mode: int = 0o600) -> Path:
        path = tmp_path / "tokens"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    return write


def refused(path: Path | None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_tokens(path)
    return str(caught.value)


def test_a_file_has_one_token_a_line(file):
    text = f"\ufeff# name role secret\r\n\r\n  actors rollout\t{A}\r\nlearner  trainer {B}   2027-01-31\n"
    tokens = load_tokens(file(text))
    assert [(t.name, t.role) for t in tokens] == [("actors", "rollout"), ("learner", "trainer")]
    assert tokens[0].expires is None
    assert find_token(tokens, B.encode()) is tokens[1]
    assert find_token(tokens, A[:-1].encode()) is None
    assert find_token(tokens, b"") is None


@pytest.mark.parametrize(
    "text",
    ["2027-01-31T12:00:00Z", "2027-01-31T12:00", "2027-01-31T13:00:00+01:00", "20270131T120000"],
)
def test_a_time_is_utc_unless_it_says_otherwise(file, text):
    (token,) = load_tokens(file(f"a viewer {A} {text}"))
    noon = datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()
    assert token.expires == noon
    assert token.expired(noon)
    assert not token.expired(noon - 1e-3)


def test_a_date_ends_as_it_begins(file):
    (token,) = load_tokens(file(f"a viewer {A} 2027-01-31"))
    assert token.expires == datetime(2027, 1, 31, tzinfo=UTC).timestamp()


def test_a_name_may_have_two_secrets_while_one_replaces_the_other(file):
    tokens = load_tokens(file(f"actors rollout {A}\nactors rollout {B}\n"))
    assert find_token(tokens, A.encode()) == tokens[0]
    assert find_token(tokens, B.encode()) == tokens[1]


def test_the_environment_adds_to_the_file_and_is_no_setting(file, monkeypatch):
    monkeypatch.setenv("HEADRACE_TOKENS", f"b trainer {B}; c viewer {C} 2030-01-01\n# none\n")
    monkeypatch.chdir(file("").parent)
    settings = load_settings([])
    assert settings.takes_tokens
    assert [t.name for t in load_tokens(None)] == ["b", "c"]
    assert [t.name for t in load_tokens(file(f"a rollout {A}"))] == ["a", "b", "c"]
    assert B not in repr(settings)
    monkeypatch.delenv("HEADRACE_TOKENS")
    assert not load_settings([]).takes_tokens
    assert load_tokens(None) == ()
    monkeypatch.setenv("HEADRACE_AUTH__TOKENS_FILE", "here")
    assert load_settings([]).auth.tokens_file == Path("here")


WRONG = [
    ("actors rollout", "line 1: got 2 words"),
    (f"actors rollout {A} 2027-01-31 12:00", "line 1: got 5 words"),
    (f"# x\n{A}! rollout actors", "line 2: word 1 is no name"),
    (f"../actors rollout {A}", "line 1: word 1 is no name"),
    (f"{'n' * 64} rollout {A}", "line 1: word 1 is no name"),
    (f"actors {A} rollout", "line 1: word 2 is no role: want one of rollout, trainer, viewer"),
    (f"actors Rollout {A}", "line 1: word 2 is no role"),
    ("actors rollout hunter2hunter2", "line 1: word 3 is no secret: got 14 characters"),
    (f"actors rollout {A}é", "line 1: word 3 is no secret"),
    (f"actors rollout {'s' * 257}", "line 1: word 3 is no secret: got 257 characters"),
    (f"actors rollout {A} {B}", "line 1: word 4 is no time"),
    (f"a rollout {A}\nb viewer {B}\na trainer {C}", "line 3: this name has another role in .*line 1"),
    (f"a rollout {A}\n\nb viewer {A}", "line 3: the secret is that of .*line 1"),
    ("", "no token there"),
    ("# only\n\n# comments\n", "no token there"),
    ("".join(f"n{k} viewer secret-{k:016d}\n" for k in range(MOST_TOKENS + 1)), f"want at most {MOST_TOKENS}"),
    (b"actors rollout \xff\xfe" + A.encode(), "not UTF-8"),
    (b"#" * (1 << 20) + b"\n", "more than 1048576 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_an_error_names_the_line_and_none_of_its_words(file, text, message):
    path = file(text)
    said = refused(path)
    assert re.search(message, said), said
    assert str(path) in said
    words = text.split() if isinstance(text, str) else []
    for word in words:
        if len(word) > 8 and not word.startswith("comment"):
            assert word not in said


@pytest.mark.parametrize("text", ["", " ; ", "# a"])
def test_a_variable_that_is_set_names_a_token(monkeypatch, text):
    monkeypatch.setenv("HEADRACE_TOKENS", text)
    assert "HEADRACE_TOKENS, line 1: no token there" in refused(None)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o640 | 0o020, 0o602, 0o601])
def test_others_may_not_read_or_change_it(file, mode):
    path = file(f"a rollout {A}", mode)
    said = refused(path)
    assert f"{mode:04o}" in said
    assert f"chmod 600 {path}" in said


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_its_group_may_read_it(file, mode):
    assert len(load_tokens(file(f"a rollout {A}", mode))) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, which only root may")
def test_it_belongs_to_the_service_or_root(file):
    path = file(f"a rollout {A}")
    os.chown(path, 12345, -1)
    assert "it belongs to uid 12345, want 0" in refused(path)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "not a regular file" in refused(tmp_path / "fifo")
    assert "Is a directory" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "missing")


def test_a_token_shows_no_digest(file):
    (token,) = load_tokens(file(f"a rollout {A}"))
    assert repr(token) == "Token(name='a', role='rollout', expires=None)"
    assert isinstance(token, Token)
