"""AES-256-GCM with a subkey for each message: the golden vectors, and what does not decrypt."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq import ConfigError
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.codecs.encrypt import parts
from rsmq.errors import CannotDecode, Malformed, TooLarge, WrongBody
from rsmq.model.body import check_ref
from rsmq.model.encoding import NO_CODECS, Binding, Encoding

ROOT = Path(__file__).parents[2]
VECTOR_KEY = bytes(range(32))
KEYRING = Keyring({"k7": VECTOR_KEY, "k6": b"6" * 32})
SEALING = Encoding([Encrypt(KEYRING)])
BOTH = Encoding([Zstd(above=0), Encrypt(KEYRING)])


def vectors() -> list[dict[str, Any]]:
    """Those on the page of the wire format."""
    page = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    tables = page.split("\n## Encoded payloads\n")[1].split("\n## ")[0].split("```json\n")[1:]
    return [vector for table in tables for vector in json.loads(table.split("```")[0])]


def binding(message_id: str = "m", key: str | None = None, kind: str = "text/plain", enc: str = "") -> Binding:
    """What a ciphertext belongs to."""
    return Binding(message_id.encode(), None if key is None else key.encode(), kind.encode(), enc.encode())


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["id"][-4:])
def test_the_golden_vectors_are_what_is_written_and_read(vector: dict[str, Any]) -> None:
    """Other languages check themselves against the page, and so does this one."""
    payload, stored = bytes.fromhex(vector["payload"]), bytes.fromhex(vector["data"])
    about = binding(vector["id"], vector["key"], vector["type"], vector["enc"])
    if "body" in vector:
        about = about._replace(body=bytes.fromhex(vector["body"]))
        assert check_ref(vector["ref"].encode(), "orders") == vector["ref"]
        with pytest.raises(WrongBody):
            BOTH.undo(stored, about._replace(body=b"another"))
    assert BOTH.undo(stored, about) == payload
    if vector["enc"] == "a256gcm=k7":  # another version of zstd may compress otherwise
        assert SEALING.encode(payload, vector["id"], vector["key"], vector["type"]) == (stored, vector["enc"])


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_a_program_in_javascript_reads_the_golden_vectors() -> None:
    """The example for other languages decrypts them, and refuses one of another message."""
    example = ROOT / "examples" / "polyglot"
    command = ["node", "--test", "--test-reporter=tap", "sealed.test.js"]
    done = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=60, check=False)
    assert "# fail 0\n" in done.stdout, done.stdout + done.stderr
    passed, skipped = (int(re.findall(rf"# {word} (\d+)", done.stdout)[0]) for word in ("pass", "skipped"))
    assert (passed + skipped, skipped) in ((5, 0), (5, 1)), done.stdout  # an older Node.js has no zstd


@given(st.binary(max_size=300), st.text(max_size=20), st.none() | st.text(max_size=20), st.text(max_size=9))
@settings(max_examples=60, deadline=None)
def test_what_is_encoded_comes_back(data: bytes, message_id: str, key: str | None, kind: str) -> None:
    """Any payload with any id, key and type; encoded twice it has the same bytes."""
    message_id = f"m{message_id}".encode(errors="ignore").decode()
    key = None if key is None else key.encode(errors="ignore").decode()
    kind = kind.encode(errors="ignore").decode()
    for encoding in (SEALING, BOTH):
        stored, enc = encoding.encode(data, message_id, key, kind)
        assert encoding.encode(data, message_id, key, kind) == (stored, enc)
        assert encoding.undo(stored, binding(message_id, key, kind, enc)) == data


def shared_nonces() -> int:
    """How many pairs of different messages have one nonce."""
    messages = [
        ("m", "a", "t", b"x"), ("m", "b", "t", b"x"), ("m", None, "t", b"x"), ("m", "", "t", b"x"),
        ("m", "a", "u", b"x"), ("m", "a", "t", b"y"), ("n", "a", "t", b"x"), ("ma", "", "t", b"x"),
    ]  # fmt: skip
    sealed = [SEALING.encode(data, message_id, key, kind)[0] for message_id, key, kind, data in messages]
    other = Encoding([Encrypt(Keyring({"k8": VECTOR_KEY}))]).encode(b"x", "m", "a", "t")[0]
    return sum(one[:12] == two[:12] for one, two in combinations([*sealed, other], 2))


def moves() -> list[str]:
    """What of a message may differ from what it was sealed with, and it decrypts all the same."""
    stored, enc = SEALING.encode(b"hello", "m", "a", "t")
    own = binding("m", "a", "t", enc)
    others = {
        "id": binding("n", "a", "t", enc), "key": binding("m", "b", "t", enc),
        "no key": binding("m", None, "t", enc), "type": binding("m", "a", "u", enc),
    }  # fmt: skip
    assert Encrypt(KEYRING).undo(stored, "k7", own, 100) == b"hello"
    found = list[str]()
    for name, other in others.items():
        with suppress(Malformed):
            Encrypt(KEYRING).undo(stored, "k7", other, 100)
            found.append(name)
    return found


def test_no_two_different_messages_share_a_nonce() -> None:
    """If anything differs, the nonce does: of one subkey and nonce, two ciphertexts would give a third one."""
    assert shared_nonces() == 0


def test_a_sealed_payload_moves_to_no_other_message() -> None:
    """Nor to another ordering key or content type of its own."""
    assert moves() == []


LEFT_OUT: list[tuple[Any, bool, list[str]]] = [
    (lambda *values: parts(*without(values, 1)), True, ["key", "no key"]),
    (lambda *values: parts(*without(values, 2)), True, ["type"]),
    (lambda *values: parts(*[b"" if each is None else each for each in values]), True, []),
    (lambda *values: b"".join(each or b"" for each in values), True, []),
]


def without(values: tuple[bytes | None, ...], position: int) -> list[bytes | None]:
    """What is bound to a message, but for one part of it."""
    return [b"" if len(values) == 4 and at == position else each for at, each in enumerate(values)]


@pytest.mark.parametrize(
    ("instead", "shares", "found"), LEFT_OUT, ids=["ordering key", "content type", "no key", "lengths"]
)
def test_a_rule_of_the_cipher_that_is_left_out_is_found(
    monkeypatch: pytest.MonkeyPatch, instead: Any, shares: bool, found: list[str]
) -> None:
    """A part that is not bound, or parts without their lengths, share a nonce, or let a payload move."""
    monkeypatch.setattr("rsmq.codecs.encrypt.parts", instead)
    assert (shared_nonces() > 0, moves()) == (shares, found)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_what_is_changed_is_malformed(data: st.DataObject) -> None:
    """Any other bytes, shorter ones too, under any `enc`, raise one of two errors: nothing else comes out."""
    stored, enc = BOTH.encode(b"hello " * 20, "m", "a")
    kind = data.draw(st.sampled_from(["bytes", "flip", "cut", "enc"]))
    if kind == "bytes":
        stored = data.draw(st.binary(max_size=64))
    elif kind == "flip":
        at = data.draw(st.integers(0, len(stored) - 1))
        stored = stored[:at] + bytes([stored[at] ^ data.draw(st.integers(1, 255))]) + stored[at + 1 :]
    elif kind == "cut":
        stored = stored[: data.draw(st.integers(0, len(stored) - 1))]
    else:
        enc = data.draw(st.text(max_size=40) | st.sampled_from(["a256gcm", "a256gcm=", "zstd=k7", "zstd;", ";", "k7"]))
    with pytest.raises((Malformed, CannotDecode)):
        BOTH.undo(stored, Binding(b"m", b"a", b"application/json", enc.encode(errors="ignore")))


@pytest.mark.parametrize(
    ("enc", "needs"),
    [("a256gcm=k9", "key k9"), ("zstd;a256gcm=k9", "key k9"), ("br", "coding br"), ("br;a256gcm=k7", "coding br")],
)
def test_what_is_missing_is_named(enc: str, needs: str) -> None:
    """The key's id, or the coding; what can be undone before it is."""
    data = b"x" * 40
    if enc == "br;a256gcm=k7":
        data = Encrypt(KEYRING).seal(b"x", binding(enc=enc))
    with pytest.raises(CannotDecode, match=needs) as caught:
        BOTH.undo(data, binding(enc=enc))
    assert caught.value.needs == needs


def test_a_process_without_codecs_can_undo_nothing() -> None:
    """It says what it needs."""
    with pytest.raises(CannotDecode, match="key k1"):
        NO_CODECS.undo(b"x" * 40, binding(enc="zstd;a256gcm=k1"))


def test_codecs_in_another_order_are_refused() -> None:
    """With the reason: what is encrypted does not become smaller."""
    with pytest.raises(ConfigError, match="Put the one that compresses first"):
        Encoding([Encrypt(KEYRING), Zstd()])
    with pytest.raises(ConfigError, match="two of them compress"):
        Encoding([Zstd(), Zstd()])
    with pytest.raises(ConfigError, match="is no codec"):
        Encoding([Zstd])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="takes a keyring"):
        Encrypt({"k1": b"x" * 32})  # type: ignore[arg-type]


def test_a_payload_above_the_decoded_limit_is_refused() -> None:
    """A publisher refuses what its readers would."""
    with pytest.raises(TooLarge, match="RSMQ_DECODED_LIMIT"):
        Encoding([Zstd()], limit=1000).encode(b" " * 1001, "m")
