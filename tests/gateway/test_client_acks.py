"""Acknowledgements of many clients in one call of the server."""

from __future__ import annotations

import asyncio

import pytest

from rsmq import Broker
from rsmq.errors import BrokerError
from rsmq.gateway.fleet.client_acks import ClientAcks
from rsmq.redis import scripts


async def opened(broker: Broker, client: str) -> tuple[tuple[str, ...], str]:
    """The keys and the epoch of a session that has read one letter."""
    *keys, channel = broker.keys.device(client)
    await broker.send(client, "hello")
    args = ("g", 0, 60_000, "source:!g", f"{1:016d}", 60_000, 1)
    reply = await scripts.OPEN_SESSION(broker.client, (*keys, channel), args)
    epoch = reply[1].decode()
    await scripts.PAGE_LETTERS(broker.client, keys, (epoch, 0, 10, 1000, 60_000, ""))
    return tuple(keys), epoch


async def test_acks_of_one_turn_are_one_call_and_each_client_has_its_own_reply(broker: Broker, name: str) -> None:
    """One was taken over elsewhere, one acknowledges what it was never sent: neither holds up the others."""
    clients = [await opened(broker, f"{name}-{n}") for n in range(4)]
    batcher = broker._connection.inboxes.batcher
    calls = list[object]()
    acks = ClientAcks(batcher, is_cluster=False)
    add, batcher.add = batcher.add, lambda call: (calls.append(call), add(call))[1]  # type: ignore[method-assign]
    try:
        wrong = {1: ("7", [1]), 2: (clients[2][1], [2])}
        replies = [
            acks.add(keys, *(wrong[n][0], "", wrong[n][1]) if n in wrong else (epoch, "", [1]))
            for n, (keys, epoch) in enumerate(clients)
        ]
        found = await asyncio.gather(*replies)
    finally:
        batcher.add = add  # type: ignore[method-assign]
    assert found == [[b"OK", 1], [b"STALE_EPOCH"], [b"BEHIND", 1], [b"OK", 1]]
    assert len(calls) == 1


@pytest.mark.parametrize("is_cluster", [False, True])
async def test_an_inbox_of_another_type_fails_alone(broker: Broker, name: str, is_cluster: bool) -> None:
    """Each of the others is acknowledged; on a cluster every client has a call of its own."""
    clients = [await opened(broker, f"{name}-{n}") for n in range(3)]
    (inbox, *_), _ = clients[1]
    await broker.client.execute_command("DEL", inbox)
    await broker.client.execute_command("SET", inbox, "spoiled")
    acks = ClientAcks(broker._connection.inboxes.batcher, is_cluster=is_cluster)
    replies = [acks.add(keys, epoch, "", [1]) for keys, epoch in clients]
    one, other, third = await asyncio.gather(*replies, return_exceptions=True)
    assert isinstance(other, BrokerError)
    assert (one[0], third[0]) == (b"OK", b"OK")
    assert [await broker.client.execute_command("EXISTS", keys[0]) for keys, _ in clients] == [0, 1, 0]
