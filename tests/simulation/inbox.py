"""Devices of a run: each connects, reads its inbox, acknowledges, and is taken over. And what they must receive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio

from rsmq import Letter, Session, SessionTaken
from rsmq.errors import RsmqError
from tests.chaos.checker import Name

if TYPE_CHECKING:
    from tests.simulation.run import Member, Run


class Devices:
    """What the devices have received. `received` is called when a letter comes for the first time.

    Never stored twice: a message has one number in an inbox. In order: within a connection the numbers grow. Not after
    its acknowledgement: a letter whose acknowledgement was confirmed does not come to a later connection.
    """

    def __init__(self, run: Run, received: Callable[[Name, int], None]) -> None:
        self._run, self._received = run, received
        self._numbers: dict[Name, int] = {}
        self._confirmed: dict[Name, float] = {}
        self.losses = 0
        """How often the server has lost writes."""

    async def serve(self, member: Member, device: str) -> None:
        """Read until a newer process of the device takes over. A late connect of an older one is taken over again."""
        choices = self._run.world.choices
        async with self._run.encoded.broker(member.number) as broker:
            while True:
                try:
                    async with broker.connect(
                        device, window=choices.among([1, 7, 100], f"{member.process.name} window")
                    ) as session:
                        await self._read(member, session)
                except SessionTaken:
                    if any(other.device == device and other.number > member.number for other in self._run.members):
                        return
                    self._run.world.note(f"   {member.process.name} was taken over by an older process")
                except RsmqError as error:
                    self._run.world.note(f"   {member.process.name} connects again: {error!r}")
                    await anyio.sleep(0.2)

    async def _read(self, member: Member, session: Session) -> None:
        run, pending, last = self._run, list[tuple[Name, int]](), 0
        opened = run.world.now
        async for letter in session:
            name = (letter.payload["key"], letter.payload["n"])
            self.note(member, name, letter.seq, last=last, opened=opened)
            last = letter.seq
            label = f"{member.process.name} {name}"
            if run.plan.busy:
                await anyio.sleep(run.world.choices.between(0, run.plan.busy, f"reads: {label}"))
            await session.ack(letter)
            pending.append((name, self.losses))
            if run.world.choices.unit(f"flushes: {label}") < 0.2:
                await session.flush()
                self.confirm(pending)
                pending.clear()

    def confirm(self, acknowledged: Sequence[tuple[Name, int]]) -> None:
        """The server has confirmed these acknowledgements. Each has the `losses` of its moment."""
        now, losses = self._run.world.now, self.losses
        self._confirmed |= {name: now for name, before in acknowledged if before == losses}

    def forget(self, since: float) -> None:
        """The server has lost its last writes: acknowledgements that it had confirmed since then may be lost."""
        self.losses += 1
        self._confirmed = {name: at for name, at in self._confirmed.items() if at < since}

    def unread(self, device: str) -> list[str]:
        """The letters of a device that it has not received. One whose acknowledgement was lost by the server may wait
        for its next connection."""
        ask, inbox = self._run.network.ask, self._run.members[0].broker.keys.inbox(device)
        refs = [each.decode() for each in ask("ZRANGE", inbox, 0, -1)]
        encoding = self._run.encoded.encoding
        letters = {seq: Letter(int(seq), ask("GET", f"{inbox}_{seq}") or b"", encoding=encoding) for seq in refs}
        if not self.losses:
            return list(letters)
        orders = {seq: json.loads(each.data) for seq, each in letters.items()}
        return [seq for seq, each in orders.items() if (each["key"], each["n"]) not in self._numbers]

    def note(self, member: Member, name: Name, seq: int, *, last: int, opened: float) -> None:
        """A connection that was opened then has received a letter, after the one with the seq `last`."""
        run, who = self._run, member.process.name
        run.world.note(f"   {who} receives {name}, number {seq}")
        if seq <= last:
            run.violate(f"{who} receives letter {seq} after {last}")
        is_copy = self._numbers.setdefault(name, seq) != seq
        if is_copy and not run.is_perhaps_twice(name):
            run.violate(f"{name} was stored as letter {self._numbers[name]} and as letter {seq}")
        if not is_copy and self._confirmed.get(name, run.world.now) < opened:
            run.violate(f"{who} receives {name} after its acknowledgement was confirmed")
        self._received(name, member.number)
