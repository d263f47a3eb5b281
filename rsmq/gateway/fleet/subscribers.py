"""The subscribers of a topic name by that name, as the server keeps them: of each shard of clients one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rsmq.model.mqtt_subscription import SHARDS, Subscription, unpack_subscribers

NEW_MS: Final = 60_000
"""How long the server keeps which messages are older than a subscription: they wait for a router far shorter."""
MS_DIGITS: Final = 20
"""Of a stream id as text that sorts: its time."""


class Subscribers:
    """The subscribers of a topic name. It is another object when they are others.

    `at`: of each shard, the state of its names in which this was read. `tokens`: clients whose subscription does not
    meet some older messages, each with the call that has noted them. `older`: by client, these messages: the newest by
    partition.
    """

    __slots__ = ("at", "found", "older", "tokens", "values")

    def __init__(self, name: str, values: Sequence[bytes | None], at: tuple[bytes, ...]) -> None:
        self.at = at
        self.values = values
        self.found: list[tuple[str, Subscription]] = []
        self.tokens: list[tuple[int, str, str]] = []
        self.older: dict[str, dict[str, str]] = {}
        for shard, value in enumerate(values):
            if value:
                for client, subscription, token in unpack_subscribers(name, value):
                    self.found.append((client, subscription))
                    if token:
                        self.tokens.append((shard, client, token))

    def passed(self, partition: str, position: str) -> None:
        """A router has passed a position of a partition: what is older there does not come any more.

        What other partitions had a minute before, which other gateways may route, counts as passed, too.
        """
        long_ago = f"{max(0, int(position[:MS_DIGITS]) - NEW_MS):0{MS_DIGITS}}"
        for client, older in list(self.older.items()):
            left = {
                name: at for name, at in older.items()
                if at > (position if name == partition else long_ago)
            }  # fmt: skip
            if left:
                self.older[client] = left
            else:
                del self.older[client]

    def __repr__(self) -> str:
        return f"<Subscribers {len(self.found)}>"


NO_SUBSCRIBERS: Final = Subscribers("", (None,) * SHARDS, (b"",) * SHARDS)
