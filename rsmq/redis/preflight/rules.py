"""The rules of the preflight: pure, each over what one server said. A finding says what is wrong and what to do.

`require` applies them to a server: it refuses the start or warns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Literal

from rsmq.errors import ConfigError
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.preflight.facts import ServerFacts, gather
from rsmq.redis.preflight.vulnerabilities import upgrade, vulnerabilities_of
from rsmq.redis.wire.url import is_loopback

log = logging.getLogger("rsmq.preflight")

TO_PUBLISH: Final = frozenset(
    "EVAL TIME XADD XLEN XRANGE GET SET EXISTS HGETALL HSETNX SADD TYPE ZADD".split()  # noqa: SIM905  a word each
)
"""The commands that a publisher needs."""
NEEDED: Final = "rsmq needs Redis 7.0 or newer, or Valkey 8 or newer"
LARGEST_SKEW: Final = timedelta(seconds=1)
NEARLY_FULL: Final = 0.9
FOR_A_WORKER: Final = 10
"""Connections of a worker process with one handler; each further handler has about four."""
LARGEST_PAGE: Final = 64 << 20
"""Bytes: what a read may bring at once, twice, with the default of `prefetch_bytes`."""
DENIED: Final = ("NOPERM", "permission", "ACL failure", "can't run this command", "can't access")
FOR_BATCHES: Final = frozenset(("BITFIELD", "HRANDFIELD"))
"""Commands that only batches, and steps and progress of handlers, need."""
TO_ADMINISTER: Final = frozenset(("XDEL", "XGROUP DESTROY"))
"""Commands that only deleting, resetting and replaying need."""
GIVE_PASSWORD: Final = "Set requirepass, or give each service a user of its own (docs/security.md)"

Level = Literal["refuse", "warn", "ok"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `text` says what was found and, unless the level is ok, what to do."""

    level: Level
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.text}"


async def require(client: Client, settings: Settings, keys: Keys, *, publishes_only: bool = False) -> list[Finding]:
    """Run all checks and log the warnings.

    Raises BrokerUnavailable, and ConfigError for a refusal unless the setting `preflight` is "warn".
    `publishes_only`: do not check rights that only a worker needs.
    """
    facts = await gather(client, keys)
    if publishes_only:
        facts = [replace(each, failures=[one for one in each.failures if one[0] in TO_PUBLISH]) for each in facts]
    findings = judge(facts)
    refused = [str(finding) for finding in findings if finding.level == "refuse"]
    if refused and settings.preflight == "refuse":
        raise ConfigError("\n".join(refused) + "\n(RSMQ_PREFLIGHT=warn starts nevertheless)")
    for finding in findings:
        if finding.level != "ok":
            log.warning("%s", finding)
    return findings


def judge(facts: Sequence[ServerFacts]) -> list[Finding]:
    """The findings about all servers: equal findings are merged, others name their node."""
    found = [(each.node, finding) for check in CHECKS for each in facts for finding in check(each)]
    alike = Counter(finding for _, finding in found)
    named = [
        replace(finding, text=f"{finding.text} (node {node})") if alike[finding] < len(facts) and node else finding
        for node, finding in found
    ]
    return list(dict.fromkeys(named))


def check_version(facts: ServerFacts) -> Iterator[Finding]:
    """Every command exists and answers as it does since 7.0."""
    if missing := facts.failed("nknown"):
        text = f"{facts.server} lacks {', '.join(missing)} (too old, or renamed in its configuration): {NEEDED}"
        yield Finding("refuse", "server", text)
    else:
        yield Finding("ok", "server", facts.server)


def check_rights(facts: ServerFacts) -> Iterator[Finding]:
    """This user has all rights that rsmq needs, apart from those of an operator."""
    denied = [each for each in facts.failed(*DENIED) if each not in FOR_BATCHES]
    if lacking := [each for each in facts.failed(*DENIED) if each in FOR_BATCHES]:
        yield Finding(
            "warn", "rights",
            f"the ACL does not let this user run {', '.join(lacking)}: members of batches are not counted without "
            f"BITFIELD, and notes of handlers stay without HRANDFIELD. Allow them (the list is in docs/keys.md)",
        )  # fmt: skip
    if denied and TO_ADMINISTER.issuperset(denied):
        yield Finding("ok", "rights", f"enough to work, not to reset, replay or delete ({', '.join(denied)})")
    elif denied:
        yield Finding(
            "refuse", "rights",
            f"the ACL does not let this user run {', '.join(denied)}: allow it (the list is in docs/keys.md)",
        )  # fmt: skip


