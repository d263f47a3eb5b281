"""Who may enter: in front of every page, file and socket of the dashboard.

Three checks, for a dashboard is worth attacking through the browser of somebody who may see it: the name under which it
is called (a foreign name that points here: DNS rebinding), the page that calls (another site's script), and the token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
COOKIE: Final = "rsmq_dashboard"
LOGIN: Final = "/login"
LONGEST_FORM: Final = 4096
SAFE_METHODS: Final = ("GET", "HEAD")
HEADERS: Final = (
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'; base-uri 'self'; form-action 'self'; object-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # no-referrer would send our own form with the origin `null`
)
FORM: Final = """<!doctype html><html lang="en"><title>rsmq dashboard</title>
<body style="font-family: sans-serif; margin: 4rem auto; max-width: 24rem"><h1>rsmq dashboard</h1>
<form method="post" action="{action}"><label>Token <input type="password" name="token" autofocus></label>
<button>Enter</button></form><p>{text}</p></body></html>"""


@dataclass(frozen=True, slots=True)
class Rules:
    """`hosts` are the names it may be called by; `token` None lets everybody in who can reach it."""

    hosts: frozenset[str] = field(default_factory=lambda: frozenset(LOOPBACK))
    token: str | None = field(default=None, repr=False)

    @property
    def pass_word(self) -> str:
        """What the cookie holds: made from the token, from which the token cannot be made."""
        return hashlib.sha256(f"rsmq dashboard {self.token}".encode()).hexdigest()


class Gate:
    """Lets in what the rules allow, and adds headers that keep the pages out of other sites' frames."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one socket from its start."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = await self._refusal(scope, receive)
        if refusal is None:
            await self._app(scope, receive, guarded(send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 4403})
        else:
            await refusal(scope, receive, guarded(send))

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        """What to answer instead of the page; None to let it in."""
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not is_allowed(host, self._rules.hosts):
            return PlainTextResponse("this dashboard is not called that: see --name of `rsmq dashboard`", 421)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return PlainTextResponse("this request comes from another site", 403)
        if self._rules.token is None:
            return None
        if scope["type"] == "http" and path_of(scope) == LOGIN:
            return await self._login(Request(scope, receive))
        if self._has_cookie(headers.get("cookie", "")):
            return None
        return form(scope, "") if scope["type"] == "http" else PlainTextResponse("", 401)

    async def _login(self, request: Request) -> Response:
        if request.method in SAFE_METHODS:
            return form(request.scope, "")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LONGEST_FORM:
                return PlainTextResponse("this is no token", 413)
        (given,) = parse_qs(body.decode(errors="replace")).get("token", [""])[:1]
        if not is_equal(given, self._rules.token or ""):
            return form(request.scope, "That is not the token.")
        answer = RedirectResponse(f"{request.scope.get('root_path', '')}/", 303)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, self._rules.pass_word, httponly=True, samesite="strict", secure=is_secure)
        return answer

    def _has_cookie(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(COOKIE)
        except CookieError:
            return False
        return found is not None and is_equal(found.value, self._rules.pass_word)


def is_equal(given: str, wanted: str) -> bool:
    """In a time that does not tell how much of it was right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def is_allowed(host: str, hosts: Iterable[str]) -> bool:
    """Whether the Host header names us; the port does not matter, as nobody can rebind one."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and "@" not in host and name.lower() in {each.lower() for each in hosts}


def path_of(scope: Scope) -> str:
    """Below the place where it is mounted."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def form(scope: Scope, text: str) -> Response:
    """The page that asks for the token."""
    return HTMLResponse(FORM.format(action=f"{scope.get('root_path', '')}{LOGIN}", text=text), 401)


def guarded(send: Send) -> Send:
    """Adds the headers to every answer."""

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = [*message.get("headers", []), *HEADERS]
            message = {**message, "headers": headers}
        await send(message)

    return forward
