"""A master is lost with writes that no replica had: the inbox of a connected client goes back to an earlier state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rsmq import Broker
from rsmq.gateway.fleet.history import Delivered, LetterHistory, fingerprint
from rsmq.model.clock import to_ms
from rsmq.persistence.letter import STAMP, pack_letter, pack_letters
from rsmq.redis.scripts import ADD_LETTERS
from tests.gateway import packets as p
from tests.gateway.raw_client import RawClient
from tests.patience import until

Make = Callable[..., RawClient]
KEPT: dict[str, Any] = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}
BACK = """
for n = 1, #KEYS do redis.call("DEL", KEYS[n]) end
for n = 1, #ARGV, 2 do redis.call("RESTORE", ARGV[n], 0, ARGV[n + 1]) end
"""


class Inbox:
    """The keys of a client on the server. `back` is what a replica has that takes over without the newest writes."""

    def __init__(self, broker: Broker, client: str) -> None:
        self._broker, self._name = broker, client
        self._call, self.keys = broker.client.execute_command, broker.keys.device(client)[:3]
        self._kept: list[Any] = []

    async def settle(self) -> None:
        """Wait until everything is acknowledged, and the next letter rings."""

        async def is_settled() -> bool:
            waiting, idle = await self._call("ZCARD", self.keys[0]), await self._call("HGET", self.keys[1], "idle")
            return not waiting and idle == b"1"

        await until(is_settled, "the inbox is settled")

    async def field(self, name: str) -> bytes:
        """A field of its session."""
        return await self._call("HGET", self.keys[1], name) or b""

    async def _names(self) -> list[Any]:
        refs = await self._call("ZRANGE", self.keys[0], 0, -1)
        return [*self.keys, *(f"{self.keys[0]}_{each.decode()}" for each in refs)]

    async def keep(self) -> None:
        """Remember its state."""
        self._kept = []
        for name in await self._names():
            if (dump := await self._call("DUMP", name)) is not None:
                self._kept += [name, dump]

    async def back(self) -> None:
        """Go back to that state, in one step."""
        names = await self._names()
        await self._call("EVAL", BACK, len(names), *names, *self._kept)

    async def envelopes(self) -> list[bytes]:
        """The letters that wait."""
        return [await self._call("GET", each) for each in (await self._names())[3:]]

    async def add_again(self, envelopes: list[bytes], source: str) -> None:
        """Store letters again, as their router does that has not finished them."""
        packed = [
            pack_letter(f"{n:016d}", int.from_bytes(each[1:7], "big"), "", each[STAMP:])
            for n, each in enumerate(envelopes, 1)
        ]
        settings = self._broker.settings
        args = (to_ms(settings.inbox_ttl), settings.inbox_limit, 600_000, pack_letters([(f"source:{source}", packed)]))
        assert (await ADD_LETTERS(self._broker.client, self.keys, args))[1] == len(envelopes)


async def finish(client: RawClient, got: Any) -> None:
    """Acknowledge a message whole."""
    if got.qos == 1:
        client.send(p.ack(4, got.packet_id))
        return
    client.send(p.ack(5, got.packet_id))
    assert (await client.answer(6)).packet_id == got.packet_id
    client.send(p.ack(7, got.packet_id))


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_client_gets_what_comes_after_a_failover_that_has_lost_its_letters(
    client: Make, broker: Broker, name: str, qos: int
) -> None:
    """It stays connected. The seqs of lost letters are given again: no new one is taken for one of them, and removed or
    skipped. Those that come again are known, wherever they stand now."""
    one, sender = await client(5).connect(name, **KEPT), await client(5).connect(f"{name}-s")
    await one.subscribe((name, qos))
    inbox = Inbox(broker, name)
    await sender.publish(name, b"kept", qos)
    await finish(one, await one.take(3))
    await inbox.settle()
    await inbox.keep()

    for payload in (b"finished", b"out", b"half"):
        await sender.publish(name, payload, qos)
    lost = [await one.take(3) for _ in range(3)]
    assert [each.payload for each in lost] == [b"finished", b"out", b"half"]
    envelopes = await inbox.envelopes()
    await finish(one, lost[0])
    if qos == 2:
        one.send(p.ack(5, lost[2].packet_id))
        assert (await one.take(6)).packet_id == lost[2].packet_id

    await inbox.back()
    await sender.publish(name, b"new 1", qos)  # has the seq of one that the client has
    await inbox.add_again(envelopes, "again")
    await sender.publish(name, b"new 2", qos)
    got = await one.take(3)
    assert got.payload == b"new 1"
    await finish(one, got)
    for each in lost[1:]:
        if each is lost[2] and qos == 2:
            one.send(p.ack(7, each.packet_id))
        else:
            await finish(one, each)
    got = await one.take(3)
    assert got.payload == b"new 2"
    await finish(one, got)
    await sender.publish(name, b"new 3", qos)
    got = await one.take(3)
    assert (got.payload, got.dup) == (b"new 3", False)
    await finish(one, got)
    assert await one.is_silent()
    await inbox.settle()


def test_letters_that_come_again_are_known_once_and_only_while_they_are_remembered() -> None:
    """By time and content. One that is out keeps its packet id; what was not lost is not looked for."""
    history = LetterHistory(kept=4)
    one, other = Delivered(history), Delivered(history)
    letters = [bytes([1, *[0] * 5, n, *[9] * 6]) + b"same" for n in range(5)]
    one.note([1], letters[:1])
    one.note([2, 3, 4], letters[1:4])
    out = {2: 2, 4: 4}
    assert one.find(2, letters[1]) is None
    one.rewind(2, out)
    assert out == {2: 2, 4: -4}
    later = letters[3][:7] + bytes(6) + letters[3][13:]  # it is kept for longer now
    assert fingerprint(later) == fingerprint(letters[3])
    assert other.find(3, later) is None
    found = [one.find(3, each) for each in (letters[1], letters[4], later, later, letters[2])]
    assert found == [None, None, 4, None, 0]
    one.rewind(2, out)
    assert one.find(3, letters[2]) == 0  # it is remembered under its new seq, as the newest of that
    other.note([1, 2], letters[:2])
    other.note([3, 4], letters[2:4])  # the history is full: the other connection is remembered
    one.rewind(2, out)
    assert one.find(3, letters[2]) is None
    other.rewind(0, {})
    assert [other.find(1, each) for each in letters[:3]] == [0, 0, 0]


async def pushed(sender: RawClient, client: RawClient, inbox: Inbox, name: str) -> Any:
    """A message whose letter has come along with its ring, and is not acknowledged. `inbox` is as before it."""
    for _ in range(50):  # one that meets a page is read by that
        await inbox.settle()
        await inbox.keep()
        await sender.publish(name, b"pushed", 1)
        got = await client.take(3)
        if await inbox.field("pushed"):
            return got
        await finish(client, got)
    raise AssertionError("no letter has come along with its ring")


async def test_a_letter_that_comes_along_with_its_ring_counts_as_sent_when_it_is_acknowledged(
    client: Make, broker: Broker, name: str
) -> None:
    """It needs no page: the inbox stays marked as read to its end."""
    one, sender = await client(5).connect(name, **KEPT), await client(5).connect(f"{name}-s")
    await one.subscribe((name, 1))
    inbox = Inbox(broker, name)
    got = await pushed(sender, one, inbox, name)
    seq = int(await inbox.field("seq"))
    assert (await inbox.field("pushed")).startswith(b"%d:" % seq)
    assert await inbox.field("idle") == b"1"
    assert int(await inbox.field("sent")) < seq
    await finish(one, got)
    await inbox.settle()
    assert (int(await inbox.field("sent")), await inbox.field("pushed")) == (seq, b"")


async def test_a_letter_that_came_along_with_its_ring_and_was_lost_does_not_take_the_next_one_with_it(
    client: Make, broker: Broker, name: str
) -> None:
    """The next one has its seq: the acknowledgement of the lost one must not remove that."""
    one, sender = await client(5).connect(name, **KEPT), await client(5).connect(f"{name}-s")
    await one.subscribe((name, 1))
    inbox = Inbox(broker, name)
    lost = await pushed(sender, one, inbox, name)
    await inbox.back()
    await sender.publish(name, b"new", 1)
    await finish(one, lost)
    got = await one.take(3)
    assert got.payload == b"new"
    await finish(one, got)
    await inbox.settle()


async def test_a_letter_that_came_along_with_its_ring_comes_again_as_sent_before(
    client: Make, broker: Broker, name: str
) -> None:
    """The client has not acknowledged it when its connection ends [MQTT-3.3.1-1]."""
    one, sender = await client(5).connect(name, **KEPT), await client(5).connect(f"{name}-s")
    await one.subscribe((name, 1))
    first = await pushed(sender, one, Inbox(broker, name), name)
    one.close()
    again = await (await client(5).connect(name, **KEPT)).take(3)
    assert (again.payload, again.packet_id, again.dup, first.dup) == (b"pushed", first.packet_id, True, False)
