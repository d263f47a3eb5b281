"""The dashboard mounted into another application."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from rsmq.testing.server import free_port
from tests.cli.conftest import Cli
from tests.servers import wait_until

OWN = """
from contextlib import asynccontextmanager
from fastapi import FastAPI
from rsmq.dashboard import mount

@asynccontextmanager
async def lifespan(app):
    app.state.word = "mine"
    yield

app = FastAPI(lifespan=lifespan)

@app.get("/own")
def own():
    return app.state.word

mount(app, "/queues")
mount(app, "/again")
"""


@pytest.fixture
def url(scene: Cli) -> Iterator[str]:
    """The address of the application."""
    (scene.directory / "own.py").write_text(OWN)
    port = free_port()
    with (scene.directory / "own.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "own:app", "--port", str(port)], cwd=scene.directory,
            env=scene.environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), "it answers")
        yield url
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    """Whether the port is open."""
    try:
        return httpx.get(f"{url}/own").status_code == 200
    except httpx.ConnectError:
        return False


def test_mounted_dashboard_stays_below_its_path(url: str, page: Page, scene: Cli) -> None:
    """Its links stay below it, and the rest of the application and its lifespan work as before."""
    scene.ok("publish", "orders", "1")
    assert httpx.get(f"{url}/own").json() == "mine"
    assert httpx.get(f"{url}/again/").status_code == 200
    assert httpx.get(f"{url}/queues/topic/nothing").status_code == 404
    assert httpx.get(f"{url}/queues/static/style.css").status_code == 200
    assert httpx.get(f"{url}/own", headers={"Host": "evil.example"}).status_code == 200
    assert httpx.get(f"{url}/queues/", headers={"Host": "evil.example"}).status_code == 421
    page.goto(f"{url}/queues/")
    page.get_by_role("link", name="orders", exact=True).first.click()
    expect(page.get_by_text("Topic orders", exact=True)).to_be_visible()
    assert page.url == f"{url}/queues/topic/orders"
    page.get_by_role("link", name="messages").click()
    expect(page.get_by_text("Messages of orders", exact=True)).to_be_visible()
    page.get_by_role("navigation").get_by_role("link", name="Overview").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert page.url == f"{url}/queues/"
