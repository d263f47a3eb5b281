"""Results: what a handler has returned for a message that was published with `keep_result`.

The settlement writes a key beside the partition, with a time to live, in the same step, and rings the doorbell of that
key. It is looked for at each ring, and every second.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar, overload

import anyio

from rsmq.broker.connection import BrokerPart
from rsmq.control.finder import candidates
from rsmq.errors import BrokerUnavailable, ConfigError, ResultFailed, ResultTimeout
from rsmq.handler.payload import decoder_for, formats_for
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.encoding import Binding, Encoding
from rsmq.model.json import decode_json
from rsmq.model.kept_result import KeptResult, result_binding
from rsmq.model.keys import Keys, check_name
from rsmq.model.message import JSON
from rsmq.model.message_ref import MessageRef
from rsmq.redis.streams import ask_all
from rsmq.redis.topics import Topic

log = logging.getLogger("rsmq.result")

T = TypeVar("T")

POLL: Final = 1.0
"""Seconds between two looks, if no ring comes."""


class Results(BrokerPart):
    """The part of a broker that asks for results."""

    keys: Keys
    encoding: Encoding

    @abstractmethod
    async def _topic_of(self, message: str, topic: str | None) -> Topic:
        """The topic of a message, or ConfigError."""

    @overload
    async def result(
        self, message: MessageRef | str, *, group: str, timeout: Duration, returns: type[T], topic: str | None = None,
        key: str | None = None,
    ) -> T: ...  # fmt: skip
    @overload
    async def result(
        self, message: MessageRef | str, *, group: str, timeout: Duration, returns: Any = None,
        topic: str | None = None, key: str | None = None,
    ) -> Any: ...  # fmt: skip
    async def result(
        self,
        message: MessageRef | str,
        *,
        group: str,
        timeout: Duration,
        returns: Any = None,
        topic: str | None = None,
        key: str | None = None,
    ) -> Any:
        """What the handler of a group has returned for a message that was published with `keep_result`.

        Waits for it, at most for `timeout` (0: looks once). It is stored in the step that settles the message, once for
        each group, and stays until `keep_result` is over: ask as often, and from as many processes, as you like.
        `message`, `topic` and `key` are as for `look`. `returns` is the type of the result, such as a pydantic model;
        without it JSON and text are decoded. The result of a batch handler is None.

        Raises ResultTimeout: it is not handled yet, was published without `keep_result`, or that time is over. Raises
        ResultFailed if the message became a dead letter, was cancelled, has expired or went on to a fallback topic;
        and Malformed for a result of another type. A replay that works replaces a failure.
        """
        group = check_name("group", group)
        span = checked_duration("timeout", timeout)
        if span < timedelta(0):
            raise ConfigError(f"timeout={timeout!r} is not possible: use 0 or more, such as '30s'")
        found = await self._topic_of(message, topic)
        numbers = [number for some in candidates(message, found, key) for number in some if number in found.numbers]
        names = [self.keys.result(found.name, number, group, str(message)) for number in dict.fromkeys(numbers)]
        raw = await self._find(names) if span == timedelta(0) else await self._wait(names, span)
        if raw is None:
            raise ResultTimeout(found.name, str(message), group, span.total_seconds())
        kept = KeptResult.read(raw)
        if kept.reason:
            raise ResultFailed(found.name, str(message), group, kept.reason, kept.error)
        return self._decoded(kept, result_binding(group, str(message)), returns)

    def _decoded(self, kept: KeptResult, identity: str, returns: Any) -> Any:
        data = kept.data
        if kept.enc:
            data = self.encoding.undo(data, Binding(identity.encode(), None, kept.type.encode(), kept.enc.encode()))
        if returns is not None:
            return formats_for(returns).get(kept.type, decoder_for(returns))(data)
        if kept.type == JSON:
            return decode_json(data)
        return data.decode() if kept.type.startswith("text/") else data

    async def _wait(self, names: Sequence[str], span: timedelta) -> bytes | None:
        """The value of the first key that is there. Goes on while the server is away."""
        doorbell, rung = self._connection.inboxes.doorbell, asyncio.Event()
        for name in names:
            doorbell.listen(name, rung.set)
        try:
            with anyio.move_on_after(span.total_seconds()):
                while True:
                    rung.clear()
                    try:
                        if (raw := await self._find(names)) is not None:
                            return raw
                    except BrokerUnavailable as error:
                        log.info("a result cannot be asked for, trying again: %s", error)
                    with anyio.move_on_after(POLL):
                        await rung.wait()
        finally:
            for name in names:
                doorbell.forget(name, rung.set)
        return None

    async def _find(self, names: Sequence[str]) -> bytes | None:
        values = await ask_all(self._connection.client, [("GET", name) for name in names])
        return next((bytes(each) for each in values if each is not None), None)
