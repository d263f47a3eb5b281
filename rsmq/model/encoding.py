"""How a payload is encoded between publisher and reader: the field `enc`, and its codecs. No I/O.

`enc` names what was done, in order: `zstd;a256gcm=k7` is compressed, then encrypted with the key `k7`. It is undone
from the right. The codecs themselves are in `rsmq.codecs`, which is loaded where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

from rsmq.errors import CannotDecode, ConfigError, Malformed, MessageError, TooLarge, WrongBody
from rsmq.model.body import BodyFolder, Offloading, check_body, is_outside, without_ref
from rsmq.model.settings import Settings

ENC: Final = b"enc"
MOST_WORDS: Final = 8
LONGEST_ENC: Final = 256
WORD: Final = re.compile(r"([a-z0-9]{1,32})(?:=([A-Za-z0-9_.-]{1,32}))?", re.ASCII)
"""A coding, and for a cipher the id of its key."""
STEPS: Final = ("compress", "encrypt")
"""The order in which codecs are applied: what is encrypted cannot be compressed any more."""
DEFAULT_LIMIT: Final = Settings.decoded_limit


class Binding(NamedTuple):
    """What an encrypted payload belongs to: moved to another message, it does not decrypt. `key` None: no ordering
    key. `enc` is the whole field, for codecs without `ref`. `body`: what the store has, where the payload lies there.
    """

    message_id: bytes
    key: bytes | None
    type: bytes
    enc: bytes
    body: bytes | None = None

    def __repr__(self) -> str:
        return f"<Binding {self.message_id!r} {self.enc!r}>"


def binding_of(named: Mapping[bytes, bytes], body: bytes | None = None) -> Binding:
    """That of an entry with these fields, `enc` among them."""
    return Binding(
        named.get(b"id", b""), named.get(b"key"), named.get(b"type", b"application/json"), named[ENC], body
    )  # fmt: skip


@runtime_checkable
class Codec(Protocol):
    """One step between a payload and what is stored. Safe to use from several threads."""

    @property
    def step(self) -> Literal["compress", "encrypt"]:
        """What it does: decides the order of codecs."""

    @property
    def is_required(self) -> bool:
        """Whether a message without this step is refused."""

    @property
    def name(self) -> str:
        """The coding: the word of `enc` before its `=`."""

    @property
    def word(self) -> str:
        """What stands in `enc` for what it writes now."""

    def shrink(self, data: bytes) -> bytes | None:
        """The payload, encoded without knowing its message; None: it stays as it is. Only of the step `compress`."""

    def seal(self, data: bytes, binding: Binding) -> bytes:
        """The payload, encrypted. Only of the step `encrypt`."""

    def undo(self, data: bytes, argument: str, binding: Binding, limit: int) -> bytes:
        """What was encoded. Raises Malformed, also for more than `limit` bytes, and CannotDecode without its key."""


class Encoding:
    """The codecs of a broker, applied in order and undone from the right.

    `limit`: a payload that is larger than this before it is encoded, or after it is undone, is refused. `bodies`: the
    store for large ones, which have a limit of their own.
    """

    may_block = False
    """Whether it gets bodies from their store when they are read: in commands and jobs."""

    def __init__(
        self, codecs: Sequence[Codec] = (), limit: int = DEFAULT_LIMIT, bodies: Offloading | None = None
    ) -> None:
        if bodies is not None and (isinstance(bodies, type) or not isinstance(bodies, Offloading)):
            raise ConfigError(f"offload={bodies!r} is no store: write offload=Offload('s3://bucket/folder')")
        for each in codecs:
            if isinstance(each, type) or not isinstance(each, Codec):
                raise ConfigError(
                    f"codecs={codecs!r}: {each!r} is no codec. Write codecs=[Zstd(), Encrypt(Keyring.from_env())]"
                )
        steps = [each.step for each in codecs]
        if len(set(steps)) < len(steps):
            raise ConfigError(f"codecs={codecs!r}: two of them {steps[-1]}. One is enough: leave the other out")
        if steps != sorted(steps, key=STEPS.index):
            raise ConfigError(
                f"codecs={codecs!r}: what is encrypted looks random and does not become smaller. Put the one that "
                f"compresses first"
            )
        self._codecs = tuple(codecs)
        self._by_name = {each.name: each for each in codecs}
        self.names = ";".join(each.name for each in codecs)
        """The codings that it writes, as in `enc` but without ids of keys: `zstd;a256gcm`."""
        self.limit = limit
        self.bodies = bodies
        self.is_required = any(each.is_required for each in codecs)
        """Whether a message that is not encoded so is malformed."""

    def codec(self, name: str) -> Codec:
        """The codec of a coding. Raises ConfigError if there is none."""
        found = self._by_name.get(name)
        if found is None:
            raise ConfigError(f"this process cannot write payloads with the coding {name[:32]!r}")
        return found

    def without_codecs(self) -> Encoding:
        """It neither compresses nor encrypts, and has the same store."""
        return Encoding((), self.limit, self.bodies)

    def __bool__(self) -> bool:
        return bool(self._codecs) or self.bodies is not None

    def encode(
        self, data: bytes, message_id: str, key: str | None = None, content_type: str = "application/json"
    ) -> tuple[bytes, str]:
        """What is stored for a payload, and its `enc`, which may be empty. Raises TooLarge."""
        if self._codecs and len(data) > self.limit:
            raise TooLarge(len(data), self.limit, "RSMQ_DECODED_LIMIT")
        return self._sealed(data, message_id, key, content_type)

    def _sealed(self, data: bytes, message_id: str, key: str | None, content_type: str) -> tuple[bytes, str]:
        """`encode` without a limit."""
        if not self._codecs:
            return data, ""
        words, ciphers = list[str](), list[Codec]()
        for each in self._codecs:
            if each.step == "encrypt":
                words.append(each.word)
                ciphers.append(each)
            elif (smaller := each.shrink(data)) is not None:
                words.append(each.word)
                data = smaller
        enc = ";".join(words)
        for each in ciphers:
            route = None if key is None else key.encode()
            data = each.seal(data, Binding(message_id.encode(), route, content_type.encode(), enc.encode()))
        return data, enc

    def bound(self, data: bytes, message_id: str, key: str | None, content_type: str) -> tuple[bytes, Binding | None]:
        """What is stored for a payload outside of a topic, and what undoes it; None: it is stored as it is. Raises
        TooLarge."""
        data, enc = self.encode(data, message_id, key, content_type)
        if not enc:
            return data, None
        route = None if key is None else key.encode()
        return data, Binding(message_id.encode(), route, content_type.encode(), enc.encode())

    def extend(
        self,
        data: bytes,
        message_id: str,
        key: str | None,
        content_type: str,
        extra: Sequence[str] = (),
        folder: BodyFolder | None = None,
    ) -> tuple[bytes, tuple[str, ...]]:
        """What is stored for a payload, and the further fields of its entry, with `enc` if there is one.

        `folder`: takes the body if it is large; without it a large one is refused by the limits of the others.
        """
        if folder is None:
            data, enc = self.encode(data, message_id, key, content_type)
            return data, (*extra, "enc", enc) if enc else tuple(extra)
        size = len(data)
        if size > max(folder.largest, self.limit):
            raise TooLarge(size, folder.largest, "the option `largest` of Offload")
        data, enc = self._sealed(data, message_id, key, content_type)
        if len(data) > folder.above or size > self.limit:
            body = folder.take(message_id, data)
            return body.digest, (*extra, *body.fields(enc))
        return data, (*extra, "enc", enc) if enc else tuple(extra)

    def read(self, name: str) -> bytes:
        """A body from the store. Raises CannotDecode without one, LostBody, and BodyUnavailable."""
        if self.bodies is None:
            raise CannotDecode(STORE, NO_STORE)
        return self.bodies.read(name)

    async def fetch(self, name: str) -> bytes:
        """`read` in a thread, for an event loop."""
        if self.bodies is None:
            raise CannotDecode(STORE, NO_STORE)
        return await self.bodies.fetch(name)

    def undo(self, data: bytes, binding: Binding) -> bytes:
        """The payload as it was published. Raises Malformed, and CannotDecode for what this process has no key, or no
        codec, for."""
        limit, words = self.limit, words_of(binding.enc)
        if is_outside(binding.enc):
            words.pop()  # `ref`
            if binding.body is None:
                raise CannotDecode(STORE, NO_STORE)
            check_body(binding.body, data, binding.message_id)
            data, binding = binding.body, binding._replace(enc=without_ref(binding.enc), body=None)
            limit = limit if self.bodies is None else max(limit, self.bodies.largest)
        if self.is_required and not any(
            each.is_required and each.name == name for each in self._codecs for name, _ in words
        ):
            raise Malformed(NOT_ENCRYPTED)
        for name, argument in reversed(words):
            codec = self._by_name.get(name)
            if codec is None:
                needs = f"key {argument}" if argument else f"coding {name}"
                raise CannotDecode(needs, f"give its broker codecs=[...] with one that reads {name!r}")
            data = codec.undo(data, argument, binding, limit)
        if len(data) > limit:
            raise Malformed(f"the payload has more than {limit} bytes when it is decoded (RSMQ_DECODED_LIMIT)")
        return data

    def __repr__(self) -> str:
        return f"<Encoding {', '.join(map(repr, self._codecs)) or 'none'}>"


NOT_ENCRYPTED: Final = "the message is not encrypted, and its broker has Encrypt(required=True)"
STORE: Final = "store of bodies"
NO_STORE: Final = "give its broker offload=Offload(...)"
NO_CODECS: Final = Encoding()
"""Of a process without codecs: it writes payloads as they are, and holds what is encoded."""


def words_of(enc: bytes) -> list[tuple[str, str]]:
    """The codings in a field `enc`, each with its argument, which may be empty. Raises Malformed."""
    if not 0 < len(enc) <= LONGEST_ENC:
        raise Malformed(f"its field enc has {len(enc)} bytes: 1 to {LONGEST_ENC} are possible")
    texts = enc.decode("latin-1").split(";")
    if len(texts) > MOST_WORDS:
        raise Malformed(f"its field enc names {len(texts)} codings, more than {MOST_WORDS}")
    found = [match for each in texts if (match := WORD.fullmatch(each))]
    if len(found) < len(texts):
        raise Malformed("its field enc is not a list such as zstd;a256gcm=k7")
    return [(match[1], match[2] or "") for match in found]


def names_of(enc: bytes) -> str:
    """The codings in a field `enc` without their keys: `zstd;a256gcm`. Raises Malformed."""
    return ";".join(name for name, _ in words_of(enc))


def why_sealed(error: MessageError, enc: str) -> str:
    """In the place of a payload that could not be undone: `encrypted (k7)`, or what is wrong with it."""
    if isinstance(error, WrongBody) or not isinstance(error, CannotDecode):
        return f"unreadable: {error}"
    key = key_of(enc.encode())
    if error.needs.startswith("store"):
        return f"in the store of bodies ({enc})"
    return f"encrypted ({key})" if key else f"encoded ({enc})"


def key_of(enc: bytes) -> str:
    """The id of the key that a message needs; empty for none, or for what cannot be read."""
    try:
        return next((argument for _, argument in words_of(enc) if argument), "")
    except Malformed:
        return ""
