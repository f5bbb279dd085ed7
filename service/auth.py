"""Who may do what: the Guard that every route but the health routes asks, before it reads a body.

    tokens are configured    a known `Authorization: Bearer` (401), a role that may (403)
    no tokens are            everybody on this machine is a trainer: the peer is a loopback address
                             (401) unless server.insecure; Host is a name of this service (421)
    either, changing state   an Origin is the service's own (403), and the content type is none that
                             a web page can send without asking first (415)

Host, Origin and content type are looked at because of the browser of someone who works on this
machine: a page in it reaches loopback addresses under the page's own name (DNS rebinding), or with
a form. No answer of ours lets another origin ask for more.

A trainer may do all that the other roles may. Names leave this module, secrets never. `reload`
reads the tokens again; a source that is bad then changes nothing. A request under way goes on as
whom it began.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv6Address, ip_address
from typing import Literal

from starlette.datastructures import Headers

from headrace.schemas.errors import (
    Forbidden,
    ForeignOrigin,
    NotLoopback,
    SettingsError,
    TokenExpired,
    Unauthorized,
    UnsupportedMedia,
)
from headrace.service.refusals import shown
from headrace.service.settings import Settings
from headrace.service.tokens import Role, find_token, load_tokens

__all__ = ["Guard", "Identity", "Need"]

log = logging.getLogger(__name__)

Need = Literal["any", "rollout", "trainer", "viewer"]

MAY: Mapping[Role, frozenset[Need]] = {
    "rollout": frozenset(("any", "rollout")),
    "trainer": frozenset(("any", "rollout", "trainer", "viewer")),
    "viewer": frozenset(("any", "viewer")),
}
MEDIA = (
    "application/json",
    "application/msgpack",
    "application/x-msgpack",
    "application/vnd.msgpack",
)
BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)
AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is: the token's name (empty where no tokens are configured) and its role."""

    name: str
    role: Role


NOBODY = Identity("", "trainer")


