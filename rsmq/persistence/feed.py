"""The feed: brings the messages of a topic into the inboxes that a function of the user's names for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from rsmq.errors import ConfigError
from rsmq.keys import encode_device
from rsmq.message import Message
from rsmq.payload import decode_nothing, decoder_for
from rsmq.persistence.letter import seal
from rsmq.persistence.post import Post, expiry_ms
from rsmq.persistence.receipt import Receipt
from rsmq.retry import Park, Reject, Retry, RetryPolicy, decide
from rsmq.signature import read_signature

WAITS: Final = "it waits for the message before it"

Recipients = str | Iterable[str] | None


class Feed:
    """The batch handler behind `broker.deliver`. It must get the messages of a partition in stream order.

    The stream ids are the positions of its source, so a message reaches each device once, however often it is
    delivered here; for that nothing may overtake a message that has to be tried again, which `ordering="partition"`
    ensures between batches, and this class within one.
    """

    def __init__(
        self,
        to: Callable[..., Any],
        group: str,
        payload: Any,
        expiry: timedelta | None,
        retry: RetryPolicy,
        post: Callable[[], Post],
    ) -> None:
        self.title = f"deliver(to={getattr(to, '__name__', type(to).__name__)})"
        self._signature = read_signature(to, self.title, is_batch=False, unannotated=payload)
        self._decode = decoder_for(self._signature.payload) if self._signature.has_payload else decode_nothing
        self._recipients = self._signature.single_call()
        self._group, self._ttl, self._retry, self._post = group, expiry_ms(expiry), retry, post

    async def __call__(self, messages: list[Message]) -> list[Exception | None] | None:
        """None when all letters of all messages are stored, else one outcome a message."""
        outcomes: list[Exception | None] = [None] * len(messages)
        receipts: dict[int, Receipt] = {}
        stopped: set[int] = set()
        for number, message in enumerate(messages):
            if message.partition in stopped:
                outcomes[number] = Retry(WAITS)
                continue
            try:
                devices = await self._addressed(message)
                if self._signature.is_async and self._is_behind(message, messages, receipts):
                    raise Retry(WAITS)
                receipts[number] = self._send(message, devices)
            except Exception as error:
                outcomes[number] = error
                if isinstance(decide(error, message.attempt, self._retry), Park):
                    stopped.add(message.partition)
        for number, receipt in receipts.items():
            try:
                await receipt.complete()
            except Exception as error:
                outcomes[number] = error
        return outcomes if any(outcomes) else None

    def _is_behind(self, message: Message, messages: list[Message], receipts: dict[int, Receipt]) -> bool:
        """Whether one before it, sent while its devices were looked up, has failed meanwhile and will be tried again.

        The mark of this one would make that one a repetition.
        """
        return any(
            receipt.error is not None
            and messages[at].partition == message.partition
            and isinstance(decide(receipt.error, messages[at].attempt, self._retry), Park)
            for at, receipt in receipts.items()
        )

    async def _addressed(self, message: Message) -> list[str]:
        """The devices that get it, each once. Raises Reject for what cannot be one."""
        message.payload = self._decode(message)
        found: Recipients = await self._recipients(message) if self._signature.is_async else self._recipients(message)
        if found is None:
            return []
        devices = [found] if isinstance(found, str) else list(dict.fromkeys(found))
        try:
            for device in devices:
                encode_device(device)
        except ConfigError as error:
            raise Reject(str(error)) from None
        return devices

    def _send(self, message: Message, devices: Sequence[str]) -> Receipt:
        milliseconds, _, number = message.stream_id.partition("-")
        position = f"{milliseconds:0>20}{number:0>20}"
        source = f"source:{message.topic}.{message.partition}/{self._group}"
        envelope = seal(message.data, message.type, message.topic, message.headers)
        post, receipt = self._post(), Receipt()
        for device in devices:
            post.put(device, source, position, milliseconds, self._ttl, envelope, receipt)
        return receipt

    def __repr__(self) -> str:
        return f"<Feed {self.title}>"
