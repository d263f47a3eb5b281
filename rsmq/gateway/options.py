"""The options of a gateway, with their defaults."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from rsmq.errors import ConfigError

NameOf = Literal["cn", "san"]

PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
MAY_BE_0: Final = {
    "most_per_address", "most_per_user", "most_connects", "most_sessions", "most_packets", "most_messages",
    "most_bytes", "most_packet_bytes", "topic_aliases",
}  # fmt: skip
"""0 is no limit there; no topic aliases."""
MOST: Final = 1 << 31
HIGHEST: Final = dict.fromkeys(
    ("receive_maximum", "window", "topic_aliases", "most_topic_bytes"), 65_535
)  # fields of two bytes


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int
    is_encrypted: bool
    is_web: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What a gateway allows. Each limit has an answer that the client can see, and a counter."""

    anonymous: bool = False
    """Whether clients without credentials may connect."""
    password_file: Path | None = None
    """In the format of `mosquitto_passwd`."""
    acl_file: Path | None = None
    """In the format of Mosquitto's acl_file."""
    certificate: Path | None = None
    """For mqtts and wss: the certificate and those that signed it, as PEM."""
    key: Path | None = None
    """Its key, if it is not in the same file."""
    client_ca: Path | None = None
    """For mqtts and wss: clients must have a certificate that one of these authorities has signed, as PEM."""
    certificate_user: NameOf = "cn"
    """The name in a client's certificate that is its user name: the common name, or the first alternative name."""
    crl: Path | None = None
    """Client certificates that are revoked: lists of the authorities, as PEM."""
    jwt_key: Path | None = None
    """Public keys as PEM, or a secret: a client may give a token in place of its password."""
    jwt_audience: str | None = None
    jwt_issuer: str | None = None
    user_as_client_id: bool = False
    """Whether a client may only use its user name as its client id."""
    proxies: tuple[str, ...] = ()
    """Load balancers that say by the PROXY protocol whom they connect: addresses, or networks such as 10.0.0.0/8."""
    origins: tuple[str, ...] = ()
    """For ws and wss: the web sites whose pages may connect, such as https://shop.example. Empty: all."""
    receive_maximum: int = 20
    """Messages of a client that are not acknowledged at a time."""
    window: int = 100
    """Messages to a client that are not acknowledged at a time; a client may ask for fewer."""
    topic_aliases: int = 16
    most_connections: int = 100_000
    most_opening: int = 10_000
    """Connections of this gateway whose CONNECT is not answered yet."""
    most_per_address: int = 0
    """Connections of this gateway from one address; 0 is no limit."""
    most_per_user: int = 0
    """Connections of this gateway with one user name; 0 is no limit."""
    most_connects: int = 0
    """Clients that connect to this gateway in a second; 0 is no limit. More wait, at most half of connect_timeout."""
    most_sessions: int = 0
    """Sessions of the whole fleet, connected or not; 0 is no limit. A gateway counts them every five seconds."""
    most_packets: int = 0
    """Packets of one client in a second; 0 is no limit."""
    most_messages: int = 0
    """PUBLISH packets of one client in a second; 0 is no limit."""
    most_bytes: int = 0
    """Bytes of one client in a second; 0 is no limit."""
    most_packet_bytes: int = 0
    """Bytes of a packet; 0: what the payload limit of the broker allows, which is also the most."""
    most_topic_bytes: int = 65_535
    """Bytes of a topic name or filter."""
    most_levels: int = 256
    """Levels of a topic name or filter."""
    most_subscriptions: int = 1_000
    """Of one client."""
    most_retained: int = 100_000
    retained_per_subscribe: int = 10_000
    session_expiry: timedelta = timedelta(days=7)
    """The longest that a session is kept after its connection."""
    keep_alive: timedelta = timedelta(minutes=20)
    """The longest keep-alive of a client of version 5; others keep theirs."""
    connect_timeout: timedelta = timedelta(seconds=10)
    """For the first packet, and again for its answer."""
    sys_interval: timedelta = timedelta(seconds=10)
    """How often clients that read $SYS get its figures; 0 is never."""
    lease: timedelta = timedelta(seconds=6)
    """A gateway that is paused or cut off for longer loses its clients to the others."""
    full_inbox_wait: timedelta = timedelta(seconds=10)
    """How long publishers wait for a connected client whose inbox is full and that takes nothing; 0 is never."""
    write_buffer: int = 64 << 10
    """Bytes that a client has not read. Above that, its messages wait in the inbox, and those of QoS 0 are dropped."""

    def __post_init__(self) -> None:
        for name in self.limits():
            lowest = 0 if name in MAY_BE_0 else 1
            highest = HIGHEST.get(name, MOST)
            if not lowest <= getattr(self, name) <= highest:
                raise ConfigError(f"{name} is {getattr(self, name)}: use a number from {lowest} to {highest}")

    @classmethod
    def limits(cls) -> list[str]:
        """The options that are numbers."""
        return [each.name for each in fields(cls) if each.type == "int"]


def split_listen(text: str) -> Address:
    """An address to listen on, such as mqtt://0.0.0.0:1883 or ws://0.0.0.0:8083, or mqtts:// and wss:// with TLS."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        port, parts = None, urlsplit("")
    is_web = parts.scheme.startswith("ws")
    if parts.scheme not in PORTS or not parts.hostname or (parts.path not in ("", "/") and not is_web):
        raise ConfigError(
            f"--listen {text!r} is not understood: use mqtt://HOST:PORT, such as mqtt://0.0.0.0:1883, "
            "or mqtts://, ws:// or wss://"
        )
    if is_web and find_spec("websockets") is None:
        raise ConfigError(f"--listen {text} needs the extra mqtt: pip install 'rsmq[mqtt]'")
    port = PORTS[parts.scheme] if port is None else port
    return Address(parts.hostname, port, parts.scheme in ("mqtts", "wss"), is_web)


def tls_context(options: GatewayOptions) -> ssl.SSLContext:
    """The TLS settings of the listeners. Raises ConfigError for a certificate that cannot be used."""
    if options.certificate is None:
        raise ConfigError(
            "mqtts:// and wss:// need --certificate, a file with the certificate and those that signed it"
        )
    if options.crl is not None and options.client_ca is None:
        raise ConfigError("--crl needs --client-ca: only certificates of clients are looked up in it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificates(context, options)
    return context


def load_certificates(context: ssl.SSLContext, options: GatewayOptions) -> None:
    """Read the files into TLS settings, also again. Raises ConfigError."""
    assert options.certificate is not None
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {options.certificate} cannot be used: {error}") from None
    if options.client_ca is None:
        return
    try:
        context.load_verify_locations(options.client_ca)
        if options.crl is not None:
            context.load_verify_locations(options.crl)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the authorities of clients cannot be used: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
