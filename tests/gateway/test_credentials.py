"""Tokens, client certificates, the PROXY protocol, and limits of one address and one client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
from base64 import urlsafe_b64encode as b64
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import aiomqtt
import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from rsmq.errors import ConfigError, Malformed
from rsmq.gateway import GatewayOptions
from rsmq.gateway.connections.auth import Gatekeeper
from rsmq.gateway.connections.peer import is_in, networks, read_proxy, user_of
from rsmq.gateway.connections.tokens import Tokens
from rsmq.gateway.options import tls_context
from rsmq.testing.proxy import Proxy
from tests.gateway import packets as p
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import SECONDS, RawClient
from tests.servers import Server

V2 = b"\r\n\r\n\0\r\nQUIT\n"
AUDIENCE = "mqtt.example"


def ends(**delta: float) -> datetime:
    return datetime.now(UTC) + timedelta(**delta)


def pem(key: Any) -> str:
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return str(key.public_key().public_bytes(*form).decode())


@pytest.fixture(scope="module")
def keys() -> tuple[Any, Any]:
    """Two that may sign, as while keys are changed."""
    return ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)


def revoked(authority: trustme.CA, *certificates: trustme.LeafCert) -> bytes:
    """The list of an authority."""
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    key: Any = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    made = x509.CertificateRevocationListBuilder().issuer_name(issuer.subject)
    made = made.last_update(ends(days=-1)).next_update(ends(days=9))
    for each in certificates:
        number = x509.load_pem_x509_certificate(each.cert_chain_pems[0].bytes()).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(ends(days=-1))
        made = made.add_revoked_certificate(entry.build())
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def lost(authority: trustme.CA) -> trustme.LeafCert:
    """The certificate of a device that was stolen."""
    return authority.issue_cert("lost.example", common_name="lost")


@pytest.fixture(scope="module")
def guarded(
    server: Server, fleet_prefix: str, tmp_path_factory: pytest.TempPathFactory, keys: tuple[Any, Any],
    authority: trustme.CA, lost: trustme.LeafCert,
) -> Iterator[GatewayProcess]:  # fmt: skip
    """A gateway that knows tokens and certificates, and admits no other client."""
    path = tmp_path_factory.mktemp("credentials")
    (path / "jwt.pem").write_text("".join(map(pem, keys)))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(path / "server.pem")
    authority.cert_pem.write_to_path(path / "ca.pem")
    (path / "crl.pem").write_bytes(revoked(authority, lost))
    (path / "acl").write_text("user ada\ntopic readwrite ada/#\nuser sensor-1\ntopic write sensors/1\n")
    with GatewayProcess(
        server.url, fleet_prefix, schemes=["mqtt", "mqtts"], anonymous=False, acl_file=str(path / "acl"),
        certificate=str(path / "server.pem"), client_ca=str(path / "ca.pem"), crl=str(path / "crl.pem"),
        jwt_key=str(path / "jwt.pem"), jwt_audience=AUDIENCE, user_as_client_id=True,
    ) as running:  # fmt: skip
        yield running


async def test_a_token_is_a_password_for_its_user_and_until_it_ends(
    guarded: GatewayProcess, keys: tuple[Any, Any]
) -> None:
    """Signed by one of the keys, with the right audience; no algorithm is no signature."""
    claims = {"sub": "ada", "exp": ends(minutes=5), "aud": AUDIENCE}
    good = jwt.encode(claims, keys[0], "ES256")
    wrong = [
        jwt.encode(claims, rsa.generate_private_key(65537, 2048), "RS256"),
        jwt.encode(claims | {"exp": ends(minutes=-5)}, keys[0], "ES256"),
        jwt.encode(claims | {"nbf": ends(minutes=4)}, keys[0], "ES256"),
        jwt.encode(claims | {"aud": "other"}, keys[0], "ES256"),
        jwt.encode({"sub": "ada", "aud": AUDIENCE}, keys[0], "ES256"),
        jwt.encode({"exp": ends(minutes=5), "aud": AUDIENCE}, keys[0], "ES256"),
        jwt.encode(claims, None, "none"),
        "eyJ", "eyJ.eyJ.x", good[:-9] + "AAAAAAAAA",
    ]  # fmt: skip
    for level, codes in ((4, (4, 5)), (5, (0x86, 0x87))):
        for token in wrong:
            one = await RawClient(guarded.port, level).connect("ada", username="ada", password=token.encode())
            assert one.connack is not None
            assert one.connack.reason == codes[0], token
            one.abort()
        none = await RawClient(guarded.port, level).connect("ada")
        assert none.connack is not None
        assert none.connack.reason == codes[1]
        none.abort()
        for token, user in ((good, "ada"), (jwt.encode(claims, keys[1], "RS256"), "")):
            one = await RawClient(guarded.port, level).connect("ada", username=user, password=token.encode())
            assert one.connack is not None
            assert one.connack.reason == 0
            assert list(await one.subscribe(("ada/x", 1), ("bob/x", 1))) == [1, 0x80 if level == 4 else 0x87]
            one.abort()
    for client, user, code in (("bob", "ada", 0x85), ("ada", "bob", 0x86)):
        one = await RawClient(guarded.port, 5).connect(client, username=user, password=good.encode())
        assert one.connack is not None
        assert one.connack.reason == code
        one.abort()
    short = jwt.encode(claims | {"exp": ends(seconds=2)}, keys[0], "ES256")
    one = await RawClient(guarded.port, 5).connect("ada", username="ada", password=short.encode())
    last = await one.ended()
    assert last is not None
    assert last.reason == 0x87
    one.abort()


def test_the_kind_of_the_key_decides_which_algorithms_count(tmp_path: Path, keys: tuple[Any, Any]) -> None:
    """A token that is signed with the text of the public key as if it were a secret is refused."""
    path, claims = tmp_path / "key", {"sub": "ada", "exp": ends(minutes=5)}
    path.write_text(pem(keys[1]))
    head, body, _ = jwt.encode(claims, "x" * 32, "HS256").split(".")
    sign = hmac.new(pem(keys[1]).encode(), f"{head}.{body}".encode(), hashlib.sha256).digest()
    assert Tokens(path, None, None).check(f"{head}.{body}.{b64(sign).decode().rstrip('=')}".encode()) is None
    assert Tokens(path, None, None).check(jwt.encode(claims, keys[1], "PS256").encode()) is not None
    path.write_text("s" * 40 + "\n")
    assert Tokens(path, None, None).check(jwt.encode(claims, "s" * 40, "HS256").encode()) is not None
    assert Tokens(path, None, "me").check(jwt.encode(claims, "s" * 40, "HS256").encode()) is None
    assert Tokens(path, None, None).check(jwt.encode(claims, keys[1], "RS256").encode()) is None
    for text in ("short", "-----BEGIN PRIVATE KEY-----\nxx\n-----END PRIVATE KEY-----"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="neither a public key nor a secret"):
            Tokens(path, None, None)
    for kind in ("PUBLIC KEY", "CERTIFICATE"):  # also when the files of a running gateway are read again
        path.write_text(f"{pem(keys[1])}\n-----BEGIN {kind}-----\nMIIB\n-----END {kind}-----\n")
        with pytest.raises(ConfigError, match="its key 2 cannot be read"):
            Tokens(path, None, None)


def client_tls(authority: trustme.CA, certificate: trustme.LeafCert | None) -> ssl.SSLContext:
    """A client's side."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


