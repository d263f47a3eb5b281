"""The keys of a process. No text that it makes has a key in it: neither `repr`, nor an error, nor a pickle."""

from __future__ import annotations

import hmac
import os
import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn, Self

from rsmq.errors import ConfigError

KEY_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)
"""Shorter than a key in base64: where both have changed places, the key is not taken for an id, and not shown."""
KEY_BYTES: Final = 32
FILE: Final = "_FILE"
FORM: Final = "write keys as k7=<base64 of 32 bytes>,k6=<...>, the first of them to write with"


class SecretKey:
    """One key. It shows its id only, also where a traceback shows local variables."""

    __slots__ = ("_secret", "id")

    def __init__(self, key_id: str, secret: bytes) -> None:
        self.id = key_id
        self._secret = secret

    def digest(self, data: bytes) -> bytes:
        """HMAC-SHA256 of the data with this key: 32 bytes."""
        return hmac.digest(self._secret, data, "sha256")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled: let each process read its keys from its environment")

    def __repr__(self) -> str:
        return f"<SecretKey {self.id}>"


class Keyring:
    """Keys by their ids: the first one is written with, all of them are read with.

    Rotate in three steps: give all processes the new key as a further one; then put it first; take the old one away
    when `rsmq keys status TOPIC` needs it no more.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """`keys`: 32 random bytes for each id, the first one to write with. Raises ConfigError."""
        self._keys = dict[str, SecretKey]()
        found = _checked(keys)
        del keys  # a traceback may show local variables
        if isinstance(found, str):
            raise ConfigError(found)
        self._keys = found
        self.first = next(iter(self._keys.values()))
        """The key that is written with."""

    @classmethod
    def from_env(cls, name: str = "RSMQ_KEYS") -> Self:
        """The keys in an environment variable, or in the file that the variable with `_FILE` behind its name names.

        Raises ConfigError if neither is set, or one is wrong; it says where, and shows no key.
        """
        if name in os.environ:
            return cls.read(os.environ[name], name)
        if name + FILE in os.environ:
            return cls.from_file(os.environ[name + FILE])
        raise ConfigError(f"neither {name} nor {name}{FILE} is set: {FORM}")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """The keys in a file, in the form of the variable; each may have a line of its own. Raises ConfigError."""
        found = _read_file(path)
        del path  # it may be the text of keys by mistake
        return cls._of(found)

    @classmethod
    def read(cls, text: str, where: str) -> Self:
        """The keys in a text, which an error calls `where`. Raises ConfigError."""
        found = _read_text(text, where)
        del text
        return cls._of(found)

    @classmethod
    def _of(cls, found: dict[str, bytes] | str) -> Self:
        """The keyring with these keys. Raises ConfigError for a reason why there are none."""
        if isinstance(found, str):
            raise ConfigError(found)
        return cls(found)

    def get(self, key_id: str) -> SecretKey | None:
        """The key with an id."""
        return self._keys.get(key_id)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, that of the key to write with first."""
        return tuple(self._keys)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a keyring is not pickled: let each process read its keys from its environment")

    def __repr__(self) -> str:
        return f"<Keyring {', '.join(self._keys)}>"


def _checked(keys: Mapping[str, bytes]) -> dict[str, SecretKey] | str:
    """The keys of a keyring; or why they are wrong, for a frame to raise that has no key."""
    if not isinstance(keys, Mapping):
        return "Keyring takes a mapping of ids to keys of 32 bytes; text is for Keyring.read"
    if not keys:
        return f"a keyring has at least one key: {FORM}"
    found = dict[str, SecretKey]()
    for key_id, secret in keys.items():
        if not isinstance(key_id, str) or not KEY_ID.fullmatch(key_id):
            return "an id of a key is not possible: use 1 to 32 letters, digits, '_', '.' and '-'"
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
            return f"key {key_id} is not {KEY_BYTES} bytes: make one with `openssl rand -base64 32`"
        found[key_id] = SecretKey(key_id, secret)
    return found


def _read_file(path: str | os.PathLike[str]) -> dict[str, bytes] | str:
    """The same as `_read_text` for a file. What is raised here may have its bytes, and is the context of no error."""
    where = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        if "=" in where:
            return f"keys cannot be read ({why}): a path with '=' in it is not shown, is it the text of keys?"
        return f"the keys in {where} cannot be read ({why})"
    return _read_text(text.replace("\n", ","), where)


def _read_text(text: str, where: str) -> dict[str, bytes] | str:
    """The bytes of each key in a text, by its id; or why the text is wrong, for a frame to raise that has no key."""
    if not isinstance(text, str):
        return f"{where}: keys are read from text: {FORM}"
    found = dict[str, bytes]()
    for number, part in enumerate((each for each in text.strip().strip("'\"").split(",") if each.strip()), 1):
        key_id, equals, encoded = part.strip().partition("=")
        if not equals or not KEY_ID.fullmatch(key_id):
            return f"{where}: key {number} has no id in front of it: {FORM}"
        if key_id in found:
            return f"{where}: there are two keys {key_id}: give the newer one another id"
        try:
            secret = b64decode(encoded.strip(), validate=True)
        except ValueError:
            return f"{where}: key {number} is not base64: {FORM}"
        if len(secret) != KEY_BYTES:
            return (
                f"{where}: key {number} has {len(secret)} bytes, not {KEY_BYTES}: make one with "
                f"`openssl rand -base64 32`"
            )
        found[key_id] = secret
    return found
