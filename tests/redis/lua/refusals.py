"""What a server may refuse in the middle of a script: tried on every call of the tests in this folder.

Before a call is executed, it is executed in vain: once for each command that its script may write with, by a user who
has no right to it; once for each key, while that key has a foreign type; and once for each stream, while it is sealed
(`XSETID` to the largest id: nothing can be added any more). An error must leave all keys of the call as they were.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from rsmq.errors import BrokerError
from rsmq.redis.scripts import Commander, Script, Value

LARGEST: Final = f"{2**64 - 1}-{2**64 - 1}"
WRITES: Final = frozenset(
    [
        "XADD",
        "XACK",
        "XCLAIM",
        "XAUTOCLAIM",
        "XDEL",
        "XTRIM",
        "XGROUP",
        "XSETID",
        "SET",
        "DEL",
        "UNLINK",
        "EXPIRE",
        "PEXPIRE",
        "PEXPIREAT",
        "HSET",
        "HDEL",
        "HINCRBY",
        "ZADD",
        "ZREM",
        "ZREMRANGEBYSCORE",
        "SADD",
        "SREM",
        "PUBLISH",
        "SPUBLISH",
    ]
)
MOST_CALLS: Final = 4
"""Of one script in one test: further ones meet no other refusals."""
MOST_KEYS: Final = 50
REPEATABLE: Final = {"add_letters", "settle_messages"}
"""Each device and each partition of a call is done by itself, and is not done again by the next call."""
SPELLED: Final = re.compile(r"'([A-Z]+)'")
LOOK: Final = """
local rows = {}
for i, name in ipairs(KEYS) do
  local is_hash = redis.call('TYPE', name).ok == 'hash'
  local held = is_hash and redis.call('HGETALL', name)
  rows[i] = { redis.call('DUMP', name), redis.call('PEXPIRETIME', name), held }
end
return rows
"""
"""All keys in one call: one command each would be most of what these tests take. DUMP is false without a key."""
PUT_BACK: Final = """
for i, name in ipairs(KEYS) do
  redis.call('DEL', name)
  local dump, ends = ARGV[2 * i - 1], ARGV[2 * i]
  if dump ~= '' then redis.call('RESTORE', name, ends, dump, 'ABSTTL') end
end
"""
Command = tuple[Value, ...]
Call = Callable[[Script, Commander, Sequence[str | bytes], Sequence[Value]], Awaitable[Any]]


class Refusals:
    """Executes calls in vain, and collects those that have changed a key although they ended with an error."""

    def __init__(self, call: Call, prefix: str) -> None:
        self._call, self._prefix = call, prefix
        self._calls = Counter[str]()
        self.broken: list[str] = []
        self.tried = 0
        self.is_off = False
        """For a test that counts what the server does."""

    async def try_all(
        self, script: Script, client: Commander, keys: Sequence[str | bytes], args: Sequence[Value]
    ) -> None:
        """Every refusal that this call may meet."""
        self._calls[script.name] += 1
        if self._calls[script.name] > MOST_CALLS or self.is_off:
            return
        if await client.execute_command("CONFIG", "GET", "maxmemory") != [b"maxmemory", b"0"]:
            return
        own = await client.execute_command("KEYS", f"{self._prefix}*")
        names = list(dict.fromkeys([*(key.encode() if isinstance(key, str) else bytes(key) for key in keys), *own]))
        if len(names) > MOST_KEYS:
            return
        user = ("ACL", "SETUSER", "default")
        troubles: list[tuple[str, list[Command], Command]] = [
            (f"without the right to {command}", [(*user, f"-{command.lower()}")], (*user, "+@all"))
            for command in sorted(WRITES & set(SPELLED.findall(script.source)))
        ]
        for name in names[: len(names) if script.name not in REPEATABLE else 0]:
            shown = name.decode(errors="replace")
            foreign = [("DEL", name), ("RPUSH", name, "of a foreign type")]
            troubles.append((f"{shown} is a list", foreign, ("PING",)))
            if await client.execute_command("TYPE", name) == b"stream":
                troubles.append((f"{shown} is sealed", [("XSETID", name, LARGEST)], ("PING",)))
        found = await self._state(client, names)
        for trouble, begin, end in troubles:
            for command in begin:
                await client.execute_command(*command)
            before = await self._state(client, names)
            error: BrokerError | None = None
            try:
                await self._call(script, client, keys, args)
            except BrokerError as refused:
                error = refused
            finally:
                await client.execute_command(*end)
            after = await self._state(client, names)
            self.tried += 1
            changed = [name.decode(errors="replace") for name in names if after[name][1:] != before[name][1:]]
            if error is not None and changed and "number of args" not in str(error):
                self.broken.append(f"{script.name}, {trouble}: {error}, and it has changed {', '.join(changed)}")
            values = [value for dump, ends, _ in found.values() for value in (dump or b"", max(0, ends))]
            await client.execute_command("EVAL", PUT_BACK, len(names), *names, *values)

    async def _state(self, client: Commander, names: Sequence[bytes]) -> dict[bytes, tuple[bytes | None, int, Any]]:
        """Keys as bytes, when they expire, and what they hold: the bytes of a hash have its fields in any order."""
        found = dict[bytes, tuple[bytes | None, int, Any]]()
        for name, (dump, ends, flat) in zip(
            names, await client.execute_command("EVAL", LOOK, len(names), *names), strict=True
        ):
            held = dump if flat is None else dict(zip(flat[::2], flat[1::2], strict=True))
            found[name] = dump, ends, held
        return found
