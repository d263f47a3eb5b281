"""Who gets in: token, host name, foreign pages; and a dashboard that only shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from rsmq.dashboard.login_limit import OF_ADDRESS
from tests.cli.conftest import Cli

TOKEN = "a-token-of-thirty-two-characters"


@pytest.fixture(scope="module")
def url(open_dashboard: Callable[..., str], scene: Cli) -> str:
    """The address of a dashboard that only shows, to those who know the token."""
    (scene.directory / "token").write_text(TOKEN + "\n")
    return open_dashboard("--token-file", "token", "--name", "queue.example.com")


def test_token_opens_the_dashboard(url: str, page: Page, scene: Cli) -> None:
    """Without or with a wrong token there is only the form; with it all pages, without changes."""
    scene.ok("publish", "orders", "1")
    page.goto(url)
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
    page.goto(f"{url}delayed/orders")
    expect(page.get_by_text("0 delayed messages", exact=True)).to_be_visible()
    assert page.get_by_role("button").count() == 0
    refused = page.request.post(f"{url}do/purge", form={"topic": "orders"})
    assert (refused.status, "it takes the role admin" in refused.text()) == (403, True)


@pytest.fixture
def visitor(url: str) -> Iterator[httpx.Client]:
    """One who knows the token."""
    with httpx.Client(base_url=url) as client:
        assert client.post("/login", data={"token": TOKEN}).status_code == 303
        yield client


def test_pages_events_and_actions_need_the_token(url: str, visitor: httpx.Client) -> None:
    """They are refused without it; style and script are the same for all visitors."""
    assert visitor.get("/").status_code == 200
    with httpx.Client(base_url=url) as stranger:
        answers = [stranger.get("/"), stranger.get("/?live=1"), stranger.post("/do/purge", data={"topic": "orders"})]
        assert [each.status_code for each in answers] == [401] * 3
        assert stranger.get("/static/style.css").status_code == 200
        assert stranger.get("/static/%2e%2e/app.py").status_code in (401, 404)


def test_request_of_another_site_is_refused(visitor: httpx.Client) -> None:
    """A page of another site may have the visitor's cookie: it is refused by host and origin."""
    foreign = {"Origin": "http://evil.example"}
    assert visitor.post("/do/purge", headers=foreign, data={"topic": "orders"}).status_code == 403
    assert visitor.get("/?live=1", headers=foreign).status_code == 403
    assert visitor.get("/", headers={"Host": "evil.example"}).status_code == 421
    named = visitor.get("/", headers={"Host": f"queue.example.com:{visitor.base_url.port}"})
    assert (named.status_code, named.headers["x-frame-options"]) == (200, "DENY")
    assert "default-src 'self'" in named.headers["content-security-policy"]


def test_right_token_is_not_limited(url: str) -> None:
    """A script may log in more often than the limit allows guesses."""
    with httpx.Client(base_url=url) as client:
        answers = {client.post("/login", data={"token": TOKEN}).status_code for _ in range(2 * OF_ADDRESS.attempts)}
    assert answers == {303}


def test_guessing_is_slowed_down(url: str, visitor: httpx.Client) -> None:
    """After some wrong tokens an address gets 429 with the time to wait.

    `test_login_limit.py` guesses hundreds of times, and waits until the right one is let in.
    """
    with httpx.Client(base_url=url) as guesser:
        answers = (guesser.post("/login", data={"token": f"guess {n}"}) for n in range(100))
        assert next(answers).status_code == 401
        refusal = next(each for each in answers if each.status_code == 429)
        assert 1 <= int(refusal.headers["retry-after"]) <= 3
        assert f"try again in {refusal.headers['retry-after']} s" in refusal.text
        assert visitor.get("/").status_code == 200, "who is logged in is not affected"


WRONG = [
    (2, ("--host", "0.0.0.0")),
    (2, ("--token-file", "short")),
    (2, ("--host", "192.0.2.1")),
    (1, ("--url", "redis://127.0.0.1:1/0")),
]


@pytest.mark.parametrize(("code", "args"), WRONG)
def test_wrong_options_are_exit_code_2(scene: Cli, code: int, args: tuple[str, ...]) -> None:
    """One line: a missing host name, a short token, an address that cannot be used, an unreachable server."""
    (scene.directory / "short").write_text("1234")
    result = scene("dashboard", "--port", "0", *args, RSMQ_UNAVAILABLE_TIMEOUT="PT0.1S")
    assert result.returncode == code, result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_public_address_gets_a_new_token(open_dashboard: Callable[..., str], start: Callable[..., object]) -> None:
    """On an address other than this machine's own it asks for a token that it has printed."""
    url = open_dashboard("--host", "0.0.0.0", "--name", "localhost")
    assert httpx.get(url.replace("0.0.0.0", "localhost")).status_code == 401
