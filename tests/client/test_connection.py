"""How the service is reached: TLS with real certificates, tokens that never show, clear refusals."""

from __future__ import annotations

import logging
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.client import AsyncRolloutClient, RolloutClient
from headrace.schemas.errors import ClientError, SettingsError

BOUND_S = 20.0
SECRET = "hr-5ecret"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem; server.pem and actor.pem signed by it, with their keys; other.pem, a stranger."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    for name in ("ca", "other"):
        openssl(
            "req",
            "-x509",
            *key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
        )
    for name in ("server", "actor"):
        openssl(
            "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
            "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
    return folder


def server_context(pki: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "server.pem", pki / "server.key")
    return context


def delivered(url: str, datum: Any, **arguments: Any) -> int:
    with RolloutClient(url, deadline_s=0.2, **arguments) as client:
        client.submit(datum())
        return client.flush(BOUND_S).delivered


def test_https_wants_an_authority_that_is_trusted(
    start_standin: Any, pki: Path, datum: Any
) -> None:
    standin = start_standin(server_context(pki))
    context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    assert [delivered(standin.url, datum, verify=v) for v in (pki / "ca.pem", False, context)] == [
        1
    ] * 3
    assert [delivered(standin.url, datum, verify=v) for v in (True, pki / "other.pem")] == [0, 0]


def test_a_certificate_of_the_clients_own(start_standin: Any, pki: Path, datum: Any) -> None:
    context = server_context(pki)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(pki / "ca.pem")
    standin = start_standin(context)
    trust = {"verify": pki / "ca.pem"}
    mine = (pki / "actor.pem", pki / "actor.key")
    assert delivered(standin.url, datum, cert=mine, **trust) == 1
    assert delivered(standin.url, datum, **trust) == 0
    assert delivered(standin.url, datum, cert=(pki / "other.pem", pki / "other.key"), **trust) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verify": "/nowhere/ca.pem"}, "verify: got '/nowhere/ca.pem'"),
        ({"cert": "/nowhere/me.pem"}, "cert: got '/nowhere/me.pem'"),
        (
            {"cert": "me.pem", "base_url": "http://host:1"},
            "cert: got one, and base_url='http://host:1'",
        ),
        ({"cert": "me.pem", "verify": ssl.create_default_context()}, "beside an SSLContext"),
        ({"token": "two words"}, "token: got 9 characters"),
        ({"token": ""}, "token: got 0 characters"),
        ({"base_url": f"https://me:{SECRET}@host:1"}, "use token= instead"),
        ({"compress": "br"}, "compress: got 'br'"),
        ({"on_invalid": "repair"}, "on_invalid: got 'repair'"),
    ],
)
@pytest.mark.parametrize("client", [RolloutClient, AsyncRolloutClient])
def test_arguments_that_make_no_sense(client: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        client(**({"base_url": "https://host:1"} | arguments))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "token", "message"),
    [
        (401, None, "token=: none was given; the service wants one that it knows"),
        (401, SECRET, "token=: the one given; the service wants one that it knows"),
        (403, SECRET, "token=: the one given; the service wants one whose role may do this"),
        (421, None, "'127.0.0.1' is not a name that the service answers to"),
    ],
)
def test_refusals_that_are_about_the_connection_are_final_and_say_so(
    standin: Any, datum: Any, caplog: Any, status: int, token: str | None, message: str
) -> None:
    caplog.set_level(logging.DEBUG)
    standin.judge = lambda post: (status, {"code": "no", "detail": "refused"})
    with RolloutClient(standin.url, token=token) as client:
        client.submit(datum())
        [(_, error)] = client.flush(BOUND_S).failed
        standin.script.append(status)
        with pytest.raises(ClientError, match=message) as caught:
            client.wait_policy()
        assert SECRET not in repr(client)
    assert message in str(error)
    assert error.http_status == status
    assert len(standin.received) == 1
    assert SECRET not in f"{error}{caught.value}{caplog.text}"


def test_zstd_says_what_to_install_where_it_is_missing() -> None:
    code = """
import sys
sys.modules["zstandard"] = None
from headrace.client import RolloutClient
from headrace.schemas.errors import SettingsError
try:
    RolloutClient("http://127.0.0.1:9", compress="zstd")
except SettingsError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install zstandard" in done.stdout, done.stderr
