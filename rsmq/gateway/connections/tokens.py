"""JSON Web Tokens in place of passwords."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from rsmq.errors import ConfigError

PEM: Final = re.compile(r"-----BEGIN (PUBLIC KEY|CERTIFICATE)-----.*?-----END \1-----", re.DOTALL)
PUBLIC: Final = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
SECRET: Final = ["HS256", "HS384", "HS512"]
SHORTEST_SECRET: Final = 32


class TokenClaims(NamedTuple):
    """Who a token belongs to, and until when, in seconds since 1970."""

    user: str
    until: float


def public_key(kind: str, pem: bytes) -> Any:
    """The public key of a PEM block. Raises some error for one that cannot be read."""
    if kind == "CERTIFICATE":
        return import_module("cryptography.x509").load_pem_x509_certificate(pem).public_key()
    return import_module("cryptography.hazmat.primitives.serialization").load_pem_public_key(pem)


class Tokens:
    """Checks tokens with the keys of a file: public keys as PEM, any of which may have signed, or one secret.

    The kind of the key decides which algorithms count, never the token: a public key is no secret.
    """

    def __init__(self, path: Path, audience: str | None, issuer: str | None) -> None:
        if find_spec("jwt") is None:
            raise ConfigError("--jwt-key needs the extra mqtt: pip install 'rsmq[mqtt]'")
        self._jwt: Any = import_module("jwt")  # an extra
        self._audience, self._issuer = audience, issuer
        text = path.read_text("utf-8-sig").strip()
        self._keys: list[Any] = []
        for number, found in enumerate(PEM.finditer(text), 1):
            try:
                self._keys.append(public_key(found[1], found[0].encode()))
            except Exception as error:  # of several kinds, by what is wrong
                raise ConfigError(f"{path}: its key {number} cannot be read: {error}") from None
        self._algorithms = PUBLIC if self._keys else SECRET
        if not self._keys:
            if "-----BEGIN" in text or len(text) < SHORTEST_SECRET:
                raise ConfigError(
                    f"{path} has neither a public key nor a secret of {SHORTEST_SECRET} characters or more"
                )
            self._keys = [text]

    def check(self, token: bytes) -> TokenClaims | None:
        """The claims of a token that is right now; None for any other. It must have `sub` and `exp`."""
        options = {"require": ["exp", "sub"], "verify_aud": self._audience is not None}
        for key in self._keys:
            try:
                found = self._jwt.decode(
                    token, key, algorithms=self._algorithms, audience=self._audience, issuer=self._issuer,
                    options=options,
                )  # fmt: skip
                return TokenClaims(str(found["sub"]), float(found["exp"]))
            except (self._jwt.PyJWTError, ValueError, TypeError, OverflowError):
                continue
        return None

    def __repr__(self) -> str:
        return f"<Tokens keys={len(self._keys)} {self._algorithms[0][:2]}>"
