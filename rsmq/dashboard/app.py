"""The dashboard as an ASGI application: by itself, or mounted into another."""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl
from uuid import uuid4

import anyio
import anyio.abc
from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rsmq.control.audit import Audit
from rsmq.dashboard import (
    batch,
    connection,
    dead_letter,
    device,
    message,
    overview,
    process,
    publishing,
    schedule,
    search,
)
from rsmq.dashboard.access import AccessControl, Rules
from rsmq.dashboard.actions import Action, ActionForm, prepare
from rsmq.dashboard.client_rates import WatchedClients
from rsmq.dashboard.history import HistorySampler
from rsmq.dashboard.html import Html, Live, button, hidden, tag
from rsmq.dashboard.page import Page, Room, Visit, failure, frame
from rsmq.dashboard.queries import EVERY, PageNotFound, PageRefused, Queries
from rsmq.dashboard.roles import Role
from rsmq.dashboard.waiting import WaitingMessages
from rsmq.errors import BrokerError, ConfigError, RsmqError
from rsmq.inspector.inspector import Inspector
from rsmq.model.extension import Extension, extensions
from rsmq.model.keys import Keys
from rsmq.model.own_tasks import Beside
from rsmq.model.settings import Settings
from rsmq.persistence.mqtt_traces import MqttTraces
from rsmq.producer import Producer
from rsmq.redis.client.connector import Connector
from rsmq.redis.embedded.server import server_for
from rsmq.redis.wire.url import database_of

log = logging.getLogger("rsmq.dashboard")

STATIC: Final = Path(__file__).parent / "static"
SUBJECTS: Final = ("device", "client", "batch")
"""Fields of forms that name what an action is about, if it is no topic."""
MOST_NOTES: Final = 200
LONGEST_FORM: Final = 1 << 18

Build = Callable[..., Awaitable[Page]]

PAGES: Final[dict[str, Build]] = {
    "/": overview.overview,
    "/members": overview.members,
    "/search": search.search,
    "/publish/{topic}": publishing.publish_form,
    "/processes": process.processes,
    "/process/{name}": process.process,
    "/topic/{name}": overview.topic,
    "/group/{name}/{group}": overview.group,
    "/messages/{topic}": message.messages,
    "/message/{topic}/{message_id:path}": message.message,
    "/delayed/{topic}": message.delayed,
    "/parked/{topic}/{group}": message.parked,
    "/batches": batch.batches,
    "/batch/{name:path}": batch.batch,
    "/schedules": schedule.schedules,
    "/schedule/{topic}/{name}": schedule.schedule,
    "/dead-letters": dead_letter.dead_letter_groups,
    "/dead-letters/{topic}/{group}": dead_letter.dead_letters,
    "/dead-letter/{topic}/{group}/{letter:path}": dead_letter.dead_letter,
    "/devices": device.devices,
    "/device/{name:path}": device.device,
    "/connections": connection.connections,
    "/retained": connection.retained,
    "/connection/{name:path}": connection.connection,
    "/audit": device.audit,
}


ADDRESS: Final = re.compile(r"[a-z][a-z0-9-]*")
"""What the name of a page that another distribution adds looks like."""
OWN: Final = {"do", "static", *(path.split("/")[1] for path in PAGES)}


def added_pages() -> list[Extension]:
    """The pages that entry points add. None takes the address of a page of rsmq."""
    found = extensions("rsmq.dashboard_pages")
    return [each for each in found if ADDRESS.fullmatch(each.name) and each.name not in OWN]


def added_page(extension: Extension) -> Build:
    """A page of another distribution, loaded when it is asked for. Visitors get it who see all topics."""

    async def build(visit: Visit) -> Page:
        if not visit.visitor.sees(None) or Role.NONE in visit.visitor.topics.values():
            raise PageRefused("your role does not show this page")
        try:
            page: Page = await extension.load()(visit)
        except RsmqError:
            raise
        except Exception as error:
            log.exception("the page %s of %s failed", extension.name, extension.distribution)
            said = f"the page {extension.name} of {extension.distribution} failed: {type(error).__name__}: {error}"
            raise RsmqError(said) from error
        return page

    return build


