"""Whether this server keeps what it is given: asked once at the start, before a message is touched.

What a server can do is found out by trying, not by its version number: forks, managed services and ACLs differ. Of a
cluster every master is asked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Literal

from rsmq.address import is_loopback
from rsmq.clock import now_ms, to_ms
from rsmq.connect import Client, redact
from rsmq.errors import ConfigError
from rsmq.flaw import flaws_of, upgrade
from rsmq.keys import Keys
from rsmq.script import Script
from rsmq.settings import Settings
from rsmq.wire import Wire, pack

log = logging.getLogger(__name__)

PROBE_SERVER: Final = Script("probe_server")
NEEDED: Final = "rsmq needs Redis 7.0 or newer, or Valkey 8 or newer"
LARGEST_SKEW: Final = timedelta(seconds=1)
NEARLY_FULL: Final = 0.9
NO_CLIENT: Final = (1 << 63) - 1
MOST_TRIES: Final = 1_000_000
"""A master with a single slot is found after 16 384 numbers or so."""
TO_PUBLISH: Final = frozenset(
    "EVAL TIME XADD XLEN XRANGE GET SET EXISTS HGETALL HSETNX SADD ZADD".split()  # noqa: SIM905  a word each
)
"""What a publisher needs of all that is tried."""
DENIED: Final = ("NOPERM", "permission", "ACL failure", "can't run this command", "can't access")

TO_ADMINISTER: Final = frozenset(("XDEL", "XGROUP DESTROY"))
"""What only somebody needs who deletes, resets or replays."""
DEFAULT_USER: Final = ("ACL", "GETUSER", "default")
"""A right that rsmq does not ask for (the hashes of passwords are in the reply): without it nothing is said."""
GIVE_PASSWORD: Final = "Set requirepass, or give each service a user of its own (docs/security.md)"

Level = Literal["refuse", "warn", "ok"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `text` says what it is and, unless it is fine, what to do about it."""

    level: Level
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.text}"


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


async def preflight(client: Client, settings: Settings, keys: Keys) -> list[Finding]:
    """Look at everything. Raises BrokerUnavailable, and ConfigError for refused credentials."""
    return findings_of(await gather_facts(client, keys))


def findings_of(facts: Sequence[Facts]) -> list[Finding]:
    """The judgement over each server: what is alike is said once, what is not names its node."""
    found = [(each.node, finding) for check in CHECKS for each in facts for finding in check(each)]
    alike = Counter(finding for _, finding in found)
    named = [
        replace(finding, text=f"{finding.text} (node {node})") if alike[finding] < len(facts) and node else finding
        for node, finding in found
    ]
    return list(dict.fromkeys(named))


async def require(client: Client, settings: Settings, keys: Keys, *, publishes_only: bool = False) -> list[Finding]:
    """The same, and raise ConfigError for what would lose messages, unless `preflight` is "warn". Logs the rest.

    `publishes_only`: rights that only a worker needs are not missed.
    """
    facts = await gather_facts(client, keys)
    if publishes_only:
        facts = [replace(each, failures=[one for one in each.failures if one[0] in TO_PUBLISH]) for each in facts]
    findings = findings_of(facts)
    refused = [finding for finding in findings if finding.level == "refuse"]
    if refused and settings.preflight == "refuse":
        raise ConfigError(
            "\n".join(str(finding) for finding in refused) + "\n(RSMQ_PREFLIGHT=warn starts nevertheless)"
        )
    for finding in findings:
        if finding.level != "ok":
            log.warning("%s", finding)
    return findings


async def gather_facts(client: Client, keys: Keys) -> list[Facts]:
    """Ask every server that holds keys; what is under our prefix is asked of all together."""
    await client.refresh()
    collisions = await find_collisions(client, keys)
    return [
        replace(await _ask(client, node, keys), collisions=() if number else collisions)
        for number, node in enumerate(client.nodes)
    ]


