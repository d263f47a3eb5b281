"""The published design for device inboxes, as ThingsBoard TBMQ describes it for its DEVICE clients.

What ours is measured beside. Written from its description to behave as it does, faults included: the tests show each
of them here, and mended in rsmq. For each client, all in one hash slot:

    {client}_messages        ZSET of the names of the message keys; no TTL
    {client}_messages_<id>   JSON of one message; <id> is its MQTT packet id; EX = its expiry in seconds, or the default
    {client}_last_packet_id  the newest packet id, 1 .. 65535, then 1 again; no TTL

One script for each operation. `Gateway` is the way from there to the device: the backlog read once, live messages past
it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis.asyncio
from redis.exceptions import NoScriptError

MESSAGE_LIMIT: Final = 10_000
DEFAULT_TTL: Final = 604_800
"""Seconds: seven days."""
DELAYED_LIMIT: Final = 1_000
"""Messages that a connection holds back when the device's receive window is full."""

Json = dict[str, Any]

ADD: Final = """
local batch = cjson.decode(ARGV[1])
local limit, ttl = tonumber(ARGV[2]), tonumber(ARGV[3])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local before, score = last, last
local newest = redis.call('ZRANGE', KEYS[1], 0, 0, 'REV', 'WITHSCORES')
if newest[2] then score = tonumber(newest[2]) end
for _, message in ipairs(batch) do
  last, score = last % 65535 + 1, score + 1
  message.packetId = last
  local name = KEYS[1] .. '_' .. last
  redis.call('SET', name, cjson.encode(message), 'EX', message.msgExpiryInterval or ttl)
  redis.call('ZADD', KEYS[1], score, name)
end
redis.call('SET', KEYS[2], last)
local surplus = redis.call('ZCARD', KEYS[1]) - limit
if surplus > 0 then
  for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, surplus - 1)) do
    redis.call('DEL', name)
    redis.call('ZREM', KEYS[1], name)
  end
end
return before
"""

READ: Final = """
local found = {}
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if redis.call('EXISTS', name) == 1 then
    found[#found + 1] = redis.call('GET', name)
  else
    redis.call('ZREM', KEYS[1], name)
  end
end
return found
"""

REMOVE: Final = """
local name = KEYS[1] .. '_' .. ARGV[1]
redis.call('ZREM', KEYS[1], name)
redis.call('DEL', name)
return 'OK'
"""

UPDATE: Final = """
local name = KEYS[1] .. '_' .. ARGV[1]
local stored = redis.call('GET', name)
if stored then
  local message = cjson.decode(stored)
  message.packetType = 'PUBREL'
  redis.call('SET', name, cjson.encode(message))
end
return 'OK'
"""

CLEAR: Final = """
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do redis.call('DEL', name) end
redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2])
return 'OK'
"""

SHA: Final = {source: hashlib.sha1(source.encode()).hexdigest() for source in (ADD, READ, REMOVE, UPDATE, CLEAR)}


def published_message(payload: bytes, *, topic: str = "devices", expiry: int | None = None, **more: Any) -> Json:
    """One message in its form: `expiry` in seconds is stored only when there is one, `more` is added as it is."""
    message: Json = {
        "topic": topic,
        "time": time.time_ns() // 1_000_000,
        "qos": 1,
        "packetType": "PUBLISH",
        "payload": base64.b64encode(payload).decode(),
        "retained": False,
    }
    return message | ({} if expiry is None else {"msgExpiryInterval": expiry}) | more


def payload_of(message: Mapping[str, Any]) -> bytes:
    """What was given to `published_message`."""
    return base64.b64decode(message["payload"])


