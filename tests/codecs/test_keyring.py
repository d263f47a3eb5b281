"""Keys are read from the environment or a file, and shown nowhere."""

from __future__ import annotations

import copy
import logging
import pickle
import traceback
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rsmq import ConfigError, Settings
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.model.encoding import Binding, Encoding

ONE, TWO = b64encode(b"1" * 32).decode(), b64encode(b"2" * 32).decode()


def test_keys_come_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first is written with. A file may have a line for each; quotes and spaces are not part of them."""
    monkeypatch.setenv("RSMQ_KEYS", f' "k7={ONE}, k6={TWO}" ')
    assert Keyring.from_env().ids == ("k7", "k6")
    monkeypatch.delenv("RSMQ_KEYS")
    path = tmp_path / "keys"
    path.write_text(f"k6={TWO}\nk7={ONE}\n")
    monkeypatch.setenv("RSMQ_KEYS_FILE", str(path))
    assert Keyring.from_env("RSMQ_KEYS").ids == ("k6", "k7")
    assert Keyring.from_file(path).first.id == "k6"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one key"), (ONE, "key 1 has no id"), (f"k 7={ONE}", "no id"), ("k7=!!!", "key 1 is not base64"),
        (f"k7={ONE[:20]}", "key 1 has 15 bytes"), (f"k7={ONE},k7={TWO}", "two keys k7"), (f"={ONE}", "no id"),
        (f"{ONE}=k7", "no id"), (f"k6={TWO},k7", "key 2 has no id"), (f"k6={TWO},k7=\u00e4", "key 2 is not base64"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_explained_without_its_keys(text: str, says: str) -> None:
    """The error says which one, and what to write."""
    with pytest.raises(ConfigError, match=says) as caught:
        Keyring.read(text, "RSMQ_KEYS")
    assert ONE[:12] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_missing_variable_and_file_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What to set, or which file."""
    monkeypatch.delenv("RSMQ_KEYS", raising=False)
    with pytest.raises(ConfigError, match="neither RSMQ_KEYS nor RSMQ_KEYS_FILE is set"):
        Keyring.from_env()
    with pytest.raises(ConfigError, match="No such file"):
        Keyring.from_file(tmp_path / "gone")


WRONG_TEXTS: list[Any] = [
    f"k7={ONE},k6=short", f"k7={ONE},k6={TWO[:20]}", f"k7={ONE},k7={TWO}", f"k7={ONE},{TWO}", f"k6={TWO},k7={ONE}x",
    f"k7={ONE},k6=\u00e4", ONE, f"k7={ONE}".encode(),
]  # fmt: skip
WRONG_KEYS: list[Any] = [
    {"k7": b"1" * 32, "k6": b"2" * 31}, {"k7": b"1" * 33}, {"k7": b"1" * 32, ONE: b"2" * 32}, {"k7": ONE}, f"k7={ONE}",
]  # fmt: skip


def locals_of(make: Callable[[], object]) -> str:
    """The traceback of an error as a service for errors shows it, below the frame that has called."""
    with pytest.raises(ConfigError) as caught:
        make()
    error = caught.value
    assert (error.__cause__, error.__context__) == (None, None)
    assert error.__traceback__ is not None
    frames = error.__traceback__.tb_next
    return "".join(traceback.TracebackException(type(error), error, frames, capture_locals=True).format())


def test_keys_are_in_no_text(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Neither in `repr`, nor in a traceback with local variables, nor in a pickle, nor in the log of settings."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("RSMQ_KEYS", f"k7={ONE}")
    Settings()
    assert "RSMQ_KEYS" not in caplog.text
    keyring = Keyring.from_env()
    encoding = Encoding([Zstd(), Encrypt(keyring)])
    shown = [repr(each) for each in (keyring, keyring.first, Encrypt(keyring, required=True), encoding)]
    try:
        encoding.undo(b"x" * 40, Binding(b"m", None, b"text/plain", b"a256gcm=k7"))
    except Exception as error:
        found = traceback.TracebackException.from_exception(error, capture_locals=True)
        shown += [*found.format()]
    path = tmp_path / "keys"
    for text in WRONG_TEXTS:
        shown.append(locals_of(partial(Keyring.read, text, "here")))
        if isinstance(text, str):
            path.write_text(text, encoding="utf-8")
            monkeypatch.setenv("RSMQ_KEYS", text)
            shown += [locals_of(Keyring.from_env), locals_of(partial(Keyring.from_file, path))]
    shown += [locals_of(partial(Keyring, keys)) for keys in WRONG_KEYS]
    assert "in from_env" in shown[-len(WRONG_KEYS) - 3]
    monkeypatch.delenv("RSMQ_KEYS")
    monkeypatch.setenv("RSMQ_KEYS_FILE", f"k7={ONE}")
    shown.append(locals_of(Keyring.from_env))
    assert "is it the text of keys?" in shown[-1]
    for each in (keyring, keyring.first):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(each)
        with pytest.raises(TypeError, match="not pickled"):
            copy.deepcopy(each)
    secrets = [form for digit in "12" for form in (digit * 31, digit.encode().hex() * 31)] + [ONE[:12], TWO[:12]]
    assert len(shown) > 4 + len(WRONG_TEXTS) + len(WRONG_KEYS)
    assert [each for each in [*shown, caplog.text] if any(secret in each for secret in secrets)] == []
