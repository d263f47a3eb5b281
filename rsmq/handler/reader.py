"""Reads the payload of a message: undoes its encoding, and decodes it as its content type says. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rsmq.errors import Malformed
from rsmq.handler.payload import Decoder
from rsmq.model.encoding import NOT_ENCRYPTED, PLAIN, Encoding
from rsmq.model.message import Message


class PayloadReader:
    """Reads messages for one handler.

    `plain` decodes the data of a message that is not encoded. `read` is for any other message: `has_more` says whether
    one that is not plain must go that way although it is not encoded.
    """

    __slots__ = ("_decode", "_encoding", "has_more", "plain")

    def __init__(self, decode: Decoder, encoding: Encoding = PLAIN) -> None:
        self._decode = decode
        self._encoding = encoding
        self.plain: Callable[[bytes], Any] = refuse_plain if encoding.is_required else decode
        self.has_more = False

    def read(self, message: Message) -> Any:
        """The payload of a message, whose `data` is what was published from now on. Raises Malformed, and CannotDecode
        where a key is missing."""
        if not message.is_plain and message.is_encoded:
            message.undo(self._encoding)
            return self._decode(message.data)
        return self.plain(message.data)

    def open(self, message: Message) -> None:
        """Make the data of a message what was published; without its key it stays as it is stored."""
        message.open(self._encoding)

    def __repr__(self) -> str:
        return f"<PayloadReader {self._encoding!r}>"


def refuse_plain(_data: bytes) -> Any:
    """For messages that must be encrypted, and are not."""
    raise Malformed(NOT_ENCRYPTED)
