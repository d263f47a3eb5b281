"""The message that a log record is about: in the handler, in the tasks it starts, in its thread. Never its payload."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any, Final

from rsmq.broker import Broker
from rsmq.handler.middleware import Call
from rsmq.model.message import Message

CURRENT: Final[ContextVar[Any]] = ContextVar("rsmq_message", default=None)


async def noting(work: Any, call_next: Call) -> Any:
    """The middleware: records logged inside belong to this message, or batch."""
    token = CURRENT.set(work)
    try:
        return await call_next(work)
    finally:
        CURRENT.reset(token)


def note_messages(broker: Broker) -> None:
    """Record the current message for log records, in all handlers of a broker from now on."""
    broker.middleware(noting)


def about_message(record: logging.LogRecord) -> dict[str, Any]:
    """Topic, partition, group, message id and attempt of a record's message; of a batch only what all share.

    That is the message whose handler is running, or one among the record's arguments.
    """
    arguments = record.args if isinstance(record.args, tuple) else ()
    work = next((each for each in arguments if isinstance(each, Message)), None) or CURRENT.get()
    if work is None:
        return {}
    if isinstance(work, Message):
        return {
            "topic": work.topic, "partition": work.partition, "group": work.group, "message_id": work.id,
            "attempt": work.attempt,
        }  # fmt: skip
    return {"topic": work[0].topic, "group": work[0].group, "messages": len(work)}


class MessageFilter(logging.Filter):
    """For your own formatter: gives every record the attributes `topic`, `partition`, `group`, `message_id`, `attempt`.

    They are None if a record is about no message. Needs `note_messages(broker)`.
    """

    NAMES: Final = ("topic", "partition", "group", "message_id", "attempt")

    def filter(self, record: logging.LogRecord) -> bool:
        """Add them; lets everything pass."""
        known = about_message(record)
        for name in self.NAMES:
            setattr(record, name, known.get(name))
        return True
