"""What a gateway says about itself, for the doctor: listeners, routes, and when its certificate ends."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic_core import to_json

from rsmq.errors import ConfigError
from rsmq.gateway.fleet.routes import Route
from rsmq.gateway.options import GatewayOptions
from rsmq.model.clock import epoch_ms

SEQUENCE: Final = 0x30
VERSION: Final = 0xA0
BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def about(
    options: GatewayOptions,
    listen: Sequence[str],
    routes: Sequence[Route],
    counts: Mapping[str, int],
    started_ms: int,
    server: str,
) -> bytes:
    """As JSON. `server`: the server process to which it is connected."""
    until = None if options.certificate is None else epoch_ms(expires(options.certificate))
    return to_json(
        {
            "listen": list(listen), "anonymous": options.anonymous, "certificate_until": until,
            "routes": [(each.filter, each.topic, each.has_subscribers) for each in routes if each.is_explicit],
            "counts": counts, "started_ms": started_ms, "server": server,
        }
    )  # fmt: skip


def expires(certificate: Path) -> datetime:
    """When the first certificate of a PEM file ends. Raises ConfigError for a file without one."""
    try:
        _, begin, rest = certificate.read_text("ascii", "replace").partition(BEGIN)
        return not_after(ssl.PEM_cert_to_DER_cert(f"{begin}{rest.partition(END)[0]}{END}"))
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"the certificate {certificate} cannot be read: {error}") from None


def not_after(der: bytes) -> datetime:
    """The second of the two times of a certificate: the standard library shows it only for one that it has verified."""
    _, start, _ = element(der, 0)  # the certificate
    _, at, _ = element(der, start)  # what is signed
    kind, _, end = element(der, at)
    for _ in range(3 if kind == VERSION else 2):  # version, serial number, algorithm; then the issuer
        at = end
        _, _, end = element(der, at)
    _, start, _ = element(der, end)  # the validity
    _, _, end = element(der, start)
    kind, start, end = element(der, end)
    text = der[start:end].decode("ascii")
    return datetime.strptime(text, "%y%m%d%H%M%SZ" if kind == 0x17 else "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def element(der: bytes, at: int) -> tuple[int, int, int]:
    """An element of DER: its tag, and where its content starts and ends."""
    size, start = der[at + 1], at + 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start], "big")
    return der[at], start, start + size
