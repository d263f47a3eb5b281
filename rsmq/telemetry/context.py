"""Which message a log line is about: in the handler, in the tasks it starts, in its thread. Never its payload."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any, Final

from rsmq.broker import Broker
from rsmq.message import Message
from rsmq.middleware import Call

CURRENT: Final[ContextVar[Any]] = ContextVar("rsmq_message", default=None)


async def noting(work: Any, call_next: Call) -> Any:
    """The middleware: what is logged inside belongs to this message, or batch."""
    token = CURRENT.set(work)
    try:
        return await call_next(work)
    finally:
        CURRENT.reset(token)


def note_messages(broker: Broker) -> None:
    """Let log lines know their message, from now on in all handlers of a broker."""
    broker.middleware(noting)


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """Topic, partition, group, message id and attempt of what a record is about; of a batch only what all share.

    That is the message whose handler is running, or one that the line itself names.
    """
    work = next((arg for arg in arguments(record) if isinstance(arg, Message)), None) or CURRENT.get()
    if work is None:
        return {}
    if isinstance(work, Message):
        return {
            "topic": work.topic, "partition": work.partition, "group": work.group, "message_id": work.id,
            "attempt": work.attempt,
        }  # fmt: skip
    return {"topic": work[0].topic, "group": work[0].group, "messages": len(work)}


def arguments(record: logging.LogRecord) -> tuple[object, ...]:
    """What the text was made of."""
    return record.args if isinstance(record.args, tuple) else ()


class MessageFilter(logging.Filter):
    """For your own formatter: gives every record the attributes `topic`, `partition`, `group`, `message_id`, `attempt`.

    They are None where a line is about no message. Needs `note_messages(broker)`.
    """

    NAMES: Final = ("topic", "partition", "group", "message_id", "attempt")

    def filter(self, record: logging.LogRecord) -> bool:
        """Add them; lets everything pass."""
        known = facts(record)
        for name in self.NAMES:
            setattr(record, name, known.get(name))
        return True
