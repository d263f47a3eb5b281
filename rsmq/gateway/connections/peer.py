"""Who is at the other end of a socket: its address, also behind a load balancer, and the name in its certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, NamedTuple

from rsmq.errors import ConfigError, Malformed
from rsmq.gateway.options import NameOf

Network = IPv4Network | IPv6Network

V1: Final = b"PROXY "
LONGEST_V1: Final = 107
V2: Final = b"\r\n\r\n\0\r\nQUIT\n"
HEAD: Final = 16
LONGEST_V2: Final = 4096
ADDRESSES: Final = {1: 4, 2: 16}
"""Bytes of an address, by family."""


class Peer(NamedTuple):
    """`user` is the name in a certificate that was asked for: empty if it has none, and None if none was asked for."""

    address: str = ""
    user: str | None = None


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Addresses and networks, such as 10.0.0.0/8. Raises ConfigError."""
    try:
        return tuple(ip_network(each) for each in texts)
    except ValueError as error:
        raise ConfigError(f"--proxy: {error}: use an address, or a network such as 10.0.0.0/8") from None


def is_in(address: str, known: Sequence[Network]) -> bool:
    """Whether an address belongs to one of these networks."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in each for each in known)


def user_of(certificate: Mapping[str, Any], name_of: NameOf) -> str:
    """The name in a verified certificate: its common name, or the first alternative name. Empty if it has none."""
    if name_of == "san":
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "email")]
    else:
        pairs = [pair for part in certificate.get("subject", ()) for pair in part]
        names = [value for key, value in pairs if key == "commonName"]
    return str(names[0]) if names else ""


def read_proxy(data: bytes) -> tuple[str | None, int] | None:
    """The header of the PROXY protocol, version 1 or 2: the client's address, and how many bytes it has.

    The address is None if the load balancer speaks for itself (its health check). Returns None if the header is not
    complete. Raises Malformed.
    """
    if data.startswith(V2[: len(data)]):
        return read_v2(data) if len(data) >= HEAD else None
    if not data.startswith(V1[: len(data)]):
        raise Malformed("the load balancer has sent no header of the PROXY protocol")
    end = data.find(b"\r\n", 0, LONGEST_V1)
    if end < 0:
        if len(data) >= LONGEST_V1:
            raise Malformed("the header of the PROXY protocol has no end")
        return None
    words = data[:end].decode("ascii", "replace").split(" ")
    if words[1] == "UNKNOWN":
        return None, end + 2
    try:
        version = {"TCP4": IPv4Address, "TCP6": IPv6Address}[words[1]]
        source, *_ = (str(version(words[2])), version(words[3]), int(words[4]), int(words[5]))
    except (KeyError, IndexError, ValueError):
        raise Malformed("the header of the PROXY protocol is malformed") from None
    return source, end + 2


def read_v2(data: bytes) -> tuple[str | None, int] | None:
    """The binary form."""
    command, family = data[12], data[13] >> 4
    size = HEAD + int.from_bytes(data[14:HEAD], "big")
    if command not in (0x20, 0x21) or size > LONGEST_V2:
        raise Malformed("the header of the PROXY protocol is malformed")
    if len(data) < size:
        return None
    width = ADDRESSES.get(family, 0)
    if command == 0x20 or not width:
        return None, size
    if size < HEAD + 2 * width + 4:
        raise Malformed("the header of the PROXY protocol is too short for its addresses")
    return str(ip_address(data[HEAD : HEAD + width])), size
