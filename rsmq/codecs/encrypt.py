"""AES-256-GCM with a key of its own for each message. `docs/wire-format.md` has the form, and vectors to check it.

The nonce is computed from all that is sealed. So the same message has the same bytes, and is recognised when it is sent
again; and no two different messages share a nonce, for which GCM would give away its authentication key.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from rsmq.codecs.keyring import Keyring
from rsmq.errors import CannotDecode, ConfigError, Malformed
from rsmq.model.encoding import Binding

NAME: Final = "a256gcm"
SUBKEY: Final = b"enc"
NONCE: Final = b"iv"
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
ABSENT: Final = b"\xff\xff\xff\xff"
"""In the place of a length: there is no such part."""


class Encrypt:
    """Encrypts payloads, and decrypts those that any key of the keyring has encrypted.

    Only the payload is encrypted. Ordering key, headers, ids and names stay readable in the server, and so do the error
    texts, tracebacks and history of dead letters: keep secrets out of these. `required`: a message of this broker's
    topics that is not encrypted is malformed.
    """

    step: Literal["encrypt"] = "encrypt"
    name = NAME

    def __init__(self, keyring: Keyring, *, required: bool = False) -> None:
        if not isinstance(keyring, Keyring):
            raise ConfigError("Encrypt takes a keyring: write Encrypt(Keyring.from_env('RSMQ_KEYS'))")
        self.keyring = keyring
        self.is_required = required
        self._cipher = aes_gcm()

    @property
    def word(self) -> str:
        """The coding with the id of the key that is written with."""
        return f"{NAME}={self.keyring.first.id}"

    def shrink(self, data: bytes) -> bytes | None:
        """Nothing: it encrypts."""
        return None

    def seal(self, data: bytes, binding: Binding) -> bytes:
        """Nonce, ciphertext and tag: 28 bytes more than the data."""
        key, about = self.keyring.first, parts(binding.message_id, binding.key, binding.type, binding.enc)
        nonce = key.digest(parts(NONCE) + about + parts(data))[:NONCE_BYTES]
        cipher = self._cipher(key.digest(parts(SUBKEY, binding.message_id)))
        sealed: bytes = cipher.encrypt(nonce, data, about)
        return nonce + sealed

    def undo(self, data: bytes, argument: str, binding: Binding, limit: int) -> bytes:
        """The data before it was sealed, `limit` has no part in this. Raises Malformed, and CannotDecode."""
        key = self.keyring.get(argument)
        if key is None:
            raise CannotDecode(f"key {argument or '(without an id)'}", "add it to its keyring, such as RSMQ_KEYS")
        if not binding.message_id:
            raise Malformed("the payload is encrypted, and the entry has no field `id`")
        if len(data) < NONCE_BYTES + TAG_BYTES:
            raise Malformed(f"the encrypted payload has {len(data)} bytes, fewer than any has")
        about = parts(binding.message_id, binding.key, binding.type, binding.enc)
        cipher = self._cipher(key.digest(parts(SUBKEY, binding.message_id)))
        try:
            opened: bytes = cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], about)
        except invalid_tag():
            raise Malformed(
                f"the payload does not decrypt with key {argument}: it was changed, belongs to another message, or the "
                f"key is another one of that id"
            ) from None
        return opened

    def __repr__(self) -> str:
        return f"Encrypt({self.keyring!r}{', required=True' if self.is_required else ''})"


def parts(*values: bytes | None) -> bytes:
    """Each part after its length, as 4 bytes, the highest first: no two lists of parts have one form."""
    return b"".join([ABSENT if each is None else len(each).to_bytes(4, "big") + each for each in values])


def aes_gcm() -> Any:
    """The cipher. Raises ConfigError without the package."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigError("Encrypt needs the package cryptography: pip install 'rsmq[codecs]'") from None
    return AESGCM


def invalid_tag() -> Any:
    """What the cipher raises for what it has not sealed."""
    from cryptography.exceptions import InvalidTag

    return InvalidTag
