"""The Guard: who is let in, by unit and through a real service, where the table of docs/security.md
is what happens.
"""

from __future__ import annotations

import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from headrace.schemas.errors import (
    Forbidden,
    ForeignOrigin,
    NotLoopback,
    Refused,
    SettingsError,
    TokenExpired,
    Unauthorized,
    UnsupportedMedia,
)
from headrace.service.app import create_app
from headrace.service.auth import Guard, Identity
from headrace.service.settings import load_settings

ROOT = Path(__file__).parent.parent.parent
SECRETS = {role: f"{role}-{'0123456789abcdef' * 3}" for role in ("rollout", "viewer", "trainer")}
MSGPACK = ("Content-Type", "application/msgpack")


@pytest.fixture
def tokens_file(tmp_path):
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("".join(f"the-{role} {role} {SECRETS[role]}\n" for role in SECRETS))
    return path


@pytest.fixture
def guard(tmp_path, monkeypatch):
    """Guards of settings: `guard("--server.allowed_hosts", "node7")`."""
    monkeypatch.chdir(tmp_path)
    return lambda *flags: Guard(load_settings([str(flag) for flag in flags]))


def check(
    guard: Guard, *headers: tuple[str, str], role="viewer", changes=False, peer="127.0.0.1"
) -> Identity:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return guard.check(Headers(raw=raw), client_host=peer, role=role, changes_state=changes)


def _from_variable() -> Guard:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_TOKENS", f"a trainer {SECRETS['trainer']}")
        return Guard(load_settings([]))


OPEN, FROM_VARIABLE = Guard(load_settings([])), _from_variable()
LOCAL = ("Host", "127.0.0.1:8421")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8421", "localhost.", "127.0.0.1", "127.8.9.1:1", "[::1]:8421", "[::ffff:127.0.0.1]"],
)  # fmt: skip
def test_loopback_names_are_everybody_and_a_trainer(host):
    assert check(OPEN, ("Host", host), role="trainer") == Identity("", "trainer")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "evil-localhost", "127.0.0.1.nip.io", "127.1", "2130706433",
        "0x7f.0.0.1", "0.0.0.0", "[::]", "[::ffff:8.8.8.8]", "10.0.0.1", "localhost:8421@evil", "evil@localhost",
        "localhost,evil", "localhost/", " ", "", "[::1", "::1", "localhost:port", "localhost:", "127.0.0.1:8421:1",
        "\xffocalhost", "localhost\x00", "a" * 30000,
    ],
)  # fmt: skip
def test_every_other_host_is_foreign(host):
    with pytest.raises(NotLoopback, match=r"server\.allowed_hosts") as caught:
        check(OPEN, ("Host", host), role="any")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isascii()


def test_a_request_has_one_host():
    for hosts in ((), (LOCAL, LOCAL), (LOCAL, ("Host", "evil"))):
        with pytest.raises(NotLoopback):
            check(OPEN, *hosts)


def test_allowed_hosts_are_names_of_the_service(guard, tokens_file):
    allowed = guard("--server.allowed_hosts", "Node7.lab,10.0.0.5")
    for host in ("node7.lab:8421", "NODE7.LAB.", "10.0.0.5", "localhost"):
        check(allowed, ("Host", host))
    with pytest.raises(NotLoopback):
        check(allowed, ("Host", "lab"))
    for name in ("node7:8421", "http://node7", "*", ""):
        with pytest.raises(SettingsError, match="without a port"):
            guard(f"--server.allowed_hosts=['{name}']".replace("'", '"'))
    bearer = ("Authorization", f"Bearer {SECRETS['viewer']}")
    check(guard("--auth.tokens_file", tokens_file), ("Host", "any.name"), bearer)
    both = guard("--auth.tokens_file", tokens_file, "--server.allowed_hosts", "node7")
    check(both, ("Host", "node7"), bearer)
    with pytest.raises(NotLoopback):
        check(both, ("Host", "any.name"), bearer)


def test_without_tokens_only_this_machine_may_ask():
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1", None):
        check(OPEN, LOCAL, peer=peer)
    for peer in ("10.0.0.9", "::ffff:10.0.0.9", "fe80::1"):
        with pytest.raises(Unauthorized, match=r"auth\.tokens_file"):
            check(OPEN, LOCAL, peer=peer)


