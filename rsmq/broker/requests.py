"""Requests: a message whose handler answers by its return value.

The caller waits for a key of its request, and the worker sets it, with a time to live. So nothing is left behind when
one of them dies. A ring of the doorbell says that the key is there; it is also looked for every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Protocol, Required, TypeVar, Unpack, overload

import anyio

from rsmq.broker.connection import BrokerPart
from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, RequestFailed, RequestTimeout, TooLarge
from rsmq.handler.dead_hook import Burial
from rsmq.handler.handler import Handler
from rsmq.handler.middleware import Call
from rsmq.handler.payload import decoder_for, formats_for
from rsmq.model.clock import to_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.encoding import Binding, Encoding
from rsmq.model.headers import REPLY_TO
from rsmq.model.json import decode_json
from rsmq.model.keys import Keys
from rsmq.model.message import JSON, Message, encode_payload, new_message_id
from rsmq.model.publish_options import MessageOptions
from rsmq.model.request import LONGEST_TTL, REPLY_TTL, answer_commands, asked_by
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, retrying

log = logging.getLogger("rsmq.request")

T = TypeVar("T")

POLL: Final = 1.0


class RequestOptions(MessageOptions, total=False):
    """The options of `request` beside the type of its answer."""

    timeout: Required[Duration]


class Requesting(BrokerPart):
    """The part of a broker that sends requests."""

    keys: Keys
    encoding: Encoding

    @overload
    async def request(self, topic: str, payload: Any, *, returns: type[T], **options: Unpack[RequestOptions]) -> T: ...
    @overload
    async def request(
        self, topic: str, payload: Any, *, returns: Any = None, **options: Unpack[RequestOptions]
    ) -> Any: ...
    async def request(
        self,
        topic: str,
        payload: Any,
        *,
        timeout: Duration,
        returns: Any = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        band: str | None = None,
    ) -> Any:
        """Publish a message and wait for the answer: what a handler with `replies=True` returns.

        Raises RequestTimeout after `timeout`; the message is handled all the same. Raises RequestFailed when it becomes
        a dead letter, and when it is cancelled for all groups: its retries count in the timeout. `returns` is the type
        of the answer, such as a pydantic model; without it JSON and text are decoded. The answer comes once, or not at
        all if its worker dies after it handled the message.
        """
        span = checked_duration("timeout", timeout)
        if span <= timedelta(0) or to_ms(span) > LONGEST_TTL:
            raise ConfigError(f"timeout={timeout!r} is not possible: use more than 0 and at most 1 day, such as '5s'")
        decode = None if returns is None else decoder_for(returns)
        formats = {} if returns is None else formats_for(returns)
        connection, identity, rung = self._connection, new_message_id(), asyncio.Event()
        reply_key, doorbell = self.keys.reply(identity), connection.inboxes.doorbell
        marks = {**(headers or {}), REPLY_TO: identity, REPLY_TTL: str(to_ms(span))}
        doorbell.listen(reply_key, rung.set)
        published = ""
        try:
            with anyio.fail_after(span.total_seconds()):
                published = await connection.producer.publish(topic, payload, key=key, headers=marks, band=band)
                raw = await answer_at(connection.client, reply_key, rung)
        except TimeoutError:
            raise RequestTimeout(topic, published, span.total_seconds()) from None
        finally:
            doorbell.forget(reply_key, rung.set)
        return read_reply(
            raw, topic, published, decode, lambda data, kind, enc: self._opened(identity, data, kind, enc), formats
        )

    def _opened(self, identity: str, data: bytes, kind: str, enc: str) -> bytes:
        """The data of an answer as its handler returned it. Raises Malformed, and CannotDecode without its key."""
        return self.encoding.undo(data, Binding(reply_id(identity).encode(), None, kind.encode(), enc.encode()))


async def answer_at(client: Client, reply_key: str, rung: asyncio.Event) -> bytes:
    """Wait for the value of a key and delete it. Goes on while the server is away."""
    while True:
        rung.clear()
        try:
            raw = await client.execute_command("GET", reply_key)
            if raw is not None:
                with contextlib.suppress(BrokerUnavailable):  # then it expires
                    await client.execute_command("UNLINK", reply_key)
                return bytes(raw)
        except BrokerUnavailable as error:
            log.info("the answer cannot be asked for, trying again: %s", error)
        with anyio.move_on_after(POLL):
            await rung.wait()


def reply_id(identity: str) -> str:
    """What an encrypted answer is bound to, in the place of a message id: it has a subkey of its own."""
    return f"reply:{identity}"


def read_reply(
    raw: bytes,
    topic: str,
    message_id: str,
    decode: Callable[[bytes], Any] | None,
    undo: Callable[[bytes, str, str], bytes],
    formats: Mapping[str, Callable[[bytes], Any]] | None = None,
) -> Any:
    """The answer, decoded. Raises RequestFailed for an error, and Malformed for another type. `undo` gets what is
    compressed or encrypted, with its type and its `enc`; `formats` read other content types than JSON."""
    head, _, data = raw.partition(b"\n")
    about = json.loads(head)
    if "reason" in about:
        raise RequestFailed(topic, message_id, about["reason"], about["error"])
    if enc := about.get("enc"):
        data = undo(data, about["type"], enc)
    if decode is not None:
        return (formats or {}).get(about["type"], decode)(data)
    if about["type"] == JSON:
        return decode_json(data)
    return data.decode() if about["type"].startswith("text/") else data


class Answers(Protocol):
    """The broker, as far as answering needs it."""

    keys: Keys
    settings: Settings
    encoding: Encoding

    @property
    def client(self) -> Client: ...


class Replying:
    """Answers the requests of one handler: a middleware for results, and what is called with its dead letters."""

    def __init__(self, broker: Answers) -> None:
        self._broker = broker

    async def answer(self, message: Message, call_next: Call) -> Any:
        """Send the result. What cannot be encoded, or is too large, fails the handler."""
        result = await call_next(message)
        if (request := request_of(message)) is not None:
            data, kind = encode_payload(result)
            data, enc = self._broker.encoding.encode(data, reply_id(request[0]), None, kind)
            if len(data) > (limit := self._broker.settings.payload_limit):
                raise TooLarge(len(data), limit)
            await self._send(*request, {"type": kind, "enc": enc} if enc else {"type": kind}, data)
        return result

    async def refuse(self, message: Message, burial: Burial) -> None:
        """Tell who has asked that the message becomes a dead letter, also one that has killed its workers too often."""
        if (request := request_of(message)) is not None:
            try:
                await self._send(*request, {"reason": burial.reason, "error": burial.error}, b"")
            except BrokerError as error:
                log.info("who has asked with %s waits until its timeout: %s", message.id, error)

    async def _send(self, identity: str, ttl_ms: int, about: dict[str, str], data: bytes) -> None:
        """Repeated if the connection breaks."""
        commands = answer_commands(self._broker.keys, identity, ttl_ms, about, data)
        async for attempt in retrying(self._broker.settings):
            with attempt:
                for reply in await self._broker.client.pipelined(commands):
                    if isinstance(reply, Exception):
                        raise reply


def request_of(message: Message) -> tuple[str, int] | None:
    """The id of the request and the time for which its answer is kept, in ms; None for any other message."""
    return None if message.is_plain else asked_by(message.headers)


def replying(broker: Answers, handler: Handler) -> Handler:
    """A handler that answers requests."""
    role = Replying(broker)
    return replace(handler, around=(role.answer, *handler.around), refuse=role.refuse)
