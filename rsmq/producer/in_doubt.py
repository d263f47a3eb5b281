"""Writes in doubt: the reply was lost, so the stream is searched for the messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rsmq.model.packing import by_name
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.scripts import Value

PAGE: Final = 100
MOST_IN_DOUBT: Final = 10_000


class InDoubt(NamedTuple):
    """A write without a reply: its connection, the stream, and the newest entry before it."""

    client_id: int
    address: str
    since: bytes
    stream: str


class InDoubtMessages:
    """The last 10 000 messages that failed with PublishUnknown: the stream is searched before one is stored again."""

    def __init__(self) -> None:
        self._by_id: dict[str, InDoubt] = {}

    def note(self, message_id: str, write: InDoubt) -> None:
        """Remember a message; beyond the limit the oldest is forgotten."""
        self._by_id[message_id] = write
        if len(self._by_id) > MOST_IN_DOUBT:
            del self._by_id[next(iter(self._by_id))]

    def get(self, message_id: str) -> InDoubt | None:
        """The earlier write of a message, if it is in doubt."""
        return self._by_id.get(message_id)

    def clear(self, message_id: str) -> None:
        """Forget a message: it is stored, and its dedup key exists."""
        self._by_id.pop(message_id, None)


async def search(connection: RawConnection, write: InDoubt, ids: Sequence[str]) -> tuple[int, bytes]:
    """How many of the ids, from the front, the write has stored, and the id of the entry before the first of them that
    is found (else the last).

    The ids are in the order of the write, and nothing else may have written them. One write has stored them in this
    order, so behind the last one that is found, those before it were stored, too: the front may have been trimmed since
    (`on_full="trim"`, retention, another client). If all of them were, they are stored again, which "at least once"
    allows. The connection of the write is killed first, so the server reads nothing more from it.
    """
    await end_write(connection, write)
    positions = {message_id.encode(): position for position, message_id in enumerate(ids, 1)}
    before = last = write.since
    stored = 0
    while stored < len(ids):
        most = connection.node.page_limit.of(PAGE)  # a write that is in doubt is looked for again, if this breaks
        with connection.node.page_limit.asking():
            page = await ask(connection, "XRANGE", write.stream, b"(" + last, "+", "COUNT", most)
        for last, fields in page:
            message_id = by_name(fields).get(b"id")
            stored = max(stored, positions.get(message_id or b"", 0))
            if not stored:
                before = last
        if len(page) < most:
            break
    return stored, before


async def end_write(connection: RawConnection, write: InDoubt) -> None:
    """Kill the connection of a write, so that the server reads nothing more from it."""
    await ask(connection, "CLIENT", "KILL", "ID", write.client_id, "ADDR", write.address)


async def ask(connection: RawConnection, *command: Value) -> Any:
    """One command on the raw connection; an error in the reply is raised."""
    (reply,) = await connection.exchange([pack(command)])
    if isinstance(reply, Exception):
        raise reply
    return reply
