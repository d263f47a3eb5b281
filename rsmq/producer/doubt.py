"""Doubt: a write whose reply was lost, and how to find out what became of it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from rsmq.script import Value
from rsmq.wire import Wire, pack

PAGE: Final = 100
MOST_DOUBTS: Final = 10_000


class Doubt(NamedTuple):
    """Which connection a write went over, and the newest entry known before it."""

    client_id: int
    address: str
    since: bytes


class Doubts:
    """The newest 10 000 messages that ended as PublishUnknown: published again by id, they are looked for first."""

    def __init__(self) -> None:
        self._by_id: dict[str, Doubt] = {}

    def note(self, message_id: str, doubt: Doubt) -> None:
        """Remember; the oldest is forgotten."""
        self._by_id[message_id] = doubt
        if len(self._by_id) > MOST_DOUBTS:
            del self._by_id[next(iter(self._by_id))]

    def get(self, message_id: str) -> Doubt | None:
        """What is known about an earlier attempt."""
        return self._by_id.get(message_id)

    def clear(self, message_id: str) -> None:
        """It is stored, and its dedup key is written."""
        self._by_id.pop(message_id, None)


async def search(wire: Wire, stream: str, doubt: Doubt, wanted: set[str]) -> tuple[int, bytes]:
    """How many of the wanted messages are stored, and the id of the entry before the first of them (else the last).

    The connection of the write is killed first: what the server has not read from it by now, it will never read.
    Entries that were trimmed meanwhile are not found: a message that every group settled and retention removed within
    the outage is stored again, which is what "at least once" allows.
    """
    await ask(wire, "CLIENT", "KILL", "ID", doubt.client_id, "ADDR", doubt.address)
    missing = {message_id.encode() for message_id in wanted}
    before = last = doubt.since
    while missing:
        page = await ask(wire, "XRANGE", stream, b"(" + last, "+", "COUNT", PAGE)
        for last, fields in page:
            message_id = dict(zip(fields[::2], fields[1::2], strict=False)).get(b"id")
            if message_id in missing:
                missing.discard(message_id)
            elif len(missing) == len(wanted):
                before = last
        if len(page) < PAGE:
            break
    return len(wanted) - len(missing), before


async def ask(wire: Wire, *command: Value) -> Any:
    """One command on the raw connection; an error in the reply is raised."""
    (reply,) = await wire.exchange([pack(command)])
    if isinstance(reply, Exception):
        raise reply
    return reply
