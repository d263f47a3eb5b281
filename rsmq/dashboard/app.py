"""The dashboard as an ASGI application: by itself, or mounted into another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import nicegui
from fastapi import FastAPI, Request
from nicegui import ui

from rsmq.connect import Connector
from rsmq.dashboard import overview
from rsmq.dashboard.dead_letter import Graveyard, graveyards
from rsmq.dashboard.desk import Desk, Refused
from rsmq.dashboard.device import Register
from rsmq.dashboard.frame import framed
from rsmq.dashboard.gate import Gate, Rules
from rsmq.dashboard.message import Browser
from rsmq.embedded import server_for
from rsmq.errors import ConfigError
from rsmq.keys import Keys
from rsmq.settings import Settings

ONCE = "a process has one dashboard: mount it once"


class Reception:
    """Where the pages find their desk: there is one while the application runs."""

    def __init__(self, settings: Settings, *, allow_changes: bool) -> None:
        self._settings, self._allow_changes = settings, allow_changes
        self._desk: Desk | None = None

    @property
    def desk(self) -> Desk:
        """Raises ConfigError outside the application's life."""
        if self._desk is None:
            raise ConfigError("the dashboard runs with the life (lifespan) of the application it is mounted into")
        return self._desk

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect, and watch while somebody looks."""
        settings = self._settings
        async with server_for(settings.url) as url, Connector(url, settings).connected() as client:
            desk = Desk(client, Keys(settings.prefix), settings, allow_changes=self._allow_changes)
            async with anyio.create_task_group() as tasks:
                await tasks.start(desk.watcher.run)
                self._desk = desk
                yield
                self._desk = None
                tasks.cancel_scope.cancel()


def create_app(settings: Settings | None = None, *, rules: Rules | None = None, allow_changes: bool = False) -> FastAPI:
    """An application that is nothing but the dashboard."""
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
    """Put the dashboard into an application, once a process. It lives with the application's lifespan.

    By default it is for this machine only (`Rules` names the hosts and the token), and it changes nothing.
    """
    global _is_mounted
    if _is_mounted:
        raise ConfigError(ONCE)
    _is_mounted = True
    reception = Reception(Settings() if settings is None else settings, allow_changes=allow_changes)
    add_pages(reception)
    nicegui.app.add_middleware(Gate, rules=Rules() if rules is None else rules)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(parent: FastAPI) -> AsyncIterator[Any]:
        async with reception.open(), inner(parent) as state:
            yield state

    app.router.lifespan_context = lifespan
    ui.run_with(app, mount_path=path, title="rsmq", favicon="📬", show_welcome_message=False, reconnect_timeout=10.0)


_is_mounted = False


def add_pages(reception: Reception) -> None:
    """What there is to see."""

    @ui.page("/")
    def _(request: Request) -> None:
        with framed(reception.desk, request, "Overview") as frame:
            overview.overview(frame)

    @ui.page("/members")
    def _(request: Request) -> None:
        with framed(reception.desk, request, "Members") as frame:
            overview.members(frame)

    @ui.page("/topic/{topic}")
    def _(request: Request, topic: str) -> None:
        with framed(reception.desk, request, f"Topic {topic}") as frame:
            overview.topic(frame, topic)

    @ui.page("/group/{topic}/{group}")
    def _(request: Request, topic: str, group: str) -> None:
        with framed(reception.desk, request, f"Group {group} of {topic}") as frame:
            overview.group(frame, topic, group)

    @ui.page("/messages/{topic}")
    async def _(request: Request, topic: str) -> None:
        with framed(reception.desk, request, f"Messages of {topic}") as frame:
            try:
                found = await frame.desk.topic(topic)
            except (Refused, ConfigError) as error:
                ui.label(str(error))
                return
            await Browser(frame, found.name, found.partitions).load()

    @ui.page("/dead-letters")
    def _(request: Request) -> None:
        with framed(reception.desk, request, "Dead letters") as frame:
            graveyards(frame)

    @ui.page("/dead-letters/{topic}/{group}")
    async def _(request: Request, topic: str, group: str) -> None:
        with framed(reception.desk, request, f"Dead letters of {group} of {topic}") as frame:
            await Graveyard(frame, topic, group).load()

    @ui.page("/devices")
    async def _(request: Request) -> None:
        with framed(reception.desk, request, "Devices") as frame:
            await Register(frame).load()