async def test_a_certificate_is_enough_and_names_the_user(
    guarded: GatewayProcess, authority: trustme.CA, lost: trustme.LeafCert
) -> None:
    """Without one, with one of another authority, or with a revoked one, the handshake fails."""
    port, sensor = guarded.ports[1], authority.issue_cert("sensor-1.example", common_name="sensor-1")
    foreign = trustme.CA().issue_cert("sensor-1.example", common_name="sensor-1")
    async with asyncio.timeout(SECONDS):
        options: dict[str, Any] = {"protocol": aiomqtt.ProtocolVersion.V5, "tls_context": client_tls(authority, sensor)}
        async with aiomqtt.Client("localhost", port, identifier="sensor-1", **options) as client:
            await client.publish("sensors/1", b"21", qos=1)
            codes: Any = await client.subscribe("sensors/1", qos=1)
            assert [each.value for each in codes] == [0x87]
        for each, name, wanted in (
            (sensor, "sensor-1", b"\0"), (sensor, "sensor-2", b"\x85"), (None, "sensor-1", b""),
            (foreign, "sensor-1", b""), (lost, "lost", b""),
        ):  # fmt: skip
            head, writer = b"", None
            with suppress(ssl.SSLError, OSError):
                reader, writer = await asyncio.open_connection("localhost", port, ssl=client_tls(authority, each))
                writer.write(p.connect(name, 5))
                head = await reader.read(4)
            if writer is not None:
                writer.transport.abort()
            assert head[3:] == wanted, name


