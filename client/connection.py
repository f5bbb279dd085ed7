"""How the service is reached: address, token, TLS. Makes the httpx clients; opens no connection.

    verify   True: the authorities that httpx trusts; a file or folder of CA certificates; an
             ssl.SSLContext; False: whoever answers, for tests only
    cert     (certificate, key) files, or one file with both, where server.tls_client_ca is set

Invariants: the token is in a header and nowhere else, not in a repr, a log or an error; proxies and
.netrc of the environment are not consulted. Called by the rollout clients.
"""

from __future__ import annotations

import re
import ssl
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from headrace.schemas.errors import SettingsError

__all__ = ["Connection", "Verify"]

Path_: TypeAlias = "str | PathLike[str]"
Verify: TypeAlias = "bool | Path_ | ssl.SSLContext"

TOKEN = re.compile(r"[!-~]+")


class Connection:
    """See the module's contract. Raises SettingsError for what cannot be an address or a token."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None,
        verify: Verify,
        cert: Path_ | tuple[Path_, Path_] | None,
        keepalive_s: float,
    ) -> None:
        self.url = httpx.URL(base_url)
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise SettingsError(f'base_url: got {base_url!r}, want one like "http://host:8421"')
        if self.url.userinfo:
            raise SettingsError("base_url: got one with a user or password; use token= instead")
        if token is not None and not TOKEN.fullmatch(token):
            raise SettingsError(
                f"token: got {len(token)} characters, want visible ASCII ones, without spaces"
            )
        secure = self.url.scheme == "https"
        if cert is not None and not secure:
            raise SettingsError(f"cert: got one, and base_url={base_url!r}; want an https address")
        self._token_given = token is not None
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {} if token is None else {"Authorization": f"Bearer {token}"},
            "limits": httpx.Limits(keepalive_expiry=keepalive_s),
            "trust_env": False,
            # Without TLS no authorities are loaded: that alone would take 20 ms.
            "verify": _context(verify, cert) if secure else False,
        }

    def client(self) -> httpx.Client:
        return httpx.Client(**self._options)

    def async_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._options)

    def hint(self, status: int) -> str:
        """What to do about a refusal that is about the connection; "" for others."""
        given = "the one given" if self._token_given else "none was given"
        return {
            401: f"; token=: {given}; the service wants one that it knows and has not expired",
            403: f"; token=: {given}; the service wants one whose role may do this",
            421: f"; {self.url.host!r} is not a name that the service answers to: use another, or "
            "add it to server.allowed_hosts",
        }.get(status, "")


def _context(verify: Verify, cert: Path_ | tuple[Path_, Path_] | None) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        if cert is not None:
            raise SettingsError("cert: got one beside an SSLContext; load it into the context")
        return verify
    try:
        if isinstance(verify, bool):
            context = httpx.create_ssl_context(verify=verify, trust_env=False)
        elif Path(verify).is_dir():
            context = ssl.create_default_context(capath=fspath(verify))
        else:
            context = ssl.create_default_context(cafile=fspath(verify))
    except OSError as error:
        raise SettingsError(
            f"verify: got {verify!r}: {error}; want a file or folder of CA certificates"
        ) from error
    if cert is not None:
        certificate, key = cert if isinstance(cert, tuple) else (cert, None)
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise SettingsError(
                f"cert: got {cert!r}: {error}; want (certificate, key) in PEM files"
            ) from error
    return context
