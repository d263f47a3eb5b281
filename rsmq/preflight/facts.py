"""What the preflight asks a server, and what that answered.

What a server can do is found out by trying, not by its version number: forks, managed services and ACLs differ. Of a
cluster every master is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rsmq.clock import now_ms
from rsmq.connect import Client, redact
from rsmq.errors import ConfigError
from rsmq.keys import Keys
from rsmq.script import Script, Value
from rsmq.wire import Wire, pack

PROBE_SERVER: Final = Script("probe_server")
CONFIG: Final = ("appendfsync", "save", "min-replicas-to-write", "protected-mode", "bind", "enable-debug-command")
DEFAULT_USER: Final = ("ACL", "GETUSER", "default")
"""A right that rsmq does not ask for (the hashes of passwords are in the reply): without it nothing is said."""
NO_CLIENT: Final = (1 << 63) - 1
MOST_TRIES: Final = 1_000_000
"""A master with a single slot is found after 16 384 numbers or so."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server answered. `failures` are (command, what the server said), `skew_ms` is server minus local.

    `node` is its address where there are several.
    """

    info: Mapping[str, str]
    config: Mapping[str, str]
    failures: Sequence[tuple[str, str]]
    skew_ms: float
    collisions: Sequence[str]
    node: str = ""
    default_flags: tuple[str, ...] | None = None
    """Of the user `default`; None where this user may not ask."""

    @property
    def server(self) -> str:
        """Its name and version, for people."""
        if version := self.info.get("valkey_version"):
            return f"Valkey {version}"
        return f"Redis {self.info.get('redis_version', '(unknown version)')}"

    def failed(self, *marks: str) -> list[str]:
        """Commands that were answered with an error in which one of the marks occurs."""
        return sorted({command for command, text in self.failures if any(mark in text for mark in marks)})


async def gather(client: Client, keys: Keys) -> list[Facts]:
    """Ask every server that holds keys; what is under our prefix is asked of all together.

    Raises BrokerUnavailable, and ConfigError for refused credentials.
    """
    await client.refresh()
    collisions = await find_collisions(client, keys)
    return [
        replace(await _ask(client, node, keys), collisions=() if number else collisions)
        for number, node in enumerate(client.nodes)
    ]


async def _ask(client: Client, node: Client, keys: Keys) -> Facts:
    """On a connection of its own, because the last question turns it into a subscriber."""
    number = next(number for number in range(MOST_TRIES) if client.node_for(keys.scratch("", number)) is node)
    listen, count = ("SSUBSCRIBE", "SHARDNUMSUB") if client.is_cluster else ("SUBSCRIBE", "NUMSUB")
    channel = keys.scratch("channel", number)
    trials = _trials(channel, count)
    wire = Wire(node)
    await wire.open()
    try:
        asked_ms = now_ms()
        time, info, default, probe, *rest = await wire.exchange([
            pack(("TIME",)),
            pack(("INFO",)),
            pack(DEFAULT_USER),
            pack(_probe(keys, number, channel)),
            *trials.values(),
            *(pack(("CONFIG", "GET", name)) for name in CONFIG),
        ])  # fmt: skip
        local_ms = (asked_ms + now_ms()) / 2
        (subscribed,) = await wire.exchange([pack((listen, channel))])
    finally:
        await wire.close()
    tried = dict(zip(trials, rest, strict=False)) | {listen: subscribed}
    return Facts(
        info=parse_info(info),
        config=dict(pairs(item for reply in rest[len(trials) :] if isinstance(reply, list) for item in reply)),
        failures=[*failures_of(probe), *errors_in(tried)],
        skew_ms=0.0 if isinstance(time, Exception) else int(time[0]) * 1000 + int(time[1]) // 1000 - local_ms,
        collisions=(),
        node=redact(node.url) if client.is_cluster else "",
        default_flags=flags_of(default),
    )


def _probe(keys: Keys, number: int, channel: str) -> tuple[Value, ...]:
    """The script that tries whatever a script may do."""
    scratch = [keys.scratch(name, number) for name in ("stream", "hash", "zset", "string", "set")]
    return PROBE_SERVER.full_command(scratch, [channel])


def _trials(channel: str, count: str) -> dict[str, bytes]:
    """What no script may do, by name."""
    return {
        "SCRIPT LOAD": pack(("SCRIPT", "LOAD", PROBE_SERVER.source)),
        "CLIENT KILL": pack(("CLIENT", "KILL", "ID", NO_CLIENT)),
        "CLIENT UNBLOCK": pack(("CLIENT", "UNBLOCK", NO_CLIENT)),
        "PUBSUB": pack(("PUBSUB", count, channel)),
    }


async def find_collisions(client: Client, keys: Keys) -> list[str]:
    """Keys under our prefix that somebody else must have written, as far as this user may look."""
    kind, topics = await client.pipelined([("TYPE", keys.topics), ("SMEMBERS", keys.topics)])
    if isinstance(kind, ConfigError):
        return []  # this user may not ask
    if kind not in (b"none", b"set"):
        return [keys.topics]
    names = [name.decode(errors="replace") for name in topics] if isinstance(topics, list) else []
    hashes = [keys.topic(name) for name in names]
    replies = await client.pipelined(
        [("TYPE", key) for key in hashes]
        + [("HLEN", key) for key in hashes]
        + [("HMGET", key, "created_ms", "partitions") for key in hashes]
    )
    count = len(hashes)
    by_key = zip(hashes, replies[:count], replies[count : 2 * count], replies[2 * count :], strict=True)
    return [key for key, kind, size, known in by_key if kind not in (b"none", b"hash") or (size and not any(known))]


# -- reading replies ------------------------------------------------------------------------------------------------


def failures_of(probe: Any) -> list[tuple[str, str]]:
    """The reply of the probe, or the error that kept it from running at all."""
    if isinstance(probe, Exception):
        return [("EVAL", str(probe))]
    return list(pairs(probe))


def errors_in(replies: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The commands, of these, that were refused."""
    for command, reply in replies.items():
        if isinstance(reply, Exception):
            yield command, str(reply)


def flags_of(user: Any) -> tuple[str, ...] | None:
    """The flags in the reply of ACL GETUSER; the hashes of the passwords beside them are not kept."""
    if not isinstance(user, list):
        return None
    flags = dict(zip(user[::2], user[1::2], strict=False)).get(b"flags", ())
    return tuple(flag.decode(errors="replace") for flag in flags)


def pairs(flat: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """A flat reply, two by two."""
    texts = (item.decode(errors="replace") for item in flat)
    return zip(texts, texts, strict=True)


def parse_info(reply: Any) -> dict[str, str]:
    """`INFO` as a dict; empty when it may not be asked."""
    if isinstance(reply, Exception):
        return {}
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
