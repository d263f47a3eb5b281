"""All pages share this: the request, the frame with its navigation, notes, and forms for actions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote, urlencode

from starlette.requests import Request

from rsmq.control.audit import Audit
from rsmq.dashboard.client_rates import WatchedClients
from rsmq.dashboard.history import HistorySampler
from rsmq.dashboard.html import Content, Html, Live, escaped, hidden, link, tag, text_field
from rsmq.dashboard.queries import PageNotFound, PageRefused, Queries
from rsmq.dashboard.roles import Role, Visitor
from rsmq.dashboard.waiting import WaitingMessages
from rsmq.errors import ConfigError
from rsmq.inspector.trend import Board
from rsmq.model.encoding import Encoding
from rsmq.model.own_tasks import Beside
from rsmq.producer import Producer

PAGES: Final = (
    ("Overview", ""), ("Members", "members"), ("Processes", "processes"), ("Schedules", "schedules"),
    ("Batches", "batches"), ("Dead letters", "dead-letters"), ("Devices", "devices"), ("Connections", "connections"),
    ("Audit", "audit"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Room:
    """The server as the pages ask it, while the application runs."""

    queries: Queries
    waiting: WaitingMessages
    history: HistorySampler
    audit: Audit
    producer: Producer
    rates: WatchedClients
    added: tuple[str, ...] = ()
    """Names of the pages that other distributions add."""

    @asynccontextmanager
    async def publishing(self, encoding: Encoding | None = None) -> AsyncIterator[Producer]:
        """What publishes: with an encoding a producer of its own, for the block."""
        if encoding is None:
            yield self.producer
            return
        queries = self.queries
        producer = Producer(queries.client, queries.keys, queries.settings, queries.topics, encoding)
        async with Beside(producer.run):
            yield producer


@dataclass(slots=True)
class Visit:
    """One request of one visitor. `prefix` is the path that the dashboard is mounted at."""

    request: Request
    room: Room
    visitor: Visitor
    prefix: str
    live: Live = field(default_factory=Live)

    @property
    def queries(self) -> Queries:
        """The questions to the server."""
        return self.room.queries

    def url(self, *parts: str, **query: str) -> str:
        """The address of a page. Names are escaped: other programs may have chosen them."""
        path = f"{self.prefix}/{'/'.join(quote(part, safe='') for part in parts)}"
        return f"{path}?{urlencode(query)}" if query else path

    def given(self, name: str) -> str:
        """A value of the address."""
        return self.request.query_params.get(name, "").strip()

    def sees(self, topic: str) -> bool:
        """Whether this visitor may see a topic."""
        return self.visitor.sees(topic)

    def search(self) -> Html:
        """A field that filters the page by a name."""
        field = text_field("q", "name contains", self.given("q"), type="search")
        return tag("form", field, tag("button", "show"), class_="bar")

    def check(self, topic: str) -> None:
        """Raises PageNotFound for a topic that does not exist for this visitor."""
        if not self.visitor.sees(topic):
            raise PageNotFound(f"there is no topic {topic!r}")

    def check_devices(self) -> None:
        """Raises PageRefused if the visitor sees only single topics."""
        if not self.visitor.sees(None):
            raise PageRefused("your role does not show this page")

    async def board(self) -> Board:
        """The newest board, with what the visitor sees."""
        return self.visible(await self.queries.poller.fresh())

    def visible(self, board: Board) -> Board:
        """The part of a board that the visitor may see."""
        if self.visitor.sees(None) and not self.visitor.topics:
            return board
        return Board(
            board.span,
            tuple(each for each in board.topics if self.visitor.sees(each.name)),
            tuple(each for each in board.groups if self.visitor.sees(each.topic)),
        )

    def action(
        self, name: str, text: str, role: Role, topic: str | None, values: Mapping[str, str], *content: Content,
        danger: bool = False, form: str | None = None,
    ) -> Html:  # fmt: skip
        """A form with one button, if the visitor may do it. Its question comes on a page of its own."""
        if not self.visitor.may(role, topic):
            return Html("")
        kind = "danger" if danger else None
        made = tag("button", text, class_=kind)
        fields = hidden({**values, "back": self.back()}.items())
        return tag("form", fields, content, made, method="post", action=self.url("do", name), id=form, class_="action")

    def back(self) -> str:
        """The address of this page, without the note of an earlier action."""
        rest = urlencode([(n, v) for n, v in self.request.query_params.multi_items() if n not in ("note", "live")])
        return f"{self.prefix}{self.path}{f'?{rest}' if rest else ''}"

    @property
    def path(self) -> str:
        """The path below the prefix, as the browser has sent it."""
        raw = self.request.scope.get("raw_path") or self.request.url.path.encode()
        path = raw.decode("latin-1").partition("?")[0]
        root = self.request.scope.get("root_path", "")
        return path.removeprefix(root) if root else path


@dataclass(slots=True)
class Page:
    """The content of a page. `is_live`: it is sent again each second, as far as it has changed."""

    title: str
    body: list[Content] = field(repr=False)
    is_live: bool = False
    crumbs: list[tuple[str, str]] = field(default_factory=list)


def frame(visit: Visit, page: Page, note: str = "") -> Html:
    """A whole page."""
    queries, visitor = visit.queries, visit.visitor
    pages = [*PAGES, *((title_of(name), name) for name in visit.room.added)]
    links = [
        tag("a", text, href=visit.url(*([path] if path else [])), aria_current="page" if page.title == text else None)
        for text, path in pages
    ]
    find = tag(
        "form", tag("input", name="find", type="search", placeholder="id, key or name", aria_label="search all topics",
                    value=visit.given("find") or None), action=visit.url("search"), class_="find", role="search",
    )  # fmt: skip
    nav = tag(
        "header", tag("strong", "rsmq"), tag("nav", links, aria_label="pages"), find,
        tag("div", tag("div", f"prefix {queries.keys.prefix}"), tag("div", word_for(visitor)), class_="who dim"),
    )  # fmt: skip
    trouble = queries.poller.trouble
    banner = visit.live.part("trouble", trouble, role="alert", class_="trouble" if trouble else "none")
    crumbs = [(link(text, url), " / ") for text, url in page.crumbs]
    said = tag("p", note, class_="note", role="status") if note else None
    main = tag("main", banner, said, tag("p", crumbs, class_="crumbs") if crumbs else None, tag("h1", page.title),
               page.body, data_live=page.is_live or None)  # fmt: skip
    static = visit.url("static")
    head = [
        tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"), tag("title", f"{page.title} · rsmq"),
        tag("link", rel="stylesheet", href=f"{static}/style.css"), tag("link", rel="icon", href=f"{static}/icon.svg"),
        tag("script", "", src=f"{static}/dashboard.js", defer=True),
    ]  # fmt: skip
    return Html("<!doctype html>" + tag("html", tag("head", head), tag("body", nav, main), lang="en"))


def title_of(name: str) -> str:
    """`slow-orders` as `Slow orders`: the link to a page that another distribution adds."""
    return name.replace("-", " ").capitalize()


def word_for(visitor: Visitor) -> str:
    """Who is here, and what they may do."""
    words = {Role.NONE: "some topics", Role.LOOK: "read-only", Role.ACT: "may act", Role.ADMIN: "admin"}
    return f"{visitor.name}: {words[visitor.role]}"


def failure(visit: Visit | None, title: str, text: str) -> Html:
    """A page that says what is wrong."""
    body = [tag("p", text)]
    if visit is None:
        return Html("<!doctype html>" + tag("html", tag("title", title), tag("body", tag("h1", title), body)))
    return frame(visit, Page(title, body))


def time_given(text: str) -> datetime | None:
    """A time in UTC from a form; a browser may send anything. Raises ConfigError."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None
    except ValueError:
        raise ConfigError(f"{text[:40]!r} is not a valid time") from None


def joined(parts: Iterable[Content], between: str = " ") -> Html:
    """Parts with a space, or a sign, between them."""
    return Html(between.join(made for part in parts if (made := escaped(part))))
