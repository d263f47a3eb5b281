"""The questions of the preflight to a server, and its answers.

Commands are tried instead of comparing version numbers: forks, managed services and ACLs differ. On a cluster every
master is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rsmq.errors import BrokerError, ConfigError, SlotMoved
from rsmq.model.clock import now_ms, server_ms
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client, redact
from rsmq.redis.client.raw_connection import RawConnection, pack
from rsmq.redis.scripts import Script

PROBE_SERVER: Final = Script("preflight/probe_server")
"""Tries all commands that a script may call."""
CONFIG: Final = (
    "appendfsync",
    "save",
    "min-replicas-to-write",
    "protected-mode",
    "bind",
    "enable-debug-command",
    "client-output-buffer-limit",
)
DEFAULT_USER: Final = ("ACL", "GETUSER", "default")
"""Needs a right that rsmq does not require (the reply contains password hashes); without it the check is skipped."""
NEWER_COMMANDS: Final = {"xackdel": "8.2", "xdelex": "8.2", "xcfgset": "8.6", "xnack": "8.8"}
"""With the first version of Redis. XCFGSET stands for IDMP, an option of XADD that cannot be asked for."""
NO_CLIENT: Final = (1 << 63) - 1
MOST_TRIES: Final = 1_000_000
"""A master with a single slot is found after 16 384 numbers or so."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The answers of one server. `failures` are (command, error text), `skew_ms` is server minus local.

    `node` is its address where there are several.
    """

    info: Mapping[str, str]
    config: Mapping[str, str]
    failures: Sequence[tuple[str, str]]
    skew_ms: float
    collisions: Sequence[str]
    node: str = ""
    default_flags: tuple[str, ...] | None = None
    """The flags of the user `default`; None without the right to ask."""

    @property
    def server(self) -> str:
        """Its name and version, for texts."""
        if version := self.info.get("valkey_version"):
            return f"Valkey {version}"
        return f"Redis {self.info.get('redis_version', '(unknown version)')}"

    def failed(self, *marks: str) -> list[str]:
        """Commands that were answered with an error in which one of the marks occurs."""
        return sorted({command for command, text in self.failures if any(mark in text for mark in marks)})


async def gather(client: Client, keys: Keys) -> list[ServerFacts]:
    """Ask every server that holds keys; collisions under our prefix are searched once for all.

    Raises BrokerUnavailable, and ConfigError for refused credentials.
    """
    await client.refresh()
    collisions = await find_collisions(client, keys)
    return [
        replace(await _ask(client, node, keys), collisions=() if number else collisions)
        for number, node in enumerate(client.nodes)
    ]


async def _ask(client: Client, node: Client, keys: Keys) -> ServerFacts:
    """On a connection of its own, because the last question turns it into a subscriber."""
    number = next(number for number in range(MOST_TRIES) if client.node_for(keys.scratch("", number)) is node)
    listen, count = ("SSUBSCRIBE", "SHARDNUMSUB") if client.is_cluster else ("SUBSCRIBE", "NUMSUB")
    channel = keys.scratch("channel", number)
    scratch = [keys.scratch(name, number) for name in ("stream", "hash", "zset", "string", "set")]
    trials = _trials(channel, count)
    connection = RawConnection(node)
    await connection.open()
    try:
        asked_ms = now_ms()
        time, info, default, probe, *rest = await connection.exchange([
            pack(("TIME",)),
            pack(("INFO",)),
            pack(DEFAULT_USER),
            pack(PROBE_SERVER.full_command(scratch, [channel])),
            *trials.values(),
            *(pack(("CONFIG", "GET", name)) for name in CONFIG),
        ])  # fmt: skip
        local_ms = (asked_ms + now_ms()) / 2
        if not connection.is_open:  # an answer was that another server has a key: the rules say what that means
            await connection.open()
        (subscribed,) = await connection.exchange([pack((listen, channel))])
    finally:
        await connection.close()
    tried = dict(zip(trials, rest, strict=False)) | {listen: subscribed}
    return ServerFacts(
        info=parse_info(info),
        config=dict(pairs(item for reply in rest[len(trials) :] if isinstance(reply, list) for item in reply)),
        failures=failures_of(probe)
        + [(name, str(reply)) for name, reply in tried.items() if isinstance(reply, Exception)],
        skew_ms=0.0 if isinstance(time, Exception) else server_ms(time) - local_ms,
        collisions=(),
        node=redact(node.url) if client.is_cluster else "",
        default_flags=flags_of(default),
    )


def _trials(channel: str, count: str) -> dict[str, bytes]:
    """The commands that a script may not call, by name."""
    return {
        "SCRIPT LOAD": pack(("SCRIPT", "LOAD", PROBE_SERVER.source)),
        "CLIENT KILL": pack(("CLIENT", "KILL", "ID", NO_CLIENT)),
        "CLIENT UNBLOCK": pack(("CLIENT", "UNBLOCK", NO_CLIENT)),
        "PUBSUB": pack(("PUBSUB", count, channel)),
    }


async def find_collisions(client: Client, keys: Keys) -> list[str]:
    """Keys under our prefix that another program must have written, as far as this user may read them."""
    kind, topics = await client.pipelined([("TYPE", keys.topics), ("SMEMBERS", keys.topics)])
    if isinstance(kind, ConfigError | SlotMoved):
        return []  # this user may not ask, or this is a node of a cluster, which is refused
    if isinstance(kind, Exception):
        raise kind
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


async def newer_commands(client: Client) -> tuple[str, ...]:
    """Which of the newer stream commands this server has, sorted; empty where this user may not ask.

    rsmq needs none of them (docs/decisions/0012-newer-commands.md); `rsmq doctor` lists them. `COMMAND LIST`, not
    `COMMAND INFO`: redis-py cannot read the reply about a command that the server does not know.
    """
    try:
        names = await client.execute_command("COMMAND LIST", "FILTERBY", "PATTERN", "x*")
    except (BrokerError, ConfigError):
        return ()
    return tuple(sorted(name.decode().upper() for name in names if name.decode().lower() in NEWER_COMMANDS))


# -- reading replies ------------------------------------------------------------------------------------------------


def failures_of(probe: Any) -> list[tuple[str, str]]:
    """The failures that the probe reports, or the error that stopped it."""
    if isinstance(probe, Exception):
        return [("EVAL", str(probe))]
    return list(pairs(probe))


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