async def test_a_new_certificate_is_shown_after_the_files_are_read_again(authority: trustme.CA, tmp_path: Path) -> None:
    """The listener stays; one that cannot be read changes nothing."""
    path = tmp_path / "server.pem"
    authority.issue_cert("localhost", common_name="old").private_key_and_cert_chain_pem.write_to_path(path)
    keeper = Gatekeeper(GatewayOptions(anonymous=True, certificate=path))
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=keeper.encryption)
    port, shown = server.sockets[0].getsockname()[1], list[str]()
    for each in ("old", "new", "none"):
        if each == "none":
            path.write_text("none")
            with pytest.raises(ConfigError, match="cannot be used"):
                keeper.load()
        else:
            made = authority.issue_cert("localhost", common_name=each)
            made.private_key_and_cert_chain_pem.write_to_path(path)
            keeper.load()
        _, writer = await asyncio.open_connection("localhost", port, ssl=client_tls(authority, None))
        shown.append(user_of(writer.get_extra_info("peercert"), "cn"))
        writer.transport.abort()
    server.close()
    assert shown == ["old", "new", "new"]


def test_wrong_files_of_authorities_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(path)
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="--crl needs --client-ca"):
        tls_context(GatewayOptions(certificate=path, crl=path))
    with pytest.raises(ConfigError, match="authorities of clients"):
        tls_context(GatewayOptions(certificate=path, client_ca=tmp_path / "bad.pem"))
    for name_of, found in (("cn", "a"), ("san", "b.example")):
        certificate = {"subject": ((("commonName", "a"),),), "subjectAltName": (("IP", "::1"), ("DNS", "b.example"))}
        assert user_of(certificate, name_of) == found  # type: ignore[arg-type]
        assert user_of({}, name_of) == ""  # type: ignore[arg-type]


# -- the PROXY protocol ------------------------------------------------------------------------------------------------


def binary(source: str, command: int = 0x21, more: bytes = b"") -> bytes:
    """A header of version 2."""
    packed = ip_address(source).packed
    body = packed * 2 + b"\0\1\0\2" + more
    return V2 + bytes((command, 0x11 if len(packed) == 4 else 0x21)) + len(body).to_bytes(2, "big") + body


HEADERS = {
    b"PROXY TCP4 192.0.2.1 10.0.0.1 5000 1883\r\n": "192.0.2.1", b"PROXY TCP6 2001:db8::1 ::1 1 2\r\n": "2001:db8::1",
    b"PROXY UNKNOWN\r\n": None, b"PROXY UNKNOWN ff:: ff:: 1 2\r\n": None, binary("192.0.2.1"): "192.0.2.1",
    binary("2001:db8::1", more=b"\x04\0\1x"): "2001:db8::1", binary("192.0.2.1", 0x20): None,
    V2 + b"\x21\0\0\0": None,
}  # fmt: skip


@pytest.mark.parametrize(("header", "address"), HEADERS.items())
def test_a_proxy_header_is_read_wherever_it_is_cut(header: bytes, address: str | None) -> None:
    assert all(read_proxy(header[:at]) is None for at in range(len(header)))
    assert read_proxy(header + b"\x10\0") == (address, len(header))


@pytest.mark.parametrize("data", [
    b"\x10\x0c\0\4MQTT", b"GET / HTTP/1.1", b"PROXY TCP4 1.2.3.4\r\n", b"PROXY TCP4 ::1 ::1 1 2\r\n",
    b"PROXY " + b"x" * 200,
    b"PROXY TCP4 1.2.3.4 1.2.3.4 a b\r\n", V2 + b"\x31\x11\0\x0c" + bytes(12), V2 + b"\x22\x11\0\x0c" + bytes(12),
    V2 + b"\x21\x11\0\4" + bytes(4), V2 + b"\x21\x11\xff\xff",
])  # fmt: skip
def test_a_malformed_proxy_header_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_proxy(data)


@given(st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(lambda rest: V2 + rest),
                 st.text(max_size=64).map(lambda rest: b"PROXY " + rest.encode())))  # fmt: skip
def test_any_bytes_are_a_header_or_malformed(data: bytes) -> None:
    try:
        found = read_proxy(data)
    except Malformed:
        return
    assert found is None or found[1] <= len(data)


def test_networks_know_their_addresses() -> None:
    known = networks(["10.0.0.0/8", "::1"])
    assert [is_in(each, known) for each in ("10.1.2.3", "::ffff:10.1.2.3", "::1", "11.0.0.1", "", "x")] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="use an address, or a network"):
        networks(["10.0.0.1/8"])


