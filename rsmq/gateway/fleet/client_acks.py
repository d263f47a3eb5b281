"""Acknowledgements of many clients on their way to the server, in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from rsmq.errors import BrokerError, BrokerUnavailable
from rsmq.gateway.fleet.scripts import ACK_CLIENTS
from rsmq.model.packing import pack_array, pack_values
from rsmq.redis.client.script_batcher import Call, ScriptBatcher

MOST_CLIENTS: Final = 64
"""Clients in one call: about 0.5 ms of the server's time."""


class ClientAck(NamedTuple):
    """What one client has acknowledged. `keys`: of its inbox. `pushed`: the letter that its reader took from a ring,
    empty for none. `seqs`: at least one, with commas. `reply`: what `ack_letters` answers."""

    keys: Sequence[str]
    epoch: str
    pushed: str
    seqs: str
    reply: asyncio.Future[Any]


class AckClientsCall(Call):
    """One call with the acknowledgements of several clients."""

    __slots__ = ("_acks", "_sender")

    def __init__(self, sender: ClientAcks, acks: list[ClientAck]) -> None:
        values = [value for each in acks for value in (each.epoch, each.pushed, each.seqs)]
        packed = pack_array(len(values), [pack_values(values)])
        super().__init__(ACK_CLIENTS, [key for each in acks for key in each.keys], (packed,))
        self._sender, self._acks = sender, acks

    def done(self, reply: Any) -> None:
        self._sender.replied(self._acks, reply)


class ClientAcks:
    """Gathers the acknowledgements of the clients of this gateway while a call is in flight.

    So a call has few of them while little happens, and nothing waits for a time. On a cluster a call has one client,
    because each has its own slot.
    """

    def __init__(self, batcher: ScriptBatcher, *, is_cluster: bool) -> None:
        self._batcher = batcher
        self._most = 1 if is_cluster else MOST_CLIENTS
        self._waiting: list[ClientAck] = []
        self._in_flight = 0
        self._is_scheduled = False

    def add(self, keys: Sequence[str], epoch: str, pushed: str, seqs: Iterable[int]) -> asyncio.Future[Any]:
        """Remove these letters from an inbox, at least one. Returns the reply to come: that of `ack_letters`."""
        loop = asyncio.get_running_loop()
        reply = loop.create_future()
        self._waiting.append(ClientAck(keys, epoch, pushed, ",".join(map(str, seqs)), reply))
        if len(self._waiting) >= self._most:
            self._send()
        elif not self._in_flight and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._send)
        return reply

    def _send(self) -> None:
        self._is_scheduled = False
        if self._waiting:
            acks, self._waiting = self._waiting, []
            self._call(acks)

    def _call(self, acks: list[ClientAck]) -> None:
        self._in_flight += 1
        self._batcher.add(AckClientsCall(self, acks))

    def replied(self, acks: list[ClientAck], reply: Any) -> None:
        """The server has answered a call, or it has failed."""
        self._in_flight -= 1
        failed = isinstance(reply, Exception)
        if isinstance(reply, BrokerError) and not isinstance(reply, BrokerUnavailable) and len(acks) > 1:
            for each in acks:  # one client has a key of another type: the acks of the others succeed, or have done so
                self._call([each])
            return
        for at, each in enumerate(acks):
            if each.reply.done():
                continue
            if failed:
                each.reply.set_exception(reply)
            else:
                each.reply.set_result(reply[at])
        if not self._in_flight:
            self._send()

    def __repr__(self) -> str:
        return f"<ClientAcks waiting={len(self._waiting)} in_flight={self._in_flight}>"
