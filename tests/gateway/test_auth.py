"""Password and ACL files in Mosquitto's formats, and callbacks."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rsmq.errors import ConfigError
from rsmq.gateway.connections import auth
from rsmq.gateway.connections.auth import Gatekeeper, check_password, read_passwords
from rsmq.gateway.options import GatewayOptions, split_listen, tls_context
from rsmq.gateway.protocol.packet import RefusedPacket
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server

ACL = """
topic read public/#
user ada
topic sensors/ada/#
topic deny sensors/ada/secret
topic write out/+
pattern readwrite own/%c/#
pattern read user/%u
"""
ARGON2ID = (
    "$argon2id$v=19$m=47104,t=1,p=1$AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0"
    "+Pw$iTIHQdb9h7b5mMKhIQqgh1QFu9OSg25IMqs+jEUEiufmIhuso+CYzJ7ZyK3XKuN1LFWAbLW67WBuWpmP78raGg"
)
"""Of `söcret`, by libargon2, with the costs and lengths of mosquitto_passwd 2.1."""


def hashed(password: bytes, rounds: int = 101) -> str:
    """A line of mosquitto_passwd 2.0."""
    salt = b"0123456789ab"
    found = hashlib.pbkdf2_hmac("sha512", password, salt, rounds)
    return f"$7${rounds}${base64.b64encode(salt).decode()}${base64.b64encode(found).decode()}"


def test_passwords_of_mosquitto_are_checked(tmp_path: Path) -> None:
    assert check_password(hashed(b"secret"), b"secret")
    assert not check_password(hashed(b"secret"), b"other")
    assert not check_password(hashed(b""), b""), "of a client without a password, or with an empty one"
    old = base64.b64encode(hashlib.sha512(b"pw" + b"salt").digest()).decode()
    assert check_password(f"$6${base64.b64encode(b'salt').decode()}${old}", b"pw")
    assert check_password(ARGON2ID, "söcret".encode())
    assert not check_password(ARGON2ID, b"other")
    assert not check_password(ARGON2ID, b"")
    spoiled = (ARGON2ID[:-2], ARGON2ID.replace("v=19", "v=x"), ARGON2ID[:40], "$argon2id$")
    for broken in ("", "$7$", "$7$x$y$z", "$8$1$2$3", "plain", "$7$101$!!$!!", *spoiled):
        assert not check_password(broken, b"")
    if (tool := shutil.which("mosquitto_passwd")) is not None:
        path = tmp_path / "passwords"
        subprocess.run([tool, "-b", "-c", str(path), "ada", "söcret"], check=True, capture_output=True)
        assert check_password(path.read_text().strip().partition(":")[2], "söcret".encode())


async def test_an_unknown_user_is_compared_with_a_hash_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the answer takes as long as that to a known one: the hashes of Mosquitto 2.1 take ten times those of 2.0,
    or a thousand times. And it is refused with that user's password, too."""
    stored, compared = hashed(b"secret", 1000), list[str]()
    (tmp_path / "passwords").write_text(f"ada:{stored}\n")
    keeper = Gatekeeper(GatewayOptions(password_file=tmp_path / "passwords"))
    monkeypatch.setattr(
        auth, "check_password", lambda text, given: compared.append(text) or check_password(text, given)
    )
    with pytest.raises(RefusedPacket):
        await keeper.admit("c", "bob", b"secret", None)
    assert (await keeper.admit("c", "ada", b"secret", None)).user == "ada"
    assert compared == [stored, stored]


