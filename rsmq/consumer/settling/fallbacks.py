"""Fallbacks: what has failed for good goes to another topic, in the step that settles it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, Final

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BodyUnavailable, BrokerUnavailable, WrongBody
from rsmq.handler.failure import LONGEST_LINE, describe, text_of
from rsmq.handler.fallback import REASONS, Fallback, fallback_headers, path_of
from rsmq.handler.reader import PayloadReader
from rsmq.handler.retry import Bury
from rsmq.model.interrupt import is_from_signal
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message
from rsmq.producer.output import Output, OwnKey

log = logging.getLogger("rsmq.settle")

MOST_RECORDS: Final = 10_000
"""Of messages that were handed on, for each partition and group: what `rsmq trace` knows of them."""
LONGEST_NOTE: Final = 500
"""Characters of why a message could not go on, in the error of its dead letter: half of it is left for the failure."""


class Fallbacks:
    """Makes the message for the fallback topic, and keeps it as an output until the first message is settled.

    The settlement stores both it and a record for `rsmq trace`. Without a fallback nothing of this runs.
    """

    def __init__(self, context: ConsumerContext) -> None:
        self._context = context
        self._keys = context.keys
        self._throttled = ThrottledLog(log)

    async def keep(self, message: Message, lane: Lane, decision: Bury, attempts: int) -> Bury | None:
        """None: the message is to be settled now, which hands it on. Otherwise it becomes a dead letter by what is
        returned: it has no fallback for this reason, or cannot be handed on, which the error says then."""
        fallback = self._context.handler.fallback
        if fallback is None or decision.reason not in REASONS:
            return decision
        path = path_of(message)
        if fallback.target in path:
            circle = " -> ".join([*path, fallback.target])
            return self._refused(fallback, decision, f"it has failed there before: {circle}")
        try:
            output = await self._output(message, lane, fallback, decision, attempts)
        except BaseException as error:
            if is_from_signal(error) or not isinstance(error, Exception):
                raise
            log.error("%s cannot go to its fallback topic %r: %s", message, fallback.target, describe(error))
            return self._refused(fallback, decision, describe(error))
        if output is not None:  # otherwise the lease is over, and the next owner does it
            lane.outgoing.hand_on(message, output, self._record(message, lane, output, decision, attempts))
        return None

    @staticmethod
    def _refused(fallback: Fallback, decision: Bury, why: str) -> Bury:
        note = text_of(f" (it could not go to the fallback topic {fallback.target!r}: {why})")[:LONGEST_NOTE]
        return replace(decision, error=f"{decision.error[: LONGEST_LINE - len(note)]}{note}")

    async def _output(
        self, message: Message, lane: Lane, fallback: Fallback, decision: Bury, attempts: int
    ) -> Output | None:
        """What is stored in the fallback topic. None: the lease has ended while the server was away. Raises what makes
        it impossible."""
        producer = self._context.producer
        assert producer is not None, "a worker gives its consumers a producer"
        handler, payload = self._context.handler, tuple[Any, ...]()
        reader = PayloadReader(handler.decode, self._context.encoding, handler.formats)
        headers = fallback_headers(message, decision, attempts)
        while lane.lease.is_held():
            try:
                await reader.undo(message)
                if fallback.payload is not None and not payload:
                    message.payload = reader.read(message)
                    payload = (await fallback.made(message),)
                member = lane.outgoing.moved_member(message, fallback.group)
                return await producer.moved(message, fallback.target, headers, lane.band, *payload, member=member)
            except (BrokerUnavailable, BodyUnavailable, WrongBody) as error:
                self._throttled.warn(f"{message} waits on its way to {fallback.target!r}", error)
                await asyncio.sleep(0.1)
        return None

    def _record(self, message: Message, lane: Lane, output: Output, decision: Bury, attempts: int) -> Output:
        """An entry beside the partition that says where the message went."""
        fields = (
            "origin", message.entry_id, "id", message.id, "topic", output.topic, "to", output.message_id,
            "reason", str(decision.reason), "attempts", str(attempts),
        )  # fmt: skip
        own = OwnKey(self._keys.handed_on(lane.topic, lane.partition, lane.group), MOST_RECORDS)
        size = sum(map(len, fields))
        return Output(self._context.topic, message.partition, message.id, fields, size, "", is_once=False, own=own)
