"""`rsmq dashboard`: the web dashboard, for as long as this command runs."""

from __future__ import annotations

import logging
import secrets
import socket
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from rsmq.cli.connection import ask, settings_for
from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, Url, example
from rsmq.errors import ConfigError
from rsmq.model.interrupt import is_from_signal
from rsmq.redis.embedded.server import server_text

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EXTRA = "`rsmq dashboard` needs the extra `dashboard`: pip install 'rsmq[dashboard]'"


@example("rsmq dashboard --port 8642")
def dashboard(
    host: Annotated[str, typer.Option(help="The address it listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port it listens on; 0: any free one.")] = 8642,
    name: Annotated[list[str] | None, typer.Option(help="A further accepted host name. May be repeated.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that visitors need.", show_default=False)
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Allow changes: replay, pause, purge.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show topics, groups, members, messages, dead letters and devices in a browser, until Ctrl-C.

    By default it listens on this machine only and is read-only. On any other address visitors need a token: the one in
    --token-file, otherwise a new one that is printed.
    """
    if not host.strip():  # it would be every address of this machine
        raise ConfigError("--host is empty: give it a value, or leave it out")
    token = token_for(host, token_file)
    names = {*LOOPBACK, *(name or ())} | ({host} if host not in ("0.0.0.0", "::") else set())
    if host in ("0.0.0.0", "::") and not name:
        raise ConfigError(f"on {host} the dashboard needs its host name: use --name dashboard.example.com")
    ask(url, lambda connection: connection.topics.names())  # report an unreachable server before anything starts
    app, server = load(url, names, token, allow_changes=allow_changes)
    listener = listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
    server_shown = server_text(settings_for(url))
    if as_json:
        told = {"url": address, "token": token if token_file is None else None, "server": server_shown}
        print_json(told, is_line=True)
    else:
        print_line(f"{address}{'' if allow_changes else ' (read-only)'} shows {server_shown}; Ctrl-C ends it")
        if token is not None and token_file is None:
            print_line(f"token: {token}")
    run(app, server, listener)


def load(url: str | None, names: set[str], token: str | None, *, allow_changes: bool) -> tuple[Any, Any]:
    """The application and its server; both are extras."""
    try:
        package, server = import_module("rsmq.dashboard"), import_module("uvicorn")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{EXTRA} ({error.name} is not installed)") from None
    roles = import_module("rsmq.dashboard.roles")
    authorize = roles.same_for_all(roles.Role.ADMIN if allow_changes else roles.Role.LOOK)
    rules = package.Rules(hosts=frozenset(names), token=token, authorize=authorize)
    return package.create_app(settings_for(url), rules=rules), server


def token_for(host: str, path: Path | None) -> str | None:
    """The token that visitors need; None on this machine without a token file."""
    if path is None:
        return None if host in LOOPBACK else secrets.token_urlsafe(24)
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token cannot be read from {path}: {error}") from None
    if len(token) < 16:
        raise ConfigError(
            f"the token in {path} is too short: use 16 characters or more, such as `openssl rand -hex 24`"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """The listening socket: its port is known before the address is printed. Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def run(app: Any, server: Any, listener: socket.socket) -> None:
    """Serve until a signal."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    config = server.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
    config.load()
    config.http_protocol_class = import_module("rsmq.dashboard.connection_limits").limited(config.http_protocol_class)
    try:
        anyio.run(lambda: server.Server(config).serve(sockets=[listener]))
    except (KeyboardInterrupt, SystemExit) as error:  # uvicorn has stopped in order, and raises the signal again
        if isinstance(error, SystemExit) and not is_from_signal(error):
            raise
