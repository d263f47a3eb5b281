"""The pages in a browser: they live, are legible in light and dark, and fit a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.cli.conftest import Cli, Running
from tests.dashboard.conftest import SCREENSHOTS
from tests.servers import wait_until

Screenshot = Callable[[str], None]
CONTRAST = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const isText = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const isLine = e.matches("svg polyline");
    if ((!isText && !isLine) || !e.getClientRects().length || e.matches("option")) continue;
    const style = getComputedStyle(e);
    const own = parse(isLine ? style.stroke : e.matches("svg *") ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(own), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (isLine ? 3 : 4.5)) poor.push([e.tagName, e.textContent.slice(0, 20), ratio.toFixed(2)]);
  }
  return poor;
}
"""
"""Texts with less than the contrast that WCAG asks for (4.5, and 3 for lines)."""


EVERY_PAGE = (
    "", "members", "processes", "topic/orders", "group/orders/billing", "messages/orders", "delayed/orders",
    "dead-letters", "dead-letters/orders/billing", "schedules", "schedule/ticks/clock", "devices", "device/phone-1",
    "connections", "retained", "audit",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(open_dashboard: Callable[..., str], start: Callable[..., Running], scene: Cli) -> str:
    """The address of a dashboard that may change things, beside a worker, with something of everything."""
    start("worker", "app:broker").expect("reads 4 of 4 partitions")
    for n in range(3):
        scene.ok("publish", "orders", json.dumps({"bad": f"customer {n}"}), "--key", f"c-{n}")
    scene.ok("publish", "orders", '{"n": 1}', "--delay", "2h")
    scene.ok("device", "send", "phone-1", '{"text": "boarding"}')
    wait_until(lambda: len(scene.json("dlq", "list", "orders", "billing")) == 3, "they are dead")
    return open_dashboard("--allow-changes")


def row(page: Page, text: str) -> Any:
    """The line of a table with a text."""
    return page.locator("tbody tr", has_text=text).first


def test_page_lives_while_messages_are_published(
    url: str, page: Page, feed: Callable[..., None], screenshot: Screenshot
) -> None:
    """Publishing changes the rate and the chart, without a reload; a field that has the focus stays."""
    page.goto(url)
    expect(row(page, "billing")).to_contain_text("running")
    page.get_by_label("name contains").fill("ord")
    total, seen = page.locator('[data-total="in"] b'), set[str]()

    def moves() -> bool:
        feed("orders", [json.dumps({"n": n}) for n in range(20)])
        page.wait_for_timeout(100)  # lets the browser work
        seen.add(total.inner_text())
        return len(seen - {"–", "0"}) > 2

    wait_until(moves, "the rate is shown, and changes")
    assert page.locator("#chart-0 polyline").count() >= 2
    screenshot("overview")
    page.get_by_label("name contains").press("Enter")
    expect(page).to_have_url(f"{url}?q=ord")
    row(page, "billing").get_by_role("link", name="billing").click()
    expect(page.get_by_role("heading", name="Partitions")).to_be_visible()
    screenshot("group")


def test_ticked_dead_letters_are_replayed(url: str, page: Page, scene: Cli, screenshot: Screenshot) -> None:
    """Enter applies a filter; the tick of all ticks what is shown; the question has its number."""
    page.goto(f"{url}dead-letters/orders/billing")
    screenshot("dead-letters")
    page.get_by_label("key").fill("c-1")
    page.get_by_label("key").press("Enter")
    expect(page.get_by_text("1 dead letter", exact=True)).to_be_visible()
    page.get_by_label("all", exact=True).check()
    (scene.directory / "mended").touch()
    page.get_by_role("button", name="replay the ticked").click()
    expect(page.get_by_text("Replay 1 dead letter of billing of orders, to this group only?")).to_be_visible()
    screenshot("question")
    page.get_by_role("link", name="cancel").click()
    expect(page.get_by_text("1 dead letter", exact=True)).to_be_visible()
    page.get_by_label("all", exact=True).check()
    page.get_by_role("button", name="replay the ticked").click()
    page.get_by_role("button", name="replay").click()
    expect(page.get_by_text("replayed 1 dead letter")).to_be_visible()
    expect(page.get_by_text("0 dead letters", exact=True)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_legible_and_fit_a_phone(url: str, browser: Browser, scheme: str) -> None:
    """Every text and every line of a chart has enough contrast, and no page is wider than its window."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    for path in (*EVERY_PAGE, "topic/nothing"):
        page.goto(url + path)
        if path == "":
            expect(page.locator("#chart-0 polyline").first).to_be_attached()
            if SCREENSHOTS and scheme == "dark":
                page.screenshot(path=f"{SCREENSHOTS}/dashboard-phone.png")
        assert page.evaluate(CONTRAST) == [], (path, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    context.close()


def test_navigation_is_one_line_in_a_window_of_1200(url: str, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.goto(url)
    tops = page.evaluate("[...document.querySelectorAll('header nav a')].map(link => link.offsetTop)")
    assert len(tops) > 8
    assert len(set(tops)) == 1
    context.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing(url: str, browser: Browser, scheme: Any, width: int) -> None:
    """On any page: names of fields, order of headings, roles, contrast, tables."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, found = context.new_page(), dict[str, list[str]]()
    for path in (*EVERY_PAGE, "search?find=c-1", "publish/orders"):
        page.goto(url + path)
        found[path] = [f"{each['id']}: {each['nodes'][0]['html']}" for each in axe.run(page).response["violations"]]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    context.close()
    assert {path: violations for path, violations in found.items() if violations} == {}


def test_times_of_this_place_are_beside_those_in_utc(url: str, browser: Browser) -> None:
    """In tables and lists; a browser whose zone is UTC shows none."""
    for zone in ("Asia/Seoul", "UTC"):
        context = browser.new_context(timezone_id=zone)
        page = context.new_page()
        page.goto(f"{url}dead-letters/orders/billing")
        expect(page.locator("tbody tr").first).to_be_visible()
        if zone == "UTC":
            expect(page.locator(".local")).to_have_count(0)
        else:
            expect(page.locator("tbody .local").first).to_be_visible()
            text = page.locator('td[data-label="died (UTC)"]').first.inner_text()
            at, here = re.findall(r"\d\d:\d\d:\d\d", text)
            assert (int(here[:2]) - int(at[:2])) % 24 == 9
        context.close()


def test_lost_dashboard_is_said(start: Callable[..., Running], browser: Browser) -> None:
    """When the dashboard has ended, an open page says that it is old."""
    running = start("dashboard", "--port", "0", "--json")
    address = json.loads(running.expect('"url"')[0])["url"]
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    expect(page.locator("body[data-connected=yes]")).to_be_attached()
    running.kill()
    expect(page.get_by_text("the dashboard does not answer: what you see is old")).to_be_visible()
    context.close()
