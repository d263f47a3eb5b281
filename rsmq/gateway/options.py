"""The options of a gateway: each with its type, its default, its bounds and what it means.

`rsmq gateway` makes its options of them.
"""

from __future__ import annotations

import ssl
from dataclasses import Field, dataclass, field, fields
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import urlsplit

from rsmq.errors import ConfigError
from rsmq.persistence.inbox_cursor import LARGEST_WINDOW

NameOf = Literal["cn", "san"]

PORTS: Final = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
MOST: Final = 1 << 31
TWO_BYTES: Final = 65_535
"""The most that a field of two bytes of a packet holds."""

T = TypeVar("T")


def option(default: T, text: str, *, lowest: int = 1, highest: int = MOST, flag: str = "") -> T:
    """A field of GatewayOptions, as the checks and the command line need it.

    `lowest` and `highest` are for numbers; a time whose `lowest` is 0 may be 0. `flag`: its name on the command line,
    where that is not the field's.
    """
    found: T = field(default=default, metadata={"text": text, "lowest": lowest, "highest": highest, "flag": flag})
    return found


class MqttAddress(NamedTuple):
    """Where to listen."""

    host: str
    port: int
    is_encrypted: bool
    is_web: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The options of a gateway. Each limit has an answer that the client can see, and a counter."""

    anonymous: bool = option(False, "Clients without credentials may connect.")
    password_file: Path | None = option(None, "Users, in the format of mosquitto_passwd.")
    acl_file: Path | None = option(None, "Rights, in the format of Mosquitto's acl_file.")
    certificate: Path | None = option(None, "For mqtts and wss: the certificate and those that signed it, as PEM.")
    key: Path | None = option(None, "Key of the certificate, if it is not in the same file.")
    client_ca: Path | None = option(
        None, "For mqtts and wss: clients must have a certificate that one of these authorities has signed, as PEM."
    )
    certificate_user: NameOf = option(
        "cn",
        "The name in a client's certificate that is its user name: the common name, or the first alternative name.",
    )
    crl: Path | None = option(None, "Client certificates that are revoked: lists of the authorities, as PEM.")
    jwt_key: Path | None = option(
        None, "Public keys as PEM, or a secret: a client may give a token in place of its password."
    )
    jwt_audience: str | None = option(None, "What `aud` of a token must have.")
    jwt_issuer: str | None = option(None, "What `iss` of a token must be.")
    user_as_client_id: bool = option(False, "A client may only use its user name as its client id.")
    proxies: tuple[str, ...] = option(
        (),
        "Load balancers that say by the PROXY protocol whom they connect: addresses, or networks such as 10.0.0.0/8.",
        flag="proxy",
    )
    origins: tuple[str, ...] = option(
        (),
        "For ws and wss: the web sites whose pages may connect, such as https://shop.example. Default: all.",
        flag="origin",
    )
    receive_maximum: int = option(20, "Messages of a client that are not acknowledged at a time.", highest=TWO_BYTES)
    window: int = option(
        100, "Messages to a client that are not acknowledged at a time; it may ask for fewer.", highest=LARGEST_WINDOW
    )
    topic_aliases: int = option(
        16, "Topic aliases in each direction of a connection; 0 is none.", lowest=0, highest=TWO_BYTES
    )
    most_connections: int = option(100_000, "Connections of this gateway.")
    most_opening: int = option(10_000, "Connections of this gateway whose CONNECT is not answered yet.")
    most_per_address: int = option(0, "Connections of this gateway from one address; 0 is no limit.", lowest=0)
    most_per_user: int = option(0, "Connections of this gateway with one user name; 0 is no limit.", lowest=0)
    most_connects: int = option(
        0,
        "Clients that connect to this gateway in a second; 0 is no limit. More wait, at most half of connect_timeout.",
        lowest=0,
    )
    most_sessions: int = option(
        0,
        "Sessions of all gateways, connected or not; 0 is no limit. A gateway counts them every five seconds.",
        lowest=0,
    )
    most_packets: int = option(0, "Packets of one client in a second; 0 is no limit.", lowest=0)
    most_messages: int = option(0, "PUBLISH packets of one client in a second; 0 is no limit.", lowest=0)
    most_bytes: int = option(0, "Bytes of one client in a second; 0 is no limit.", lowest=0)
    most_packet_bytes: int = option(
        0, "Bytes of a packet; 0: what the payload limit of the broker allows, which is also the most.", lowest=0
    )
    most_topic_bytes: int = option(TWO_BYTES, "Bytes of a topic name or filter.", highest=TWO_BYTES)
    most_levels: int = option(256, "Levels of a topic name or filter.")
    most_subscriptions: int = option(1_000, "Subscriptions of one client.")
    most_retained: int = option(100_000, "Retained messages of all gateways.")
    retained_per_subscribe: int = option(10_000, "Retained messages that a client gets for one subscription.")
    session_expiry: timedelta = option(
        timedelta(days=7), "The longest that a session is kept after its connection; 0: not at all.", lowest=0
    )
    keep_alive: timedelta = option(
        timedelta(minutes=20), "The longest keep-alive of a client of version 5; others keep theirs."
    )
    connect_timeout: timedelta = option(
        timedelta(seconds=10), "How long the first packet of a client may take, and again its answer."
    )
    sys_interval: timedelta = option(
        timedelta(seconds=10), "How often clients that read $SYS get its figures; 0 is never.", lowest=0
    )
    lease: timedelta = option(
        timedelta(seconds=6), "A gateway that is paused or cut off for longer loses its clients to the others."
    )
    full_inbox_wait: timedelta = option(
        timedelta(seconds=10),
        "How long publishers wait for a connected client whose inbox is full and that takes nothing; 0 is never.",
        lowest=0,
    )
    write_buffer: int = option(
        64 << 10,
        "Bytes that a client has not read. Above that, its messages wait in the inbox; those of QoS 0 are dropped.",
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            check(each, getattr(self, each.name))


def check(each: Field[Any], value: Any) -> None:
    """Raise ConfigError for a value that an option cannot have."""
    if any(part in ("", Path()) for part in (value if isinstance(value, tuple | list) else (value,))):
        raise ConfigError(f"{each.name} is empty: give it a value, or leave it out")
    lowest, highest = each.metadata["lowest"], each.metadata["highest"]
    kind = type(each.default)
    if kind is int and (type(value) is not int or not lowest <= value <= highest):
        raise ConfigError(f"{each.name} is {value!r}: use a number from {lowest} to {highest}")
    if kind is timedelta and not (isinstance(value, timedelta) and value >= timedelta(0)):
        raise ConfigError(f"{each.name} is {value!r}: use a timedelta that is not negative")
    if kind is timedelta and lowest and not value:
        raise ConfigError(f"{each.name} is 0: use a longer time")
    if kind is tuple and not (isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)):
        raise ConfigError(f"{each.name} is {value!r}: use several texts, such as ('10.0.0.0/8',)")
    if kind is bool and type(value) is not bool:
        raise ConfigError(f"{each.name} is {value!r}: use True or False")
    if each.name == "certificate_user" and value not in get_args(NameOf):
        raise ConfigError(f"{each.name} is {value!r}: use 'cn' or 'san'")


def split_listen(text: str) -> MqttAddress:
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
    return MqttAddress(parts.hostname, port, parts.scheme in ("mqtts", "wss"), is_web)


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
