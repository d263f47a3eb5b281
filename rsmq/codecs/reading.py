"""What a command, the dashboard or a job reads with: the codecs that are installed, and the keys of the environment."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from rsmq.codecs.encrypt import Encrypt
from rsmq.codecs.keyring import FILE, Keyring
from rsmq.codecs.offload import Offload
from rsmq.codecs.zstd import Zstd
from rsmq.errors import ConfigError
from rsmq.model.encoding import DEFAULT_LIMIT, Binding, Codec, Encoding

KEYS: Final = "RSMQ_KEYS"
"""The environment variable with the keys of commands and jobs."""
BODIES: Final = "RSMQ_BODIES"
"""The environment variable with the store of large payloads, for commands and jobs."""


class Reading(Encoding):
    """Undoes what this process can: zstd if its package is installed, and what the keys of RSMQ_KEYS decrypt.

    It encodes nothing by itself: `like` makes what does. The keys are read when it meets the first encoded payload:
    then it raises ConfigError for keys that are wrong, and for keys without the package that uses them.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT, *, may_block: bool = False) -> None:
        """`may_block`: to undo a payload also gets its body from the store that RSMQ_BODIES names. Otherwise only
        `fetch` does."""
        super().__init__((), limit)
        self.may_block = may_block
        self._made: Encoding | None = None

    def undo(self, data: bytes, binding: Binding) -> bytes:
        """The payload as it was published. Raises Malformed, CannotDecode and ConfigError."""
        return self._can.undo(data, binding)

    def read(self, name: str) -> bytes:
        """A body. Raises CannotDecode without RSMQ_BODIES, ConfigError for a wrong one, LostBody, BodyUnavailable."""
        return self._can.read(name)

    async def fetch(self, name: str) -> bytes:
        """The same in a thread, for an event loop."""
        return await self._can.fetch(name)

    @property
    def _can(self) -> Encoding:
        if self._made is None:
            self._made = Encoding(codecs_of(), self.limit, store_of(BODIES))
        return self._made

    def like(self, names: str) -> Encoding:
        """What encodes as `names` say, such as `zstd;a256gcm`, with the first key of the keyring. Raises ConfigError
        for a coding that this process cannot write."""
        return Encoding([self._can.codec(name) for name in names.split(";")], self.limit)

    def __repr__(self) -> str:
        return f"<Reading {KEYS}{'' if self._made is None else f' {self._made!r}'}>"


def store_of(name: str = BODIES) -> Offload | None:
    """The store in an environment variable; None if it is not set. Raises ConfigError."""
    found = os.environ.get(name)
    return None if found is None else Offload(found)


def has_keys() -> bool:
    """Whether this process has a keyring in its environment."""
    return KEYS in os.environ or KEYS + FILE in os.environ


def codecs_to_write() -> list[Codec]:
    """As a broker with `codecs=[Zstd(), Encrypt(Keyring.from_env())]`; none without keys. Raises ConfigError for keys
    that are wrong, or without the package that uses them."""
    return codecs_of() if has_keys() else []


def codecs_beside(newest: str | None, what: str, otherwise: str = "") -> list[Codec]:
    """What to write with beside entries of which the newest is encrypted with the key `newest`: empty, it is readable;
    None: there is none, and keys decide. Raises ConfigError for keys that are missing. `what` is beside it, such as
    "topic 'orders'"; `otherwise` says what else can be done.
    """
    codecs = [] if newest == "" else codecs_to_write()
    if newest and not codecs:
        raise ConfigError(
            f"the newest entry of {what} is encrypted (key {newest}), and there are no keys here: set {KEYS}, or "
            f"{KEYS}{FILE}, so that this one is encrypted, too{otherwise}"
        )
    return codecs


def codecs_of() -> list[Codec]:
    """The codecs that this process can read with."""
    codecs = list[Codec]()
    with suppress(ConfigError):  # without its package what is compressed is shown as such
        codecs.append(Zstd())
    if has_keys():
        codecs.append(Encrypt(Keyring.from_env(KEYS)))
    return codecs
