"""Holds of a group on the server: written by handlers, breakers and commands, and read by its members."""

from __future__ import annotations

from typing import Literal

from rsmq.errors import ConfigError
from rsmq.model.clock import server_ms
from rsmq.model.held_name import MOST_HELD, HeldName, HoldKind, bounded_name, read_holds, still_held
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import announce
from rsmq.redis.scripts import HOLD_NAME, OK
from rsmq.redis.streams import ask_all

Change = Literal["set", "longer", "probe", "end"]


async def hold_name(
    client: Client,
    keys: Keys,
    topic: str,
    group: str,
    name: str,
    ms: int,
    kind: HoldKind,
    change: Change = "set",
    known: int | None = None,
) -> tuple[bool, int]:
    """Hold a name, or end that, and tell the members. `known`: the end that the caller knows; a probe, or an end, does
    nothing if it has changed. Returns whether it was done, and when the hold ends (0: it is not held)."""
    args = (bounded_name(name), ms, kind, change, "" if known is None else known, MOST_HELD)
    word, until = await HOLD_NAME(client, (keys.group(topic, group),), args)
    if word == b"FULL":
        raise ConfigError(
            f"{topic}/{group} holds {MOST_HELD} names: hold all of its messages, or end some of them first"
        )
    if word == OK:
        await announce(client, keys, topic, group)
    return word == OK, int(until)


async def holds_of(client: Client, keys: Keys, topic: str, group: str) -> tuple[HeldName, ...]:
    """What a group holds now, by the server's clock."""
    time, found = await ask_all(client, [("TIME",), ("HGET", keys.group(topic, group), "holds")])
    return still_held(read_holds(found), server_ms(time))