class Published:
    """The messages of all clients on one server.

    `redis` is a redis-py asyncio client with its defaults. `prefix` is for tests that share a server.
    """

    def __init__(
        self, redis: redis.asyncio.Redis, *, prefix: str = "", limit: int = MESSAGE_LIMIT, ttl: int = DEFAULT_TTL
    ) -> None:
        self.redis = redis
        self.prefix = prefix
        self.limit = limit
        self.ttl = ttl

    def messages_key(self, client: str) -> str:
        """The ZSET of one client."""
        return f"{self.prefix}{{{client}}}_messages"

    def message_key(self, client: str, packet_id: int) -> str:
        """The JSON of one message."""
        return f"{self.messages_key(client)}_{packet_id}"

    def last_packet_id_key(self, client: str) -> str:
        """The newest packet id of one client."""
        return f"{self.prefix}{{{client}}}_last_packet_id"

    async def add(self, client: str, messages: Sequence[Mapping[str, Any]]) -> int:
        """Store a batch; returns the packet id before its first one (theirs count on from it).

        Raises redis' ResponseError when an expiry is refused: what came before it in the batch stays.
        """
        return int(await self._run(*self.add_command(client, messages)))

    async def read(self, client: str) -> list[Json]:
        """The whole backlog, oldest first, in one call."""
        return [json.loads(each) for each in await self._run(*self.read_command(client))]

    async def remove(self, client: str, packet_id: int) -> None:
        """The device has acknowledged a message (PUBACK or PUBCOMP)."""
        await self._run(*self.remove_command(client, packet_id))

    async def update(self, client: str, packet_id: int) -> None:
        """The device has received a QoS 2 message (PUBREC): from now on PUBREL is what it gets."""
        await self._run(*self.update_command(client, packet_id))

    async def clear(self, client: str) -> None:
        """A clean start: drop everything of one client."""
        await self._run("EVALSHA", SHA[CLEAR], 2, self.messages_key(client), self.last_packet_id_key(client))

    def add_command(self, client: str, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """`add` as a command, for a pipeline. Needs `load`."""
        batch = json.dumps([{"clientId": client, **message} for message in messages], separators=(",", ":"))
        keys = (self.messages_key(client), self.last_packet_id_key(client))
        return ("EVALSHA", SHA[ADD], 2, *keys, batch, self.limit, self.ttl)

    def read_command(self, client: str) -> tuple[Any, ...]:
        """`read` as a command."""
        return ("EVALSHA", SHA[READ], 1, self.messages_key(client))

    def remove_command(self, client: str, packet_id: int) -> tuple[Any, ...]:
        """`remove` as a command."""
        return ("EVALSHA", SHA[REMOVE], 1, self.messages_key(client), packet_id)

    def update_command(self, client: str, packet_id: int) -> tuple[Any, ...]:
        """`update` as a command."""
        return ("EVALSHA", SHA[UPDATE], 1, self.messages_key(client), packet_id)

    async def load(self) -> None:
        """Make the scripts known to the server. The five operations do so by themselves; pipelines need it before."""
        for source in SHA:
            await self.redis.script_load(source)

    async def _run(self, *command: Any) -> Any:
        try:
            return await self.redis.execute_command(*command)
        except NoScriptError:
            await self.load()
            return await self.redis.execute_command(*command)


class Gateway:
    """One connection of one device, as that design serves it: two ways to the device that know nothing of each other.

    The steps are events of an actor; the caller chooses their order, as the network does: `connect`, `await load()`
    (reads the backlog), `deliver_backlog` (its event arrives), `deliver(message)` (a live one, already stored),
    `await acknowledge(packet_id)`. `sent` is what the device has got, in order.
    """

    def __init__(
        self, published: Published, client: str, *, window: int = 65_535, delayed_limit: int = DELAYED_LIMIT
    ) -> None:
        self.sent: list[Json] = []
        self._published = published
        self._client = client
        self._window = window
        self._delayed_limit = delayed_limit
        self._is_connected = False
        self._backlog: list[Json] = []
        self._in_flight: set[int] = set()
        self._delayed: deque[Json] = deque()

    def connect(self) -> None:
        """The device is there: live messages go to it from now on, whether or not the backlog was read."""
        self._is_connected = True

    async def load(self) -> None:
        """Read the whole backlog."""
        self._backlog = await self._published.read(self._client)

    def deliver_backlog(self) -> None:
        """Send what `load` has read."""
        backlog, self._backlog = self._backlog, []
        for message in backlog:
            self.deliver(message)

    def deliver(self, message: Json) -> None:
        """Send one message: at once, or when the window has room, or (with too many waiting) not in this connection."""
        if not self._is_connected:
            return
        if len(self._in_flight) < self._window:
            self._send(message)
        elif len(self._delayed) < self._delayed_limit:
            self._delayed.append(message)

    async def acknowledge(self, packet_id: int) -> None:
        """The device has acknowledged: the message is removed, and the next one that waits is sent."""
        await self._published.remove(self._client, packet_id)
        self._in_flight.discard(packet_id)
        if self._delayed and len(self._in_flight) < self._window:
            self._send(self._delayed.popleft())

    def _send(self, message: Json) -> None:
        self._in_flight.add(message["packetId"])
        self.sent.append(message)