async def _ask(client: Client, node: Client, keys: Keys) -> Facts:
    """On a connection of its own, because the last question turns it into a subscriber."""
    number = next(number for number in range(MOST_TRIES) if client.node_for(keys.scratch("", number)) is node)
    scratch = [keys.scratch(name, number) for name in ("stream", "hash", "zset", "string", "set")]
    channel = keys.scratch("channel", number)
    listen, count = ("SSUBSCRIBE", "SHARDNUMSUB") if client.is_cluster else ("SUBSCRIBE", "NUMSUB")
    wire = Wire(node)
    await wire.open()
    try:
        asked_ms = now_ms()
        time, info, default, probe, *rest = await wire.exchange([
            pack(("TIME",)),
            pack(("INFO",)),
            pack(DEFAULT_USER),
            pack(PROBE_SERVER.full_command(scratch, [channel])),
            pack(("SCRIPT", "LOAD", PROBE_SERVER.source)),
            pack(("CLIENT", "KILL", "ID", NO_CLIENT)),
            pack(("CLIENT", "UNBLOCK", NO_CLIENT)),
            pack(("PUBSUB", count, channel)),
            pack(("CONFIG", "GET", "appendfsync")),
            pack(("CONFIG", "GET", "save")),
            pack(("CONFIG", "GET", "min-replicas-to-write")),
            pack(("CONFIG", "GET", "protected-mode")),
            pack(("CONFIG", "GET", "bind")),
            pack(("CONFIG", "GET", "enable-debug-command")),
        ])  # fmt: skip
        local_ms = (asked_ms + now_ms()) / 2
        load, kill, unblock, counted, *config = rest
        (subscribed,) = await wire.exchange([pack((listen, channel))])
        asked = {"SCRIPT LOAD": load, "CLIENT KILL": kill, "CLIENT UNBLOCK": unblock, "PUBSUB": counted}
    finally:
        await wire.close()
    return Facts(
        info=parse_info(info),
        config=dict(pairs(item for reply in config if isinstance(reply, list) for item in reply)),
        failures=[*failures_of(probe), *outside({**asked, listen: subscribed})],
        skew_ms=0.0 if isinstance(time, Exception) else int(time[0]) * 1000 + int(time[1]) // 1000 - local_ms,
        collisions=(),
        node=redact(node.url) if client.is_cluster else "",
        default_flags=flags_of(default),
    )


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


def check_version(facts: Facts) -> Iterator[Finding]:
    """Every command exists and answers as it does since 7.0."""
    if missing := facts.failed("nknown"):
        text = f"{facts.server} lacks {', '.join(missing)} (too old, or renamed in its configuration): {NEEDED}"
        yield Finding("refuse", "server", text)
    else:
        yield Finding("ok", "server", facts.server)


def check_rights(facts: Facts) -> Iterator[Finding]:
    """This user may do all that rsmq does; what only an operator does is not missed."""
    denied = facts.failed(*DENIED)
    if denied and TO_ADMINISTER.issuperset(denied):
        yield Finding("ok", "rights", f"enough to work, not to reset, replay or delete ({', '.join(denied)})")
    elif denied:
        yield Finding(
            "refuse", "rights",
            f"the ACL does not let this user run {', '.join(denied)}: allow it (the list is in docs/keys.md)",
        )  # fmt: skip


def check_role(facts: Facts) -> Iterator[Finding]:
    """Not a replica: it would refuse every write."""
    if facts.failed("READONLY") or facts.info.get("role") == "slave":
        text = "this server is a read-only replica: let RSMQ_URL name the master, or use redis+sentinel://"
        yield Finding("refuse", "role", text)


