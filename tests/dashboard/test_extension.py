"""A page of another distribution, as after `pip install`: a module and its metadata on the path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from rsmq import Settings
from rsmq.dashboard import Role, Rules, Visitor, create_app

MODULE = """
from rsmq.dashboard.html import tag
from rsmq.dashboard.page import Page

async def slow(visit):
    return Page("Slow orders", [tag("p", f"<{visit.queries.keys.prefix}> has none")])

async def wrong(visit):
    raise ValueError("no orders")
"""
ENTRIES = """
[rsmq.dashboard_pages]
slow-orders = rsmq_slow:slow
wrong = rsmq_slow:wrong
missing = rsmq_slow:nothing
members = rsmq_slow:slow
Bad/{name} = rsmq_slow:slow
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rsmq-slow` is on the path of this process."""
    (tmp_path / "rsmq_slow.py").write_text(MODULE)
    metadata = tmp_path / "rsmq_slow-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rsmq-slow\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


@asynccontextmanager
async def browsing(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the running application."""
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


@pytest.mark.usefixtures("installed")
async def test_page_of_another_distribution_is_shown_and_in_the_navigation(settings: Settings, prefix: str) -> None:
    """It has the frame of all pages; one that fails, or cannot be loaded, says whose it is, and the others work."""
    async with browsing(create_app(settings)) as client:
        shown = await client.get("/slow-orders")
        assert shown.status_code == 200, shown.text
        assert f"&lt;{prefix}&gt; has none" in shown.text
        assert '<a href="/slow-orders" aria-current="page">Slow orders</a>' in shown.text
        failed, missing, members = [await client.get(path) for path in ("/wrong", "/missing", "/members")]
        assert (failed.status_code, missing.status_code, members.status_code) == (400, 400, 200)
        assert "the page wrong of rsmq-slow failed: ValueError: no orders" in failed.text
        assert "update or uninstall rsmq-slow" in missing.text
        assert "has none" not in members.text
        assert members.text.count(">Members</a>") == 1
        assert "Bad" not in members.text


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("visitor", [
    Visitor("ada", Role.NONE, topics={"orders": Role.ACT}), Visitor("ada", Role.LOOK, topics={"orders": Role.NONE}),
])  # fmt: skip
async def test_page_of_another_distribution_is_not_for_visitors_of_some_topics(
    settings: Settings, visitor: Visitor
) -> None:
    """It may show anything, and rsmq cannot know which topics are in it."""
    async with browsing(create_app(settings, rules=Rules(authorize=lambda _: visitor))) as client:
        assert (await client.get("/slow-orders")).status_code == 403
