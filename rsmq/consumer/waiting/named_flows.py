"""What waits in one lane for the turn of its tenant, or for the rate of its name: ids, and the keys among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, takewhile
from typing import Final

from rsmq.consumer.waiting.ids import Ids
from rsmq.model.message import Message

FlowName = tuple[str | None, str | None]
"""A tenant, and the name of a rate. What has the same of both waits for the same thing."""
POSITION_BITS: Final = 40
POSITION: Final = (1 << POSITION_BITS) - 1
HASH: Final = (1 << 60) - 1
"""A longer number would take sixteen bytes more."""
SPARE_KEYS: Final = 1024
"""Keys beyond twice the ids, before those whose last message has left are looked for."""


class NamedFlow:
    """The ids of one flow, in order. `gone` counts those that have left it, so the first one is at this position."""

    __slots__ = ("gone", "ids", "name", "number")

    def __init__(self, name: FlowName, number: int) -> None:
        self.name = name
        self.number = number
        self.ids = Ids()
        self.gone = 0


class NamedFlows:
    """The flows of one lane that have ids, and what they have in memory.

    Order per key: of each key that waits here the flow and the position of its last message are known, by the hash of
    the key, at about 120 bytes. A later message of that key goes behind it, into the same flow, even if its own name
    differs. Nothing is counted down, because ids also leave unread: the key is free when the flow is past that
    position. Two keys with one hash only wait for each other.

    `near` are messages in memory of each flow that have not started: below a bound the next ones are read again.
    """

    def __init__(self) -> None:
        self.near: dict[FlowName, int] = {}
        self.count = 0
        self._flows: dict[FlowName, NamedFlow] = {}
        self._by_number: dict[int, NamedFlow] = {}
        self._numbers = 0
        self._last_of: dict[int, int] = {}
        self._near_of: dict[Message, FlowName] = {}

    def __bool__(self) -> bool:
        return bool(self._flows)

    def __contains__(self, name: object) -> bool:
        return name in self._flows

    def __iter__(self) -> Iterator[FlowName]:
        return iter(self._flows)

    def has(self, name: FlowName) -> bool:
        """Whether anything of a flow is here, as an id or in memory."""
        return name in self._flows or name in self.near

    # -- ids --------------------------------------------------------------------------------------------------------

    def flow_of(self, key: bytes) -> FlowName | None:
        """The flow in which the last message of a key waits. None: no message of it does."""
        last = self._last_of.get(hash(key) & HASH)
        if last is None:
            return None
        flow = self._by_number.get(last >> POSITION_BITS)
        if flow is not None and last & POSITION >= flow.gone:
            return flow.name
        del self._last_of[hash(key) & HASH]
        return None

    def append(self, name: FlowName, message: Message, key: bytes | None) -> tuple[int, int]:
        """A message waits at the end of a flow. `key`: the one whose order it has to keep. Returns its id's halves."""
        flow = self._flows.get(name)
        if flow is None:
            self._numbers += 1
            flow = self._flows[name] = self._by_number[self._numbers] = NamedFlow(name, self._numbers)
        halves = flow.ids.append(message.entry_id)
        if key is not None:
            self._last_of[hash(key) & HASH] = flow.number << POSITION_BITS | flow.gone + len(flow.ids) - 1
        self.count += 1
        return halves

    def first(self, name: FlowName, most: int) -> list[bytes]:
        """Up to so many ids from the front of a flow."""
        flow = self._flows.get(name)
        return [] if flow is None else flow.ids.first(most)

    def drop(self, name: FlowName, number: int) -> None:
        """So many ids at the front of a flow are read, or settled."""
        flow = self._flows[name]
        flow.ids.drop(number)
        flow.gone += number
        self.count -= number
        if not flow.ids:
            del self._flows[name]
            del self._by_number[flow.number]
        if not self._flows:
            self._last_of.clear()
        elif len(self._last_of) > 2 * self.count + SPARE_KEYS:
            self._forget_keys()

    def _forget_keys(self) -> None:
        flows = self._by_number
        self._last_of = {
            key: last
            for key, last in self._last_of.items()
            if (flow := flows.get(last >> POSITION_BITS)) is not None and last & POSITION >= flow.gone
        }

    def ids(self) -> Iterator[bytes]:
        """All of them."""
        return chain.from_iterable(flow.ids for flow in self._flows.values())

    def far(self, name: FlowName) -> int:
        """How many wait in a flow as ids. May be called from any thread."""
        flow = self._flows.get(name)
        return 0 if flow is None else len(flow.ids)

    def counts(self) -> list[tuple[FlowName, int]]:
        """How many wait in each flow as ids. May be called from any thread."""
        return [(flow.name, len(flow.ids)) for flow in list(self._flows.values())]

    def before(self, entry_id: bytes) -> tuple[FlowName, int] | None:
        """The flow that an id waits in, and how many of this flow are before it, with those in memory."""
        for flow in self._flows.values():
            at = flow.ids.position(entry_id)
            if at is not None:
                return flow.name, self.near.get(flow.name, 0) + at
        return None

    def near_before(self, message: Message) -> tuple[FlowName, int] | None:
        """The flow of a message in memory that has not started, and how many of this flow have come before it."""
        name = self._near_of.get(message)
        if name is None:
            return None
        earlier = takewhile(lambda each: each[0] is not message, list(self._near_of.items()))
        return name, sum(each == name for _, each in earlier)

    # -- in memory --------------------------------------------------------------------------------------------------

    def arrived(self, name: FlowName, message: Message) -> None:
        """A message of a flow is in memory."""
        self.near[name] = self.near.get(name, 0) + 1
        self._near_of[message] = name

    def left(self, message: Message) -> FlowName | None:
        """A message starts, or waits elsewhere. Returns its flow, if it was counted."""
        name = self._near_of.pop(message, None)
        if name is not None:
            self.near[name] -= 1
            if not self.near[name]:
                del self.near[name]
        return name

    def clear(self) -> None:
        """Forget all of it."""
        self._flows.clear()
        self._by_number.clear()
        self._last_of.clear()
        self._near_of.clear()
        self.near.clear()
        self.count = 0

    def __repr__(self) -> str:
        names = ", ".join(f"{name!r}: {len(self._flows[name].ids)}" for name in islice(self._flows, 3))
        return f"<NamedFlows {self.count} in {len(self._flows)} ({names})>"
