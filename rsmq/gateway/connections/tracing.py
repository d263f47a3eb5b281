"""What operators watch: the packets of single clients, sent to them as they pass. Nothing is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from pydantic_core import to_json

from rsmq.gateway.protocol.packet import Connect
from rsmq.gateway.protocol.trace import Described, FrameReader, describe, describe_connect
from rsmq.persistence.mqtt_traces import LONGEST_SILENCE, MOST_A_SECOND, TraceOrder, read_order

Clock = Callable[[], int]
"""Milliseconds since 1970, by the server."""
Tell = Callable[[str, bytes], None]
"""Sends lines to the operator with a token."""


class Watch:
    """One operator who watches one client; it ends when the operator has not asked again for a while."""

    def __init__(self, order: TraceOrder, now_ms: Clock, tell: Tell) -> None:
        self._order = order
        self._now_ms = now_ms
        self._tell = tell
        self._until_ms = 0
        self._lines: list[bytes] = []
        self._second, self._number = 0, 0
        self._left_out = 0
        self.renew()

    @property
    def shows_payloads(self) -> bool:
        """Whether the operator has asked for them."""
        return self._order.payloads

    @property
    def has_ended(self) -> bool:
        """Whether the operator has gone."""
        return self._now_ms() > self._until_ms

    def renew(self) -> None:
        """The operator has asked again."""
        self._until_ms = self._now_ms() + int(LONGEST_SILENCE * 1000)

    def see(self, way: str, described: Described) -> None:
        """A packet has passed. More than a thousand a second are counted only."""
        now_ms = self._now_ms()
        if now_ms // 1000 != self._second:
            self._second, self._number = now_ms // 1000, 0
        self._number += 1
        if self._number > MOST_A_SECOND:
            self._left_out += 1
            return
        line = {"at_ms": now_ms, "client": self._order.client, "way": way} | described
        if self._left_out:
            line["left_out"], self._left_out = self._left_out, 0
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        self._lines.append(to_json(line))

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        self._tell(self._order.token, b"\n".join(lines))


class Watches:
    """The operators who watch clients now, by client id."""

    def __init__(self, now_ms: Clock, tell: Tell) -> None:
        self._now_ms, self._tell = now_ms, tell
        self._watches: dict[str, dict[str, Watch]] = {}

    def __bool__(self) -> bool:
        return bool(self._watches)

    def obey(self, raw: str) -> str | None:
        """An operator asks. Returns the client id if it is a new one who asks for it."""
        order = read_order(raw)
        if order is None:
            return None
        known = self._watches.setdefault(order.client, {})
        if order.token in known:
            known[order.token].renew()
            return None
        known[order.token] = Watch(order, self._now_ms, self._tell)
        return order.client

    def of(self, client_id: str) -> list[Watch]:
        """Those who watch a client. Those who have gone are forgotten."""
        for name in list(self._watches):
            known = self._watches[name]
            for token in [token for token, watch in known.items() if watch.has_ended]:
                del known[token]
            if not known:
                del self._watches[name]
        return list(self._watches.get(client_id, {}).values())

    def __repr__(self) -> str:
        return f"<Watches {len(self._watches)}>"


class ClientTrace:
    """The packets of one connection, for those who watch it. `rest`: bytes of the client that wait for their packet."""

    def __init__(self, watches: list[Watch], level: int, rest: bytes = b"") -> None:
        self._watches, self._level = watches, level
        self._came, self._went = FrameReader(rest), FrameReader()

    @property
    def has_ended(self) -> bool:
        """Whether all have gone."""
        return all(watch.has_ended for watch in self._watches)

    def connects(self, request: Connect) -> None:
        """The client has sent its CONNECT, without a password here."""
        for watch in self._watches:
            watch.see("in", describe_connect(request))

    def came(self, data: bytes) -> None:
        """Bytes of the client."""
        self._see("in", self._came.feed(data))

    def went(self, data: bytes) -> None:
        """Bytes to the client."""
        self._see("out", self._went.feed(data))

    def _see(self, way: str, frames: list[tuple[int, bytes, int]]) -> None:
        for watch, frame in self._each(frames):
            watch.see(way, describe(*frame, self._level, payloads=watch.shows_payloads))

    def _each(self, frames: list[tuple[int, bytes, int]]) -> Iterator[tuple[Watch, tuple[int, bytes, int]]]:
        return ((watch, frame) for frame in frames for watch in self._watches if not watch.has_ended)
