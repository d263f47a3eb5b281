"""The feed stores the messages of a topic in the inboxes of devices, which a function of the user chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rsmq.errors import ConfigError
from rsmq.handler.payload import decode_nothing, decoder_for, formats_for
from rsmq.handler.reader import PayloadReader
from rsmq.handler.retry import Park, Reject, Retry, RetryPolicy, decide, readable_error
from rsmq.handler.signature import read_signature
from rsmq.model.duration import Duration
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.interrupt import is_from_signal
from rsmq.model.keys import encode_device
from rsmq.model.message import LARGEST_PAYLOAD, Message, remaining_ms, stored_ms, stored_payload
from rsmq.persistence.inbox_writer import InboxWriter, Receipt, expiry_ms
from rsmq.persistence.letter import pack_letter, seal

WAITS: Final = "an earlier message of the partition must be stored first"

Recipients = str | Iterable[str] | None


class Feed:
    """The batch handler behind `broker.deliver`. It must get the messages of a partition in stream order.

    The stream ids are the positions of its source, so a redelivered message reaches each device once. No message may
    overtake one that is retried: `ordering="partition"` ensures this between batches, this class within a batch.
    """

    def __init__(
        self,
        to: Callable[..., Any],
        group: str,
        payload: Any,
        expires: Duration | None,
        retry: RetryPolicy,
        writer: Callable[[], InboxWriter],
        encoding: Encoding = NO_CODECS,
        *,
        is_plain: bool = False,
    ) -> None:
        """`is_plain`: letters are stored as their messages were published, else as these are stored. `encoding`: for
        those whose body lies in a store."""
        self.title = f"deliver(to={getattr(to, '__name__', type(to).__name__)})"
        self._signature = read_signature(to, self.title, is_batch=False, unannotated=payload)
        self._reader = PayloadReader(decode_nothing)
        if self._signature.has_payload:
            payload = self._signature.payload
            self._reader = PayloadReader(decoder_for(payload), formats=formats_for(payload))
        self._recipients = self._signature.single_call()
        self._group = group
        self._ttl = expiry_ms(expires)
        self._retry = retry
        self._writer = writer
        self._encoding = encoding
        self._is_plain = is_plain

    async def __call__(self, messages: list[Message]) -> list[BaseException | None] | None:
        """None when all letters of all messages are stored, else one outcome per message."""
        outcomes: list[BaseException | None] = [None] * len(messages)
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
            except (
                BaseException
            ) as raised:  # of the user's function: the other messages of the batch have no part in it
                if is_from_signal(raised) or is_cancelled(raised):
                    raise
                error = readable_error(raised)
                outcomes[number] = error
                if isinstance(decide(error, message.attempt, self._retry), Park):
                    stopped.add(message.partition)
        for number, receipt in receipts.items():
            try:
                await receipt.complete()
            except Exception as error:
                outcomes[number] = error
        return outcomes if any(each is not None for each in outcomes) else None

    def _is_behind(self, message: Message, messages: list[Message], receipts: dict[int, Receipt]) -> bool:
        """Whether an earlier message failed while this one looked up its devices, and will be retried.

        The higher position of this one would make the server skip that retry as a repetition.
        """
        return any(
            receipt.error is not None
            and messages[at].partition == message.partition
            and isinstance(decide(receipt.error, messages[at].attempt, self._retry), Park)
            for at, receipt in receipts.items()
        )

    async def _addressed(self, message: Message) -> list[str]:
        """The devices of a message, without duplicates. Raises Reject for an impossible device id."""
        message.payload = self._reader.read(message)
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
        data, binding = (message.data, None) if self._is_plain else stored_payload(message, self._encoding)
        if len(data) > LARGEST_PAYLOAD:
            raise Reject(
                f"the payload has {len(data)} bytes, more than a letter may have ({LARGEST_PAYLOAD}): send the "
                f"device a link"
            )
        milliseconds, _, number = message.entry_id.partition(b"-")
        position = milliseconds.zfill(20) + number.zfill(20)
        source = f"source:{message.topic}.{message.partition}/{self._group}"
        envelope = seal(data, message.type, message.topic, message.headers, binding)
        writer, receipt, ttl = self._writer(), Receipt(), self._ttl
        left = remaining_ms(message, stored_ms(message))
        if left is not None:
            ttl = max(1, left if ttl == b"" else min(int(ttl), left))
        writer.put(devices, source, pack_letter(position, milliseconds, ttl, envelope), receipt)
        return receipt

    def __repr__(self) -> str:
        return f"<Feed {self.title}>"


def is_cancelled(error: BaseException) -> bool:
    """Whether this very task is being cancelled, and not only something that the function awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
