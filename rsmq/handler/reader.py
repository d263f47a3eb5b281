"""Reads the payload of a message: undoes its encoding, and decodes it as its content type says.

No I/O, but that of bodies in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NoReturn

from rsmq.errors import CannotDecode, Malformed, MessageError, WrongBody
from rsmq.handler.payload import Decoder
from rsmq.model.encoding import NO_CODECS, NOT_ENCRYPTED, Encoding
from rsmq.model.message import Message

PAUSES: Final = (0.1, 0.4, 1.0, 2.0)
"""Seconds before each further read of a body that is not the one that was published."""


class PayloadReader:
    """Reads messages for one handler.

    `plain` decodes the data of a message that is not encoded. `read` is for any other message: `has_more` says whether
    one that is not plain must go that way although it is not encoded.
    """

    __slots__ = ("_decode", "_encoding", "_formats", "has_more", "plain")

    def __init__(
        self, decode: Decoder, encoding: Encoding = NO_CODECS, formats: Mapping[str, Decoder] | None = None
    ) -> None:
        """`formats`: the decoders for other content types than JSON."""
        self._decode = decode
        self._encoding = encoding
        self._formats = formats or {}
        self.plain: Callable[[bytes], Any] = refuse_plain if encoding.is_required else decode
        self.has_more = bool(formats) or encoding.is_required

    def read(self, message: Message) -> Any:
        """The payload of a message, whose `data` is what was published from now on. Raises Malformed, and CannotDecode
        where a key is missing."""
        if message.is_plain:
            return self.plain(message.data)
        try:
            if message.is_encoded:
                message.undo(self._encoding)
            elif message.encoding is None and self._encoding.is_required:
                refuse_plain(message.data)
            decode = self._formats.get(message.type, self._decode) if self._formats else self._decode
            return decode(message.data)
        except CannotDecode as error:
            error.subject = message
            raise

    async def fetch(self, message: Message) -> None:
        """Bring the body of a message that `is_outside`; without a store `read` says what is missing. A body that is
        not the one that was published is read again, within 3.5 s: the store may have answered with a part of it.
        Raises LostBody, Malformed, and while the store is away, or answers with something else, CannotDecode."""
        if self._encoding.bodies is None:
            return
        try:
            message.bring(await self._encoding.fetch(message.body_name))
            for pause in PAUSES:
                if not self._is_another(message):
                    return
                await asyncio.sleep(pause)
                message.bring(await self._encoding.fetch(message.body_name))
            if self._is_another(message):
                raise WrongBody(message.body_name)
        except CannotDecode as error:
            error.subject = message
            raise

    def _is_another(self, message: Message) -> bool:
        """Whether the body that was brought is not the one that was published. If it is, it is undone, where it can."""
        try:
            message.undo(self._encoding)
        except WrongBody:
            return True
        except MessageError:  # to read it raises why
            return False
        return False

    def can_undo(self, message: Message) -> bool:
        """Whether the encoding of a message is undone, now or before. If not, `read` says why."""
        return not message.open(self._encoding)

    async def open(self, message: Message) -> None:
        """Make the data of a message what was published, with its body from the store. Without its key or its body it
        stays as it is stored, and `is_encoded`."""
        if message.is_outside:
            with suppress(MessageError):
                await self.fetch(message)
        message.open(self._encoding)

    async def undo(self, message: Message) -> None:
        """Make the data of a message what was published, with its body. Raises as `read` and `fetch` do."""
        if message.is_outside:
            await self.fetch(message)
        message.undo(self._encoding)

    def __repr__(self) -> str:
        return f"<PayloadReader {self._encoding!r}>"


def refuse_plain(_data: bytes) -> NoReturn:
    """For messages that must be encrypted, and are not."""
    raise Malformed(NOT_ENCRYPTED)
