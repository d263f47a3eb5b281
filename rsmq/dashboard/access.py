"""Access control in front of every page, file and socket of the dashboard.

Three checks, because another site could attack through the browser of an authorised user: the Host header (a foreign
name that resolves to this address: DNS rebinding), the Origin header (another site's script), and the token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rsmq.dashboard.login_limit import LoginLimit
from rsmq.dashboard.roles import Authorize, Role, same_for_all
from rsmq.model.clock import monotonic

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
COOKIE: Final = "rsmq_dashboard"
LOGIN: Final = "/login"
LONGEST_FORM: Final = 4096
SAFE_METHODS: Final = ("GET", "HEAD")
HEADERS: Final = (
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; frame-ancestors 'none'; base-uri 'self'; form-action 'self'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # no-referrer would send our own form with the origin `null`
)
STATIC: Final = "/static/"
"""Style and script: the same for all visitors, so the form of the token may use them."""
FORM: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>rsmq dashboard</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="{root}/static/style.css">
</head><body class="login"><h1>rsmq dashboard</h1><form method="post" action="{root}/login" class="bar">
<label>Token <input type="password" name="token" autofocus></label><button>Enter</button></form>
<p>{text}</p></body></html>
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """`hosts` are the accepted host names; without a `token` every visitor who can reach the port is let in.

    `authorize` says who sends a request and what they may do, in which topic; by default all visitors may look.
    """

    hosts: frozenset[str] = field(default_factory=lambda: frozenset(LOOPBACK))
    token: str | None = field(default=None, repr=False)
    authorize: Authorize = field(default_factory=lambda: same_for_all(Role.LOOK))

    def pass_word(self) -> str:
        """The value of the cookie: a hash from which the token cannot be computed. It takes a while to make one on
        purpose, because guesses of cookies are not limited as those of tokens are."""
        return hashlib.scrypt((self.token or "").encode(), salt=b"rsmq dashboard", n=1 << 14, r=8, p=1).hex()


class AccessControl:
    """Refuses what the rules do not allow, and adds headers that keep the pages out of other sites' frames."""

    def __init__(self, app: ASGIApp, rules: Rules, clock: Callable[[], float] = monotonic) -> None:
        self._app, self._rules = app, rules
        self._pass_word = "" if rules.token is None else rules.pass_word()
        self._limit = LoginLimit(clock)

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
        """The answer instead of the page; None to let the request in."""
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not is_allowed(host, self._rules.hosts):
            return PlainTextResponse("this host name is not allowed: add it with --name of `rsmq dashboard`", 421)
        origin = headers.get("origin")
        if origin is not None and not is_own(origin, host, self._rules.hosts):
            return PlainTextResponse(
                "this request comes from another site: if it is the public address of this dashboard behind a proxy, "
                "add its name with --name of `rsmq dashboard`", 403,
            )  # fmt: skip
        if self._rules.token is None:
            return None
        path = str(scope["path"]).removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path == LOGIN:
            return await self._login(Request(scope, receive), host)
        if path.startswith(STATIC) and ".." not in path:
            return None
        if self._has_cookie(scope, host):
            return None
        return form(scope, "") if scope["type"] == "http" else PlainTextResponse("", 401)

    async def _login(self, request: Request, host: str) -> Response:
        if request.method in SAFE_METHODS:
            return form(request.scope, "")
        body = b""
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > LONGEST_FORM:
                    return PlainTextResponse("the token is too long", 413)
        except ClientDisconnect:
            return PlainTextResponse("the form is incomplete", 400)
        address = request.client.host if request.client is not None else ""
        seconds = self._limit.take(address)
        if seconds:
            text = f"Too many wrong tokens: try again in {seconds} s."
            return form(request.scope, text, 429, {"Retry-After": str(seconds)})
        (token,) = parse_qs(body.decode(errors="replace")).get("token", [""])[:1]
        if not is_equal(token, self._rules.token or ""):
            return form(request.scope, "That is not the token.")
        self._limit.succeeded(address)
        answer = RedirectResponse(f"{request.scope.get('root_path', '')}/", 303)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(cookie_of(host), self._pass_word, httponly=True, samesite="strict", secure=is_secure)
        return answer

    def _has_cookie(self, scope: Scope, host: str) -> bool:
        """Also beside cookies of other programs that no rule of cookies allows, such as JSON."""
        found = HTTPConnection(scope).cookies.get(cookie_of(host))
        return found is not None and is_equal(found, self._pass_word)


def cookie_of(host: str) -> str:
    """The name of the cookie. A browser sends those of a host to all of its ports: two that lead to different
    dashboards, as port-forwarding makes them, must not take the cookie from each other."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() and port != host else COOKIE


def is_equal(given: str, wanted: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def is_allowed(host: str, hosts: Iterable[str]) -> bool:
    """Whether the Host header is an accepted name. Any port is: DNS rebinding cannot change it."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and "@" not in host and name.lower() in {each.lower() for each in hosts}


def is_own(origin: str, host: str, hosts: Iterable[str]) -> bool:
    """Whether a page of this dashboard has sent the request.

    It has if the Origin is the Host, but for the default port; or if its name was added, because a proxy may pass
    another Host and has ports of its own. A loopback name must be the Host to the letter: other programs of this
    machine have pages there, too.
    """
    try:
        given, asked = urlsplit(origin), urlsplit(f"//{host}")
        ports = [each.port or DEFAULT_PORTS.get(given.scheme) for each in (given, asked)]
    except ValueError:
        return False
    if given.hostname is None or given.scheme not in DEFAULT_PORTS:
        return False
    added = {each.lower() for each in hosts} - set(LOOPBACK)
    return given.hostname in added or (given.hostname == asked.hostname and ports[0] == ports[1])


def form(scope: Scope, text: str, status: int = 401, headers: Mapping[str, str] | None = None) -> Response:
    """The page that asks for the token."""
    return HTMLResponse(FORM.format(root=scope.get("root_path", ""), text=text), status, headers)


def guarded(send: Send) -> Send:
    """Adds the headers to every answer."""

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return forward
