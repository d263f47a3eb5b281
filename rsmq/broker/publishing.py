"""Publishing by a broker: what it checks, and what it passes on to its producer."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar, Unpack

from rsmq.broker.connection import BrokerPart
from rsmq.errors import ConfigError
from rsmq.model.keys import Keys
from rsmq.model.message_ref import MessageRef
from rsmq.model.publish_options import ManyOptions, PublishOptions, refuse_unknown
from rsmq.model.settings import Settings
from rsmq.producer.open_batch import BatchOptions, BatchSettings, OpenBatch

T = TypeVar("T")


class Publishing(BrokerPart):
    """The part of a broker that publishes."""

    keys: Keys
    settings: Settings

    def publish(
        self, /, topic: str, payload: Any, **options: Unpack[PublishOptions]
    ) -> Coroutine[Any, Any, MessageRef]:
        """Store one message and return its id, a text that knows where the message is. When this returns, it is stored.

        Calls made at the same time share one write. Raises TooLarge, NotJson, TopicFull, BrokerUnavailable (not stored)
        or PublishUnknown (perhaps stored: publish it again with the `message_id` of the error); a plain BrokerError
        where it is stored, and too few replicas have it. Options:

        - `key`: messages with the same key are handled in order (none: a random partition).
        - `headers`: names and values, both text (none).
        - `band`: a band of the topic, such as `urgent`, which does not wait behind the others (`normal`). While it is
          not open, its messages go to `normal`.
        - `delay`: a timedelta or text such as `5m`, deliver the message that much later (at once).
        - `at`: an aware datetime, deliver the message then (at once).
        - `message_id`: the message is stored once, however often this id is published within RSMQ_DEDUP_WINDOW.
          `is_new` of what is returned says whether this call has stored it, `is_same` whether the payload was the same.
        - `expires`: no attempt of a handler starts after that, also of a message that waits for its retry: a duration
          from the moment when the server stores it, or an aware datetime (never).
        - `on_expiry`: "drop", or "dead" for a dead letter with the reason `expired` ("drop").
        - `keep_result`: a duration, for how long `broker.result` can ask what the handler of each group has returned.
        - `unique`: a name that one message of the topic has at a time. If another message has it, nothing is stored,
          and the ref of that message is returned, with `is_new` False. A name belongs to one key; without a key it is
          the key.
        - `until`: "settled": the name is free when all groups have settled the message, or cancelled it; "started": as
          soon as a worker of any group has it in its hands; a duration: after that time ("settled").
        - `on_conflict`: "keep"; "replace": the new message takes the place of one that is delayed, or that no worker
          has; "extend": a delayed message keeps its payload, and is due at the new time ("keep").
        - `wait_replicas`: return when so many replicas have the message, too (0).
        """
        producer = self._producer or self._connection.producer  # its `publish` checks the event loop for less
        return producer.publish(topic, payload, **options)  # no coroutine around it: that would cost more

    def batch(self, name: str, **options: Unpack[BatchSettings]) -> OpenBatch:
        """Messages with one callback when the last of them has ended: `async with broker.batch(...) as batch:`.

        `await batch.publish(topic, payload, ...)` adds a member. The batch closes at the end of the block. Options:

        - `group`: the group that handles the members. It must be there, in each topic with members; other groups of
          these topics do not count.
        - `on_complete`: a topic that gets one message when all members have ended for good: done, failed (a dead
          letter), cancelled or expired. Its payload has the numbers, its key is the name of the batch.
        - `on_success`: the same when all of them are done, also after a replay of dead letters.
        - `expires`: a duration; then the callback comes in any case, and says `abandoned` (1 day).
        - `keep`: how long the numbers are kept after the callback; until then the name is taken (7 days).
        - `resume`: go on with a batch whose publisher has ended before its time. Each member needs a `message_id`.

        Raises BatchExists, BatchEnded and ConfigError when the block begins.
        """
        connection = self._connection
        refuse_unknown("batch", options, BatchSettings.__annotations__)
        if "group" not in options:
            raise ConfigError("a batch needs group=...: the group that handles its members")
        checked = BatchOptions.checked(name, **options)
        if connection.producer.encoding is not None and connection.producer.encoding.is_required:
            raise ConfigError(
                "a broker that refuses payloads which are not encrypted cannot use batches: the server writes their "
                "callbacks. Use a broker without required=True for the members and callbacks of batches"
            )
        about = (connection.client, self.keys, self.settings, connection.topics, connection.producer)
        return OpenBatch(*about, checked)

    async def publish_many(self, topic: str, items: Iterable[T], **options: Unpack[ManyOptions[T]]) -> list[str]:
        """Store many messages and return their ids. Messages of one key are stored in the order of `items`.

        `key` and `message_id` are called with each item; `headers` and `at` may be functions of it, too. `delay` and
        `at` are as for `publish`. `batch` is the most messages of one partition in one write, 1 to 500. After an error
        some of the messages may be stored: with a `message_id` publish all of them again, and each is stored once. Then
        each id is a `MessageRef`, whose `is_new` says whether this call has stored it.
        `expires`, `on_expiry` and `keep_result` hold for each of them, as for `publish`.
        """
        refuse_unknown("publish_many", options, ManyOptions.__annotations__)
        ids: list[str] = await self._connection.producer.publish_many(topic, items, **options)
        return ids
