"""Bearer tokens: what a file or an environment variable says, and which token a secret is.

    name role secret [expires]        one token a line; lines that begin with # are comments
    actors  rollout 3gWm...           name     [a-z0-9][a-z0-9_.-]{0,62}, shown in logs and status
    learner trainer mT0q... 2027-01-01T00:00:00Z
                                      role     rollout | trainer | viewer
                                      secret   16 to 256 of A-Z a-z 0-9 - . _ ~ + / =
                                      expires  date or date and time, UTC unless it says otherwise

Invariants: a secret is kept as its SHA-256 digest only, and no message shows any word of a line,
since words may stand in the wrong order. A name may come several times with one role, so that a
secret can be changed without a gap; a secret comes once. A source that is set and names no token is
an error: it would open the door.

Used by the Guard (auth.py), which never looks at a file itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from headrace.schemas.errors import SettingsError
from headrace.service.settings import NAME_PATTERN, TOKENS_VARIABLE

__all__ = ["Role", "Token", "find_token", "load_tokens", "parse_tokens"]

Role = Literal["rollout", "trainer", "viewer"]

ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
SECRET = re.compile(r"[A-Za-z0-9\-._~+/=]{16,256}")
FILE_BYTES = 1 << 20
MOST_TOKENS = 1000  # a request is compared with each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One line of a tokens file."""

    name: str
    role: Role
    digest: bytes = field(repr=False)  # SHA-256 of the secret, 32 bytes
    expires: float | None = None  # Unix time in seconds; None: never

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


def find_token(tokens: Sequence[Token], secret: bytes) -> Token | None:
    """The token that `secret` is. Looks at every token whichever it is, so that the time taken
    tells nothing.
    """
    digest = hashlib.sha256(secret).digest()
    found = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def load_tokens(path: Path | None) -> tuple[Token, ...]:
    """The tokens of the file `path` and of the environment's HEADRACE_TOKENS, where they are set.

    Raises SettingsError, and then the caller's tokens are as they were.
    """
    lines: list[tuple[str, str]] = []
    if path is not None:
        lines += _numbered(f"auth.tokens_file = {path}", _read(path).splitlines())
    variable = os.environ.get(TOKENS_VARIABLE)
    if variable is not None:
        lines += _numbered(TOKENS_VARIABLE, re.split(r"[\n;]", variable))
    return parse_tokens(lines) if path is not None or variable is not None else ()


def parse_tokens(lines: Sequence[tuple[str, str]]) -> tuple[Token, ...]:
    """The tokens of `lines`, each with the place that an error names. At least one."""
    roles: dict[str, tuple[Role, str]] = {}
    places: dict[bytes, str] = {}
    tokens: list[Token] = []
    for place, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        token = _token(place, line.split())
        role, first = roles.setdefault(token.name, (token.role, place))
        if role != token.role:
            raise SettingsError(f"{place}: this name has another role in {first}: give it one role")
        if token.digest in places:
            raise SettingsError(
                f"{place}: the secret is that of {places[token.digest]}: every token has its own"
            )
        places[token.digest] = place
        tokens.append(token)
    if not tokens:
        raise SettingsError(
            f"{lines[0][0] if lines else 'auth.tokens_file'}: no token there: write lines of "
            "name, role, secret, or drop the setting"
        )
    if len(tokens) > MOST_TOKENS:
        raise SettingsError(f"{lines[0][0]}: got {len(tokens)} tokens, want at most {MOST_TOKENS}")
    return tuple(tokens)


def _token(place: str, words: list[str]) -> Token:
    if len(words) not in (3, 4):
        raise SettingsError(f"{place}: got {len(words)} words, want name role secret [expires]")
    name, role, secret, *expires = words
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise SettingsError(f"{place}: word 1 is no name: want {NAME_PATTERN[1:-1]}")
    matching = ROLES.get(role)
    if matching is None:
        raise SettingsError(f"{place}: word 2 is no role: want one of {', '.join(ROLES)}")
    if SECRET.fullmatch(secret) is None:
        raise SettingsError(
            f"{place}: word 3 is no secret: got {len(secret)} characters, want 16 to 256 of "
            "A-Z a-z 0-9 - . _ ~ + / = (make one with: openssl rand -hex 32)"
        )
    return Token(
        name=name,
        role=matching,
        digest=hashlib.sha256(secret.encode("ascii")).digest(),
        expires=_moment(place, expires[0]) if expires else None,
    )


def _moment(place: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(
            f"{place}: word 4 is no time: want an ISO date or date and time, for instance "
            "2027-01-31 or 2027-01-31T12:00:00Z"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _numbered(source: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines or [""], 1):
        yield f"{source}, line {number}", line


def _read(path: Path) -> str:
    """The file's text, if nobody else may read or change it."""
    what = f"auth.tokens_file = {path}"
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            _check_owner(what, os.fstat(file.fileno()), path)
            text = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{what}: {error.strerror}") from error
    if len(text) > FILE_BYTES:
        raise SettingsError(f"{what}: more than {FILE_BYTES} bytes")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SettingsError(f"{what}: not UTF-8") from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer


def _check_owner(what: str, status: os.stat_result, path: Path) -> None:
    mode, uid = stat.S_IMODE(status.st_mode), os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        raise SettingsError(f"{what}: not a regular file")
    if mode & 0o027:
        raise SettingsError(
            f"{what}: its mode is {mode:04o}, want 0600 (or 0640), since others may read or "
            f"change the secrets: chmod 600 {path}"
        )
    if status.st_uid not in (0, uid):
        raise SettingsError(
            f"{what}: it belongs to uid {status.st_uid}, want {uid}, which the service runs as, "
            f"or 0: chown {uid} {path}"
        )
