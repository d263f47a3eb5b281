"""Every Redis key that rsmq uses (`docs/keys.md` describes them).

The braces are hash tags: all keys of one partition live in one cluster slot, so that one script can move a message
between them atomically.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from rsmq.errors import ConfigError

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
LONGEST_DEVICE: Final = 256
LONGEST_NAME: Final = 200
"""Characters of a name that a rate counts by. A longer one is hashed."""
UNSAFE: Final = re.compile(r"[{}%\x00-\x1f\x7f]")
ENCODED: Final = re.compile(r"%([0-9A-F]{2})")
RESERVED_GROUPS: Final = ("archived", "delayed", "dedup", "every", "jobs", "marks", "relayed", "removed", "unique")
"""Such a group would share keys with its partition: the lease of a group `dedup` is the key of message id `lease`."""


def encode_name(name: str) -> str:
    """A name that a limit counts by, as a part of a key."""
    if len(name) > LONGEST_NAME:
        name = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", name).encode(errors="backslashreplace").decode()


def plain_text(text: str) -> str:
    """Text as a str itself. A member of an enumeration of texts, `class Topics(str, Enum)`, is text, and in a key it
    would be `Topics.ORDERS`, not its value."""
    return text if type(text) is str else str.__str__(text)


def check_name(kind: str, name: str) -> str:
    """Return `name`, or raise ConfigError when it could break a key."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} name {name!r} is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ - and do not start with a dot"
        )
    if kind == "group" and name in RESERVED_GROUPS:
        raise ConfigError(f"group name {name!r} is reserved, as are {', '.join(RESERVED_GROUPS)}: choose another")
    return plain_text(name)


def encode_device(device: str) -> str:
    """A device id for a key: characters that could end the hash tag or a line are percent-encoded."""
    if not isinstance(device, str) or not device:
        raise ConfigError(f"device id {device!r} is not allowed: use text of 1 to {LONGEST_DEVICE} bytes")
    device = plain_text(device)
    try:
        size = len(device) if device.isascii() else len(device.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"device id {device!r} is not valid Unicode: it has a lone surrogate") from None
    if size > LONGEST_DEVICE:
        raise ConfigError(f"device id {device[:40]!r}... has {size} bytes: use at most {LONGEST_DEVICE}")
    if UNSAFE.search(device) is None:
        return device
    return UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", device)


def decode_device(encoded: str) -> str:
    """The inverse of `encode_device`."""
    return ENCODED.sub(lambda found: chr(int(found[1], 16)), encoded)


