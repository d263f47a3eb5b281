"""A dashboard without keys writes nothing readable beside encrypted messages."""

from __future__ import annotations

import random
from base64 import b64encode
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from rsmq import Broker, Reject, Settings
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd
from rsmq.dashboard import Role, Rules, Visitor, create_app
from rsmq.model.words import count
from tests.contract.witness import dies, letters_of
from tests.dashboard.test_extension import browsing


def random_text(size: int) -> str:
    """What does not compress below half."""
    return random.Random(1).randbytes(size // 2).hex()


FORMS = {
    "publish": {"topic": "safe", "payload": "1", "kind": "json", "confirmed": "yes"},
    "add-schedule": {"topic": "safe", "schedule": "s", "rule": "12h", "payload": "1", "confirmed": "yes"},
}


async def test_pages_of_one_message_show_a_body_from_the_store(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a message and of a dead letter, and a form that publishes a copy; the lists say where it lies. Without the
    store all of them do."""
    settings = replace(settings, preflight="warn", partitions=1)
    key = Keyring({"k1": b"1" * 32})
    broker = Broker(settings, codecs=[Encrypt(key)], offload=Offload(tmp_path, above="1kB"))
    rules = Rules(authorize=lambda _: Visitor("root", Role.ADMIN))

    @broker.handler("safe", group="g")
    async def refuse(order: dict[str, str]) -> None:
        raise Reject("no")

    async with broker:
        ref = await broker.publish("safe", {"to": "lovelace", "x": "y" * 3000})
        async with broker.running():
            await dies(broker, "safe", "g", 1)
        (letter,) = await letters_of(broker, "safe", "g")
        lists = ["/messages/safe", "/dead-letters/safe/g"]
        ones = [f"/message/safe/{ref}", f"/dead-letter/safe/g/{letter.id}", f"/publish/safe?message={ref}"]
        monkeypatch.setenv("RSMQ_KEYS", f"k1={b64encode(b'1' * 32).decode()}")
        for store, shown in ((str(tmp_path), ones), (None, [])):
            monkeypatch.setenv("RSMQ_BODIES", store) if store else monkeypatch.delenv("RSMQ_BODIES")
            async with browsing(create_app(settings, rules=rules)) as web:
                for path in (*lists, *ones):
                    page = unescape((await web.get(path)).text)
                    assert ("lovelace" in page) == (path in shown), path


async def test_pages_say_which_payloads_they_could_not_look_into(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists get none from a store, and without keys nothing is known of what is encrypted. What a replay of all that
    match asks has the number that it replays."""
    settings = replace(settings, preflight="warn", partitions=1)
    codecs, store = [Zstd(above="100B"), Encrypt(Keyring({"k1": b"1" * 32}))], Offload(tmp_path, above="1kB")
    broker = Broker(settings, codecs=codecs, offload=store)
    rules = Rules(authorize=lambda _: Visitor("root", Role.ADMIN))

    @broker.handler("safe", group="g")
    async def refuse(order: dict[str, str]) -> None:
        raise Reject("no")

    async with broker, broker.running():
        for text in ("y", "y" * 300, random_text(3000)):
            await broker.publish("safe", {"to": "ada", "text": text})
        await dies(broker, "safe", "g", 3)
    monkeypatch.setenv("RSMQ_BODIES", str(tmp_path))
    fields = {"topic": "safe", "group": "g", "where": "to=ada"}
    for keys, found, unread in (
        (f"k1={b64encode(b'1' * 32).decode()}", 2, ["in the store of bodies (zstd;a256gcm=k1;ref): 1"]),
        ("", 0, ["encrypted (k1): 2", "in the store of bodies (zstd;a256gcm=k1;ref): 1"]),
    ):
        monkeypatch.setenv("RSMQ_KEYS", keys) if keys else monkeypatch.delenv("RSMQ_KEYS")
        async with browsing(create_app(settings, rules=rules)) as web:
            for path, one in (("/messages/safe", "message"), ("/dead-letters/safe/g", "dead letter")):
                page = unescape((await web.get(f"{path}?where=to%3Dada")).text)
                what = f"The payload of {count(3 - found, one)} could not be read, so its fields are unknown"
                assert what in page
                assert all(each in page for each in unread), page
                assert "could not be read" not in unescape((await web.get(path)).text)
            asked = unescape((await web.post("/do/replay-matching", data=fields)).text)
            assert f"all that match the fields: {3 if keys else 0} dead letters" in asked


@pytest.mark.parametrize("action", FORMS)
async def test_a_dashboard_without_keys_refuses_what_would_be_readable(settings: Settings, action: str) -> None:
    """With what to do; beside a readable message it publishes."""
    settings = replace(settings, preflight="warn")
    rules = Rules(authorize=lambda _: Visitor("root", Role.ADMIN))
    async with Broker(settings, codecs=[Encrypt(Keyring({"k1": b"1" * 32}))]) as sealed, Broker(settings) as plain:
        await sealed.publish("safe", {"to": "ada"})
        async with browsing(create_app(settings, rules=rules)) as web:
            page = await web.get("/publish/safe")
            answer = await web.post(f"/do/{action}", data=FORMS[action])
            for each in (page, answer):
                assert each.status_code == 400
                assert "is encrypted (key k1), and there are no keys here: set RSMQ_KEYS" in unescape(each.text)
            await plain.publish("safe", {"to": "ada"})
            assert (await web.post(f"/do/{action}", data=FORMS[action])).status_code == 303
