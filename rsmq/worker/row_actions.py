"""What the relay of an outbox asks of its worker: messages with unique names, and cancels."""

from __future__ import annotations

from collections.abc import Callable

from rsmq.control.cancel import Cancel
from rsmq.errors import BrokerUnavailable
from rsmq.model.body import Body
from rsmq.model.encoded_message import EncodedMessage
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.model.unique import Unique
from rsmq.producer import Producer
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics


class WorkerRowActions:
    """By the producer of the worker, which the broker sets before it runs."""

    def __init__(
        self, producer: Callable[[], Producer | None], client: Client, keys: Keys, settings: Settings, topics: Topics
    ) -> None:
        self._producer, self._topics = producer, topics
        self._cancel = Cancel(client, keys, settings)

    async def publish_unique(self, message: EncodedMessage, name: Unique) -> bool:
        """Store a message with a unique name. False: another one keeps the name, or its id was stored."""
        ref = await self._connected().claim(message, name)
        return ref.is_new is not False

    @property
    def above(self) -> int | None:
        """A message whose stored form has more bytes has its body in the store; None: there is no store."""
        producer = self._producer()
        return None if producer is None else producer.above

    async def offload(self, topic: str, message_id: str, data: bytes) -> Body:
        """Put the stored form of a message into the store. Raises StoreUnavailable."""
        return await self._connected().offload(topic, message_id, data)

    async def keep_body(self, body: Body) -> None:
        """After its entry is stored: put a body again that was swept meanwhile. Raises StoreUnavailable."""
        await self._connected().keep_body(body)

    def _connected(self) -> Producer:
        producer = self._producer()
        if producer is None:
            raise BrokerUnavailable("the broker of this worker publishes nothing yet")
        return producer

    async def cancel(self, message_id: str, topic: str, key: str | None) -> None:
        """Mark a message as `broker.cancel` does. The answer of its owner is not waited for."""
        found = await self._topics.find(topic)
        if found is not None:
            await self._cancel(message_id, found, key, waits=False)
