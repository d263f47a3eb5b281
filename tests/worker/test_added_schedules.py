"""Schedules that no code has, beside records that another client has spoiled: each costs itself."""

from __future__ import annotations

import logging
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest

from rsmq import Broker, Message, Settings
from rsmq.codecs import Encrypt, Keyring, Offload
from rsmq.control.schedules import entry_of
from rsmq.errors import CannotDecode, ConfigError, Malformed, TooLarge
from rsmq.inspector.schedules import schedules_of
from rsmq.model.schedule_run import ScheduleRun
from rsmq.worker.added_schedules import read_schedule
from tests.codecs.stores import MemoryStore
from tests.contract.witness import ask
from tests.patience import until

SPOILED = (b"\xff", b"{}", b"[]", b"7", b'{"payload": 7, "type": []}', b'{"payload": "!", "type": "text/plain"}')


@pytest.mark.parametrize("spoiled", SPOILED, ids=repr)
async def test_a_spoiled_schedule_costs_itself(
    server_url: str, prefix: str, spoiled: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its definition is none; beside it one whose topic takes no message, and one that is well."""
    broker, found = Broker(Settings(url=server_url, prefix=prefix, preflight="warn")), list[int]()

    @broker.handler("ticks", group="g", partitions=1)
    async def note(n: int) -> None:
        found.append(n)

    async with broker:
        schedules = broker.schedules
        await broker.topics.ensure("broken", 1)
        await ask(broker, "SET", broker.keys.stream("broken", 0), "no stream")
        await broker.topics.ensure("ticks", 1)
        await schedules.upsert("refused", "100ms", "broken", 2)
        await schedules.upsert("spoiled", "100ms", "ticks", 1)
        await schedules.upsert("well", "100ms", "ticks", 3)
        await ask(broker, "HSET", broker.keys.every("ticks", 0), "added|spoiled", spoiled)
        await ask(broker, "ZADD", broker.keys.schedules, 0, entry_of("ticks", "spoiled", None), 0, b"\xff|\xff")
        with caplog.at_level(logging.WARNING, "rsmq.schedule"):
            async with broker.running():
                await until(lambda: len(found) >= 3, "the one that is well ticks")
                await until(lambda: any("refused of broken" in each for each in said(caplog)), "the other one is named")
    assert set(found) == {3}
    assert sum("spoiled of ticks" in each for each in said(caplog)) == 1


async def test_an_added_schedule_that_would_publish_what_no_handler_gets_is_refused(settings: Settings) -> None:
    """The topic has no such band, and readers refuse such headers and sizes: at each tick, long after the call."""
    broker = Broker(replace(settings, preflight="warn", payload_limit=1000))
    async with broker:
        await broker.topics.ensure("ticks", 1)
        for options, problem in (
            ({"band": "urgent"}, "has no band 'urgent'"), ({"headers": {"customer": 7}}, "must be str")
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=problem):
                await broker.schedules.upsert("clock", "1h", "ticks", 1, **options)
        with pytest.raises(TooLarge):
            await broker.schedules.upsert("clock", "1h", "ticks", "x" * 1001)
        assert await ask(broker, "EXISTS", broker.keys.every("ticks", 0), broker.keys.schedules) == 0


async def test_a_tick_that_is_too_large_is_a_failed_run(settings: Settings) -> None:
    """As `publish` refuses it: nothing is stored, and the history says why."""
    broker = Broker(replace(settings, preflight="warn", payload_limit=1000, partitions=1))
    broker.handler("ticks", group="g")(refuse)
    broker.every("100ms", "ticks", name="clock")(lambda: "x" * 1001)
    async with broker.running():
        topic = await broker.topics.existing("ticks")

        async def runs() -> list[ScheduleRun]:
            states = await schedules_of(broker.client, broker.keys, [topic])
            return [each.newest for each in states if each.newest is not None]

        await until(runs, "it has run")
        (run,) = await runs()
        assert run.result == "failed"
        assert "the limit 1000" in run.error
        assert await ask(broker, "XLEN", broker.keys.stream("ticks", 0)) == 0


async def refuse(text: str) -> None:
    raise AssertionError(text)


def broker_with(server_url: str, prefix: str, *keys: str) -> Broker:
    """Its keys are named by their letters; without any it encrypts nothing."""
    codecs = [Encrypt(Keyring({each: each.encode() * 32 for each in keys}), required=True)] if keys else []
    return Broker(Settings(url=server_url, prefix=prefix, preflight="warn"), codecs=codecs)


async def test_the_payload_of_an_added_schedule_is_encrypted_and_a_worker_with_its_key_publishes_it(
    server_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without the key leads first: it publishes its own, names the key once, and lets the other one lead. Two
    ticks have other ids, so other bytes. With the same payload the record has the same bytes."""
    sealed, plain = broker_with(server_url, prefix, "a"), broker_with(server_url, prefix)
    found, others = list[object](), list[object]()

    @sealed.handler("safe", group="g", partitions=1)
    async def take(payload: str) -> None:
        found.append(payload)

    @plain.handler("open", group="g", partitions=1)
    async def take_open(payload: str) -> None:
        others.append(payload)

    async with sealed, plain:
        await sealed.topics.ensure("safe", 1)
        await plain.topics.ensure("open", 1)
        await plain.schedules.upsert("well", "100ms", "open", "x")
        records = list[bytes]()
        for _ in range(2):
            await sealed.schedules.upsert("secret", "100ms", "safe", "ada's", key="c-1")
            records.append(await ask(sealed, "HGET", sealed.keys.every("safe", 0), "added|secret"))
        with caplog.at_level(logging.ERROR, "rsmq.schedule"):
            async with plain.running():
                await until(lambda: any("needs the key a" in each for each in said(caplog)), "it is named")
                assert not found
                async with sealed.running():
                    await until(lambda: len(found) >= 2, "the one with the key leads")
                    before = len(others)
                    await until(lambda: len(others) > before, "and publishes those of the other one, readable")
        entries = await ask(sealed, "XRANGE", sealed.keys.stream("safe", 0), "-", "+")
    assert records[0] == records[1]
    assert (b"a256gcm=a" in records[0], b64encode(b"ada's") in records[0]) == (True, False)
    assert set(found) == {"ada's"}
    stored = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in entries]
    assert all(each[b"enc"] == b"a256gcm=a" for each in stored)
    assert len({each[b"data"] for each in stored}) == len(stored)
    assert sum("needs the key a" in each for each in said(caplog)) == 1


