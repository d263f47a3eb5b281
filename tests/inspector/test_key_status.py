"""`keys status` never calls a key free that something needs, whatever moves between two of its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rsmq import Broker, Settings
from rsmq.codecs import Encrypt, Keyring
from rsmq.inspector import key_status
from rsmq.inspector.key_status import KeyStatus
from rsmq.inspector.letter_keys import letters_of
from rsmq.model.encoding import key_of
from tests.contract.witness import ask
from tests.control.test_bodies import ACROSS, WITHIN, World, following

RELEASED = ("delayed", "release")
OLD = Keyring({"old": b"1" * 32})


class Interrupted:
    """The client of a reader: before chosen calls something else happens."""

    def __init__(self, client: Any, moves: Sequence[tuple[int, Callable[[], Awaitable[None]]]]) -> None:
        self._client = client
        self._moves = list(moves)
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def _call(self) -> None:
        self.calls += 1
        while self._moves and self._moves[0][0] <= self.calls:
            await self._moves.pop(0)[1]()

    async def execute_command(self, *command: Any) -> Any:
        await self._call()
        return await self._client.execute_command(*command)

    async def pipelined(self, commands: Sequence[Any]) -> Any:
        await self._call()
        return await self._client.pipelined(commands)


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """One that encrypts."""
    return Broker(replace(settings, preflight="warn", partitions=1), codecs=[Encrypt(OLD)])


@pytest.mark.parametrize("history", [*WITHIN, RELEASED, *ACROSS], ids=lambda each: f"{each[0]} {each[1]}")
async def test_no_move_between_two_calls_hides_the_key_of_a_message(
    broker: Broker, history: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release, death and trim, replay, and a move of a stray message, at each call and each choice of calls."""
    begin, steps = history[0], history[1].split()
    partitions = 2 if "move" in steps else 1
    monkeypatch.setattr("rsmq.redis.topics.MOST_PARTITIONS", partitions)
    async with broker:
        topic = await broker.topics.ensure("t", partitions)
        world, places = World(broker, partitions), [1] * len(steps)
        still = Interrupted(broker.client, [])
        await world.make(begin)
        await KeyStatus(still, broker.keys, topic).run()  # type: ignore[arg-type]
        most = still.calls + 2
        while places:
            if len(steps) > 1 and sum(places) % 13:  # all of them take a minute
                places = following(places, most)
                continue
            await world.make(begin)
            moves = [(place, getattr(world, step)) for place, step in zip(places, steps, strict=True)]
            client = Interrupted(broker.client, moves)
            uses = await KeyStatus(client, broker.keys, topic).run()  # type: ignore[arg-type]
            assert [use.key for use in uses] == ["old"], f"{history} at {places}"
            most = max(most, client.calls)
            places = following(places, most)


async def test_what_leaves_before_a_message_or_a_letter_does_not_hide_it(
    broker: Broker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at the front of the delayed messages, and of an inbox, go between two pages. They have another key."""
    monkeypatch.setattr(key_status, "PAGE", 2)
    monkeypatch.setattr("rsmq.inspector.letter_keys.PAGE", 2)
    other = Broker(replace(settings, preflight="warn", partitions=1), codecs=[Encrypt(Keyring({"new": b"2" * 32}))])
    async with broker, other:
        topic = await broker.topics.ensure("t", 1)
        for minutes, own in enumerate((other, other, broker, broker, broker), 1):
            await own.publish("t", minutes, delay=f"{minutes}m")
            await own.send("phone", minutes, topic="news")
        delayed, inbox = broker.keys.delayed("t", 0), broker.keys.inbox("phone")
        for key in (delayed, inbox):

            async def leave(key: str = key) -> None:
                await ask(broker, "ZREMRANGEBYRANK", key, 0, 1)

            before = await ask(broker, "ZRANGE", key, 0, -1, "WITHSCORES")
            for call in range(1, 12):
                client: Any = Interrupted(broker.client, [(call, leave)])
                if key == delayed:
                    uses = await KeyStatus(client, broker.keys, topic).run()
                    found = [use.delayed for use in uses if use.key == "old"]
                else:
                    found = [[key_of(enc) async for enc in letters_of(client, broker.keys, "phone")].count("old")]
                assert found == [3], f"{key} before call {call}"
                for member, score in zip(before[::2], before[1::2], strict=True):
                    await ask(broker, "ZADD", key, score, member)
