"""The pages in a browser: live charts, messages, dead letters and their replay, devices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.cli.conftest import Cli, Running
from tests.servers import wait_until

Screenshot = Callable[[str], None]
HACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{ window.hacked=1 }}'
PAGES = {
    "": "Overview",
    "members": "Members",
    "dead-letters": "Dead letters",
    "dead-letters/orders/billing": "Dead letters of billing of orders",
    "devices": "Devices",
    "topic/orders": "Topic orders",
    "group/orders/billing": "Group billing of orders",
    "messages/orders": "Messages of orders",
}


@pytest.fixture(scope="module")
def worker(start: Callable[..., Running]) -> Running:
    """Serves `orders`."""
    running = start("worker", "app:broker")
    running.expect("reads 4 of 4 partitions")
    return running


@pytest.fixture(scope="module")
def url(open_dashboard: Callable[..., str], worker: Running) -> str:
    """The address of a dashboard that may change things."""
    return open_dashboard("--allow-changes")


def row(page: Page, text: str) -> Any:
    """The line of a table with a text."""
    return page.locator("tbody tr", has_text=text).first


@pytest.mark.parametrize("path", PAGES)
def test_page_has_title_and_live_socket(url: str, page: Page, path: str) -> None:
    """Every page has its title, and its socket lives."""
    with page.expect_websocket():
        page.goto(url + path)
    expect(page.get_by_text(PAGES[path], exact=True).first).to_be_visible()
    assert page.title() == f"{PAGES[path]} · rsmq"


def test_charts_change_while_messages_are_published(
    url: str, page: Page, feed: Callable[..., None], screenshot: Screenshot
) -> None:
    """Publishing changes the rate, the chart and the row of the topic, without a reload."""
    page.goto(url)
    line = page.locator(".nicegui-echart svg").first
    expect(row(page, "billing")).to_contain_text("running")
    before = line.inner_html()
    total = page.locator('[data-total="in"]')
    seen: set[str] = set()

    def moves() -> bool:
        feed("orders", [json.dumps({"n": n}) for n in range(20)])
        page.wait_for_timeout(100)  # lets the browser work
        seen.add(total.inner_text())
        return len(seen - {"–", "0"}) > 2

    wait_until(moves, "the rate is shown, and changes")
    assert line.inner_html() != before
    expect(row(page, "orders")).to_contain_text(re.compile(r"\d+[02468]0"))
    screenshot("overview")
    row(page, "orders").get_by_role("link", name="orders").click()
    expect(page.get_by_text("Topic orders", exact=True)).to_be_visible()
    row(page, "billing").get_by_role("link", name="billing").click()
    expect(page.get_by_text("Partitions", exact=True)).to_be_visible()
    expect(page.locator("tbody tr", has_text="4/4")).to_be_visible()
    screenshot("group")


def test_message_with_markup_is_shown_as_text(
    url: str, page: Page, scene: Cli, feed: Callable[..., None], screenshot: Screenshot
) -> None:
    """Newest first, a page at a time; a payload, key and header with markup stay text."""
    scene.ok("topic", "set", "pages", "--partitions", "1")
    feed("pages", [json.dumps({"n": n}) for n in range(60)])
    feed("pages", [HACK], key=HACK, h=json.dumps({"h": HACK}))
    page.goto(f"{url}messages/pages")
    expect(row(page, "onerror")).to_be_visible()
    row(page, "onerror").click()
    dialog = page.locator("[data-payload]")
    expect(dialog).to_have_text(HACK)
    screenshot("message")
    page.get_by_role("button", name="close").click()
    page.get_by_role("button", name="older").click()
    expect(row(page, '{"n": 35}')).to_be_visible()
    page.get_by_role("button", name="older").click()
    expect(row(page, '{"n": 10}')).to_be_visible()
    expect(page.get_by_role("button", name="older")).to_be_disabled()
    page.get_by_role("button", name="newer").click()
    expect(row(page, '{"n": 35}')).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert len(scene.ok("tail", "pages", "-n", "100").splitlines()) == 61


def test_dead_letter_is_replayed_by_a_click(
    url: str, page: Page, scene: Cli, feed: Callable[..., None], worker: Running, screenshot: Screenshot
) -> None:
    """It is found by its error, read as text, replayed, handled, and gone; its neighbour stays."""
    feed("orders", [json.dumps({"bad": HACK})], key="k-1")
    feed("orders", [json.dumps({"bad": "the other"})], key="k-2")
    page.goto(f"{url}dead-letters")
    expect(row(page, "billing")).to_contain_text("2")
    row(page, "billing").get_by_role("link", name="billing").click()
    expect(page.get_by_text("2 dead letters", exact=True)).to_be_visible()
    screenshot("dead-letters")
    page.get_by_label("died before (UTC)").fill("2020-01-01T00:00:00")
    page.get_by_role("button", name="show").click()
    expect(page.get_by_text("0 dead letters", exact=True)).to_be_visible()
    page.get_by_label("died before (UTC)").fill("")
    page.get_by_label("died since (UTC)").fill("2020-01-01T00:00:00")
    page.get_by_label("error contains").fill("ONERROR")
    page.get_by_role("button", name="show").click()
    expect(page.get_by_text("1 dead letter", exact=True)).to_be_visible()
    row(page, "onerror").click()
    expect(page.locator("[data-payload]")).to_contain_text("<img src=x onerror=")
    expect(page.locator("[data-traceback]")).to_contain_text("in bill")
    expect(page.locator("[data-traceback]")).to_contain_text("Reject: cannot bill <img src=x onerror=")
    assert page.evaluate("window.hacked") is None
    screenshot("dead-letter")
    (scene.directory / "mended").touch()
    page.get_by_role("button", name="replay", exact=True).click()
    expect(page.get_by_text("0 dead letters", exact=True)).to_be_visible()
    worker.expect("billed at last")
    (left,) = scene.json("dlq", "list", "orders", "billing")
    assert left["key"] == "k-2"


def test_filtered_dead_letters_are_replayed_at_a_rate(
    url: str, page: Page, scene: Cli, feed: Callable[..., None], worker: Running
) -> None:
    """Only the letters of the key, not faster than the rate; the question says so."""
    (scene.directory / "mended").unlink(missing_ok=True)
    scene.ok("dlq", "purge", "orders", "billing", "--yes")
    feed("orders", [json.dumps({"bad": "slow"})] * 2, key="paced")
    wait_until(lambda: len(scene.json("dlq", "list", "orders", "billing")) == 2, "they are dead")
    (scene.directory / "mended").touch()
    page.goto(f"{url}dead-letters/orders/billing")
    page.get_by_label("key").fill("paced")
    page.get_by_label("replay at most a second").fill("20")
    page.get_by_role("button", name="replay all of these").click()
    expect(page.get_by_text("at most 20 a second")).to_be_visible()
    page.get_by_role("button", name="replay", exact=True).click()
    expect(page.get_by_text("replayed 2 dead letters")).to_be_visible()
    assert scene.json("dlq", "list", "orders", "billing") == []


def test_purge_of_dead_letters_is_confirmed(url: str, page: Page, scene: Cli, feed: Callable[..., None]) -> None:
    """Cancelled it deletes nothing, confirmed all of the group."""
    (scene.directory / "mended").unlink(missing_ok=True)
    feed("orders", [json.dumps({"bad": "one"})])
    wait_until(lambda: scene.json("dlq", "list"), "it is dead")
    page.goto(f"{url}dead-letters/orders/billing")
    expect(page.locator("tbody tr").first).to_contain_text("rejected")
    page.get_by_role("button", name="purge the group's").click()
    page.get_by_role("button", name="cancel").click()
    expect(page.get_by_role("button", name="cancel")).to_be_hidden()
    assert scene.json("dlq", "list")
    page.get_by_role("button", name="purge the group's").click()
    page.get_by_role("button", name="delete", exact=True).click()
    expect(page.get_by_text("0 dead letters", exact=True)).to_be_visible()
    assert scene.json("dlq", "list") == []


def test_device_page_shows_and_purges_an_inbox(url: str, page: Page, scene: Cli, screenshot: Screenshot) -> None:
    """Backlog and name are shown as text; one device can be searched, and its inbox purged."""
    scene.ok("device", "send", "phone-1", "hello")
    scene.ok("device", "send", HACK, "hello")
    page.goto(f"{url}devices")
    expect(page.get_by_text("2 devices", exact=True)).to_be_visible()
    expect(row(page, "onerror")).to_be_visible()
    page.get_by_label("device id").fill("phone-1")
    page.get_by_role("button", name="show").click()
    expect(page.get_by_text("1 device", exact=True)).to_be_visible()
    row(page, "phone-1").click()
    expect(page.locator("[data-payload]")).to_have_text("hello")
    assert page.evaluate("window.hacked") is None
    screenshot("devices")
    page.get_by_role("button", name="purge the inbox").click()
    page.get_by_role("button", name="cancel").click()
    expect(page.get_by_role("button", name="cancel")).to_be_hidden()
    assert scene.json("device", "show", "phone-1")["backlog"] == 1
    row(page, "phone-1").click()
    page.get_by_role("button", name="purge the inbox").click()
    expect(page.get_by_text("all letters that wait for device 'phone-1' for good")).to_be_visible()
    page.get_by_role("button", name="delete", exact=True).click()
    expect(page.get_by_text("deleted 1")).to_be_visible()  # for some seconds only
    expect(row(page, "phone-1")).to_contain_text("0")
    assert scene.json("device", "show", "phone-1")["backlog"] == 0


def test_messages_are_filtered_by_key_and_time(url: str, page: Page, scene: Cli) -> None:
    """A key selects its partition and its messages; a time selects older messages."""
    scene.ok("topic", "set", "keyed", "--partitions", "4")
    scene.ok("publish", "keyed", "-", "--key", "c-42", stdin="mine\n")
    scene.ok("publish", "keyed", "-", "--key", "other", stdin="theirs\n" * 3)
    page.goto(f"{url}messages/keyed")
    page.get_by_label("key").fill("c-42")
    page.get_by_role("button", name="show").click()
    expect(row(page, "mine")).to_be_visible()
    expect(page.locator("tbody tr", has_text="theirs")).to_have_count(0)
    page.get_by_label("stored before (UTC)").fill("2020-01-01T00:00:00")
    page.get_by_role("button", name="show").click()
    expect(page.get_by_text("No data available")).to_be_visible()
    page.get_by_label("stored before (UTC)").fill("2999-01-01T00:00:00")
    page.get_by_role("button", name="show").click()
    expect(row(page, "mine")).to_be_visible()


def test_missing_topic_is_a_sentence(url: str, page: Page) -> None:
    """The page of a missing topic says so."""
    page.goto(f"{url}messages/nothing")
    expect(page.get_by_text("there is no topic 'nothing'")).to_be_visible()
    page.goto(f"{url}messages/%3Cimg%20src=x%20onerror=hack()%3E")
    expect(page.get_by_text("is not allowed")).to_be_visible()
    assert page.locator("img[src=x]").count() == 0
