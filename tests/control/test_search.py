"""`broker.find`: messages by what they hold, in every state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tenacity import wait_fixed

from rsmq import Broker, ConfigError, Message, Reject, RetryPolicy, Settings
from rsmq.codecs import Encrypt, Keyring
from tests.contract.witness import ask, dies, letters_of
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn", partitions=2))


async def found(broker: Broker, **options: Any) -> list[Any]:
    """The numbers in the payloads of what is found."""
    findings = await broker.find("in", **options)
    assert findings.is_all
    return sorted(hit.data.decode(errors="replace") for hit in findings.hits)


async def test_messages_are_found_by_key_payload_header_and_time(broker: Broker) -> None:
    """All conditions must hold; what is no JSON has no field."""
    async with broker:
        for n in range(6):
            await broker.publish("in", {"n": n, "who": {"id": n % 2}}, key=f"k{n % 3}", headers={"lang": "en"[: n % 3]})
        await broker.publish("in", b"\xff", key="k1")
        assert len(await found(broker)) == 7
        assert await found(broker, where=["who.id=1", "n!=3"]) == [
            '{"n":1,"who":{"id":1}}', '{"n":5,"who":{"id":1}}',
        ]  # fmt: skip
        assert await found(broker, key="k2", where=["n=2"]) == ['{"n":2,"who":{"id":0}}']
        assert len(await found(broker, headers={"lang": "en"})) == 2
        now = datetime.now(UTC)
        assert await found(broker, until=now - timedelta(hours=1)) == []
        assert await found(broker, since=now + timedelta(hours=1)) == []
        assert len(await found(broker, since=now - timedelta(hours=1), until=now + timedelta(hours=1))) == 7


async def test_messages_are_found_in_every_state(broker: Broker) -> None:
    """Delayed, undelivered, in flight, parked and dead, each with its ids."""
    go_on, began = asyncio.Event(), set[str]()

    async def work(payload: str, message: Message) -> None:
        began.add(payload)
        if payload == "dead":
            raise Reject("no")
        if payload == "waiting_for_retry":
            raise OSError("no")
        await go_on.wait()

    broker.handler("in", group="g", retry=RetryPolicy(max_attempts=3, wait=wait_fixed(3600)))(work)
    async with broker:
        refs = {each: await broker.publish("in", each, key=each) for each in ("dead", "waiting_for_retry", "running")}
        refs["delayed"] = await broker.publish("in", "delayed", key="d", delay="1h")
        async with broker.running():

            async def is_there() -> bool:
                parked = await broker.find("in", state="waiting_for_retry", group="g")
                dead = await broker.find("in", state="dead", group="g")
                return bool(parked.hits and dead.hits and "running" in began)

            await until(is_there, "all are where they belong")
            for state, ref in refs.items():
                findings = await broker.find("in", state=state, group="g", key=ref.key)  # type: ignore[arg-type]
                hits = [hit for hit in findings.hits if hit.data == state.encode()]
                assert [hit.id for hit in hits] == [ref], state
                status = await broker.look(ref)
                assert hits[0].stream_id == status.stream_id
                letter = status.groups[0].letter if status.groups else None
                assert hits[0].letter == letter
            go_on.set()
        refs["unread"] = await broker.publish("in", "unread", key="u")
        assert await found(broker, state="unread", group="g") == ["unread"]


async def test_search_finds_a_dead_letter_whose_fields_are_packed(broker: Broker) -> None:
    """It had more fields than a message may have. It has the id that it was published with, as `dlq list` says it."""
    fields = [part for n in range(5000) for part in (f"f{n}", "x")]

    @broker.handler("in", group="g", retry=RetryPolicy(max_attempts=1))
    async def refuse(payload: dict[str, int]) -> None:
        raise Reject("no")

    async with broker, broker.running():
        stream = broker.keys.stream("in", 0)
        await ask(broker, "XADD", stream, "*", "data", '{"n": 1}', "key", "k", "id", "wide", *fields)
        await dies(broker, "in", "g", 1)
        assert await ask(broker, "XLEN", broker.keys.dlq("in", 0, "g")) == 1
        ((_, stored),) = await ask(broker, "XRANGE", broker.keys.dlq("in", 0, "g"), "-", "+")
        assert b"dlq.packed" in stored[::2]
        (hit,) = (await broker.find("in", state="dead", group="g")).hits
        (letter,) = await letters_of(broker, "in", "g")
        assert (hit.id, hit.letter, hit.stream_id) == (letter.message_id, letter.id, letter.origin)
        assert hit.id == "wide"


async def test_search_counts_payloads_that_it_cannot_read(broker: Broker) -> None:
    """They have no field that is known, so they are no hits: by the reason. Only where a field is wanted."""
    sealed = Broker(broker.settings, codecs=[Encrypt(Keyring({"k7": b"7" * 32}))])
    async with broker, sealed:
        await broker.publish("in", {"n": 1}, key="a")
        await sealed.publish("in", {"n": 1}, key="a")
        await sealed.publish("in", {"n": 1}, key="b")
        findings = await broker.find("in", where=["n=1"])
        assert (len(findings.hits), findings.unread) == (1, {"encrypted (k7)": 2})
        assert (await broker.find("in", key="a", where=["n=1"])).unread == {"encrypted (k7)": 1}
        assert (await broker.find("in", key="a")).unread == {}
        assert (await sealed.find("in", where=["n=1"])).unread == {}


async def test_search_is_bounded_and_says_so(broker: Broker) -> None:
    """It ends with enough hits, or after enough messages, and tells how far it is."""
    seen = list[int]()
    async with broker:
        await broker.publish_many("in", range(1200), key=lambda n: "k")
        findings = await broker.find("in", most=3)
        assert (len(findings.hits), findings.is_all) == (3, False)
        findings = await broker.find("in", where=["x=1"], scan=700, progress=seen.append)
        assert (findings.hits, findings.looked_at, findings.is_all, seen) == ((), 700, False, [500])
        findings = await broker.find("in", key="k", most=1200, progress=seen.append)
        assert (len(findings.hits), findings.looked_at, findings.is_all) == (1200, 1200, True)
        assert seen[1:] == [500, 1000, 1200]
        assert await ask(broker, "XLEN", broker.keys.stream("in", 0)) in (0, 1200)
        with pytest.raises(ConfigError, match="pass group"):
            await broker.find("in", state="dead")
        for state in ("unread", "running", "waiting_for_retry", "dead"):
            with pytest.raises(ConfigError, match="has no group 'missing'"):
                await broker.find("in", state=state, group="missing")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is unknown"):
            await broker.find("in", state="lost")  # type: ignore[arg-type]
