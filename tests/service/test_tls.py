"""https, with and without client certificates, on certificates that the `openssl` of this machine makes."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.schemas.errors import SettingsError
from headrace.service.settings import load_settings

MSGPACK = {"Content-Type": "application/msgpack"}
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_ca(folder: Path, name: str) -> None:
    """`name`.pem and `name`.key: an authority."""
    openssl(
        folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}",
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip


def make_certificate(folder: Path, name: str, ca: str) -> None:
    """`name`.pem and `name`.key, signed by `ca`, for 127.0.0.1."""
    openssl(
        folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}",
    )  # fmt: skip
    (folder / "names").write_text(
        "subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n"
    )
    openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
        "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem",
    )  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for ca in ("ours", "theirs"):
        make_ca(folder, ca)
    for name, ca in (("server", "ours"), ("actor", "ours"), ("stranger", "theirs")):
        make_certificate(folder, name, ca)
    return folder


def trusting(folder: Path, ca: str = "ours", own: str | None = None) -> ssl.SSLContext:
    """A client's context that trusts `ca`, with the certificate `own`."""
    context = ssl.create_default_context(cafile=str(folder / f"{ca}.pem"))
    if own is not None:
        context.load_cert_chain(folder / f"{own}.pem", folder / f"{own}.key")
    return context


def tls(folder: Path, **more: object) -> dict[str, object]:
    files = {"server.tls_cert": folder / "server.pem", "server.tls_key": folder / "server.key"}
    return files | {f"server.{name}": value for name, value in more.items()}


@pytest.mark.slow
def test_https_is_spoken_and_nothing_else(serve, posts, certificates):
    service = serve(**tls(certificates, head_timeout_s=1))
    assert service.url.startswith("https://127.0.0.1:")
    body = posts.body(posts.datum())
    with httpx.Client(base_url=service.url, verify=trusting(certificates)) as client:
        for _ in range(2):
            answer = client.post("/v1/datums", content=body, headers=MSGPACK)
            assert answer.status_code == 202, answer.text
        refused = client.post("/v1/datums", content=b"x" * (8 << 20), headers=MSGPACK)
        assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
        # A client that trusts another authority, one that speaks plain HTTP, one that says nothing.
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(service.url + "/healthz", verify=trusting(certificates, "theirs"))
        plain = service.url.replace("https", "http")
        with httpx.Client(verify=False) as other, pytest.raises(httpx.TransportError):
            other.get(plain + "/healthz")
        with socket.create_connection(address(service), timeout=10) as silent:
            assert silent.recv(1) == b"", "a handshake has the time of a head"
        assert client.get("/healthz").status_code == 204
        assert service.stop() == 0, "an idle connection does not hold it"
    assert "Traceback" not in service.stderr.read_text()


@pytest.mark.slow
def test_slow_and_large_heads_are_refused_under_tls_too(serve, certificates):
    service = serve(**tls(certificates, head_timeout_s=1))
    context = trusting(certificates)

    def said(data: bytes) -> bytes:
        connection = socket.create_connection(address(service), timeout=10)
        with context.wrap_socket(connection, server_hostname="127.0.0.1") as secure:
            secure.sendall(data)
            return secure.recv(65536)

    assert said(b"GET /healthz HTTP/1.1\r\n").startswith(b"HTTP/1.1 408")
    assert said(b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000).startswith(b"HTTP/1.1 431")
    assert service.stop() == 0


def test_client_certificates_are_asked_for(serve, posts, certificates):
    service = serve(**tls(certificates, tls_client_ca=certificates / "ours.pem"))
    body = posts.body(posts.datum())
    for own in (None, "stranger"):
        context = trusting(certificates, own=own)
        client = httpx.Client(base_url=service.url, verify=context)
        # TLS 1.3 tells the client with its first answer, 1.2 in the handshake.
        with client, pytest.raises(httpx.TransportError):
            client.post("/v1/datums", content=body, headers=MSGPACK)
    context = trusting(certificates, own="actor")
    with httpx.Client(base_url=service.url, verify=context) as client:
        assert client.post("/v1/datums", content=body, headers=MSGPACK).status_code == 202
        assert client.get("/v1/status").json()["books"]["accepted"] == 1
    assert "Traceback" not in service.stderr.read_text()


def test_tls_files_that_cannot_be_used_end_with_exit_2(serve, certificates):
    wrong = {"server.tls_key": certificates / "actor.key"}
    with pytest.raises(RuntimeError, match=r"exit 2: headrace: server\.tls_cert = .*server\.pem"):
        serve(**(tls(certificates) | wrong))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--server.tls_cert=a.pem"], ["server.tls_cert", "server.tls_key"]),
        (["--server.tls_key=a.key"], ["server.tls_cert", "server.tls_key"]),
        (["--server.tls_client_ca=ca.pem"], ["server.tls_client_ca", "server.tls_cert"]),
        (["--server.host=0.0.0.0"], ["server.host", "auth.tokens_file", "server.insecure", "HEADRACE_TOKENS"]),
        (["--server.host=example.org"], ["server.host", "server.insecure"]),
    ],
)  # fmt: skip
def test_what_a_bind_needs(flags, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_TOKENS", raising=False)
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    for name in names:
        assert name in str(caught.value)


def test_tokens_or_insecure_open_other_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_TOKENS", raising=False)
    for flags in (["--server.insecure=true"], ["--auth.tokens_file=tokens"]):
        assert load_settings(["--server.host=0.0.0.0", *flags]).server.host == "0.0.0.0"
    for host in ("127.0.0.7", "::1", "localhost"):
        assert load_settings([f"--server.host={host}"]).server.host == host


def address(service: Any) -> tuple[str, int]:
    host, _, port = service.url.removeprefix("https://").rpartition(":")
    return host, int(port)
