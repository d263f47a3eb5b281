"""Every kind of record that rsmq keeps in the server, and how each is spoiled: see `test_hostile_records.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rsmq.model.keys import Keys
from rsmq.model.mqtt_subscription import shard_of

SPOILED: Final = [
    b"", b"word", b"\xff\xfe\x80", b"\x94\x01", b"17", b"-1", b'{"a":[1]}', b"9" * 400, b"inf", b"x" * 50_000,
]  # fmt: skip
"""Empty, a word, no UTF-8, MessagePack that is cut off, numbers, JSON of another shape, huge ones."""

Command = tuple[Any, ...]

AT: Final = ("orders", 0, "billing")
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "topic": (
        "partitions", "layout", "max_length", "on_full", "retention_age_ms", "retention_length", "created_ms",
        "archive",
    ),
    "removed": ("own", "seen|billing"),
    "archived": ("lake",),
    "jobs": ("job|orders.0", "out|orders.0|billing", "stray|1"),
    "every": (
        "last|clock", "rule|clock", "owner|clock", "until|clock", "run|clock", "paused|clock", "set|clock",
        "history|clock", "failures|clock", "trace|clock", "served|clock", "added|clock",
    ),
    "relayed": ("rows|db", "turn|db"),
    "lease": (
        "owner", "epoch", "until_ms", "reader", "before", "ttl", "clock", "waits_clock", "starts", "call", "run",
    ),
    "errors": ("ID", "ID|past", "ID|due"),
    "calls": ("c-1",),
    "steps": ("ID", "ID|charge", "ID|share"),
    "progress": ("ID",),
    "cancels": ("ID", "ID|due"),
    "group": ("distribution", "paused", "created_ms", "unfinished"),
    "unique": ("name",),
    "holders": ("other",),
    "leader": ("owner", "until_ms", "epoch"),
    "outboxes": ("db",),
    "session": (
        "epoch", "gateway", "connected_ms", "seen_ms", "seq", "sent", "floor", "since_ms", "held", "idle", "until_ms",
        "pushed", "dropped", "expired", "late", "mqtt", "source:s", "source:!g",
    ),
    "received": ("7",),
    "batch_names": ("campaign",),
    "batch_state": (
        "name", "group", "opened_ms", "expires_ms", "keep_ms", "on_complete", "on_success", "total", "done", "closed",
        "blocks", "block|b", "total|b", "ended_ms", "state", "pending|on_complete", "topic|orders",
    ),
    "will": ("1", "published"),
    "gateway_clients": ("phone",),
    "bans": ("client phone", "user ada", "address 10.0.0.7/32"),
}  # fmt: skip
"""The fields of each hash."""
HASHES: Final = frozenset(FIELDS)
SETS: Final = frozenset({"topics", "members", "former"})
ZSETS: Final = frozenset(
    {
        "schedules",
        "delayed",
        "marks",
        "retry",
        "waits",
        "cancelled",
        "inbox",
        "expiry",
        "gateways",
        "bodies",
        "batch_due",
    }
)
STREAMS: Final = frozenset({"stream", "out", "dlq", "handed_on", "history", "audit"})
STRINGS: Final = frozenset(
    {
        "deployment",
        "sweep",
        "dedup",
        "rate",
        "permits",
        "alive",
        "watched",
        "vitals",
        "letter",
        "task",
        "reply",
        "result",
        "gateway_about",
        "batch_members",
    }
)
MQTT_KEYS: Final = ("subscriptions", "changes", "names", "followed", "mark", "sessions", "wills")
SEVERAL: Final = frozenset({"mqtt", "retained"})
"""Several keys under one method."""
NO_RECORDS: Final = {
    "presence": "a channel without data",
    "changes": "a channel without data",
    "wake": "a channel without data",
    "gateway_alive": "a channel without data",
    "broadcast": "a channel: nothing is stored",
    "trace": "a channel: nothing is stored",
    "batch_counts": "the keys `batch_state`, `batch_members` and `batch_due` together",
    "device": "the keys `inbox`, `session`, `expiry` and `wake` together",
    "of_group": "the keys of a group in one partition, each of which stands here by itself",
    "scratch": "keys that the start-up check makes and removes within a call",
}


def of(keys: Keys, kind: str) -> str:
    """One key of a kind."""
    found = getattr(keys, kind)
    arguments: dict[str, tuple[Any, ...]] = {
        "topic": AT[:1], "former": AT[:1], "dedup": (*AT[:2], "m"),
        "rate": ("orders", "billing", "acme"), "permits": ("orders", "billing"),
        "holders": ("orders", "billing"), "leader": ("outbox.db",),
        "members": ("orders", "billing"), "alive": ("orders", "billing", "other"),
        "watched": ("orders", "billing"), "bodies": ("orders",), "group": ("orders", "billing"),
        "vitals": ("orders", "billing", "other"), "letter": ("phone", 1), "task": ("t",), "reply": ("r",),
        "result": (*AT, "m"),
        "gateway_clients": ("other",), "gateway_about": ("other",), "batch_names": (0,), "batch_due": (0,),
        "batch_state": ("0.b",), "batch_members": ("0.b",),
    }  # fmt: skip
    if isinstance(found, str):
        return found
    if kind in ("inbox", "session", "expiry", "received", "will"):
        return str(found("phone"))
    if kind in (
        "lease",
        "retry",
        "waits",
        "calls",
        "out",
        "errors",
        "cancels",
        "cancelled",
        "dlq",
        "handed_on",
        "steps",
        "progress",
    ):
        return str(found(*AT))
    return str(found(*arguments.get(kind, AT[:2])))


def spoilings(keys: Keys, kind: str, entry_id: str) -> Iterator[list[Command]]:
    """The commands that spoil a kind of record, in turn: of a hash or a string each way by itself, else all at once."""
    if kind in HASHES:
        key = of(keys, kind)
        for value in SPOILED:
            fields = [field.replace("ID", entry_id) for field in FIELDS[kind]]
            yield [("HSET", key, *(part for field in fields for part in (field, value)))]
        if kind != "topic":
            yield [("HSET", key, *(part for value in SPOILED for part in (value, value)))]
    elif kind in STRINGS:
        for value in SPOILED:
            yield [("SET", of(keys, kind), value)]
    elif kind in SETS:
        yield [("SADD", of(keys, kind), *SPOILED)]
    elif kind in ZSETS:
        yield [("ZADD", of(keys, kind), 1, value) for value in SPOILED]
        yield [("ZADD", of(keys, kind), "inf", value) for value in SPOILED]
    elif kind in STREAMS:
        where = "*" if kind != "history" else "1-*"
        names = [b"data", b"id", b"h", b"key", b"dlq.at_ms", b"dlq.history", b"out.topic", b"out.due", b"who", b"z"]
        yield [("XADD", of(keys, kind), where, name, value) for value in SPOILED for name in names]
        yield [("XADD", of(keys, kind), where, value, value) for value in SPOILED]
    elif kind == "mqtt":
        names = {name: keys.mqtt(shard_of("phone"), name) for name in MQTT_KEYS}
        for value in SPOILED:
            yield [("HSET", names["subscriptions"], "phone", value, "other", b"1|" + value)]
        yield [("HSET", names["subscriptions"], *(part for value in SPOILED for part in (value, value)))]
        yield [("XADD", names["changes"], "*", "n", value, "c", value, "v", value) for value in SPOILED]
        yield [("XADD", names["changes"], "*", value, value) for value in SPOILED]
        for value in SPOILED:
            yield [("HSET", names["names"], "a/b", value, "a/c", b"phone\x001000\0" + value)]
            yield [("HSET", names["followed"], "phone", value, value, value, b"phone\0" + value, value)]
            yield [("SET", names["mark"], value)]
        for score in ("1", "-inf"):
            yield [("ZADD", names[name], score, value) for name in ("sessions", "wills") for value in SPOILED]
    else:
        names = {name: keys.retained(0, name) for name in ("messages", "names", "expiries")}
        for value in SPOILED:
            yield [("HSET", names["messages"], "a/b", value, "a/c", b"1" * 60 + b"|" + value)]
            yield [("ZADD", names["names"], 0, "a/b", 0, "a/c", 0, value)]
        yield [("ZADD", names["expiries"], "inf", value) for value in SPOILED]
