"""The dashboard as an ASGI application: by itself, or mounted into another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nicegui
from fastapi import FastAPI, Request
from nicegui import ui

from rsmq.dashboard import overview
from rsmq.dashboard.access import AccessControl, Rules
from rsmq.dashboard.dead_letter import DeadLetterTable, dead_letter_tables
from rsmq.dashboard.device import DeviceTable
from rsmq.dashboard.layout import page_layout
from rsmq.dashboard.message import Browser
from rsmq.dashboard.queries import Queries, Refused
from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.own_tasks import own_tasks
from rsmq.model.settings import Settings
from rsmq.redis.connector import Connector
from rsmq.redis.embedded.server import server_for


class DashboardState:
    """What the pages share while the application runs: their queries."""

    def __init__(self, settings: Settings, *, allow_changes: bool) -> None:
        self._settings, self._allow_changes = settings, allow_changes
        self._queries: Queries | None = None

    @property
    def queries(self) -> Queries:
        """Raises ConfigError while the application is not running."""
        if self._queries is None:
            raise ConfigError(
                "the dashboard is not running: it starts with the lifespan of the application it is mounted into"
            )
        return self._queries

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect, and poll the server while pages are open."""
        settings = self._settings
        async with server_for(settings.url) as url, Connector(url, settings).connected() as client:
            queries = Queries(client, Keys(settings.prefix), settings, allow_changes=self._allow_changes)
            async with own_tasks() as tasks:
                await tasks.start(queries.poller.run)
                self._queries = queries
                yield
                self._queries = None
                tasks.cancel_scope.cancel()


def create_app(settings: Settings | None = None, *, rules: Rules | None = None, allow_changes: bool = False) -> FastAPI:
    """An application that serves only the dashboard."""
    app = FastAPI(openapi_url=None)
    mount(app, "/", settings, rules=rules, allow_changes=allow_changes)
    return app


def mount(
    app: FastAPI,
    path: str = "/rsmq",
    settings: Settings | None = None,
    *,
    rules: Rules | None = None,
    allow_changes: bool = False,
) -> None:
    """Add the dashboard to an application; a process can have one. It runs with the application's lifespan.

    By default it serves this machine only (`Rules` names the hosts and the token), and it is read-only.
    """
    global _is_mounted
    if _is_mounted:
        raise ConfigError("this process already has a dashboard: mount it once")
    _is_mounted = True
    state = DashboardState(Settings() if settings is None else settings, allow_changes=allow_changes)
    add_pages(state)
    nicegui.app.add_middleware(AccessControl, rules=Rules() if rules is None else rules)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(parent: FastAPI) -> AsyncIterator[Any]:
        async with state.open(), inner(parent) as given:
            yield given

    app.router.lifespan_context = lifespan
    ui.run_with(app, mount_path=path, title="rsmq", favicon="📬", show_welcome_message=False, reconnect_timeout=10.0)


_is_mounted = False


def add_pages(state: DashboardState) -> None:
    """Register the pages."""

    @ui.page("/")
    def _(request: Request) -> None:
        with page_layout(state.queries, request, "Overview") as layout:
            overview.overview(layout)

    @ui.page("/members")
    def _(request: Request) -> None:
        with page_layout(state.queries, request, "Members") as layout:
            overview.members(layout)

    @ui.page("/topic/{topic}")
    def _(request: Request, topic: str) -> None:
        with page_layout(state.queries, request, f"Topic {topic}") as layout:
            overview.topic(layout, topic)

    @ui.page("/group/{topic}/{group}")
    def _(request: Request, topic: str, group: str) -> None:
        with page_layout(state.queries, request, f"Group {group} of {topic}") as layout:
            overview.group(layout, topic, group)

    @ui.page("/messages/{topic}")
    async def _(request: Request, topic: str) -> None:
        with page_layout(state.queries, request, f"Messages of {topic}") as layout:
            try:
                found = await layout.queries.topic(topic)
            except (Refused, ConfigError) as error:
                ui.label(str(error))
                return
            await Browser(layout, found.name, found.partitions).load()

    @ui.page("/dead-letters")
    def _(request: Request) -> None:
        with page_layout(state.queries, request, "Dead letters") as layout:
            dead_letter_tables(layout)

    @ui.page("/dead-letters/{topic}/{group}")
    async def _(request: Request, topic: str, group: str) -> None:
        with page_layout(state.queries, request, f"Dead letters of {group} of {topic}") as layout:
            await DeadLetterTable(layout, topic, group).load()

    @ui.page("/devices")
    async def _(request: Request) -> None:
        with page_layout(state.queries, request, "Devices") as layout:
            await DeviceTable(layout).load()