async def test_a_load_balancer_says_whom_it_connects_and_an_address_has_a_limit(
    server: Server, fleet_prefix: str, tmp_path: Path
) -> None:
    """Behind it, two most_per_address are the most. It says nothing for itself; a wrong header closes."""
    with GatewayProcess(
        server.url, fleet_prefix, proxies=["127.0.0.0/8"], most_per_address=2, most_packets=50, connect_timeout=2,
    ) as gateway:  # fmt: skip

        async def connected(header: bytes, name: str) -> RawClient | None:
            one = await RawClient(gateway.port, 5).open()
            data = header + p.connect(name, 5)
            for at in range(0, len(data), 16):
                one.send(data[at : at + 16])
            try:
                assert (await one.take(2)).reason == 0
            except (asyncio.IncompleteReadError, ConnectionError):
                one.abort()
                return None
            return one

        silent = await RawClient(gateway.port).open()
        headers = [binary("192.0.2.1"), b"PROXY TCP4 192.0.2.1 10.0.0.1 5000 1883\r\n", binary("192.0.2.1")]
        made = [await connected(header, f"p{at}") for at, header in enumerate(headers)]
        assert [each is not None for each in made] == [True, True, False]
        other = await connected(binary("192.0.2.2"), "p4")
        health = await connected(binary("127.0.0.1", 0x20), "health")
        assert None not in (other, health)
        assert await connected(b"", "none") is None
        assert made[0] is not None
        await made[0].disconnect()
        again = await connected(headers[0], "p5")
        assert again is not None
        again.send(p.PING * 49)
        for _ in range(49):
            await again.take(13)
        again.send(p.PING * 200)
        last = await again.ended()
        assert last is not None
        assert last.reason == 0x96
        assert await silent.ended() is None  # the header has not come
        for each in (*made, other, health, again, silent):
            if each is not None:
                each.abort()


class Balancer(Proxy):
    """Begins each connection with a header, in pieces of so many bytes; the last one has the first bytes of TLS."""

    def __init__(self, target: int, header: bytes, size: int) -> None:
        super().__init__(target)
        self.header, self.size = header, size

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("peername")[1] == self._target:
            data = self.header + await reader.read(1 << 16)
            for at in range(0, len(data), self.size):
                writer.write(data[at : at + self.size])
                await writer.drain()
        await super()._pump(reader, writer)


@pytest.mark.parametrize("loop", ["", "uvloop"])
async def test_tls_begins_behind_the_header_of_a_load_balancer(
    server: Server, fleet_prefix: str, authority: trustme.CA, tmp_path: Path, loop: str, monkeypatch: Any
) -> None:
    """mqtts and wss, of both loops: with a certificate of the client, and its address for the limit."""
    monkeypatch.setenv("UVLOOP", loop)
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trusted = client_tls(authority, authority.issue_cert("a.example", common_name="ada"))
    with GatewayProcess(
        server.url, f"{fleet_prefix}{loop}", schemes=["mqtts", "wss"], proxies=["127.0.0.0/8"], most_per_address=1,
        certificate=str(tmp_path / "server.pem"), client_ca=str(tmp_path / "ca.pem"), connect_timeout=3,
        anonymous=False,
    ) as gateway:  # fmt: skip
        silent = await RawClient(gateway.port).open()
        silent.send(b"PROXY TCP4")

        def client(balancer: Balancer, name: str, **more: Any) -> aiomqtt.Client:
            return aiomqtt.Client(
                "localhost", balancer.port, identifier=name, tls_context=trusted, timeout=SECONDS, **more
            )

        async with (
            Balancer(gateway.ports[0], binary("192.0.2.1", more=b"\x04\0\1x"), 7) as first,
            Balancer(gateway.ports[1], b"PROXY TCP4 192.0.2.2 10.0.0.1 5000 443\r\n", 1 << 16) as second,
            Balancer(gateway.ports[0], binary("192.0.2.1"), 1 << 16) as third,
            Balancer(gateway.ports[0], b"nonsense", 1 << 16) as wrong, Balancer(gateway.ports[0], b"", 1 << 16) as none,
            client(first, "ada") as one, client(second, "ben", transport="websockets") as two,
        ):  # fmt: skip
            for subscriber, publisher in ((one, two), (two, one)):
                await subscriber.subscribe(f"{fleet_prefix}/x", qos=1)
                await publisher.publish(f"{fleet_prefix}/x", b"hello", qos=1)
                assert (await anext(subscriber.messages)).payload == b"hello"
                await subscriber.unsubscribe(f"{fleet_prefix}/x")
            for refused in (third, wrong, none):
                answer = b""
                with suppress(OSError):  # the handshake fails, or the connection is closed behind it
                    reader, writer = await asyncio.open_connection("localhost", refused.port, ssl=trusted)
                    writer.write(p.connect("cleo"))
                    answer = await reader.read()
                    writer.transport.abort()
                assert answer == b""
        assert await silent.ended() is None
        silent.abort()
        assert "192.0.2.1 has its most connections" in gateway.log()
        assert gateway.log().count("connections of load balancers are closed") == 1  # in ten seconds
