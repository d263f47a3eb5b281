"""A dashboard as a process of its own, a worker beside it, and the browser of this machine."""

from __future__ import annotations

import json
import os
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.browsers import browser, sync_api
from tests.cli.conftest import Cli, Running
from tests.servers import Server

pytest.importorskip("starlette", reason="needs the extra `dashboard`")

__all__ = ["browser"]
SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
"""A directory: where the pictures of the documentation are made."""
MODULE = """
from pathlib import Path
from rsmq import Broker, Reject, Retry

broker = Broker()

@broker.every("8760h", "ticks", name="clock")
def tick() -> str:
    return "tick"

@broker.handler("orders", group="billing", partitions=4)
async def bill(order: dict) -> None:
    if order.get("bad") and not Path("mended").exists():
        raise Reject(f"cannot bill {order['bad']}")
    if order.get("bad"):
        print("billed at last", flush=True)
    if order.get("later") and not Path("mended").exists():
        raise Retry("not yet", after="1h")
"""

KEYS = ",".join(f"{key_id}={b64encode(key_id.encode() * 16).decode()}" for key_id in ("k7", "k6"))
"""What the dashboard reads encrypted payloads with, and writes copies of them."""

APP_VERSION = "2.4.1"
"""Of the service whose worker runs."""

Start = Callable[..., Running]
Feed = Callable[..., None]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, server_url: str) -> Cli:
    """Commands in a directory with an `app`, under a prefix of their own."""
    directory: Path = tmp_path_factory.mktemp("dashboard")
    (directory / "app.py").write_text(MODULE)
    prefix = "rsmq" if SCREENSHOTS else f"t{uuid.uuid4().hex[:12]}"
    return Cli(directory, {"RSMQ_URL": server_url, "RSMQ_PREFIX": prefix, "RSMQ_APP_VERSION": APP_VERSION})


@pytest.fixture(scope="module")
def feed(scene: Cli, server: Server) -> Iterator[Feed]:
    """Publish as any client may: payloads into a partition, in one write, without starting a process."""
    prefix = scene.environment["RSMQ_PREFIX"]

    def publish(topic: str, payloads: Iterable[str], **fields: str) -> None:
        pipe = redis.pipeline(transaction=False)
        for payload in payloads:
            pipe.xadd(f"{prefix}:{{{topic}.0}}", {"data": payload, **fields})
        pipe.execute()

    with server.client() as redis:
        yield publish


@pytest.fixture(scope="module")
def start(scene: Cli) -> Iterator[Start]:
    """Start a command that goes on until the tests of the module end. A dashboard has keys."""
    running: list[Running] = []

    def launch(*args: str) -> Running:
        keys = {"RSMQ_KEYS": KEYS} if args[0] == "dashboard" else {}
        running.append(Running(Cli(scene.directory, scene.environment | keys), *args))
        return running[-1]

    yield launch
    for each in running:
        each.kill()


@pytest.fixture(scope="module")
def open_dashboard(start: Start) -> Callable[..., str]:
    """Start one with options, and return its address."""

    def launch(*args: str) -> str:
        found = start("dashboard", "--port", "0", "--json", *args).expect('"url"')
        return str(json.loads(found[0])["url"])

    return launch


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    """A fresh page. Nothing on it may go wrong silently."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found = context.new_page()
    found.set_default_timeout(30_000)
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    yield found
    context.close()
    assert errors == []


@pytest.fixture
def screenshot(page: sync_api.Page) -> Callable[[str], None]:
    """Keep a screenshot for the documentation, when that is wanted."""

    def keep(name: str) -> None:
        if SCREENSHOTS:
            page.wait_for_timeout(500)  # a dialog comes in slowly
            page.screenshot(path=Path(SCREENSHOTS) / f"dashboard-{name}.png")

    return keep