def check_role(facts: ServerFacts) -> Iterator[Finding]:
    """Not a replica: it would refuse every write."""
    if facts.failed("READONLY") or facts.info.get("role") == "slave":
        text = "this server is a read-only replica: let RSMQ_URL name the master, or use redis+sentinel://"
        yield Finding("refuse", "role", text)


def check_mode(facts: ServerFacts) -> Iterator[Finding]:
    """Not a node of a cluster under a URL of one server: it has a part of the keys only."""
    if facts.info.get("cluster_enabled") == "1" and not facts.node:
        text = "this server is a node of a cluster: use redis+cluster:// (or rediss+cluster://) in RSMQ_URL"
        yield Finding("refuse", "mode", text)


def check_eviction(facts: ServerFacts) -> Iterator[Finding]:
    """The server deletes nothing to make room."""
    policy = facts.info.get("maxmemory_policy")
    if policy is None:
        yield Finding("warn", "eviction", "the server does not show maxmemory-policy: make sure that it is noeviction")
    elif policy != "noeviction":
        yield Finding(
            "refuse", "eviction",
            f"maxmemory-policy is {policy}: the server would delete messages when it is full. "
            f"CONFIG SET maxmemory-policy noeviction, and write it into its configuration",
        )  # fmt: skip
    else:
        yield Finding("ok", "eviction", "noeviction")


def check_memory(facts: ServerFacts) -> Iterator[Finding]:
    """Memory is left. Never a refusal: only running consumers can empty a full server."""
    used, limit = int(facts.info.get("used_memory", 0)), int(facts.info.get("maxmemory", 0))
    if facts.failed("OOM") or (limit and used > NEARLY_FULL * limit):
        text = f"{used / max(limit, 1):.0%} of maxmemory is used: raise it, or trim topics (`rsmq topic list`)"
        yield Finding("warn", "memory", text)
    else:
        yield Finding("ok", "memory", f"{used / limit:.0%} of maxmemory is used" if limit else "no limit is set")


def check_persistence(facts: ServerFacts) -> Iterator[Finding]:
    """The durability profile of the server, which decides what a crash loses."""
    advice = "CONFIG SET appendonly yes, and write it into its configuration"
    is_replicated = int(facts.info.get("connected_slaves", 0)) and int(facts.config.get("min-replicas-to-write", 0))
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        yield Finding("warn", "persistence", "the server cannot write its append-only file: free space, or see its log")
    elif facts.info.get("aof_enabled") != "1" and is_replicated:
        yield Finding("ok", "persistence", "replicated: replicas hold every message, no append-only file")
    elif facts.info.get("aof_enabled") != "1" and facts.config.get("save"):
        text = f"snapshots only: a crash of the server loses all messages since the last one, usually minutes. {advice}"
        yield Finding("warn", "persistence", text)
    elif facts.info.get("aof_enabled") != "1":
        yield Finding("warn", "persistence", f"none: a restart of the server loses every message. {advice}")
    elif facts.config.get("appendfsync") == "always":
        yield Finding("ok", "persistence", "durable: every write is on disk before it is confirmed")
    elif is_replicated:
        yield Finding("ok", "persistence", "replicated: append-only file, and replicas hold every message")
    else:
        yield Finding(
            "ok",
            "persistence",
            "fast: append-only file; a power failure, or a crash while the disk is slow, can lose the last 2 s",
        )


def check_patches(facts: ServerFacts) -> Iterator[Finding]:
    """No known vulnerability lets a client take over the server. Only a warning: distributions fix vulnerabilities in
    their packages without changing the version."""
    found = vulnerabilities_of(facts.info)
    if found:
        text = f"{facts.server} has known vulnerabilities, {', '.join(each.name for each in found)}"
        text += (
            f": {upgrade(facts.info, found)}; from a distribution, check your package: it may have the fixes already"
        )
        yield Finding("warn", "patches", text)
    elif found is not None:
        yield Finding("ok", "patches", "this version has no known vulnerability (as of this rsmq)")