async def test_a_schedule_whose_store_is_away_holds_up_no_other(server_url: str, prefix: str) -> None:
    """Its tick is large. One of code and one that was added go on, and it ticks when the store is there again."""
    store, found = MemoryStore(), list[int]()
    settings = Settings(url=server_url, prefix=prefix, preflight="warn", partitions=1)
    broker = Broker(settings, offload=Offload(store, above="1kB"))
    broker.every("100ms", "small", name="code")(lambda: {"n": 1})

    @broker.handler("small", group="g")
    async def note(payload: dict[str, Any]) -> None:
        found.append(payload["n"])

    @broker.handler("large", group="g")
    async def note_large(payload: dict[str, Any]) -> None:
        found.append(payload["n"])

    async with broker:
        await broker.topics.ensure("large", 1)
        await broker.topics.ensure("small", 1)
        await broker.schedules.upsert("a", "100ms", "large", {"n": 3, "x": "x" * 2000})
        await broker.schedules.upsert("b", "100ms", "small", {"n": 2})
        store.is_away = True
        async with broker.running():
            await until(lambda: store.refused and found.count(1) > 5 and found.count(2) > 5, "the others tick")
            assert 3 not in found
            store.is_away = False
            await until(lambda: 3 in found, "it ticks")


async def test_the_payload_of_a_schedule_belongs_to_its_name_and_key(server_url: str, prefix: str) -> None:
    """Moved to another schedule, or under another key, it does not decrypt."""
    broker = broker_with(server_url, prefix, "a")
    async with broker:
        await broker.schedules.upsert("one", "1h", "safe", {"to": "ada"}, key="k")
        topic = await broker.topics.existing("safe")
        (found,) = [
            each for number in topic.numbers
            if (each := await ask(broker, "HMGET", broker.keys.every("safe", number), "added|one", "rule|one"))[0]
        ]  # fmt: skip
    definition, rule = found
    read = read_schedule("safe", "one", "k", definition, rule, broker.encoding).function()
    assert read == (b'{"to":"ada"}', "application/json", False)
    for name, wrong in (("two", definition), ("one", definition.replace(b'"key":"k"', b'"key":"j"'))):
        with pytest.raises(Malformed, match="does not decrypt"):
            read_schedule("safe", name, "k", wrong, rule, broker.encoding)
    with pytest.raises(CannotDecode, match="key a"):
        read_schedule("safe", "one", "k", definition, rule)


