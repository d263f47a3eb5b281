"""Pages look as in the kept pictures: light and dark, wide and on a phone. `PICTURES=new` keeps new ones.

What changes from run to run is replaced first: numbers, ids and the lines of charts. Then both pictures are made small,
because the fonts of another machine may differ, and compared field by field.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.cli.conftest import Cli, Running
from tests.servers import wait_until

PICTURES = Path(__file__).parent / "pictures"
PATHS = {
    "overview": "",
    "dead-letters": "dead-letters/orders/billing",
    "delayed": "delayed/orders",
    "topic": "topic/orders",
    "messages": "messages/orders",
    "device": "device/phone-1",
    "schedules": "schedules",
    "group": "group/orders/billing",
    "processes": "processes",
    "publish": "publish/orders",
    "search": "search?find=c-1",
}
SIZES = {"light": (1200, 900), "dark": (1200, 900), "phone": (360, 900)}
STEADY = """
() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    node.data = node.data.replace(/[\\w.:,–-]*\\d[\\w.:,–-]*( (ms|s|min|h)\\b)?/g, "0").replace(/–/g, "0");
  }
  for (const each of document.querySelectorAll("header .dim")) each.textContent = "someone";
  for (const each of document.querySelectorAll("td[data-label=trend]")) each.textContent = "0";
  for (const svg of document.querySelectorAll("svg")) {
    svg.replaceChildren();
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    for (const at of [0, 1]) {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      line.setAttribute("class", `s${at}`);
      line.setAttribute("points", `0,${height * (0.3 + at * 0.4)} ${width},${height * (0.4 + at * 0.4)}`);
      svg.append(line);
    }
  }
}
"""
DIFFERENCE = """
async ([before, after, columns, rows]) => {
  const fields = async (picture) => {
    const image = new Image();
    image.src = `data:image/png;base64,${picture}`;
    await image.decode();
    const canvas = new OffscreenCanvas(columns, rows).getContext("2d");
    canvas.imageSmoothingQuality = "high";
    canvas.drawImage(image, 0, 0, columns, rows);
    return canvas.getImageData(0, 0, columns, rows).data;
  };
  const [a, b] = [await fields(before), await fields(after)];
  const apart = [...a.keys()].filter((at) => at % 4 < 3).map((at) => Math.abs(a[at] - b[at])); // without alpha
  return apart.filter((value) => value > 24).length / apart.length;
}
"""
"""The part of the fields that differ by more than a tenth."""
MOST = 0.02


@pytest.fixture(scope="module")
def url(open_dashboard: Callable[..., str], start: Callable[..., Running], scene: Cli) -> str:
    """A worker, dead letters and delayed messages, always the same."""
    start("worker", "app:broker").expect("reads 4 of 4 partitions")
    for n in range(3):
        scene.ok("publish", "orders", json.dumps({"bad": f"customer {n}"}), "--key", f"c-{n}")
        scene.ok("publish", "orders", json.dumps({"n": n}), "--delay", "2h")
    scene.ok("device", "send", "phone-1", '{"text": "boarding"}')
    wait_until(lambda: len(scene.json("dlq", "list", "orders", "billing")) == 3, "they are dead")
    return open_dashboard("--allow-changes")


def taken(page: Page, address: str) -> bytes:
    """A picture of a page without what changes."""
    page.route("**/dashboard.js", lambda route: route.abort())  # the page stays as it was sent
    page.goto(address)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.evaluate(STEADY)
    return page.screenshot()


def difference(page: Page, before: bytes, after: bytes, size: tuple[int, int]) -> float:
    """How far two pictures are apart: 0 to 1."""
    given: list[Any] = [b64encode(before).decode(), b64encode(after).decode(), size[0] // 12, size[1] // 12]
    return float(page.evaluate(DIFFERENCE, given))


@pytest.mark.parametrize("look", SIZES)
def test_pages_look_as_in_their_pictures(url: str, browser: Browser, look: str) -> None:
    """All pages in one look; a page without its styles looks different, so the comparison can fail."""
    scheme: Any = "dark" if look == "dark" else "light"
    size = SIZES[look]
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page, blank, apart = context.new_page(), context.new_page(), dict[str, float]()
    for name, path in PATHS.items():
        kept, now = PICTURES / f"{name}-{look}.png", taken(page, url + path)
        if os.environ.get("PICTURES") == "new":
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(now)
        apart[name] = difference(blank, kept.read_bytes(), now, size)
    page.evaluate("document.querySelector('link[rel=stylesheet]').remove()")
    without = difference(blank, kept.read_bytes(), page.screenshot(), size)
    context.close()
    assert {name: value for name, value in apart.items() if value > MOST} == {}
    assert without > 2 * MOST
