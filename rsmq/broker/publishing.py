"""Publishing by a broker: what it checks, and what it passes on to its producer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar, Unpack

from rsmq.broker.connection import BrokerPart
from rsmq.errors import ConfigError
from rsmq.handler.options import refuse_unknown
from rsmq.model.duration import Duration
from rsmq.model.message_ref import MessageRef
from rsmq.producer import ExpiryOptions, PublishOptions, RareOptions

T = TypeVar("T")


class Publishing(BrokerPart):
    """The part of a broker that publishes."""

    async def publish(  # written out: passing `**options` on costs 2 % of the CPU of a message
        self,
        /,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
        **rare: Unpack[RareOptions],
    ) -> MessageRef:
        """Store one message and return its id, a text that knows where the message is. When this returns, it is stored.

        Calls made at the same time share one write. Raises TooLarge, NotJson, TopicFull, BrokerUnavailable (not stored)
        or PublishUnknown (perhaps stored: publish it again with the `message_id` of the error). Options:

        - `key`: messages with the same key are handled in order (none: a random partition).
        - `headers`: names and values, both text (none).
        - `delay`: a timedelta or text such as `5m`, deliver the message that much later (at once).
        - `at`: an aware datetime, deliver the message then (at once).
        - `message_id`: the message is stored once, however often this id is published within RSMQ_DEDUP_WINDOW.
          `is_new` of what is returned says whether this call has stored it, `is_same` whether the payload was the same.
        - `expires`: no attempt of a handler starts after that, also of a message that waits for its retry: a duration
          from the moment when the server stores it, or an aware datetime (never).
        - `on_expiry`: "drop", or "dead" for a dead letter with the reason `expired` ("drop").
        - `unique`: a name that one message of the topic has at a time. If another message has it, nothing is stored,
          and the ref of that message is returned, with `is_new` False. A name belongs to one key; without a key it is
          the key.
        - `until`: "settled": the name is free when all groups have settled the message, or cancelled it; "started": as
          soon as a worker of any group has it in its hands; a duration: after that time ("settled").
        - `on_conflict`: "keep"; "replace": the new message takes the place of one that is delayed, or that no worker
          has; "extend": a delayed message keeps its payload, and is due at the new time ("keep").
        - `wait_replicas`: return when so many replicas have the message, too (0).
        """
        if rare:
            refuse_unknown("publish", rare, PublishOptions.__annotations__)
            publish: Callable[..., Awaitable[MessageRef]] = self._connection.producer.publish_unique
            if rare.get("unique") is None:
                if rare.keys() & {"until", "on_conflict"}:
                    raise ConfigError("until and on_conflict need unique, such as unique='user-7'")
                rare.pop("unique", None)
                publish = self._connection.producer.publish
            return await publish(
                topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
                wait_replicas=wait_replicas, **rare,
            )  # fmt: skip
        producer = self.producer or self._connection.producer  # its `publish` checks the event loop for less
        return await producer.publish(
            topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id,
            wait_replicas=wait_replicas,
        )  # fmt: skip

    async def publish_many(
        self,
        topic: str,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: Callable[[T], str] | None = None,
        batch: int = 500,
        **expiry: Unpack[ExpiryOptions],
    ) -> list[str]:
        """Store many messages and return their ids. Messages of one key are stored in the order of `items`.

        `key` and `message_id` are called with each item. `batch` is the most messages of one partition in one write, 1
        to 500. After an error some of the messages may be stored: with a `message_id` publish all of them again, and
        each is stored once. Then each id is a `MessageRef`, whose `is_new` says whether this call has stored it.
        `expires` and `on_expiry` hold for each of them, as for `publish`.
        """
        refuse_unknown("publish_many", expiry, ExpiryOptions.__annotations__)
        ids: list[str] = await self._connection.producer.publish_many(
            topic, items, key=key, headers=headers, message_id=message_id, batch=batch, **expiry
        )
        return ids
