"""AccessControl in front of an application that always answers yes."""

from __future__ import annotations

import httpx
import pytest
from starlette.responses import PlainTextResponse

from rsmq.dashboard.access import COOKIE, LOOPBACK, AccessControl, Rules, is_allowed, is_own


def visit(rules: Rules, host: str = "localhost:1", root: str = "") -> httpx.AsyncClient:
    """A client in front of AccessControl."""
    transport = httpx.ASGITransport(AccessControl(PlainTextResponse("yes"), rules), root_path=root)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


@pytest.mark.parametrize(
    ("host", "is_in"),
    [
        ("localhost", True), ("localhost:8642", True), ("LOCALHOST", True), ("127.0.0.1:1", True), ("[::1]:80", True),
        ("", False), ("evil.example", False), ("localhost.evil.example", False), ("evil.example@localhost", False),
        ("localhost@evil.example", False), ("[", False), ("127.0.0.1.evil.example", False),
    ],
)  # fmt: skip
def test_host_header_must_be_an_accepted_name(host: str, is_in: bool) -> None:
    """The port does not matter."""
    assert is_allowed(host, Rules().hosts) is is_in


async def test_without_token_every_visitor_is_let_in() -> None:
    """This is for the own machine only."""
    async with visit(Rules()) as client:
        answer = await client.get("/")
        assert (answer.text, answer.headers["x-frame-options"]) == ("yes", "DENY")
        assert (await client.get("/", headers={"Origin": "http://localhost:1"})).text == "yes"
        assert (await client.get("/", headers={"Origin": "http://localhost:2"})).status_code == 403
        assert (await client.get("/", headers={"Origin": "null"})).status_code == 403
    async with visit(Rules(), "evil.example") as client:
        assert (await client.get("/")).status_code == 421


async def test_cookie_is_set_for_the_right_token_only() -> None:
    """The form works below a mount path, too."""
    async with visit(Rules(token="secret-enough"), root="/ops") as client:
        refused = await client.get("/ops/")
        assert (refused.status_code, 'action="/ops/login"' in refused.text) == (401, True)
        for wrong in ({"token": "secret"}, {"token": ""}, {}, {"token": "ä" * 10}):
            assert (await client.post("/ops/login", data=wrong)).status_code == 401
        assert (await client.post("/ops/login", data={"token": "x" * 10_000})).status_code == 413
        assert (await client.get("/ops/", headers={"Origin": "http://[", "Host": "localhost:1"})).status_code == 403
        assert (await client.get("/ops/", headers={"Cookie": f"{COOKIE}_1=ä; ;=;".encode()})).status_code == 401
        answer = await client.post("/ops/login", data={"token": "secret-enough"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ops/")
        assert "secret" not in answer.headers["set-cookie"]
        assert (await client.get("/ops/")).text == "yes"
    assert "secret" not in repr(Rules(token="secret-enough"))


async def test_cookies_of_other_programs_on_the_same_host_do_not_matter() -> None:
    """Such as JSON of another program, and that of a second dashboard: a browser sends those of a host to each port."""
    tokens = ("token-of-staging", "token-of-production")
    async with visit(Rules(token=tokens[0]), "localhost:1") as one, visit(Rules(token=tokens[1]), "localhost:2") as two:
        made = list[str]()
        for each, token in zip((one, two), tokens, strict=True):
            answer = await each.post("/login", data={"token": token})
            made.append(answer.headers["set-cookie"].partition(";")[0])
        sent = {"Cookie": "; ".join(('theme={"is dark": [true]}', *made))}
        for each in (one, two):
            each.cookies.clear()
            assert (await each.get("/", headers=sent)).text == "yes"


@pytest.mark.parametrize(
    ("host", "origin", "is_ours"),
    [
        ("ops.example.com", "https://ops.example.com", True),
        ("ops.example.com:443", "https://ops.example.com", True),
        ("ops.example.com", "https://ops.example.com:8443", True),
        ("127.0.0.1:8642", "https://ops.example.com", True),  # nginx and Apache pass the upstream's Host by default
        ("ops.example.com", "https://evil.example.net", False),
        ("ops.example.com", "https://ops.example.com.evil.net", False),
        ("localhost:8642", "http://localhost:8642", True),
        ("localhost", "http://localhost:80", True),
        ("localhost:8642", "http://localhost:3000", False),  # another program of this machine
        ("localhost:8642", "http://127.0.0.1:8642", False),
        ("localhost:8642", "null", False),
        ("localhost:8642", "http://[", False),
        ("localhost:8642", "http://localhost:x", False),
        ("localhost:8642", "file://localhost:8642", False),
    ],
)
def test_an_origin_is_ours_by_the_host_or_by_a_name_that_was_added(host: str, origin: str, is_ours: bool) -> None:
    assert is_own(origin, host, {*LOOPBACK, "ops.example.com"}) is is_ours