def check_eviction(facts: Facts) -> Iterator[Finding]:
    """Nothing is ever thrown away to make room."""
    policy = facts.info.get("maxmemory_policy")
    if policy is None:
        yield Finding("warn", "eviction", "the server does not tell its policy: make sure that it is noeviction")
    elif policy != "noeviction":
        yield Finding(
            "refuse", "eviction",
            f"maxmemory-policy is {policy}: the server would delete messages when it is full. "
            f"CONFIG SET maxmemory-policy noeviction, and write it into its configuration",
        )  # fmt: skip
    else:
        yield Finding("ok", "eviction", "noeviction")


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Room is left. Never a refusal: what is full gets empty only when the consumers start."""
    used, limit = int(facts.info.get("used_memory", 0)), int(facts.info.get("maxmemory", 0))
    if facts.failed("OOM") or (limit and used > NEARLY_FULL * limit):
        text = f"{used / max(limit, 1):.0%} of maxmemory is used: raise it, or trim topics (`rsmq topic list`)"
        yield Finding("warn", "memory", text)
    else:
        yield Finding("ok", "memory", f"{used / limit:.0%} of maxmemory is used" if limit else "no limit is set")


def check_persistence(facts: Facts) -> Iterator[Finding]:
    """Which profile the server has, and so what a crash of the server costs."""
    advice = "CONFIG SET appendonly yes, and write it into its configuration"
    is_replicated = int(facts.info.get("connected_slaves", 0)) and int(facts.config.get("min-replicas-to-write", 0))
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        yield Finding("warn", "persistence", "the server cannot write its append-only file: free space, or see its log")
    elif facts.info.get("aof_enabled") != "1" and is_replicated:
        yield Finding("ok", "persistence", "replicated: replicas hold every message, no file does")
    elif facts.info.get("aof_enabled") != "1" and facts.config.get("save"):
        text = f"snapshots only: a crash of the server loses what came since the last one, minutes. {advice}"
        yield Finding("warn", "persistence", text)
    elif facts.info.get("aof_enabled") != "1":
        yield Finding("warn", "persistence", f"none: a restart of the server loses every message. {advice}")
    elif facts.config.get("appendfsync") == "always":
        yield Finding("ok", "persistence", "durable: every write is on disk before it is confirmed")
    elif is_replicated:
        yield Finding("ok", "persistence", "replicated: append-only file, and replicas hold every message")
    else:
        yield Finding("ok", "persistence", "fast: append-only file; a power failure can lose the last 2 s")


def check_patches(facts: Facts) -> Iterator[Finding]:
    """No flaw is known by which somebody who may connect takes over the server. A warning: distributions mend such
    flaws in their packages without changing the number."""
    found = flaws_of(facts.info)
    if found is None:
        return
    if found:
        names = ", ".join(str(flaw) for flaw in found)
        yield Finding(
            "warn", "patches",
            f"{facts.server} has known flaws, {names}: {upgrade(facts.info, found)}; from a distribution, check your "
            f"package, for it may be mended under this number",
        )  # fmt: skip
    else:
        yield Finding("ok", "patches", "no flaw is known of this version (as of this rsmq)")


def check_access(facts: Facts) -> Iterator[Finding]:
    """A stranger is asked for a password."""
    if facts.info.get("tcp_port") == "0":
        yield Finding("ok", "access", "by its unix socket only")
    elif facts.default_flags is None:
        return
    elif "nopass" not in facts.default_flags or "off" in facts.default_flags:
        yield Finding("ok", "access", "a password is needed")
    elif facts.config.get("protected-mode") == "no" and not is_local(facts.config.get("bind", "")):
        yield Finding(
            "warn", "access",
            f"protected-mode is off and the user `default` has no password: whoever reaches port "
            f"{facts.info.get('tcp_port')} may read and delete everything. {GIVE_PASSWORD}",
        )  # fmt: skip
    else:
        text = "the user `default` has no password: every program on this machine may read and delete everything"
        yield Finding("warn", "access", f"{text}. {GIVE_PASSWORD}")


def check_debug(facts: Facts) -> Iterator[Finding]:
    """Nobody can crash or stall the server with a command made for it."""
    if facts.config.get("enable-debug-command") == "yes" and facts.info.get("tcp_port") != "0":
        text = "DEBUG is enabled: it crashes or stalls the server at will. Set enable-debug-command to no"
        yield Finding("warn", "debug", text)


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Both clocks agree. Only what people read depends on it: the server's clock decides all else."""
    if abs(facts.skew_ms) > to_ms(LARGEST_SKEW):
        way = "ahead of" if facts.skew_ms > 0 else "behind"
        text = (
            f"the server's is {abs(facts.skew_ms) / 1000:.1f} s {way} this machine's: times shown will be off; use NTP"
        )
        yield Finding("warn", "clock", text)
    else:
        yield Finding("ok", "clock", "the server's and this machine's agree")


def check_prefix(facts: Facts) -> Iterator[Finding]:
    """Nobody else writes under our prefix."""
    if facts.collisions:
        text = f"another program has written {', '.join(facts.collisions[:5])}: set RSMQ_PREFIX to a prefix of your own"
        yield Finding("refuse", "prefix", text)


CHECKS: Final = (
    check_version, check_rights, check_role, check_eviction, check_memory, check_persistence, check_patches,
    check_access, check_debug, check_clock, check_prefix,
)  # fmt: skip


def failures_of(probe: Any) -> list[tuple[str, str]]:
    """The reply of the probe, or the error that kept it from running at all."""
    if isinstance(probe, Exception):
        return [("EVAL", str(probe))]
    return list(pairs(probe))


def flags_of(user: Any) -> tuple[str, ...] | None:
    """The flags in the reply of ACL GETUSER; the hashes of the passwords beside them are not kept."""
    if not isinstance(user, list):
        return None
    flags = dict(zip(user[::2], user[1::2], strict=False)).get(b"flags", ())
    return tuple(flag.decode(errors="replace") for flag in flags)


def is_local(bind: str) -> bool:
    """Whether a server that listens there can be reached from this machine only."""
    return bool(bind.split()) and all(is_loopback(host.removeprefix("-")) for host in bind.split())


def outside(replies: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Commands that no script may run, where the answer was an error."""
    for command, reply in replies.items():
        if isinstance(reply, Exception):
            yield command, str(reply)


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
