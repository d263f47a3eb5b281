"""Wills: stored with the connection, and published once, whichever gateway is alive when they are due."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter
from pydantic_core import to_json

from rsmq.errors import CannotDecode, Malformed, RsmqError
from rsmq.gateway.fleet.scripts import CLAIM_WILLS, FORGET_WILL, TAKE_WILL
from rsmq.gateway.protocol.packet import Publish, RefusedPacket, Will
from rsmq.gateway.protocol.properties import Property
from rsmq.gateway.protocol.topic_filter import check_topic_name
from rsmq.model.encoding import NO_CODECS, Binding, Encoding
from rsmq.model.keys import Keys
from rsmq.model.log_names import name_in_log
from rsmq.model.message import BYTES, new_message_id
from rsmq.model.mqtt_subscription import SHARDS, shard_of
from rsmq.model.record import device_id, whole
from rsmq.redis.client.connector import Client
from rsmq.redis.client.script_batcher import ScriptBatcher
from rsmq.redis.streams import ask_all

log = logging.getLogger("rsmq.gateway")

PAGE: Final = 500
HIDDEN_MS: Final = 3_000
"""How long a will belongs to the gateway that has taken it, which may die before it has published it."""
ROUTED_MS: Final = 10_000
"""After so long a router has passed a message, as a rule."""
STORED: Final = (
    Property.MESSAGE_EXPIRY, Property.CONTENT_TYPE, Property.PAYLOAD_FORMAT, Property.USER_PROPERTY
)  # fmt: skip
"""What a topic keeps of the properties, besides those that receivers get."""

Properties = dict[Annotated[str, Field(pattern=r"^[0-9]{1,3}$")], Any]
Head = tuple[str | None, str, Literal[0, 1, 2], bool, str, Properties]
EncodedHead = tuple[str | None, str, Literal[0, 1, 2], bool, str, Properties, str, str]
WILL: Final[TypeAdapter[Any]] = TypeAdapter(Head | EncodedHead)
Publisher = Callable[[str, str | None, Publish, str], Awaitable[None]]
"""Client id, user name, message, token: publishes it once, and returns when it is stored or refused."""


def pack(will: Will, user: str | None, encoding: Encoding = NO_CODECS) -> bytes:
    """A will for the server: its delay in seconds first, where scripts read it, and its payload last.

    With codecs the payload is encoded, and the head also has an id and `enc`.
    """
    properties = {str(int(key)): will.properties[key] for key in STORED if key in will.properties}
    head = [user, will.topic, will.qos, will.retain, b64encode(will.forwarded).decode(), properties]
    delay = will.properties.get(Property.WILL_DELAY, 0)
    payload, binding = will.payload, None
    if payload and encoding.names:
        payload, binding = encoding.bound(payload, new_message_id(), None, BYTES)
    if binding is not None:
        head += [binding.message_id.decode(), binding.enc.decode()]
    return b"%d|%b\n%b" % (delay, to_json(head), payload)


def unpack(raw: bytes, encoding: Encoding | None = None) -> tuple[str | None, Publish]:
    """The user name and the message. Raises ValueError for what is no will, and CannotDecode without its key.

    `encoding` None: the payload is left as it is stored.
    """
    head, _, payload = raw.partition(b"|")[2].partition(b"\n")
    try:
        user, topic, qos, retain, forwarded, found, *encoded = WILL.validate_json(head)
        check_topic_name(topic)
        if encoded and encoding is not None:
            message_id, enc = (text.encode() for text in encoded)
            payload = encoding.undo(payload, Binding(message_id, None, BYTES.encode(), enc))
    except Malformed as error:
        raise ValueError(str(error)) from None
    except RefusedPacket as error:
        raise ValueError(str(error)) from None
    properties: dict[int, Any] = {int(key): value for key, value in found.items()}
    if Property.USER_PROPERTY in properties:
        properties[Property.USER_PROPERTY] = [tuple(pair) for pair in properties[Property.USER_PROPERTY]]
    return user, Publish(topic, payload, qos, retain=retain, properties=properties, forwarded=b64decode(forwarded))


def topic_of(raw: bytes) -> str:
    """Its topic name, empty if it cannot be read."""
    try:
        return unpack(raw)[1].topic
    except ValueError:
        return ""


def read_member(member: bytes) -> tuple[str, str] | None:
    """The epoch and the client id of a connection; None for what is none."""
    epoch, colon, client = member.partition(b":")
    name = device_id(client)
    return (epoch.decode(), name) if colon and whole(epoch) is not None and name is not None else None


def token_of(client: str, epoch: str) -> str:
    """The token under which each attempt publishes this will."""
    return f"will:{hashlib.sha256(client.encode()).hexdigest()[:24]}:{epoch}"


class Wills:
    """The wills of all clients that are due.

    A will is stored under the epoch of its connection, and its due time when that ends. Every gateway looks for wills
    that are due; one of them takes each, publishes it under a message id that never changes, and removes it. So does
    the next connection of its client, before it is answered: whichever is first, the others store nothing.
    """

    def __init__(
        self, client: Client, keys: Keys, batcher: ScriptBatcher, publish: Publisher, encoding: Encoding = NO_CODECS
    ) -> None:
        """`encoding` undoes the payloads of wills."""
        self._encoding = encoding
        self._client = client
        self._keys = keys
        self._batcher = batcher
        self._publish = publish
        self._under_way: dict[tuple[str, str], asyncio.Future[bool]] = {}

    async def schedule(self, client: str, epoch: str, due_ms: int) -> None:
        """Publish a will at this time of the server. An earlier time that is noted already stays."""
        key = self._keys.mqtt(shard_of(client), "wills")
        await self._client.execute_command("ZADD", key, "LT", due_ms, f"{epoch}:{client}")

    async def fire(self) -> None:
        """Publish what is due."""
        queues = [self._keys.mqtt(shard, "wills") for shard in range(SHARDS)]
        while queues:
            calls = [self._batcher.submit(CLAIM_WILLS, (queue,), (PAGE, HIDDEN_MS)) for queue in queues]
            pages = await asyncio.gather(*calls)
            for queue, page in zip(queues, pages, strict=True):
                await self._remove_foreign(queue, page)
            await self.publish(list(filter(None, (read_member(member) for page in pages for member in page))))
            queues = [queue for queue, page in zip(queues, pages, strict=True) if len(page) == PAGE]

    async def _remove_foreign(self, queue: str, page: Sequence[bytes]) -> None:
        """What names no connection was written by another client, and would come back for ever."""
        if found := [member for member in page if read_member(member) is None]:
            log.warning("removed from %s what names no will: %s", queue, ", ".join(repr(each[:60]) for each in found))
            await self._client.execute_command("ZREM", queue, *found)

    async def publish(self, due: Sequence[tuple[str, str]]) -> bool:
        """Publish wills, by epoch and client id, that were not published or dropped before.

        Returns whether that is done for all of them. One that fails stays, and is tried again. So does one that needs a
        key that this process does not have: it waits for a gateway that has it, and nothing waits for it.
        """
        known = [self._under_way[each] for each in due if each in self._under_way]
        fresh = [each for each in dict.fromkeys(due) if each not in self._under_way]
        if fresh:
            task = asyncio.ensure_future(self._publish_all(fresh))
            self._under_way.update(dict.fromkeys(fresh, task))
            task.add_done_callback(lambda done: self._published(done, fresh))
            known.append(task)
        return all(await asyncio.gather(*(asyncio.shield(each) for each in known)))

    def _published(self, done: asyncio.Future[bool], due: Sequence[tuple[str, str]]) -> None:
        for each in due:
            del self._under_way[each]
        if not done.cancelled():
            done.exception()  # whoever waited for it may be gone

    async def _publish_all(self, due: Sequence[tuple[str, str]]) -> bool:
        taken = [self._batcher.submit(TAKE_WILL, (self._keys.will(client),), (epoch,)) for epoch, client in due]
        found = await asyncio.gather(*taken)
        are_done = await asyncio.gather(*map(self._publish_one, due, found))
        done = [each for each, is_done in zip(due, are_done, strict=True) if is_done]
        forgotten = [((self._keys.will(client),), (epoch, ROUTED_MS)) for epoch, client in done]
        await asyncio.gather(*(self._batcher.submit(FORGET_WILL, *each) for each in forgotten))
        gone = [("ZREM", self._keys.mqtt(shard_of(each[1]), "wills"), ":".join(each)) for each in done]
        await ask_all(self._client, gone)
        return False not in are_done

    async def _publish_one(self, due: tuple[str, str], raw: bytes | None) -> bool | None:
        """Returns whether it is published, or there is nothing to publish; None: this process cannot decode it."""
        epoch, client = due
        if raw is None:
            return True
        try:
            user, message = unpack(raw, self._encoding)
        except CannotDecode as error:
            log.warning("the will of client %s waits for another gateway: %s", name_in_log(client), error)
            return None
        except ValueError:
            log.warning("the will of client %s cannot be read, and is dropped", name_in_log(client))
            return True
        try:
            await self._publish(client, user, message, token_of(client, epoch))
        except RsmqError as error:
            log.info("the will of client %s is tried again: %s", name_in_log(client), error)
            return False
        return True

    def __repr__(self) -> str:
        return f"<Wills under_way={len(self._under_way)}>"
