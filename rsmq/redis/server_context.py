"""The surroundings of a service in the worker that runs it: the connected client and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rsmq.model.body import Body
from rsmq.model.encoded_message import EncodedMessage
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.model.unique import Unique
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics


class RowActions(Protocol):
    """What the relay of an outbox does by the publisher and the cancelling of its worker."""

    async def publish_unique(self, message: EncodedMessage, name: Unique) -> bool:
        """Store a message with a unique name. False: another one keeps the name, or its id was stored."""
        ...

    @property
    def above(self) -> int | None:
        """A message whose stored form has more bytes has its body in the store; None: there is no store."""
        ...

    async def offload(self, topic: str, message_id: str, data: bytes) -> Body:
        """Put the stored form of a message into the store. Raises StoreUnavailable."""
        ...

    async def keep_body(self, body: Body) -> None:
        """After its entry is stored: put a body again that was swept meanwhile. Raises StoreUnavailable."""
        ...

    async def cancel(self, message_id: str, topic: str, key: str | None) -> None:
        """Mark a message as `broker.cancel` does. The answer of its owner is not waited for."""
        ...


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The server, as one member of it sees it."""

    client: Client
    keys: Keys
    settings: Settings
    topics: Topics
    member: str
    actions: RowActions | None = None
