"""Every combination of what decides who may connect, and every kind of client: a name without a proof is no name."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jwt
import pytest

from rsmq.errors import ConfigError
from rsmq.gateway.connections.auth import Gatekeeper
from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.packet import ReasonCode, RefusedPacket
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.gateway.test_auth import hashed
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("clients")

SECRET = "s" * 40
PROOFS = ("password_file", "jwt_key", "client_ca", "callback")
OTHERS = ("anonymous", "user_as_client_id")
REASONS = (ReasonCode.BAD_CREDENTIALS, ReasonCode.NOT_AUTHORIZED, ReasonCode.CLIENT_ID_NOT_VALID)
CALLED = b"the callback knows it"


class Knock(NamedTuple):
    """A client that connects as `admin`, or says nothing. `proves`: what its credentials are right for."""

    user: str | None = None
    password: bytes | None = None
    certified: str | None = None
    proves: str = ""


def token(user: str, key: str = SECRET) -> bytes:
    return jwt.encode({"sub": user, "exp": time.time() + 86_400}, key, "HS256").encode()


KNOCKS = {
    "says nothing": Knock(),
    "names admin": Knock("admin"),
    "names nobody": Knock(""),
    "names admin, any password": Knock("admin", b"x"),
    "names admin, empty password": Knock("admin", b""),
    "only a password": Knock(None, b"secret"),
    "admin and its password": Knock("admin", b"secret", proves="password_file"),
    "admin and the password of another": Knock("admin", b"other"),
    "a user that nobody knows": Knock("stranger", b"secret"),
    "admin's token": Knock(None, token("admin"), proves="jwt_key"),
    "admin's token and name": Knock("admin", token("admin"), proves="jwt_key"),
    "admin's name, the token of another": Knock("admin", token("eve")),
    "admin's token of another key": Knock("admin", token("admin", "z" * 40)),
    "admin's certificate": Knock(certified="admin", proves="client_ca"),
    "admin's certificate, another name": Knock("eve", b"x", certified="admin", proves="client_ca"),
    "a certificate without a name": Knock(certified=""),
    "what the callback knows": Knock("admin", CALLED, proves="callback"),
}


def combinations() -> Iterator[tuple[str, ...]]:
    """Of all options."""
    for size in range(len(PROOFS + OTHERS) + 1):
        yield from itertools.combinations(PROOFS + OTHERS, size)


def keeper(found: tuple[str, ...], path: Path) -> Gatekeeper:
    """A gatekeeper with these."""
    (path / "passwords").write_text(f"admin:{hashed(b'secret')}\neve:{hashed(b'other')}\n")
    (path / "key").write_text(SECRET)

    async def check(_client: str, user: str | None, password: bytes | None) -> bool:
        return (user, password) == ("admin", CALLED)

    return Gatekeeper(
        GatewayOptions(
            anonymous="anonymous" in found, user_as_client_id="user_as_client_id" in found,
            password_file=path / "passwords" if "password_file" in found else None,
            jwt_key=path / "key" if "jwt_key" in found else None,
            client_ca=path / "ca" if "client_ca" in found else None,
        ),
        check if "callback" in found else None,
    )  # fmt: skip


def expected(found: tuple[str, ...], knock: Knock, client: str) -> tuple[str | None] | None:
    """The user of a client that may connect, in a tuple; None if it may not.

    With a callback, it is asked in any case: here it lets in only the client that it knows.
    """
    proofs = [each for each in PROOFS if each in found]
    if knock.certified is not None and "client_ca" not in found:
        pytest.fail("no listener has asked for a certificate")
    if "callback" in proofs:
        only = [each for each in proofs if each not in ("callback", "jwt_key", "client_ca")]
        user = ("admin",) if knock.proves == "callback" and not only else None
    elif not proofs:
        user = (knock.user,) if "anonymous" in found else None
    elif knock.proves in proofs:
        user = ("admin",)
    else:
        says_nothing = knock == Knock()
        user = (None,) if says_nothing and "anonymous" in found else None
    return None if user is not None and "user_as_client_id" in found and user[0] != client else user


async def test_a_client_is_who_it_proves_to_be_under_every_combination_of_options(tmp_path: Path) -> None:
    """64 combinations, 17 kinds of clients, and two client ids."""
    number = 0
    for found in combinations():
        gatekeeper = keeper(found, tmp_path)
        for (name, knock), client in itertools.product(KNOCKS.items(), ("admin", "phone")):
            if knock.certified is not None and "client_ca" not in found:
                continue
            try:
                admitted = await gatekeeper.admit(client, knock.user, knock.password, knock.certified)
                got: tuple[str | None] | None = (admitted.user,)
            except RefusedPacket as error:
                is_known = error.reason in REASONS
                got = None if is_known else ("refused for another reason",)
            assert got == expected(found, knock, client), f"{found}: {name}, client id {client!r}"
            number += 1
    assert number > 1800


async def test_a_gateway_that_nobody_could_enter_does_not_start(tmp_path: Path) -> None:
    for found in combinations():
        gatekeeper = keeper(found, tmp_path)
        if set(found) <= {"user_as_client_id"}:
            with pytest.raises(ConfigError, match="no client could connect"):
                gatekeeper.require_some()
        else:
            gatekeeper.require_some()


async def test_anonymous_clients_beside_tokens_have_the_rights_of_nobody(
    server: Server, fleet_prefix: str, tmp_path: Path
) -> None:
    """Over the wire: who only names `admin` is not let in, and who says nothing may read what everybody may."""
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "acl").write_text("topic read public/#\nuser admin\ntopic readwrite #\n")
    files = {"jwt_key": str(tmp_path / "key"), "acl_file": str(tmp_path / "acl")}
    with GatewayProcess(server.url, f"{fleet_prefix}w", **files) as gateway:

        async def attempt(username: str | None = None, password: bytes | None = None) -> tuple[int, bytes]:
            one = await RawClient(gateway.port, 5).connect("", username=username, password=password)
            assert one.connack is not None
            if one.connack.reason:
                return one.connack.reason, b""
            return 0, await one.subscribe(("secret/#", 1), ("public/#", 1))

        assert await attempt() == (0, b"\x87\x01")
        assert await attempt(username="admin", password=token("admin")) == (0, b"\x01\x01")
        assert await attempt(username="admin") == (0x86, b"")
        assert await attempt(username="admin", password=b"x") == (0x86, b"")
        assert await attempt(password=b"x") == (0x86, b"")
