"""The real server: a command is executed in a state that is restored first, and the state after it is read back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import redis

from rsmq.model.clock import to_ms
from rsmq.redis.scripts import SCRIPTS
from rsmq.testing.server import ThrowawayServer
from tests.interleavings.commands import (
    DAY,
    DLQ,
    GROUP,
    KEYS,
    LEASE,
    OUT,
    RETRY,
    STREAM,
    Wire,
    number_of,
    stream_id,
    wire,
)
from tests.interleavings.world import Command, Server

LATEST: Final = 10**15
"""The epoch before the first one: later than the clock, so that every grant adds 1, at whatever time it comes."""
LONG_MS: Final = to_ms(DAY)
"""So long a message is idle when its member is taken for dead. No search takes so long."""
PARTS: Final = (STREAM, LEASE, RETRY, DLQ, OUT)
PICTURE: Final = (
    ("TIME",),
    ("HMGET", LEASE, "owner", "epoch", "until_ms", "reader", "before", "call"),
    ("XINFO", "GROUPS", STREAM),
    ("XPENDING", STREAM, GROUP, "-", "+", 100),
    ("ZRANGE", RETRY, 0, -1, "WITHSCORES"),
    ("XRANGE", DLQ, "-", "+"),
    ("XRANGE", OUT, "-", "+"),
    ("XRANGE", STREAM, "-", "+"),
    *(("DUMP", part) for part in PARTS),
)


RIGHTS: Final = ("xack", "xadd", "xclaim", "xautoclaim", "zadd", "zrem", "hset")
SEAL: Final = f"{2**64 - 1}-{2**64 - 1}"
REFUSALS: Final[tuple[tuple[str, list[Wire], str], ...]] = (
    *((f"no right to {name.upper()}", [("AUTH", f"no-{name}", "")], "") for name in RIGHTS),
    ("no memory", [("CONFIG", "SET", "maxmemory", 1)], ""),
    *((f"{key} has another type", [("SET", key, "x")], key) for key in (RETRY, DLQ, OUT)),
    *((f"{key} takes no entries", [("DEL", key), ("XADD", key, SEAL, "x", "x")], key) for key in (DLQ, OUT)),
)
"""What the server may refuse a write with: the commands before it, and the key that they spoil."""
UNHINDERED: Final[tuple[Wire, ...]] = (("AUTH", "default", ""), ("CONFIG", "SET", "maxmemory", 0))


class Store:
    """Executes commands on states. The same command in the same state is executed once; `calls` counts these.

    Time stands still between two steps, because leases and retries last a day: it passes by a step that ends them.
    """

    def __init__(self, client: redis.Redis, listeners: dict[str, redis.client.PubSub]) -> None:
        self._client, self._listeners = client, listeners
        self._listening: frozenset[str] = frozenset()
        self._dumps: dict[Server, list[bytes | None]] = {}
        self._known: dict[tuple[Any, ...], tuple[Any, Server]] = {}

    @property
    def calls(self) -> int:
        """How many different calls the server has executed."""
        return len(self._known)

    def begin(self, keys: Sequence[str]) -> Server:
        """The state with a message for each key, none of them delivered."""
        for source in {script.source for script in SCRIPTS.values()}:
            self._client.script_load(source)
        self._client.flushdb()
        for name in RIGHTS:
            self._client.execute_command(
                "ACL", "SETUSER", f"no-{name}", "on", "nopass", "~*", "&*", "+@all", f"-{name}"
            )
        for number, key in enumerate(keys, 1):
            fields = ("data", "", "id", f"{number}", *(("key", key) if key else ()))
            self._client.execute_command("XADD", STREAM, stream_id(number), *fields)
        self._client.execute_command("XGROUP", "CREATE", STREAM, GROUP, "0")
        self._client.execute_command("HSET", LEASE, "epoch", LATEST)
        return self._exchange([])[1]

    def execute(self, server: Server, command: Command, alive: frozenset[str]) -> tuple[Any, Server]:
        """The reply, and the state after it. `alive`: the members with a presence connection."""
        asked = (server, command.kind, command.member, command.epoch, command.args, command.retried)
        asked = (*asked, command.kind == "take" and alive)
        if asked not in self._known:
            if command.kind == "take":
                self._listen(alive)
            self._known[asked] = self._exchange([wire(command)], server)
        return self._known[asked]

    def refusals(self, server: Server, command: Command) -> dict[Server, str]:
        """The states after a command whose writes the server refuses, each with what refused it. What hinders it is
        gone after it. A command that succeeds all the same is none of these."""
        asked = (server, command.kind, command.member, command.epoch, command.args, command.retried, "refused")
        if asked not in self._known:
            states = dict[Server, str]()
            for name, before, key in REFUSALS:
                reply, after = self._exchange([*before, wire(command), *UNHINDERED], server, len(before), key)
                if isinstance(reply, redis.ResponseError):
                    states.setdefault(after, name)
            self._known[asked] = (states, server)
        found: dict[Server, str] = self._known[asked][0]
        return found

    def pass_lease(self, server: Server) -> Server:
        """The lease is over, and every retry is due."""
        dues = [self._due(index, *each[:2]) for index, each in enumerate(server.parked)]
        return self._pass(server, "lease", [("HSET", LEASE, "until_ms", "0"), *dues])

    def pass_retry(self, server: Server) -> Server:
        """The next retry is due."""
        index = next(index for index, each in enumerate(server.parked) if not each[2])
        return self._pass(server, "retry", [self._due(index, *server.parked[index][:2])])

    def lose_start(self, server: Server, number: int, *, was_parked: bool) -> Server:
        """A failover has lost the last start of a message: its charge, and that it is parked no more."""
        owner, attempts = next(row[1:3] for row in server.pending if row[0] == number)
        lost = [("XCLAIM", STREAM, GROUP, owner, 0, stream_id(number), "RETRYCOUNT", attempts - 1, "JUSTID")]
        if was_parked:
            lost.append(self._due(0, number, attempts - 1))
        return self._pass(server, f"loss of {number}", lost)

    def pass_idle(self, server: Server, numbers: frozenset[int]) -> Server:
        """These messages were not touched for a lease, and every retry is due."""
        dues = [self._due(index, *each[:2]) for index, each in enumerate(server.parked)]
        idle = [
            ("XCLAIM", STREAM, GROUP, row[1], 0, stream_id(row[0]), "IDLE", LONG_MS, "JUSTID")
            for row in server.pending if row[0] in numbers
        ]  # fmt: skip
        return self._pass(server, f"idle {sorted(numbers)}", [*idle, *dues])

    def delete(self, server: Server, number: int) -> Server:
        """Another client deletes an entry."""
        return self._pass(server, f"deletion of {number}", [("XDEL", STREAM, stream_id(number))])

    def unconsume(self, server: Server, member: str) -> Server:
        """Another client deletes the consumer of a member, with all that is pending for it."""
        return self._pass(server, f"no consumer {member}", [("XGROUP", "DELCONSUMER", STREAM, GROUP, member)])

    def _due(self, index: int, number: int, attempts: int) -> Wire:
        return "ZADD", RETRY, index, f"{number}-0|{attempts}"

    def _pass(self, server: Server, what: str, commands: list[Wire]) -> Server:
        if (server, what) not in self._known:
            self._known[server, what] = self._exchange(commands, server)
        return self._known[server, what][1]

    def _exchange(
        self, commands: list[Wire], server: Server | None = None, asked: int = 0, spoiled: str = ""
    ) -> tuple[Any, Server]:
        """The reply to the command number `asked`, which may be an error, and the state after all of them. `spoiled`: a
        key that is as before in it."""
        restoring = dict[str, Wire]()
        if server is not None:
            dumps = zip(PARTS, self._dumps[server], strict=True)
            restoring = {part: ("RESTORE", part, 0, dump, "REPLACE") if dump else ("DEL", part) for part, dump in dumps}
        mended = [restoring[spoiled]] if spoiled else []
        with self._client.pipeline(transaction=False) as exchange:
            for command in (*restoring.values(), *commands, *mended, *PICTURE):
                exchange.execute_command(*command)
            replies = exchange.execute(raise_on_error=False)
        failed = [
            each for at, each in enumerate(replies) if isinstance(each, Exception) and at != len(restoring) + asked
        ]
        if failed:
            raise failed[0]
        picture, dumps = replies[-len(PICTURE) : -len(PARTS)], replies[-len(PARTS) :]
        after = _picture(*picture)
        self._dumps.setdefault(after, dumps)
        return replies[len(restoring) + asked] if commands else None, after

    def _listen(self, alive: frozenset[str]) -> None:
        for name in alive ^ self._listening:
            listener = self._listeners[name]
            (listener.subscribe if name in alive else listener.unsubscribe)(KEYS.presence(name))
            listener.get_message(timeout=10)
        self._listening = alive


def _fields(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _picture(time: Any, lease: Any, groups: Any, pending: Any, parked: Any, dead: Any, out: Any, stored: Any) -> Server:
    now = int(time[0]) * 1000 + int(time[1]) // 1000
    owner, epoch, until, reader, before, call = ((value or b"").decode() for value in lease)
    letters = [_fields(fields) for _, fields in dead]
    return Server(
        owner,
        epoch,
        int(until or 0) <= now,
        reader,
        tuple(before.split("\n")) if before else (),
        number_of(_fields(groups[0])[b"last-delivered-id"]),
        tuple((number_of(each), consumer.decode(), count, idle >= LONG_MS) for each, consumer, idle, count in pending),
        tuple(
            (number_of(entry_id), int(attempts), float(due) <= now)
            for (entry_id, _, attempts), due in ((each.partition(b"|"), due) for each, due in _fields(parked).items())
        ),
        tuple((number_of(letter[b"dlq.origin"]), letter[b"dlq.reason"].decode()) for letter in letters),
        tuple(int(_fields(fields)[b"data"]) for _, fields in out),
        call,
        tuple(number_of(entry_id) for entry_id, _ in stored),
    )


@contextlib.contextmanager
def store(*members: str) -> Iterator[Store]:
    """A server of its own, for as long as the block lasts."""
    server = ThrowawayServer().start()
    client = redis.Redis.from_url(server.url, decode_responses=False, protocol=2)
    try:
        client.response_callbacks.clear()
        yield Store(client, {name: client.pubsub() for name in members})
    finally:
        client.close()
        server.close()
