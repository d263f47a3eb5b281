"""`rsmq server`: the embedded server of this project, for as long as this command runs; and those of all projects."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from rsmq.cli.failure import print_error
from rsmq.cli.output import confirm, print_json, print_line, print_result
from rsmq.cli.parameters import Json, Yes, example
from rsmq.cli.tables import print_rows
from rsmq.inspector.text import timestamp
from rsmq.model.words import size
from rsmq.redis.embedded.inventory import StoredServer, find, remove, stored_servers
from rsmq.redis.embedded.server import EmbeddedServer, state_directory


@example("rsmq server")
def server(
    list_all: Annotated[bool, typer.Option("--list", help="List the servers of all projects, and end.")] = False,
    removed: Annotated[
        str | None,
        typer.Option("--remove", metavar="NAME", help="Delete the data of a server that is not in use, and end."),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run this project's embedded server until Ctrl-C. Processes of this project without RSMQ_URL share it.

    The data of each project lie in a directory below ~/.local/state/rsmq (or $XDG_STATE_HOME/rsmq), which --list names.
    """
    if list_all:
        show_all(as_json=as_json)
    elif removed is not None:
        remove_one(removed, is_agreed=yes, as_json=as_json)
    else:
        run(as_json=as_json)


def run(*, as_json: bool) -> None:
    """Hold this project's server until a signal."""
    embedded = EmbeddedServer()
    url = embedded.acquire()
    try:
        if os.environ.get("RSMQ_URL"):
            print_error("RSMQ_URL is set: processes with it do not use this server")
        if as_json:
            print_json({"url": url, "directory": str(embedded.directory)}, is_line=True)
        else:
            print_line(f"{url}\ndata in {embedded.directory}; Ctrl-C ends it unless other processes use it")
        # only now: the keeper, started above, must not inherit the mask
        wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        signal.sigwait(wanted)
    finally:
        embedded.release()


def show_all(*, as_json: bool) -> None:
    """List the servers of this user."""
    servers = stored_servers()
    rows = (
        (each.name, project(each), "running" if each.is_running else "", timestamp(each.used_at), size(each.size))
        for each in servers
    )
    nothing = f"there are no embedded servers in {state_directory()}"
    print_rows(servers, ("name", "project", "state", "started", "#size"), rows, nothing, as_json=as_json)
    if servers and not as_json:
        print_line(f"data in {state_directory()}/NAME")


def project(server: StoredServer) -> str:
    """Where its project is."""
    if server.project is None:
        return "unknown"
    return f"{server.project} (does not exist)" if server.is_orphaned else str(server.project)


def remove_one(name: str, *, is_agreed: bool, as_json: bool) -> None:
    """Delete the data of one."""
    found = find(name)
    confirm(f"Delete {size(found.size)} in {found.directory}, the data of {project(found)}?", is_agreed=is_agreed)
    remove(found)
    print_result({"removed": found.name, "directory": found.directory}, f"removed {found.directory}", as_json=as_json)