def test_a_page_of_another_origin_changes_nothing(guard):
    port = LOCAL[1]
    for origin in (f"http://{port}", f"https://{port}"):
        check(OPEN, LOCAL, MSGPACK, ("Origin", origin), changes=True)
    for origin in ("null", "http://evil.example", "http://127.0.0.1:3000", "http://localhost:8421", f"file://{port}",
                   f"http://{port}.evil", f"http://evil@{port}", f"http://{port}/", port, "", "http://"):  # fmt: skip
        check(OPEN, LOCAL, ("Origin", origin))
        with pytest.raises(ForeignOrigin):
            check(OPEN, LOCAL, MSGPACK, ("Origin", origin), changes=True)
    with pytest.raises(ForeignOrigin):
        check(OPEN, LOCAL, MSGPACK, *[("Origin", f"http://{port}")] * 2, changes=True)
    allowed = guard("--server.allowed_hosts", "board.lab")
    check(allowed, LOCAL, MSGPACK, ("Origin", "https://board.lab:3000"), changes=True)


def test_a_form_changes_nothing():
    for media in ("application/json", "application/msgpack", "Application/JSON ; charset=utf-8", "application/x-msgpack",
                  "application/vnd.msgpack"):  # fmt: skip
        check(OPEN, LOCAL, ("Content-Type", media), changes=True)
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "*/*",
                  "text/plain;application/json", "application/json, text/plain", "application/jsonx"):  # fmt: skip
        check(OPEN, LOCAL, ("Content-Type", media))
        with pytest.raises(UnsupportedMedia):
            check(OPEN, LOCAL, ("Content-Type", media), changes=True)
    for headers in ((), (MSGPACK, ("Content-Type", "text/plain"))):
        with pytest.raises(UnsupportedMedia):
            check(OPEN, LOCAL, *headers, changes=True)


def test_a_bearer_token_in_one_header(guard, tokens_file):
    asked = guard("--auth.tokens_file", tokens_file)
    secret = SECRETS["viewer"]
    for form in (f"Bearer {secret}", f"bearer   {secret} ", f"BEARER {secret}"):
        assert check(asked, ("Authorization", form)) == Identity("the-viewer", "viewer")
    for form in ("", secret, f"Bearer{secret}", f"Basic {secret}", f"Bearer {secret} x", f"Bearer {secret},", "Bearer ",
                 f"Bearer {secret[:-1]}", f"Bearer {secret}\xe9", f"Bearer {secret.upper()}", "Bearer \xff"):  # fmt: skip
        with pytest.raises(Unauthorized) as caught:
            check(asked, ("Authorization", form))
        assert secret not in str(caught.value)
        assert caught.value.code == "unauthorized"
    with pytest.raises(Unauthorized):
        check(asked, *[("Authorization", f"Bearer {secret}")] * 2)
    with pytest.raises(Unauthorized):
        check(asked, LOCAL, peer="127.0.0.1")
    assert secret not in repr(asked) + str(vars(asked))


@pytest.mark.parametrize(
    ("has", "may"),
    [
        ("rollout", {"any", "rollout"}),
        ("viewer", {"any", "viewer"}),
        ("trainer", {"any", "rollout", "viewer", "trainer"}),
    ],
)
def test_roles(guard, tokens_file, has, may):
    asked = guard("--auth.tokens_file", tokens_file)
    bearer = ("Authorization", f"Bearer {SECRETS[has]}")
    for role in ("any", "rollout", "viewer", "trainer"):
        if role in may:
            assert check(asked, bearer, role=role).role == has
        else:
            with pytest.raises(Forbidden, match=f"'the-{has}' has the role {has}.* wants {role}"):
                check(asked, bearer, role=role)


def test_a_token_ends_when_it_says(guard, tokens_file, caplog):
    now = datetime.now(UTC)
    past, future = (now - timedelta(seconds=1)).isoformat(), (now + timedelta(hours=1)).isoformat()
    tokens_file.write_text(
        f"old viewer {SECRETS['viewer']} {past}\nnew viewer {SECRETS['trainer']} {future}\n"
    )
    asked = guard("--auth.tokens_file", tokens_file)
    assert "tokens that have expired: old" in caplog.text
    with pytest.raises(TokenExpired, match="'old' expired at 20"):
        check(asked, ("Authorization", f"Bearer {SECRETS['viewer']}"))
    check(asked, ("Authorization", f"Bearer {SECRETS['trainer']}"))


