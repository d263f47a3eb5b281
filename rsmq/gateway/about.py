"""A gateway's own description, for the doctor: listeners, routes, and when its certificate ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from rsmq.errors import ConfigError
from rsmq.gateway.fleet.routes import Route
from rsmq.gateway.options import GatewayOptions
from rsmq.model.clock import epoch_ms


def about(
    options: GatewayOptions,
    listen: Sequence[str],
    routes: Sequence[Route],
    counts: Mapping[str, int],
    started_ms: int,
    server: str,
    held: Mapping[str, int],
) -> bytes:
    """As JSON. `server`: the server process to which it is connected. `held`: how many clients wait for letters that
    need what this process does not have, such as `key k7`."""
    until = None if options.certificate is None else epoch_ms(expires(options.certificate))
    return to_json(
        {
            "listen": list(listen), "anonymous": options.anonymous, "certificate_until": until,
            "routes": [(each.filter, each.topic, each.has_subscribers) for each in routes if each.is_explicit],
            "counts": counts, "started_ms": started_ms, "server": server,
            **({"held": held} if held else {}),
        }
    )  # fmt: skip


def expires(certificate: Path) -> datetime:
    """When the first certificate of a PEM file ends. Raises ConfigError for a file without one."""
    if find_spec("cryptography") is None:
        raise ConfigError("--certificate needs the extra mqtt: pip install 'rsmq[mqtt]'")
    x509: Any = import_module("cryptography.x509")  # an extra
    try:
        until: datetime = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificate {certificate} cannot be read: {error}") from None
    return until