def test_a_password_file_with_argon2id_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when it is read, and not at the first client."""
    (tmp_path / "passwords").write_text(f"ada:{ARGON2ID}\n")
    Gatekeeper(GatewayOptions(password_file=tmp_path / "passwords"))
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.kdf.argon2", None)
    with pytest.raises(ConfigError, match=r"Argon2id need the extra mqtt: pip install -U 'rsmq\[mqtt\]'"):
        Gatekeeper(GatewayOptions(password_file=tmp_path / "passwords"))


def test_rules_of_an_acl_file_decide(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    path.write_text(ACL)
    keeper = Gatekeeper(GatewayOptions(anonymous=True, acl_file=path))
    for user, access, topic, wanted in [
        (None, "read", "public/x", True), (None, "write", "public/x", False), (None, "read", "sensors/ada/1", False),
        ("ada", "read", "sensors/ada/1", True), ("ada", "write", "sensors/ada/1", True),
        ("ada", "read", "sensors/ada/secret", False), ("ada", "read", "sensors/ada/#", True),
        ("ada", "read", "sensors/#", False), ("ada", "read", "#", False), ("ada", "read", "+/ada/1", False),
        ("ada", "write", "out/x", True), ("ada", "read", "out/x", False), ("ada", "read", "public/x", False),
        ("ada", "write", "own/c1/x", True), ("ada", "write", "own/c2/x", False), ("ada", "read", "user/ada", True),
        ("bob", "write", "own/c1/x", True), ("bob", "read", "sensors/ada/1", False), (None, "read", "user/x", False),
        ("ada", "write", "$SYS/x", False),
    ]:  # fmt: skip
        assert keeper.allows("c1", user, access, topic) is wanted, (user, access, topic)  # type: ignore[arg-type]
    assert not keeper.allows("+", "ada", "write", "own/c1/x"), "a client id with a wildcard widens no pattern"
    path.write_text("topic a#\n")
    with pytest.raises(ConfigError, match="acl:1"):
        keeper.load()
    assert keeper.allows("c1", "ada", "write", "out/x"), "what was read before stays"


@pytest.mark.parametrize("client", ["c1", "a/b", "+", "#"])
def test_a_client_id_escapes_no_rule_that_denies(tmp_path: Path, client: str) -> None:
    """One with a wildcard or a level widens no right, and a pattern that denies is for it, too."""
    (tmp_path / "acl").write_text("topic readwrite #\npattern deny locked/%c/#\n")
    keeper = Gatekeeper(GatewayOptions(anonymous=True, acl_file=tmp_path / "acl"))
    own = "c1" if client in ("+", "#") else client
    assert not keeper.allows(client, None, "write", f"locked/{own}/x")
    assert keeper.allows(client, None, "write", "open/x")
    (tmp_path / "acl").write_text("pattern read own/%c/#\npattern read all/#\n")
    keeper.load()
    assert keeper.allows(client, None, "read", f"own/{own}/x") is (client == "c1")
    assert keeper.allows(client, None, "read", "all/x"), "what has no name in it is for every name"


def test_files_of_windows_are_read(tmp_path: Path) -> None:
    """With a byte order mark and its line ends: without the mark the first user would be unknown."""
    (tmp_path / "passwords").write_bytes(f"\ufeffada:{hashed(b'secret')}\r\n".encode())
    (tmp_path / "acl").write_bytes("\ufeffuser ada\r\ntopic read public/#\r\n".encode())
    assert list(read_passwords(tmp_path / "passwords")) == ["ada"]
    keeper = Gatekeeper(GatewayOptions(anonymous=True, acl_file=tmp_path / "acl"))
    assert keeper.allows("c1", "ada", "read", "public/x")
    assert not keeper.allows("c1", "bob", "read", "public/x")


def test_a_gateway_that_lets_nobody_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--anonymous"):
        Gatekeeper(GatewayOptions()).require_some()
    (tmp_path / "bad").write_text("ada:plain\n")
    with pytest.raises(ConfigError, match="bad:1"):
        Gatekeeper(GatewayOptions(password_file=tmp_path / "bad"))
    with pytest.raises(ConfigError, match="cannot be read"):
        Gatekeeper(GatewayOptions(password_file=tmp_path / "none"))


@pytest.mark.parametrize("text", ["127.0.0.1:1883", "http://x", "mqtt://", "mqtt://x:99999", "mqtt://x/path", "wx://x"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not understood"):
        split_listen(text)
    assert split_listen("mqtt://[::1]:5") == ("::1", 5, False, False)
    assert split_listen("mqtts://host") == ("host", 8883, True, False)
    assert split_listen("wss://host/mqtt") == ("host", 443, True, True)


def test_a_wrong_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need --certificate"):
        tls_context(GatewayOptions())
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"bad\.pem cannot be used"):
        tls_context(GatewayOptions(certificate=tmp_path / "bad.pem"))


async def test_credentials_and_rights_decide_at_each_step(server: Server, fleet_prefix: str, tmp_path: Path) -> None:
    (tmp_path / "passwords").write_text(f"ada:{hashed(b'secret')}\nopen:{hashed(b'')}\n")
    (tmp_path / "acl").write_text("topic write open/#\nuser ada\ntopic private/#\ntopic deny private/hidden\n")
    with GatewayProcess(
        server.url, fleet_prefix, anonymous=False, password_file=str(tmp_path / "passwords"),
        acl_file=str(tmp_path / "acl"),
    ) as gateway:  # fmt: skip
        for level, user, password, code in [
            (4, None, None, 5), (5, None, None, 0x87), (4, "ada", b"wrong", 4), (5, "ada", b"wrong", 0x86),
            (5, "eve", b"secret", 0x86), (5, "ada", None, 0x86), (5, "ada", b"secret", 0), (4, "ada", b"secret", 0),
            (5, "open", None, 0x86), (5, "open", b"", 0x86),
        ]:  # fmt: skip
            one = await RawClient(gateway.port, level).connect("c", username=user, password=password)
            assert one.connack is not None
            assert one.connack.reason == code, (user, password)
            one.abort()
        ada = await RawClient(gateway.port, 5).connect("ada", username="ada", password=b"secret")
        assert await ada.subscribe(("private/#", 1), ("#", 1), ("open/x", 1)) == b"\1\x87\x87"
        old = await RawClient(gateway.port, 4).connect("ada-4", username="ada", password=b"secret")
        assert await old.subscribe(("private/#", 1), ("#", 1)) == b"\1\x80"
        old.abort()
        assert await ada.publish("open/x", b"no") == 0x87
        assert await ada.publish("private/hidden", b"no") == 0x87
        assert await ada.publish("private/x", b"yes") == 0
        assert (await ada.message()).payload == b"yes"
        ada.abort()