def test_a_bad_source_leaves_the_tokens_as_they_were(guard, tokens_file, caplog):
    asked = guard("--auth.tokens_file", tokens_file)
    bearer = ("Authorization", f"Bearer {SECRETS['viewer']}")
    good = tokens_file.read_text()

    def spoil(text: str | None, mode: int = 0o600) -> None:
        tokens_file.unlink(missing_ok=True)
        if text is not None:
            tokens_file.touch()
            tokens_file.write_text(text)
            tokens_file.chmod(mode)
        caplog.clear()
        asked.reload()
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert "the 3 tokens stay as they were: auth.tokens_file" in record.getMessage()
        assert not any(secret in record.getMessage() for secret in SECRETS.values())
        assert check(asked, bearer).name == "the-viewer"

    spoil(None)
    spoil("")
    spoil(good, 0o644)
    spoil(f"the-viewer admin {SECRETS['viewer']}\n")
    with pytest.raises(SettingsError, match="word 2 is no role"):
        guard("--auth.tokens_file", tokens_file)


LATIN = st.text(st.characters(max_codepoint=255), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(["host", "origin", "authorization", "content-type"]),
            LATIN | st.sampled_from(["localhost", "Bearer ", "http://[", "[::1%25eth0]", "[1.2]"]),
        ),
        max_size=6,
    ),
    peer=st.none() | LATIN | st.ip_addresses().map(str),
    role=st.sampled_from(["any", "trainer"]),
    changes=st.booleans(),
)
def test_no_header_makes_it_fail_otherwise(headers, peer, role, changes):
    for guard in (OPEN, FROM_VARIABLE):
        try:
            identity = check(guard, *headers, role=role, changes=changes, peer=peer)
        except Refused as refused:
            said = str(refused)
        else:
            said = ""
            assert guard is not FROM_VARIABLE
            assert identity == Identity("", "trainer")
        assert said.isascii()


# a real service


def roles_table() -> dict[tuple[str, str], dict[str, str]]:
    """(method, path) -> column -> cell, of docs/security.md."""
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.search(r"<!-- roles -->\n((?:\|.*\n)+)", page)
    assert rows is not None
    head, _, *body = (
        [cell.strip() for cell in row.strip("|\n").split("|")] for row in rows[1].splitlines()
    )
    table = {}
    for route, *cells in body:
        method, path = route.strip("`").split()
        table[method, path] = dict(zip(head[1:], cells, strict=True))
    return table


