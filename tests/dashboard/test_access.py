"""Who gets in: token, host name, foreign pages; and a dashboard that only shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.cli.conftest import Cli

TOKEN = "a-token-of-thirty-two-characters"
HANDSHAKE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(open_dashboard: Callable[..., str], scene: Cli) -> str:
    """The address of a dashboard that only shows, to those who know the token."""
    (scene.directory / "token").write_text(TOKEN + "\n")
    return open_dashboard("--token-file", "token", "--name", "queue.example.com")


def test_the_token_opens_it(place: str, page: Page, scene: Cli) -> None:
    """Without it a form, with a wrong one too; then everything, and nothing to change."""
    scene.ok("publish", "orders", "1")
    page.goto(place)
    expect(page.get_by_text("Overview", exact=True)).to_be_hidden()
    page.get_by_label("Token").fill("a guess")
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_text("That is not the token.")).to_be_visible()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_text("read-only")).to_be_visible()
    expect(page.locator("tbody tr", has_text="orders").first).to_be_visible()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    page.goto(f"{place}dead-letters/orders/billing")
    expect(page.get_by_text("0 dead letters", exact=True)).to_be_visible()
    assert page.get_by_role("button", name="purge").count() == 0
    assert page.get_by_role("button", name="replay").count() == 0


@pytest.fixture
def visitor(place: str) -> Iterator[httpx.Client]:
    """One who knows the token."""
    with httpx.Client(base_url=place) as client:
        assert client.post("/login", data={"token": TOKEN}).status_code == 303
        yield client


def test_sockets_and_files_need_the_token_too(place: str, visitor: httpx.Client) -> None:
    """Nothing is behind the form that can be had without it."""
    sid = visitor.get("/_nicegui_ws/socket.io/", params={"EIO": "4", "transport": "polling"})
    assert sid.status_code == 200
    with httpx.Client(base_url=place) as stranger:
        polling = stranger.get("/_nicegui_ws/socket.io/", params={"EIO": "4", "transport": "polling"})
        socket = stranger.get("/_nicegui_ws/socket.io/?EIO=4&transport=websocket", headers=HANDSHAKE)
        assert (polling.status_code, socket.status_code) == (401, 403)


def test_other_sites_get_nothing(visitor: httpx.Client) -> None:
    """A page of another site has the visitor's network, and perhaps the cookie: its name gives it away."""
    foreign = {"Origin": "http://evil.example"}
    path = "/_nicegui_ws/socket.io/?EIO=4&transport="
    assert visitor.get(f"{path}websocket", headers=HANDSHAKE | foreign).status_code == 403
    assert visitor.post(f"{path}polling", headers=foreign).status_code == 403
    assert visitor.get("/", headers={"Host": "evil.example"}).status_code == 421
    named = visitor.get("/", headers={"Host": "queue.example.com"})
    assert (named.status_code, named.headers["x-frame-options"]) == (200, "DENY")


WRONG = [
    (2, ("--host", "0.0.0.0")),
    (2, ("--token-file", "short")),
    (2, ("--host", "192.0.2.1")),
    (1, ("--url", "redis://127.0.0.1:1/0")),
]


@pytest.mark.parametrize(("code", "args"), WRONG)
def test_wrong_use_is_explained(scene: Cli, code: int, args: tuple[str, ...]) -> None:
    """One line: no name for every address, a guessable token, an address of somebody else, a server that is away."""
    (scene.directory / "short").write_text("1234")
    result = scene("dashboard", "--port", "0", *args, RSMQ_UNAVAILABLE_TIMEOUT="PT0.1S")
    assert result.returncode == code, result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_exposed_it_makes_a_token(open_dashboard: Callable[..., str], start: Callable[..., object]) -> None:
    """On another address than this machine's own it asks for one that it has printed."""
    place = open_dashboard("--host", "0.0.0.0", "--name", "localhost")
    assert httpx.get(place.replace("0.0.0.0", "localhost")).status_code == 401
