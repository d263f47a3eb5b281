"""Pages look as in the kept pictures: light and dark, wide and on a phone. `PICTURES=new` keeps new ones.

What changes from run to run is replaced first: numbers, ids and the lines of charts. Then both pictures are made small,
because the fonts of another machine may differ, and compared field by field.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from rsmq.dashboard.access import FORM
from rsmq.testing.server import free_port
from tests.cli.conftest import Cli, Running
from tests.gateway import packets
from tests.servers import wait_until

PICTURES = Path(__file__).parent / "pictures"
PATHS = {
    "overview": "",
    "members": "members",
    "processes": "processes",
    "process": "process/{member}",
    "topic": "topic/orders",
    "group": "group/orders/billing",
    "flows": "group/sms/provider",
    "batches": "batches",
    "batch": "batch/campaign",
    "messages": "messages/orders",
    "message": "message/orders/{message}",
    "publish": "publish/orders",
    "delayed": "delayed/orders",
    "parked": "parked/orders/billing",
    "dead-letter-groups": "dead-letters",
    "dead-letters": "dead-letters/orders/billing",
    "dead-letter": "dead-letter/orders/billing/{letter}",
    "schedules": "schedules",
    "schedule": "schedule/ticks/clock",
    "devices": "devices",
    "device": "device/phone-1",
    "connections": "connections",
    "connection": "connection/meter-7",
    "retained": "retained",
    "search": "search?find=c-1",
    "audit": "audit",
    "not-found": "topic/nothing",
    "login": "login-page",
    "question": "question-page",
}
"""Every page, as the address of it; in braces what the server has named."""
SIZES = {"light": (1200, 900), "dark": (1200, 900), "phone": (360, 900)}
TALL = {"flows": {"light": (1200, 2300), "dark": (1200, 2300), "phone": (360, 3600)}}
"""Pages of which all is in the pictures."""
SENDER = """
import asyncio
from rsmq import Broker, Rate

broker = Broker()
sms = broker.topic("sms", str, bands=("urgent", "normal"))
by_name = lambda message: message.headers["tenant"]

@sms.handler(group="provider", partitions=1, concurrency=8, tenant=by_name, weights={"gold": 3}, reserve={"urgent": 1},
             rate=Rate(1, per="1d", by=by_name))
async def send(text: str) -> None:
    await asyncio.sleep(86400)

async def main() -> None:
    async with broker, broker.batch("campaign", group="provider", on_complete="reports") as batch:
        for n in range(124):
            tenant = "basic" if n % 31 == 0 else "gold"
            await batch.publish("sms", "the sale begins", headers={"tenant": tenant})

if __name__ == "__main__":
    asyncio.run(main())
"""
"""A campaign of two tenants: one message of each runs, and the others wait for their rates, most of them for one."""
STEADY = """
() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    node.data = node.data.replace(/[\\w.:,–-]*\\d[\\w.:,–-]*( (ms|s|min|h)\\b)?/g, "0").replace(/–/g, "0");
  }
  for (const each of document.querySelectorAll("header .dim")) each.textContent = "someone";
  for (const each of document.querySelectorAll("td[data-label=trend]")) each.textContent = "0";
  for (const each of document.querySelectorAll("progress")) each.value = 0.4;
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
CUT = """[...document.querySelectorAll('.wide')]
  .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.id)"""
"""Tables that are wider than a phone, so that a part of them is out of sight."""
MOST = 0.02


QUESTION = {"topic": "orders", "group": "billing", "back": "/group/orders/billing"}


@pytest.fixture(scope="module")
def meter(start: Callable[..., Running]) -> Iterator[None]:
    """An MQTT client that stays connected, has a subscription and a letter, and has retained a message."""
    port = free_port()
    start("gateway", "app:broker", "--listen", f"mqtt://127.0.0.1:{port}", "--anonymous")
    wait_until(lambda: is_listening(port), "the gateway listens")
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(packets.connect("meter-7", keep_alive=0, clean=False, username="ada", password=b""))
        connection.sendall(packets.subscribe([("home/+/power", 1)]))
        connection.sendall(packets.publish("home/attic/humidity", b'{"percent": 41}', 1, retain=True))
        received = b""
        while len(packets.split(received)[0]) < 3:
            received += connection.recv(1000)
        yield