@pytest.mark.parametrize("partitions", [1, 5])
async def test_a_schedule_with_an_empty_key_ticks_and_one_that_changes_its_key_ticks_once(
    server_url: str, prefix: str, partitions: int
) -> None:
    """An empty key is a key: the messages bear it. With another key the schedule goes on, paused as it was."""
    broker, found = broker_with(server_url, prefix), list[tuple[str, str | None]]()

    @broker.handler("ticks", group="g", partitions=partitions)
    async def note(payload: str, message: Message) -> None:
        found.append((payload, message.key))

    async with broker:
        await broker.topics.ensure("ticks", partitions)
        await broker.schedules.upsert("one", "100ms", "ticks", "before", key="c-1")
        await broker.schedules.upsert("one", "100ms", "ticks", "without")
        await broker.schedules.pause("ticks", "one")
        await broker.schedules.upsert("one", "100ms", "ticks", "empty", key="")
        async with broker.running():
            await broker.schedules.resume("ticks", "one")
            await until(lambda: len(found) >= 3, "it ticks")
        assert set(found) == {("empty", "")}
        every = [broker.keys.every("ticks", number) for number in range(partitions)]
        assert sum([await ask(broker, "HEXISTS", each, "added|one") for each in every]) == 1
        await broker.schedules.remove("ticks", "one")
        assert await ask(broker, "EXISTS", broker.keys.schedules, *every) == 0


async def test_an_added_schedule_publishes_in_its_band_and_goes_on_in_another_one(
    server_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of code does. It is one schedule with one record, also when its band changes, and when it is removed."""
    broker, found = broker_with(server_url, prefix), list[tuple[int, str]]()
    broker.topic("sms", int, bands=("urgent", "normal"))

    @broker.handler("sms", group="g", partitions=3)
    async def note(n: int, message: Message) -> None:
        found.append((n, message.band))

    async with broker, broker.running():
        schedules = broker.schedules
        for number, band in enumerate(("urgent", "normal", "urgent", None)):
            await schedules.upsert("code", "100ms", "sms", number, band=band)
            wanted = (number, band or "normal")
            await until(lambda wanted=wanted: found.count(wanted) > 1, f"it ticks in {band}")
            (state,) = await schedules_of(broker.client, broker.keys, [await broker.topics.existing("sms")])
            assert (state.is_added, bool(state.leader)) == (True, True)
        assert {band for n, band in found if n == 0} == {"urgent"}
        with pytest.raises(ConfigError, match="has no band 'bulk'"):
            await schedules.upsert("other", "100ms", "sms", 1, band="bulk")
        await schedules.upsert("code", "100ms", "sms", 9, band="urgent")
        await schedules.remove("sms", "code")
        every = [broker.keys.every("sms", number) for number in (await broker.topics.existing("sms")).numbers]
        assert await ask(broker, "EXISTS", broker.keys.schedules, *every) == 0
    assert said(caplog) == []


async def test_a_schedule_is_not_added_to_a_band_that_is_not_open(server_url: str, prefix: str) -> None:
    """Its records would be in the band normal, where its messages go until then."""
    broker = broker_with(server_url, prefix)
    async with broker:
        topic = await broker.topics.ensure("sms", 1)
        waiting = topic.layout.with_bands(("urgent", "normal"))
        await ask(broker, "HSET", broker.keys.topic("sms"), "layout", waiting.stored)
        with pytest.raises(ConfigError, match="'urgent' of topic 'sms' is not open yet"):
            await broker.schedules.upsert("code", "1h", "sms", 1, band="urgent")
        assert await ask(broker, "EXISTS", broker.keys.schedules) == 0


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has about schedules."""
    return [record.getMessage() for record in caplog.records if record.name == "rsmq.schedule"]
