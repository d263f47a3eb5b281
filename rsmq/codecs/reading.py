"""What a command, the dashboard or a job reads with: the codecs that are installed, and the keys of the environment."""

from __future__ import annotations

import os
from contextlib import suppress

from rsmq.codecs.encrypt import Encrypt
from rsmq.codecs.keyring import FILE, Keyring
from rsmq.codecs.zstd import Zstd
from rsmq.errors import ConfigError
from rsmq.model.encoding import DEFAULT_LIMIT, Binding, Codec, Encoding


class Reading(Encoding):
    """Undoes what this process can: zstd if its package is installed, and what the keys of RSMQ_KEYS decrypt.

    It encodes nothing by itself: `like` makes what does. The keys are read when it meets the first encoded payload:
    then it raises ConfigError for keys that are wrong, and for keys without the package that uses them.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT, name: str = "RSMQ_KEYS") -> None:
        super().__init__((), limit)
        self._name = name
        self._made: Encoding | None = None

    def undo(self, data: bytes, binding: Binding) -> bytes:
        """The payload as it was published. Raises Malformed, CannotDecode and ConfigError."""
        return self._can.undo(data, binding)

    @property
    def _can(self) -> Encoding:
        if self._made is None:
            self._made = Encoding(codecs_of(self._name), self.limit)
        return self._made

    def like(self, names: str) -> Encoding:
        """What encodes as `names` say, such as `zstd;a256gcm`, with the first key of the keyring. Raises ConfigError
        for a coding that this process cannot write."""
        return Encoding([self._can.codec(name) for name in names.split(";")], self.limit)

    def __repr__(self) -> str:
        return f"<Reading {self._name}{'' if self._made is None else f' {self._made!r}'}>"


def codecs_of(name: str) -> list[Codec]:
    """The codecs that this process can read with."""
    codecs = list[Codec]()
    with suppress(ConfigError):  # without its package what is compressed is shown as such
        codecs.append(Zstd())
    if name in os.environ or name + FILE in os.environ:
        codecs.append(Encrypt(Keyring.from_env(name)))
    return codecs
