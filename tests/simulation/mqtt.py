"""MQTT gateways of a run: each reads the inboxes of some clients with the package's own reader, and is taken over.

A worker stores letters as the router of a gateway does: some come along with their rings. What the clients have got is
in `inbox.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from rsmq import Message, RetryPolicy, SessionTaken
from rsmq.errors import RsmqError
from rsmq.gateway.fleet.client_acks import ClientAcks
from rsmq.gateway.fleet.history import LetterHistory
from rsmq.gateway.fleet.inbox_reader import InboxReader
from rsmq.gateway.fleet.router import source_of, stamp_of
from rsmq.persistence.inbox_writer import Receipt
from rsmq.persistence.letter import pack_letter, packet_id_of, read_mqtt, seal_mqtt
from rsmq.persistence.session import Inboxes
from tests.chaos.checker import Name

if TYPE_CHECKING:
    from tests.simulation.inbox import Devices
    from tests.simulation.run import Member, Run

LIFE: Final = 3600
"""Seconds for which a session is kept."""
PAGE_BYTES: Final = 65_536
LOST_AT_MOST: Final = 1.5
"""Seconds: longer than a failover reaches back."""
FULL_INBOX_WAIT: Final = 60.0
FRONT: Final = seal_mqtt(1, b"t", b"", b"")


class Gateways:
    """The gateways of a run, and the clients whose sessions have begun: `opened`."""

    def __init__(self, run: Run, devices: Devices) -> None:
        self._run, self._devices = run, devices
        self.opened: set[str] = set()

    async def wait_for_sessions(self, count: int) -> None:
        """Wait until so many clients have a session that no failover takes away: what is stored for a client without
        one is dropped, as it must be."""
        while len(self.opened) < count:
            await anyio.sleep(0.1)
        await anyio.sleep(LOST_AT_MOST)

    def route(self, member: Member, topic: str, group: str, batch: int, retry: RetryPolicy) -> None:
        """Register the handler of a worker that stores each message for the client that its key names."""

        async def store(messages: list[Message]) -> None:
            writer, receipt = member.broker._connection.inboxes.writer, Receipt()
            writer.wait_for_readers(FULL_INBOX_WAIT, lambda count: self._run.violate(f"{count} letters are dropped"))
            for message in messages:
                milliseconds, position = stamp_of(message)
                letter = pack_letter(position, milliseconds, b"", FRONT + message.data)
                writer.put((str(message.key),), source_of(message.origin), letter, receipt)
            await receipt.complete()

        member.broker.handler(topic, group=group, ordering="partition", batch=batch, retry=retry)(store)

    async def serve(self, member: Member, clients: str) -> None:
        """Serve these clients until a newer gateway has taken all of them over."""
        async with self._run.encoded.broker(member.number) as broker:
            inboxes = broker._connection.inboxes
            acks, history = ClientAcks(inboxes.batcher, is_cluster=False), LetterHistory()
            async with anyio.create_task_group() as tasks:
                for client in clients.split():
                    tasks.start_soon(self._keep, member, client, inboxes, acks, history)

    async def _keep(
        self, member: Member, client: str, inboxes: Inboxes, acks: ClientAcks, history: LetterHistory
    ) -> None:
        """Let a client connect again and again. A late connect of an older gateway is taken over again."""
        run = self._run
        while True:
            connection = Connection(run, self._devices, member, client, inboxes, acks, history)
            try:
                await connection.live(self.opened.add)
            except SessionTaken:
                if any(each.device == member.device and each.number > member.number for each in run.members):
                    return
                run.world.note(f"   {client} at {member.process.name} was taken over by an older gateway")
            except RsmqError as error:
                run.world.note(f"   {client} connects to {member.process.name} again: {error!r}")
                await anyio.sleep(0.2)


class Connection:
    """One connection of a client. It acknowledges each letter, after a while or at once."""

    def __init__(
        self, run: Run, devices: Devices, member: Member, client: str, inboxes: Inboxes, acks: ClientAcks,
        history: LetterHistory,
    ) -> None:  # fmt: skip
        self._run, self._devices, self._member, self._client = run, devices, member, client
        self._label = f"{member.process.name} {client}"
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._opened, self._last, self._losses = run.world.now, 0, devices.losses
        self._got = set[Name]()
        self._acknowledged: list[tuple[Name, int]] = []
        """Letters, and how often the server had lost writes then."""
        self._reader = InboxReader(
            inboxes, client, run.world.choices.among([1, 7, 100], f"{self._label} window"), page_bytes=PAGE_BYTES,
            on_letters=self._letters, on_received=lambda _ids: None, on_end=self._end, history=history, acks=acks,
        )  # fmt: skip

    async def live(self, opened: Callable[[str], None]) -> None:
        """From the CONNECT to the end of the connection. Raises what has ended it."""
        reader = self._reader
        try:
            await reader.open(clean=False, life_ms=LIFE * 1000)
            await reader.begin(clean=False, expiry=LIFE, has_removed=False, will=b"")
            opened(self._client)
            async with anyio.create_task_group() as self._tasks:
                reader.start()
                await asyncio.wait([self._ended])
                self._tasks.cancel_scope.cancel()
        finally:
            reader.close()
        self._ended.result()

    def _end(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _letters(self, seqs: Sequence[int], envelopes: Sequence[bytes], _sent: int) -> int:
        run, choices, devices = self._run, self._run.world.choices, self._devices
        if seqs and seqs[0] <= self._last and self._losses < devices.losses:  # the server gives lost seqs again
            self._losses += 1
            self._last = 0
        for seq, envelope in zip(seqs, envelopes, strict=True):
            order = json.loads(read_mqtt(envelope).data)
            name = (order["key"], order["n"])
            devices.note(self._member, name, seq, last=self._last, opened=self._opened)
            if name in self._got and not run.is_perhaps_twice(name):
                run.violate(f"{self._label} receives {name} twice in one connection")
            self._got.add(name)
            self._last = seq
            delay = choices.between(0, run.plan.busy, f"reads: {self._label} {name}")
            self._loop.call_later(delay, self._ack, packet_id_of(seq), name)
        return len(seqs)

    def _ack(self, packet_id: int, name: Name) -> None:
        if self._ended.done():
            return
        self._reader.ack(packet_id)
        self._acknowledged.append((name, self._devices.losses))
        if self._run.world.choices.unit(f"settles: {self._label} {name}") < 0.2 and self._tasks is not None:
            self._tasks.start_soon(self._settle)

    async def _settle(self) -> None:
        """The server has all acknowledgements so far, unless the connection has ended."""
        acknowledged, self._acknowledged = self._acknowledged, []
        await self._reader.settled()
        if not self._ended.done():
            self._devices.confirm(acknowledged)