def check_access(facts: ServerFacts) -> Iterator[Finding]:
    """The server asks for a password."""
    if facts.info.get("tcp_port") == "0":
        yield Finding("ok", "access", "only by its unix socket")
    elif facts.default_flags is None:
        return
    elif "nopass" not in facts.default_flags or "off" in facts.default_flags:
        yield Finding("ok", "access", "a password is needed")
    elif facts.config.get("protected-mode") == "no" and not is_local(facts.config.get("bind", "")):
        yield Finding(
            "warn", "access",
            f"protected-mode is off and the user `default` has no password: every machine that reaches "
            f"port {facts.info.get('tcp_port')} can read and delete everything. {GIVE_PASSWORD}",
        )  # fmt: skip
    else:
        text = "the user `default` has no password: every program on this machine can read and delete everything"
        yield Finding("warn", "access", f"{text}. {GIVE_PASSWORD}")


def check_debug(facts: ServerFacts) -> Iterator[Finding]:
    """The command that can crash or stall the server is disabled."""
    if facts.config.get("enable-debug-command") == "yes" and facts.info.get("tcp_port") != "0":
        text = "DEBUG is enabled: any client can crash or stall the server with it. Set enable-debug-command to no"
        yield Finding("warn", "debug", text)


def check_clock(facts: ServerFacts) -> Iterator[Finding]:
    """Both clocks agree. Only displayed times depend on it: the server's clock decides everything else."""
    if abs(facts.skew_ms) > to_ms(LARGEST_SKEW):
        way = "ahead of" if facts.skew_ms > 0 else "behind"
        text = f"the server's is {abs(facts.skew_ms) / 1000:.1f} s {way} this machine's: shown times are wrong; use NTP"
        yield Finding("warn", "clock", text)
    else:
        yield Finding("ok", "clock", "the server's and this machine's agree")


def check_connections(facts: ServerFacts) -> Iterator[Finding]:
    """There are connections left for another worker, and answers may be as large as a page."""
    used, limit = int(facts.info.get("connected_clients", 0)), int(facts.info.get("maxclients", 0))
    if limit and limit - used < FOR_A_WORKER:
        yield Finding(
            "warn", "connections",
            f"{used} of {limit} connections are used (maxclients), and a worker process needs about {FOR_A_WORKER}: "
            f"one that gets too few serves nothing. Raise maxclients, or run fewer processes",
        )  # fmt: skip
    allowed = output_limit(facts.config.get("client-output-buffer-limit", ""))
    if 0 < allowed < LARGEST_PAGE:
        yield Finding(
            "warn", "connections",
            f"client-output-buffer-limit of class normal is {allowed} bytes: the server closes connections with larger "
            f"answers, so pages are read again and again until they are small enough. Raise it to {LARGEST_PAGE} or 0",
        )  # fmt: skip


def output_limit(text: str) -> int:
    """The hard limit of the class `normal` in bytes; 0: none."""
    words = text.split()
    at = words.index("normal") if "normal" in words else len(words)
    return int(words[at + 1]) if words[at + 1 : at + 2] and words[at + 1].isdecimal() else 0


def check_prefix(facts: ServerFacts) -> Iterator[Finding]:
    """No other program writes under our prefix."""
    if facts.collisions:
        text = f"another program has written {', '.join(facts.collisions[:5])}: set RSMQ_PREFIX to a prefix of your own"
        yield Finding("refuse", "prefix", text)


def is_local(bind: str) -> bool:
    """Whether a server that listens there can be reached from this machine only."""
    return bool(bind.split()) and all(is_loopback(host.removeprefix("-")) for host in bind.split())


CHECKS: Final = (
    check_version, check_rights, check_role, check_mode, check_eviction, check_memory, check_persistence,
    check_patches, check_access, check_debug, check_clock, check_connections, check_prefix,
)  # fmt: skip