def test_the_table_has_every_route(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = create_app(load_settings([]))
    routes = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    plain = [route for route in app.routes if getattr(route, "path", None) is not None]
    routes |= {(method, route.path) for route in plain for method in route.methods}
    assert {route for route in routes if route[0] != "HEAD"} == set(roles_table())


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


JSON_BODIES = {
    "/v1/admission": b'{"groups": 1}',
    "/v1/groups/close": b'{"group_id": "g", "size": 2}',
    "/v1/flush": b"{}",
}


def test_every_route_with_every_role_is_as_the_table_says(serve, tokens_file, posts):
    service = serve(**{"auth.tokens_file": tokens_file, "groups.shared": True})
    body = posts.body(posts.datum())
    service.post(
        posts.body(posts.datum(group_id="g", group_size=2)),
        Authorization=f"Bearer {SECRETS['rollout']}",
    )
    for (method, path), row in roles_table().items():
        for column, cell in row.items():
            headers = {"Content-Type": "application/msgpack"}
            if column != "no token":
                headers |= bearer(SECRETS[column])
            sent = body if method == "POST" else None
            if path in JSON_BODIES:
                headers["Content-Type"] = "application/json"
                sent = JSON_BODIES[path]
            answer = service.client.request(method, path, headers=headers, content=sent)
            where = (method, path, column, answer.text)
            if cell == "yes":
                assert answer.status_code in (200, 202, 204), where
                continue
            assert answer.status_code == int(cell), where
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["code"] == {"401": "unauthorized", "403": "forbidden"}[cell]
            assert answer.headers.get("www-authenticate") == ("Bearer" if cell == "401" else None)
            assert answer.headers.get("connection") == ("close" if sent else None)
    status = service.client.get("/v1/status", headers=bearer(SECRETS["viewer"])).json()
    assert status["books"]["accepted"] == 3
    assert status["refused"]["codes"] == {"unauthorized": 7, "forbidden": 6}
    assert status["refused"]["tokens"] == {
        "the-rollout": {"forbidden": 2},
        "the-viewer": {"forbidden": 4},
    }
    _nothing_tells(service, *SECRETS.values(), also=str(status))


def _nothing_tells(service, *secrets: str, also: str = "") -> None:
    assert service.stop() == 0
    text = service.stderr.read_text() + also
    assert "refused" in text
    for secret in secrets:
        assert secret not in text


def test_sighup_reads_the_tokens_again(serve, tokens_file, wait_until):
    service = serve(**{"auth.tokens_file": tokens_file})
    old, new = SECRETS["trainer"], "new-trainer-0123456789abcdef"

    def says(secret: str) -> tuple[int, str]:
        answer = service.client.get("/v1/status", headers=bearer(secret))
        return answer.status_code, answer.json().get("code", "")

    def hang_up(text: str) -> None:
        tokens_file.write_text(text)
        service.process.send_signal(signal.SIGHUP)

    assert (says(old), says(new)) == ((200, ""), (401, "unauthorized"))
    hang_up(f"a trainer {old}\nb trainer {new}\n")  # one more
    wait_until(lambda: says(new)[0] == 200)
    assert says(old)[0] == 200
    hang_up(f"b trainer {new}\n")  # one revoked
    wait_until(lambda: says(old) == (401, "unauthorized"))
    hang_up(f"b trainer {new}\na trainer {old} 2020-01-01\n")  # one expired
    wait_until(lambda: says(old) == (401, "token_expired"))
    hang_up(f"b trainer\na trainer {old}\n")  # a bad file
    wait_until(lambda: "the 2 tokens stay as they were" in service.stderr.read_text())
    assert (says(old), says(new)) == ((401, "token_expired"), (200, ""))
    _nothing_tells(service, old, new)


def test_a_bad_source_ends_the_start_with_exit_2(serve, tokens_file, tmp_path, monkeypatch):
    tokens_file.chmod(0o644)
    with pytest.raises(
        RuntimeError, match=r"exit 2: headrace: auth\.tokens_file = .*chmod 600"
    ) as caught:
        serve(**{"auth.tokens_file": tokens_file})
    assert "Traceback" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_TOKENS", f"a {SECRETS['viewer']} viewer")
    with pytest.raises(SettingsError, match="HEADRACE_TOKENS, line 1: word 2 is no role"):
        Guard(load_settings([]))


def test_strangers_get_nothing_out_of_a_service_without_tokens(serve, posts):
    service = serve()
    body = posts.body(posts.datum())
    local = {"Content-Type": "application/msgpack"}

    def post(**headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return service.client.post("/v1/datums", content=body, headers=local | named)

    assert post(Host="rebound.example").json()["code"] == "foreign_host"
    assert post(Origin="http://evil.example").json()["code"] == "foreign_origin"
    assert post(Content_Type="text/plain").json()["code"] == "unsupported_media"
    asking = service.client.options(
        "/v1/datums",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert asking.status_code == 405
    assert not [name for name in asking.headers if name.startswith("access-control")]
    for path in ("/v1/status", "/v1/limits", "/v1/policy"):
        assert service.client.get(path, headers={"Host": "rebound.example"}).status_code == 421
    assert service.client.get("/healthz", headers={"Host": "10.1.2.3"}).status_code == 204
    proxied = service.client.get("/v1/status", headers={"X-Forwarded-For": "203.0.113.9"})
    assert (proxied.status_code, proxied.json()["code"]) == (401, "unauthorized")
    lost = service.client.post("/v1/nothing", content=body)
    assert (lost.status_code, lost.headers["connection"]) == (404, "close")
    assert service.books()["accepted"] == 0
    assert post(Origin=service.url).status_code == 202
