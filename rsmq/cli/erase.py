"""`rsmq erase`: forget a key."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from rsmq.broker import Broker
from rsmq.cli.connection import ask_broker
from rsmq.cli.failure import print_error
from rsmq.cli.output import confirm, print_result
from rsmq.cli.parameters import Json, Url, Yes, duration_option, example
from rsmq.codecs.reading import store_of
from rsmq.control import Erased
from rsmq.model.words import count, printable

PATIENCE = timedelta(seconds=30)
NOT_FOUND = (
    "not looked at: payloads of other keys, messages without a key, retained MQTT messages, archives, outboxes, "
    "databases, logs, traces, the server's files until it rewrites them, backups"
)


@example("rsmq erase u7 --device phone-7")
def erase(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The ordering key, in all topics.", show_default=False)],
    device: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="ID", help="Also empty the inbox of this device. Repeatable."),
    ] = None,
    timeout: Annotated[
        timedelta | None, duration_option("How long to wait for what a handler works on. Default: 30s.")
    ] = None,
    yes: Yes = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Erase what the server holds of a key: messages, delayed ones, dead letters. Exit code 1 if some still run.

    Stop what publishes for the key before, and delete its rows of outboxes. With RSMQ_BODIES large bodies are deleted
    in that store; otherwise they go with the sweeps.
    """
    inboxes = f", and the inboxes of {', '.join(map(printable, device))}" if device else ""
    confirm(f"Erase all messages of the key {key!r} in all topics{inboxes}?", is_agreed=yes)

    def act(broker: Broker) -> Awaitable[Erased]:
        return broker.erase(key, devices=device or (), timeout=timeout or PATIENCE)

    found = ask_broker(url, act, offload=store_of())
    text = (
        f"erased {count(found.stored, 'message')}, {found.delayed} delayed, {count(found.dead, 'dead letter')}, "
        f"{count(found.outputs, 'output')}, {count(found.names, 'unique name')}, {count(found.letters, 'letter')}, "
        f"{count(found.replies, 'answer')}, {count(found.bodies, 'body', 'bodies')}; "
        f"{found.running} still in the hands of a worker"
    )
    print_result(asdict(found), text, as_json=as_json)
    print_error(NOT_FOUND)
    if found.running:
        raise typer.Exit(1)