def is_listening(port: int) -> bool:
    """Whether a program accepts connections there."""
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture(scope="module")
def url(open_dashboard: Callable[..., str], start: Callable[..., Running], scene: Cli, meter: None) -> str:
    """A dashboard with something on every page, always the same."""
    start("worker", "app:broker").expect("reads 4 of 4 partitions")
    (scene.directory / "sender.py").write_text(SENDER)
    start("worker", "sender:broker").expect("reads 2 of 2 partitions")
    made = {**os.environ, **scene.environment}
    subprocess.run([sys.executable, "sender.py"], cwd=scene.directory, env=made, check=True, timeout=60)
    for n in range(3):
        scene.ok("publish", "orders", json.dumps({"bad": f"customer {n}"}), "--key", f"c-{n}")
        scene.ok("publish", "orders", json.dumps({"n": n}), "--delay", "2h")
    scene.ok("publish", "orders", '{"later": true}', "--key", "c-9", "--header", "shop=7")
    scene.ok("device", "send", "phone-1", '{"text": "boarding"}')
    wait_until(lambda: len(scene.json("dlq", "list", "orders", "billing")) == 3, "they are dead")
    wait_until(lambda: scene.json("group", "show", "orders", "billing")["waiting_for_retry"] == 1, "one is parked")
    wait_until(
        lambda: scene.json("group", "show", "sms", "provider")["work"]["waiting_for_rate"] == 122, "the rest waits"
    )
    address = open_dashboard("--allow-changes")
    for action in ("pause", "resume"):
        assert httpx.post(f"{address}do/{action}", data=QUESTION | {"confirmed": "yes"}).is_redirect
    return address


@pytest.fixture(scope="module")
def paths(url: str, scene: Cli) -> dict[str, str]:
    """The addresses of all pages."""
    member = scene.json("member", "list", "orders", "billing")[0]["id"]
    letter = scene.json("dlq", "list", "orders", "billing")[0]["id"]
    message = scene.json("message", "find", "orders", "--where", "later=true")[0]["id"]
    return {name: url + path.format(member=member, letter=letter, message=message) for name, path in PATHS.items()}


def answered(page: Page, url: str) -> None:
    """Pages that have no address of their own: the login of a dashboard with a token, and what an action asks first."""
    login = FORM.format(root="", text="That is not the token.")
    page.route("**/login-page", lambda route: route.fulfill(body=login, content_type="text/html"))
    asked = httpx.post(f"{url}do/pause", data=QUESTION).text
    page.route("**/question-page", lambda route: route.fulfill(body=asked, content_type="text/html"))


def difference(page: Page, before: bytes, after: bytes, size: tuple[int, int]) -> float:
    """How far two pictures are apart: 0 to 1."""
    given: list[Any] = [b64encode(before).decode(), b64encode(after).decode(), size[0] // 12, size[1] // 12]
    return float(page.evaluate(DIFFERENCE, given))


def test_pages_look_as_in_their_pictures(url: str, paths: dict[str, str], browser: Browser) -> None:
    """All pages in all looks; a page without its styles looks different, so the comparison can fail. Nothing is wider
    than the window of a phone."""
    context = browser.new_context()
    page, blank, apart = context.new_page(), context.new_page(), dict[str, float]()
    page.route("**/dashboard.js", lambda route: route.abort())  # the page stays as it was sent
    answered(page, url)
    for name, address in paths.items():
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.evaluate(STEADY)
        for look, (width, height) in TALL.get(name, SIZES).items():
            page.emulate_media(color_scheme="dark" if look == "dark" else "light")
            page.set_viewport_size({"width": width, "height": height})
            kept, now = PICTURES / f"{name}-{look}.png", page.screenshot()
            if os.environ.get("PICTURES") == "new":
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes(now)
            apart[f"{name}-{look}"] = difference(blank, kept.read_bytes(), now, (width, height))
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0], name
        assert page.evaluate(CUT) == [], name
    page.evaluate("document.querySelector('link[rel=stylesheet]').remove()")
    without = difference(blank, kept.read_bytes(), page.screenshot(), SIZES["phone"])
    context.close()
    assert {name: value for name, value in apart.items() if value > MOST} == {}
    assert without > 2 * MOST


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_where_a_backlog_waits(
    url: str, paths: dict[str, str], browser: Browser, scheme: Any, width: int
) -> None:
    """What stands in its way, bars of progress, bands, tenants and rates. `test_browser` has the other pages."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, found = context.new_page(), dict[str, list[str]]()
    for name in ("overview", "flows", "batches", "batch"):
        page.goto(paths[name])
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        found[name] = [f"{each['id']}: {each['nodes'][0]['html']}" for each in axe.run(page).response["violations"]]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    page.goto(paths["flows"])
    expect(page.locator("#obstacles")).to_contain_text("wait for the rate of 'gold'")
    context.close()
    assert {name: violations for name, violations in found.items() if violations} == {}
