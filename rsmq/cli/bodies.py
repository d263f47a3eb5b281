"""`rsmq bodies`: large payloads that lie in a store outside of the server."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer

from rsmq.cli.connection import CommandConnection, ask
from rsmq.cli.output import confirm, print_line
from rsmq.cli.parameters import Json, Url, Yes, duration_option, noun
from rsmq.cli.tables import print_rows
from rsmq.codecs.offload import Offload
from rsmq.codecs.reading import BODIES
from rsmq.control import Bodies, TopicBodies
from rsmq.errors import ConfigError

app = noun("Large payloads in a store: which are needed, and the sweep of the others.")

Store = Annotated[
    str | None,
    typer.Option(metavar="STORE", help=f"The folder or URL of Offload. Default: the environment's {BODIES}."),
]
Keep = Annotated[
    timedelta | None, duration_option("How long a body is kept at least, as `keep` of Offload. Default: 1d.", "--keep")
]


@dataclass(frozen=True, slots=True)
class Given:
    """Where bodies lie, and for how long they are kept in any case."""

    store: str | None
    keep: timedelta | None

    def offload(self) -> Offload:
        """The store. Raises ConfigError."""
        store = os.environ.get(BODIES) if self.store is None else self.store
        if store is None:
            raise ConfigError(f"which store? Give --store FOLDER, or a URL, or set {BODIES}")
        return Offload(store) if self.keep is None else Offload(store, keep=self.keep)

    def bodies(self, connection: CommandConnection) -> Bodies:
        """The bodies of the server in it."""
        return Bodies(connection.client, connection.keys, connection.topics, self.offload())


@app.command(epilog="Example: rsmq bodies status --store s3://bucket/queue")
def status(store: Store = None, keep: Keep = None, url: Url = None, as_json: Json = False) -> None:
    """The bodies of each topic, and how many of them entries name. Reads the topics that have some.

    `unnamed`: nothing names them, and the next sweeps delete them. `lost`: names in entries, without a body. Exits 1
    if a body is lost.
    """
    given = Given(store, keep)
    given.offload()
    found = ask(url, lambda connection: given.bodies(connection).status())
    show(found, as_json=as_json)
    if any(topic.lost for topic in found):
        raise typer.Exit(1)


@app.command(epilog="Example: rsmq bodies sweep --store s3://bucket/queue --yes")
def sweep(store: Store = None, keep: Keep = None, yes: Yes = False, url: Url = None, as_json: Json = False) -> None:
    """Delete bodies that no entry has named for an hour, as each worker with Offload does by itself.

    The first sweep notes which these are, one that comes an hour later deletes them.
    """
    given = Given(store, keep)
    offload = given.offload()
    confirm(f"Delete what no entry names in {offload!r}?", is_agreed=yes)
    show(ask(url, lambda connection: given.bodies(connection).sweep()), as_json=as_json)


def show(found: list[TopicBodies], *, as_json: bool) -> None:
    """A row for each topic, and the names without a body."""
    rows = [
        (each.topic, each.bodies, each.size, each.named, each.unnamed, each.removed, len(each.lost)) for each in found
    ]
    columns = ("topic", "#bodies", "#bytes", "#named", "#unnamed", "#removed", "#lost")
    values: list[dict[str, Any]] = [asdict(each) for each in found]
    print_rows(values, columns, rows, "the store has no bodies of this server", as_json=as_json)
    for each in () if as_json else found:
        if each.is_moving:
            print_line(f"{each.topic}: its entries move to other partitions, so nothing was deleted: look again later")
        for name in each.lost:
            print_line(f"{each.topic}: an entry names {name}, and the store does not have it")