class Dashboard:
    """The pages of one server. They ask it only while the application runs."""

    def __init__(self, settings: Settings, rules: Rules) -> None:
        self._settings, self._rules = settings, rules
        self._added = added_pages()
        self._room: Room | None = None
        self._inspector: Inspector | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._notes: OrderedDict[str, str] = OrderedDict()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect, poll the server while pages are open, and keep the history."""
        settings = self._settings
        async with server_for(settings) as url, Connector(url, settings).connected() as client:
            keys = Keys(settings.prefix, database_of(settings.url))
            self._inspector = Inspector(client, keys, settings)
            queries, history = Queries(client, keys, settings), HistorySampler(client, keys, self._inspector)
            producer = Producer(client, keys, settings, queries.topics)
            rates = WatchedClients(MqttTraces(client, keys))

            async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
                async with anyio.create_task_group() as self._tasks:
                    await self._tasks.start(queries.poller.run)
                    await self._tasks.start(history.run)
                    await self._tasks.start(producer.run)
                    await self._tasks.start(rates.run)
                    task_status.started()

            async with Beside(run):
                waiting, names = (
                    WaitingMessages(client, keys, settings, queries.encoding),
                    tuple(each.name for each in self._added),
                )
                self._room = Room(queries, waiting, history, Audit(client, keys), producer, rates, names)
                yield
                self._room = None

    def routes(self) -> list[Route | Mount]:
        """The pages, the actions and the files."""
        routes: list[Route | Mount] = [Route(path, self._page(build)) for path, build in PAGES.items()]
        routes += [Route(f"/{each.name}", self._page(added_page(each))) for each in self._added]
        routes.append(Route("/do/{action}", self._answering(self._act), methods=["POST"]))
        routes.append(Mount("/static", StaticFiles(directory=STATIC)))
        routes.append(Route("/{rest:path}", self._answering(self._nothing)))
        return routes

    # -- answers --------------------------------------------------------------------------------------------------

    def _page(self, build: Build) -> Callable[[Request], Awaitable[Response]]:
        async def answer(visit: Visit) -> Response:
            page = await build(visit, **visit.request.path_params)
            made = frame(visit, page, self._notes.get(visit.given("note"), ""))
            if "live" in visit.request.query_params and page.is_live:
                return StreamingResponse(self._changes(visit, build), media_type="text/event-stream",
                                         headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})  # fmt: skip
            return HTMLResponse(made)

        return self._answering(answer)

    async def _changes(self, visit: Visit, build: Build) -> AsyncIterator[str]:
        """The changes of a page, each second, until its browser leaves. The first event is all of it."""
        before = Live()
        while True:
            visit.live = Live()
            try:
                frame(visit, await build(visit, **visit.request.path_params))
            except RsmqError as error:
                visit.live.part("trouble", str(error), role="alert", class_="trouble")
            after = visit.live
            changed = after.changes(before)
            yield f"data: {json.dumps(changed)}\n\n" if changed else ": nothing\n\n"
            before = after
            await anyio.sleep(EVERY)

    async def _nothing(self, visit: Visit) -> Response:
        raise PageNotFound(f"there is no page {visit.path}")

    def _answering(self, answer: Callable[[Visit], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Errors as pages with their status."""

        async def respond(request: Request) -> Response:
            visit: Visit | None = None
            try:
                visit = await self._visit(request)
                return await answer(visit)
            except PageNotFound as error:
                return HTMLResponse(failure(visit, "Not found", str(error)), 404)
            except PageRefused as error:
                return HTMLResponse(failure(visit, "Not allowed", str(error)), 403)
            except BrokerError as error:
                return HTMLResponse(failure(visit, "The server does not answer", str(error)), 503)
            except (ConfigError, RsmqError) as error:
                return HTMLResponse(failure(visit, "That does not work", str(error)), 400)

        return respond

    async def _visit(self, request: Request) -> Visit:
        """Who asks. Raises PageRefused and ConfigError."""
        if self._room is None:
            raise ConfigError(
                "the dashboard is not running: it starts with the lifespan of the application it is mounted into"
            )
        found: Any = self._rules.authorize(request)
        visitor = await found if isawaitable(found) else found
        if visitor is None:
            raise PageRefused("you may not see this dashboard")
        prefix = request.headers.get("X-Forwarded-Prefix", "").rstrip("/") + request.scope.get("root_path", "")
        return Visit(request, self._room, visitor, prefix if prefix.startswith("/") else "")

    # -- actions --------------------------------------------------------------------------------------------------

    async def _act(self, visit: Visit) -> Response:
        """Ask first; with the answer, do it and go back to the page."""
        assert self._inspector is not None
        form = await read_form(visit.request)
        name = str(visit.request.path_params["action"])
        back = str(form.get("back") or "")
        if not back.startswith(f"{visit.prefix}/") or back.startswith("//") or "\\" in back:
            back = visit.url()
        action, wanted = await prepare(name, visit, self._inspector, form)
        if form.get("confirmed") != "yes":
            return HTMLResponse(frame(visit, question(visit, action, wanted, name, back)))

        async def do() -> str:
            subject = (wanted.topic or next(filter(None, map(wanted.value, SUBJECTS)), ""), wanted.group)
            return await visit.room.audit.record(visit.visitor.name, name, subject, wanted.state, action.act)

        note = await self._later(do) if action.is_long else await do()
        back, token = visit.url(*action.then) if action.then else back, uuid4().hex
        self._notes[token] = note
        while len(self._notes) > MOST_NOTES:
            self._notes.popitem(last=False)
        return RedirectResponse(f"{back}{'&' if '?' in back else '?'}note={token}", 303)

    async def _later(self, do: Callable[[], Awaitable[str]]) -> str:
        """Do something slow while the dashboard runs; the audit page shows its end."""
        assert self._tasks is not None

        async def run() -> None:
            try:
                await do()
            except RsmqError as error:
                log.warning("an action of the dashboard failed: %s", error)

        self._tasks.start_soon(run)
        return "it has begun, and goes on in the background: the audit page shows its end"


