"""A test certificate authority with a server and a client certificate, as files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

import trustme


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """Issue them, valid for this machine's loopback."""
        authority, made = trustme.CA(), {"authority": directory / "authority.pem"}
        authority.cert_pem.write_to_path(str(made["authority"]))
        for role in ("server", "client"):
            issued = authority.issue_cert("127.0.0.1", "localhost")
            made[role], made[f"{role}_key"] = directory / f"{role}.pem", directory / f"{role}.key"
            issued.cert_chain_pems[0].write_to_path(str(made[role]))
            issued.private_key_pem.write_to_path(str(made[f"{role}_key"]))
        return cls(**made)

    @property
    def query(self) -> str:
        """The options of a `rediss://` URL that presents the client's certificate."""
        named = {"ssl_ca_certs": self.authority, "ssl_certfile": self.client, "ssl_keyfile": self.client_key}
        return urlencode({name: str(path) for name, path in named.items()})

    @property
    def query_without(self) -> str:
        """The same without a certificate of the client."""
        return urlencode({"ssl_ca_certs": str(self.authority)})

    def context(self) -> ssl.SSLContext:
        """The TLS context of a server that requires client certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server, self.server_key)
        context.load_verify_locations(self.authority)
        context.verify_mode = ssl.CERT_REQUIRED
        return context