class Guard:
    """Made once by the app; `check` is called for each request, `reload` on SIGHUP."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError where tokens cannot be read, or an allowed host is no name."""
        self._path = settings.auth.tokens_file
        self._tokens = load_tokens(self._path)
        self._insecure = settings.server.insecure
        self._allowed = frozenset(_name(text) for text in settings.server.allowed_hosts)
        host = settings.server.host
        # A wildcard address is no name of this service; browsers take it for loopback.
        own = set() if _is_ip(host) and ip_address(host).is_unspecified else {_plain(host)}
        self._hosts = self._allowed | own
        self._warn_of_expired()

    def __repr__(self) -> str:
        return f"Guard(tokens={len(self._tokens)})"

    def check(
        self, headers: Headers, *, client_host: str | None, role: Need, changes_state: bool
    ) -> Identity:
        """Whose request it is, if it may. `client_host`: the peer's address, None on a Unix socket.

        Raises Unauthorized, TokenExpired, Forbidden, ForeignOrigin, NotLoopback or
        UnsupportedMedia.
        """
        identity = self.identify(headers, client_host=client_host)
        self.allow(identity, headers, role=role, changes_state=changes_state)
        return identity

    def identify(self, headers: Headers, *, client_host: str | None) -> Identity:
        """The first half of `check`. Raises Unauthorized, TokenExpired or NotLoopback."""
        if not self._tokens:
            self._check_peer(client_host)
        if not self._tokens or self._allowed:
            self._check_host(headers)
        return self._holder(headers) if self._tokens else NOBODY

    def allow(
        self, identity: Identity, headers: Headers, *, role: Need, changes_state: bool
    ) -> None:
        """The second half. Raises Forbidden, ForeignOrigin or UnsupportedMedia."""
        if role not in MAY[identity.role]:
            raise Forbidden(
                f"token {identity.name!r} has the role {identity.role}, this route wants "
                f"{role}: use another token"
            )
        if changes_state:
            self._check_origin(headers)
            _check_media(headers)

    def reload(self) -> None:
        """Read the tokens again. Where that fails, the ones there are stay, and a line says why."""
        before = self._tokens
        try:
            self._tokens = load_tokens(self._path)
        except SettingsError as error:
            log.error("the %d tokens stay as they were: %s", len(before), error)
            return
        added, gone = set(self._tokens) - set(before), set(before) - set(self._tokens)
        log.info(
            "tokens read again: %d, of them %d new; %d gone",
            len(self._tokens),
            len(added),
            len(gone),
        )
        self._warn_of_expired()

    def _warn_of_expired(self) -> None:
        now = time.time()
        names = sorted({token.name for token in self._tokens if token.expired(now)})
        if names:
            log.warning("tokens that have expired: %s", ", ".join(names))

    def _holder(self, headers: Headers) -> Identity:
        given = headers.getlist("authorization")
        if not given:
            raise Unauthorized("Authorization: got none, want a token: Authorization: Bearer ...")
        bearer = BEARER.fullmatch(given[0].strip())
        if len(given) > 1 or bearer is None:
            raise Unauthorized(
                "Authorization: got another form, want one header of the form: Bearer ..."
            )
        token = find_token(self._tokens, bearer[1].encode("latin-1"))
        if token is None:
            raise Unauthorized(
                "Authorization: the token is not known here: ask who runs the service for one"
            )
        if token.expired(time.time()):
            assert token.expires is not None
            ended = datetime.fromtimestamp(token.expires, UTC).isoformat(timespec="seconds")
            raise TokenExpired(
                f"token {token.name!r} expired at {ended}: ask who runs the service for another"
            )
        return Identity(token.name, token.role)

    def _check_peer(self, client_host: str | None) -> None:
        if self._insecure or client_host is None or not _is_ip(client_host):
            return
        if not _is_loopback(client_host):
            raise Unauthorized(
                f"the client's address is {client_host}: without tokens only this machine may "
                "ask; set auth.tokens_file"
            )

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        authority = AUTHORITY.fullmatch(given[0]) if len(given) == 1 else None
        if authority is None or not self._is_own(authority[1]):
            got = shown(", ".join(given)) if given else "none"
            raise NotLoopback(
                f"Host: got {got}, want localhost, a loopback address or a name of "
                "server.allowed_hosts"
            )

    def _is_own(self, host: str) -> bool:
        plain = _plain(host)
        return plain == "localhost" or plain in self._hosts or _is_loopback(plain)

    def _check_origin(self, headers: Headers) -> None:
        origins = headers.getlist("origin")
        if not origins:
            return  # no browser
        scheme, _, rest = origins[0].partition("://")
        authority = AUTHORITY.fullmatch(rest)
        if len(origins) == 1 and scheme in ("http", "https") and authority is not None:
            host = headers.get("host", "")
            if rest.lower() == host.lower() or _plain(authority[1]) in self._allowed:
                return
        raise ForeignOrigin(
            f"Origin: got {shown(', '.join(origins))}, want the service's own or a name of "
            "server.allowed_hosts: pages of other origins may not change anything here"
        )


def _check_media(headers: Headers) -> None:
    given = headers.getlist("content-type")
    media = given[0].partition(";")[0].strip().lower() if given else ""
    if len(given) != 1 or media not in MEDIA:
        got = shown(", ".join(given)) if given else "none"
        raise UnsupportedMedia(f"Content-Type: got {got}, want {MEDIA[0]} or {MEDIA[1]}")


def _plain(host: str) -> str:
    """A host name or address as it is compared: lower case, no brackets, no closing dot."""
    return host.strip("[]").removesuffix(".").lower()


def _name(text: str) -> str:
    plain = _plain(text)
    if not _is_ip(plain) and re.fullmatch(r"[a-z0-9._-]+", plain) is None:
        raise SettingsError(
            f"server.allowed_hosts: got {shown(text)}, want names or addresses, without a port"
        )
    return plain


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if not _is_ip(host):
        return False
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