async def read_form(request: Request) -> FormData:
    """The fields of a form. Raises ConfigError for one that is too long, or incomplete."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > LONGEST_FORM:
                raise ConfigError("the form is too long")
    except ClientDisconnect:
        raise ConfigError("the form is incomplete") from None
    values = parse_qsl(body.decode(errors="replace"), keep_blank_values=True, errors="replace")
    return FormData([(name, value) for name, value in values])


def question(visit: Visit, action: Action, wanted: ActionForm, name: str, back: str) -> Page:
    """The page that asks before something is changed. It sends the same form again."""
    values = [(key, value) for key, value in wanted.form.multi_items() if isinstance(value, str) and key != "confirmed"]
    fields = hidden([*values, ("confirmed", "yes")])
    made: list[Html] = [fields, button(action.word, danger=action.is_danger), tag("a", "cancel", href=back)]
    form = tag("form", made, method="post", action=visit.url("do", name), class_="bar")
    return Page("Are you sure?", [tag("p", action.question, class_="question"), form])


def create_app(settings: Settings | None = None, *, rules: Rules | None = None) -> Starlette:
    """An application that serves only the dashboard."""
    found = Rules() if rules is None else rules
    dashboard = Dashboard(Settings() if settings is None else settings, found)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with dashboard.open():
            yield

    app = Starlette(routes=dashboard.routes(), lifespan=lifespan)
    app.add_middleware(AccessControl, rules=found)
    return app


def mount(app: Starlette, path: str = "/rsmq", settings: Settings | None = None, *, rules: Rules | None = None) -> None:
    """Add the dashboard to an application of Starlette or FastAPI. It runs with the application's lifespan.

    By default it serves this machine only, and every visitor may only look (`Rules`).
    """
    found = Rules() if rules is None else rules
    dashboard = Dashboard(Settings() if settings is None else settings, found)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(parent: Any) -> AsyncIterator[Any]:
        async with dashboard.open(), inner(parent) as given:
            yield given

    app.router.lifespan_context = lifespan
    pages = Starlette(routes=dashboard.routes())
    pages.add_middleware(AccessControl, rules=found)
    app.mount(path, pages)
