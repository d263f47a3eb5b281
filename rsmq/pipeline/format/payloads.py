"""The payloads of a read as they were published, or with their bodies: the option `decode`.

Keys and the store are those of the machine that reads, RSMQ_KEYS and RSMQ_BODIES: options are in plans and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rsmq.codecs.reading import BODIES, Reading
from rsmq.errors import BodyUnavailable, CannotDecode, ConfigError, LostBody, Malformed, WrongBody
from rsmq.model.body import REF, check_body, check_ref, is_outside, without_ref
from rsmq.model.encoding import ENC, binding_of

log = logging.getLogger("rsmq.pipeline")

Decode = Literal["none", "bodies", "all"]
DECODE: Final = ("none", "bodies", "all")
MOST_BYTES: Final = 32 << 20
"""Of one batch of rows: bodies are larger than entries."""

StreamEntry = tuple[bytes, list[bytes]]


class PayloadOpener:
    """Opens the entries of one topic. `none`: they stay as they are stored. `bodies`: what lies in a store is brought,
    and stays compressed or encrypted. `all`: payloads are what was published.

    Raises ConfigError for a key, a package or a store that this machine does not have, BodyUnavailable for a store that
    is away, and WrongBody for one that answers with something else. What is malformed, or whose body is lost, stays as
    it is stored, with its header `enc`.
    """

    def __init__(self, decode: Decode, topic: str, limit: int) -> None:
        self._decode = decode
        self._topic = topic
        self._reading = Reading(limit, may_block=True)

    def parts(self, entries: list[StreamEntry]) -> Iterator[list[StreamEntry]]:
        """The entries, in parts that are not much larger than a reply of the server."""
        if self._decode == "none" or not any(ENC in fields[::2] for _, fields in entries):
            yield entries
            return
        part, size = list[StreamEntry](), 0
        for entry_id, fields in entries:
            opened = self._opened(fields) if ENC in fields[::2] else fields
            part.append((entry_id, opened))
            size += sum(map(len, opened))
            if size >= MOST_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part

    def _opened(self, fields: list[bytes]) -> list[bytes]:
        named = dict(zip(fields[::2], fields[1::2], strict=True))
        enc, body = named[ENC], None
        try:
            if is_outside(enc):
                body = self._reading.read(check_ref(named.get(REF.encode()), self._topic))
                check_body(body, named.get(b"data", b""), named.get(b"id", b""))
            if self._decode == "all":
                return rewritten(fields, self._reading.undo(named.get(b"data", b""), binding_of(named, body)), b"")
            return fields if body is None else rewritten(fields, body, without_ref(enc))
        except BodyUnavailable:
            raise
        except WrongBody as error:
            name = named[REF.encode()].decode()
            error.args = (f"{error}: {name}. If it stays so, delete that object: then its message is left as it is",)
            raise
        except CannotDecode as error:
            raise ConfigError(
                f"a message of topic {self._topic!r} needs the {error.needs}, which this machine does not have: set "
                f"RSMQ_KEYS, or RSMQ_KEYS_FILE, and {BODIES} on the driver and on every executor, and install "
                f"rsmq[codecs] there"
            ) from None
        except (LostBody, Malformed) as error:
            log.warning("a message of topic %s is left as it is stored: %s", self._topic, error)
            return fields


def rewritten(fields: Sequence[bytes], data: bytes, enc: bytes) -> list[bytes]:
    """The fields of an entry with other data; without `ref`, and without `enc` if that is empty."""
    found = list[bytes]()
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        if name == b"data":
            found += (name, data)
        elif name == ENC:
            found += (name, enc) if enc else ()
        elif name != REF.encode():
            found += (name, value)
    return found