@dataclass(frozen=True, slots=True)
class Keys:
    """The key catalogue under one prefix.

    Keys belong to a database of the server, channels to the whole server: those of another database than 0 carry its
    number, so that two deployments with equal names do not hear each other.
    """

    prefix: str = "rsmq"
    database: int = 0

    def _channel(self, name: str) -> str:
        return f"{name}@{self.database}" if self.database else name

    @property
    def topics(self) -> str:
        """Set: topic names."""
        return f"{self.prefix}:topics"

    @property
    def deployment(self) -> str:
        """String: the random id of this server and prefix."""
        return f"{self.prefix}:deployment"

    def topic(self, topic: str) -> str:
        """Hash: partitions, limits, retention, created_ms."""
        return f"{self.prefix}:topic:{{{topic}}}"

    def bodies(self, topic: str) -> str:
        """ZSET with TTL: since when a sweep has found no entry that names a body -> the name of the body."""
        return f"{self.prefix}:topic:{{{topic}}}:bodies"

    def former(self, topic: str) -> str:
        """Set with TTL: high numbers of partitions that a deleted topic of this name had."""
        return f"{self.prefix}:topic:{{{topic}}}:former"

    @property
    def sweep(self) -> str:
        """String with TTL: a worker has swept the store of bodies lately."""
        return f"{self.prefix}:sweep"

    def stream(self, topic: str, partition: int) -> str:
        """Stream: one partition."""
        return f"{self.prefix}:{{{topic}.{partition}}}"

    def delayed(self, topic: str, partition: int) -> str:
        """ZSET: due_ms -> packed entry."""
        return f"{self.stream(topic, partition)}:delayed"

    def dedup(self, topic: str, partition: int, message_id: str) -> str:
        """String with TTL: the stream id under which a message id was stored."""
        return f"{self.stream(topic, partition)}:dedup:{message_id}"

    def unique(self, topic: str, partition: int) -> str:
        """Hash: unique name -> its message, and until when that holds the name (MessagePack)."""
        return f"{self.stream(topic, partition)}:unique"

    def marks(self, topic: str, partition: int) -> str:
        """ZSET: entries ever added -> stream id, so that retention can count without reading bodies."""
        return f"{self.stream(topic, partition)}:marks"

    def removed(self, topic: str, partition: int) -> str:
        """Hash: `own`, entries that retention has removed; `cut` and `left`, where it removed between those that wait;
        `seen|group`, removals by others that the owner has counted; `end`, the newest id as of the seal of a resize."""
        return f"{self.stream(topic, partition)}:removed"

    def archived(self, topic: str, partition: int) -> str:
        """Hash: name of an archive -> the newest stream id up to which it has committed every entry."""
        return f"{self.stream(topic, partition)}:archived"

    def jobs(self, topic: str, partition: int) -> str:
        """Hash: `job|source` -> the last position of that source whose message the job has appended here."""
        return f"{self.stream(topic, partition)}:jobs"

    @property
    def schedules(self) -> str:
        """Sorted set: `topic|name|key` of each schedule that was added without code, by the time of its next tick."""
        return f"{self.prefix}:schedules"

    def every(self, topic: str, partition: int) -> str:
        """Hash: `last|name` and `rule|name` of each schedule that publishes here, `owner|name` and `until|name` of its
        leader, `history|name` of its runs; what operators have set."""
        return f"{self.stream(topic, partition)}:every"

    def relayed(self, topic: str, partition: int) -> str:
        """Hash: `rows|outbox`, ids of rows that are appended here and may not be deleted yet; `turn|outbox`, the last
        call of a relay."""
        return f"{self.stream(topic, partition)}:relayed"

    def lease(self, topic: str, partition: int, group: str) -> str:
        """Hash: owner, epoch, until_ms, reader, before, ttl, clock."""
        return f"{self.stream(topic, partition)}:{group}:lease"

    def retry(self, topic: str, partition: int, group: str) -> str:
        """ZSET: due_ms -> `id|attempt`."""
        return f"{self.stream(topic, partition)}:{group}:retry"

    def waits(self, topic: str, partition: int, group: str) -> str:
        """ZSET: due_ms -> stream id, of messages that wait for a time."""
        return f"{self.stream(topic, partition)}:{group}:waits"

    def calls(self, topic: str, partition: int, group: str) -> str:
        """Hash: key -> last stream id of its latest call, of a handler that gathers messages by key."""
        return f"{self.stream(topic, partition)}:{group}:calls"

    def out(self, topic: str, partition: int, group: str) -> str:
        """Stream, on a cluster: outputs of settled messages, on their way to partitions in other slots."""
        return f"{self.stream(topic, partition)}:{group}:out"

    def errors(self, topic: str, partition: int, group: str) -> str:
        """Hash: stream id -> `attempts at_ms error` of the last failed attempt; `id|past` -> those before."""
        return f"{self.stream(topic, partition)}:{group}:errors"

    def steps(self, topic: str, partition: int, group: str) -> str:
        """Hash: `id|name` -> the result of a step that the handler of a message has done; stream id -> their names."""
        return f"{self.stream(topic, partition)}:{group}:steps"

    def progress(self, topic: str, partition: int, group: str) -> str:
        """Hash: stream id -> how far its handler has come, as JSON."""
        return f"{self.stream(topic, partition)}:{group}:progress"

    def result(self, topic: str, partition: int, group: str, message_id: str) -> str:
        """String with TTL, and sharded channel: what the handler of a group has returned for a message."""
        return f"{self.stream(topic, partition)}:{group}:result:{message_id}"

    def cancels(self, topic: str, partition: int, group: str) -> str:
        """Hash: stream id -> `asked`, `interrupt` or `running`, of messages that are to be cancelled; `batch|home` ->
        until when its members are."""
        return f"{self.stream(topic, partition)}:{group}:cancels"

    def cancelled(self, topic: str, partition: int, group: str) -> str:
        """ZSET: ms of the stream id -> stream id, of messages that were cancelled."""
        return f"{self.stream(topic, partition)}:{group}:cancelled"

    def dlq(self, topic: str, partition: int, group: str) -> str:
        """Stream: dead letters."""
        return f"{self.stream(topic, partition)}:{plain_text(group)}:dlq"

    def handed_on(self, topic: str, partition: int, group: str) -> str:
        """Stream: origin, id -> topic, id of messages that went to the fallback topic of their handler."""
        return f"{self.stream(topic, partition)}:{group}:handed_on"

    def of_group(self, topic: str, partition: int, group: str) -> list[str]:
        """All that a group has in one partition, beside its place in the stream: what is deleted with it."""
        parts = (
            self.lease, self.retry, self.waits, self.calls, self.out, self.errors, self.steps, self.progress,
            self.cancels, self.cancelled, self.dlq, self.handed_on,
        )  # fmt: skip
        return [part(topic, partition, group) for part in parts]

    def group(self, topic: str, group: str) -> str:
        """Hash: distribution, paused, created_ms."""
        return f"{self.prefix}:{{{topic}}}:{group}"

    def rate(self, topic: str, group: str, name: str) -> str:
        """String with TTL: the starts of one name that a rate over the group counts, as JSON."""
        return f"{self.prefix}:{{{topic}}}:{group}:rate:{encode_name(name)}"

    def permits(self, topic: str, group: str, name: str | None = None) -> str:
        """String with TTL: who holds permits of one name, or of the whole group, and who waits for some, as JSON."""
        return f"{self.prefix}:{{{topic}}}:{group}:permits{'' if name is None else ':' + encode_name(name)}"

    def holders(self, topic: str, group: str) -> str:
        """Hash with TTL: member -> `token|until_ms|ttl_ms` of those that hold permits of the group."""
        return f"{self.prefix}:{{{topic}}}:{group}:holders"

    def members(self, topic: str, group: str) -> str:
        """Set: member ids."""
        return f"{self.prefix}:{{{topic}}}:{group}:alive:nodes:set"

    def alive(self, topic: str, group: str, member: str) -> str:
        """String with TTL: a member's heartbeat, its info as JSON."""
        return f"{self.prefix}:{{{topic}}}:{group}:alive:nodes:{member}"

    def watched(self, topic: str, group: str) -> str:
        """String with TTL: some member of a large group looks at all others."""
        return f"{self.prefix}:{{{topic}}}:{group}:alive:watched"

    def vitals(self, topic: str, group: str, member: str) -> str:
        """String with TTL: the event loop lag of a member, as JSON. Not in its heartbeat: it may be missing."""
        return f"{self.prefix}:{{{topic}}}:{group}:alive:vitals:{member}"

    def presence(self, member: str) -> str:
        """Channel: only this member subscribes, so without a subscriber its process is gone."""
        return self._channel(f"{self.prefix}:presence:{member}")

    def changes(self, topic: str, group: str) -> str:
        """Channel: news of a group's members (`joined <member>`), other changes without data, and questions."""
        return self._channel(f"{self.prefix}:{{{topic}}}:{group}:changes")

    def leader(self, work: str) -> str:
        """Hash: owner, until_ms and epoch of the member that does a piece of work for all workers."""
        return f"{self.prefix}:leader:{{{work}}}"

    @property
    def outboxes(self) -> str:
        """Hash: id of a database -> what waits in its outbox, as its relay has last counted it (JSON)."""
        return f"{self.prefix}:outboxes"

    def batch_names(self, shard: int) -> str:
        """Hash: name -> home of each batch of a shard that is open or kept. No topic has a `%`."""
        return f"{self.prefix}:{{%batches.{shard}}}:names"

    def batch_due(self, shard: int) -> str:
        """ZSET: due_ms -> home of each batch: when it expires, or when its state goes."""
        return f"{self.prefix}:{{%batches.{shard}}}:due"

    def batch_state(self, home: str) -> str:
        """Hash: name, group, callbacks, times and counts of a batch. `home`: its shard and id. Scripts derive it."""
        shard, _, identity = home.partition(".")
        return f"{self.prefix}:{{%batches.{shard}}}:state:{identity}"

    def batch_members(self, home: str) -> str:
        """String: four bits for each member of a batch, its outcome. Scripts derive it."""
        shard, _, identity = home.partition(".")
        return f"{self.prefix}:{{%batches.{shard}}}:members:{identity}"

    def batch_counts(self, home: str) -> tuple[str, str, str]:
        """State, members and due times of a batch: all that a script uses which counts its members."""
        return self.batch_state(home), self.batch_members(home), self.batch_due(int(home.partition(".")[0]))

    def device(self, device: str) -> tuple[str, str, str, str]:
        """All keys of a device except its letters: inbox, session, expiry, wake."""
        stem = f"{self.prefix}:{{{encode_device(device)}}}_"
        return stem + "messages", stem + "session", stem + "expiry", stem + "wake"

    def inbox(self, device: str) -> str:
        """ZSET: the letters of a device, seq as member and score."""
        return f"{self.prefix}:{{{encode_device(device)}}}_messages"

    def letter(self, device: str, seq: int) -> str:
        """String with TTL: one letter, as its envelope. Scripts derive it from the key of the inbox."""
        return f"{self.inbox(device)}_{seq}"

    def session(self, device: str) -> str:
        """Hash: epoch, gateway, seq, marks of the sources, drop counters."""
        return f"{self.prefix}:{{{encode_device(device)}}}_session"

    def expiry(self, device: str) -> str:
        """ZSET: expires_ms -> seq of the letters with an expiry of their own."""
        return f"{self.prefix}:{{{encode_device(device)}}}_expiry"

    def wake(self, device: str) -> str:
        """Sharded channel: a letter has come into a drained inbox. Scripts derive it from the key of the inbox.

        Messages carry no data: one from the same device of another database has its reader look once more, no more.
        """
        return f"{self.prefix}:{{{encode_device(device)}}}_wake"

    def task(self, task: str) -> str:
        """String with TTL: a task of Django, with its result. No topic has a `%`."""
        return f"{self.prefix}:{{%task.{task}}}"

    def reply(self, request: str) -> str:
        """String with TTL, and sharded channel: the answer to a request. No topic has a `%`."""
        return f"{self.prefix}:{{%reply.{request}}}"

    def received(self, device: str) -> str:
        """Hash with TTL: packet id -> topic and token of each QoS 2 message of an MQTT client that is not released."""
        return f"{self.prefix}:{{{encode_device(device)}}}_received"

    def will(self, device: str) -> str:
        """Hash: epoch -> will of an MQTT client's connection, and of older ones that are not published yet."""
        return f"{self.prefix}:{{{encode_device(device)}}}_will"

    def mqtt(self, shard: int, name: str) -> str:
        """Of the MQTT gateways, for the clients of a shard: `subscriptions` (hash: client -> epoch and its list),
        `names` (hash: topic name -> its subscribers), `followed` (hash: client -> the rest of its list), `changes`
        (stream of these), `mark` (string: their state), `new:<call>` (string with TTL: older messages), `sessions`
        (ZSET: expires_ms -> epoch and client) and `wills` (the same).

        No topic has a `%`, and in a device it is encoded, so these keys meet no others.
        """
        return f"{self.prefix}:{{%mqtt.{shard}}}:{name}"

    def retained(self, bucket: int, name: str) -> str:
        """Retained messages: `messages` (hash: topic name -> stamp and envelope), `names` (ZSET in lexical order) and
        `expiries` (ZSET: expires_ms -> topic name)."""
        return f"{self.prefix}:{{%mqtt.r{bucket}}}:{name}"

    @property
    def gateways(self) -> str:
        """ZSET: until_ms -> gateway, the leases of the MQTT gateways."""
        return f"{self.prefix}:{{%mqtt}}:gateways"

    def gateway_alive(self, gateway: str) -> str:
        """Channel: a gateway listens on it as long as its process is alive. Messages carry no data."""
        return self._channel(f"{self.prefix}:{{%mqtt}}:alive:{gateway}")

    @property
    def broadcast(self) -> str:
        """Sharded channel: messages of QoS 0 between the MQTT gateways."""
        return self._channel(f"{self.prefix}:{{%mqtt}}:broadcast")

    def trace(self, token: str) -> str:
        """Sharded channel: the packets of an MQTT client, for the operator with this token."""
        return self._channel(f"{self.prefix}:{{%mqtt}}:trace:{token}")

    @property
    def bans(self) -> str:
        """Hash: kind and name of what may not connect to the MQTT gateways -> until when, since when, and why."""
        return f"{self.prefix}:{{%mqtt}}:bans"

    def gateway_clients(self, gateway: str) -> str:
        """Hash: client -> epoch and session expiry of each client that is connected to a gateway."""
        return f"{self.prefix}:{{%mqtt.g.{gateway}}}:clients"

    def gateway_about(self, gateway: str) -> str:
        """String with TTL: what a gateway says about itself, as JSON: its listeners, routes and certificate."""
        return f"{self.prefix}:{{%mqtt.g.{gateway}}}:about"

    @property
    def history(self) -> str:
        """Stream of the dashboard: the figures of a minute."""
        return f"{self.prefix}:{{%dashboard}}:history"

    @property
    def audit(self) -> str:
        """Stream of the dashboard: who did what, with the state before and after."""
        return f"{self.prefix}:{{%dashboard}}:audit"

    def scratch(self, name: str, number: int = 0) -> str:
        """A temporary key of the preflight. No name contains `%`, so it cannot collide with another key.

        All keys with one number are in one slot; on a cluster the preflight finds a number for each master.
        """
        return f"{self.prefix}:{{%preflight{number or ''}}}:{name}"
