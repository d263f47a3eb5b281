"""The check of schemas before a rollout: all kinds of messages, decoded by the handlers of new code."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anyio
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, RetryPolicy, Settings
from rsmq.handler.reader import PayloadReader
from rsmq.inspector.schema_check import OTHERS, SchemaCheck, SchemaFinding
from tests.patience import until


class New(BaseModel):
    """What the new code expects."""

    n: int


def new_code(settings: Settings, *, start: str = "earliest") -> Broker:
    """The broker of the rollout."""
    broker = Broker(settings)

    @broker.handler("orders", group="billing", start=start)
    async def bill(order: New) -> None: ...

    return broker


async def check(broker: Broker, new: Broker, sample: int = 100) -> dict[str, SchemaFinding]:
    """The findings by kind."""
    found = await SchemaCheck(broker.client, broker.keys, broker.topics).run(new.handlers, sample)
    return {each.kind: each for each in found}


OLD = {"text": "no number"}
HOLD, PARK, BURY = {"n": 1, "do": "hold"}, {"n": 1, "do": "park"}, {"n": 1, "do": "bury"}


async def test_every_kind_of_message_is_decoded(settings: Settings) -> None:
    """Of each kind one that fits and one that does not; nothing is changed by it."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    held = anyio.Event()

    @broker.handler("orders", group="billing", ordering="none", retry=RetryPolicy(3, wait_fixed(3600)), timeout="1h")
    async def bill(order: dict[str, Any]) -> None:
        if order["do"] == "hold":
            await held.wait()
        if order["do"] == "park":
            raise ValueError
        raise Reject("no")

    async with broker, broker.running():
        for payload in (HOLD, PARK, BURY):
            await broker.publish("orders", payload)
            await broker.publish("orders", {**payload, "n": "x"})
        await broker.publish("orders", {"n": 1}, delay="1h")
        await broker.publish("orders", OLD, delay="1h")

        async def settled() -> bool:
            return (await check(broker, new_code(settings)))["dead"].checked == 2 and (
                await check(broker, new_code(settings))
            )["waiting_for_retry"].checked == 2

        async def is_tidied() -> int:
            return int(await broker.client.execute_command("EXISTS", broker.keys.removed("orders", 0)))

        await until(settled, "two are parked, two are dead")
        await until(is_tidied, "retention has looked at the partition, and made its record")
        before = await broker.client.execute_command("DBSIZE")
        found = await check(broker, new_code(settings))
        assert {kind: (each.checked, each.failed) for kind, each in found.items()} == {
                "unread": (0, 0), "pending": (2, 1), "waiting_for_retry": (2, 1), "delayed": (2, 1), "dead": (2, 1),
            }  # fmt: skip
        assert list(found["delayed"].errors) == ["the payload does not fit New: n: Field required"]
        assert found["pending"].example.startswith("0/1")
        assert await broker.client.execute_command("DBSIZE") == before
        held.set()


async def test_a_new_group_gets_what_its_start_says(settings: Settings) -> None:
    """All of the stream, or nothing; and a replayed dead letter of another group is not its own."""
    broker = Broker(replace(settings, preflight="warn"))
    async with broker:
        await broker.publish_many("orders", [{"n": 1}, OLD, OLD])
        stream = broker.keys.stream("orders", 0)
        await broker.client.execute_command("XADD", stream, "*", "data", "x", "group", "other")
        await broker.client.execute_command("XADD", stream, "*", "nothing", "x")
        found = await check(broker, new_code(settings))
        assert (found["unread"].checked, found["unread"].failed) == (3, 3)
        assert "the entry has no field `data`" in found["unread"].errors
        assert (await check(broker, new_code(settings, start="latest")))["unread"].checked == 0
        for partition in range(8):
            await broker.client.execute_command(
                "XGROUP", "CREATE", broker.keys.stream("orders", partition), "billing", "$", "MKSTREAM"
            )
        assert (await check(broker, new_code(settings)))["unread"].checked == 0
        await broker.publish("orders", {"n": 1})
        assert (await check(broker, new_code(settings)))["unread"].checked == 1
        other = Broker(settings)
        other.handler("missing", group="g")(handle)
        assert await check(broker, other) == {}


async def handle(payload: str) -> None:
    """Takes text."""


async def test_a_sample_has_the_oldest_and_the_newest(settings: Settings) -> None:
    """Of a long backlog; different errors are counted up to a limit."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    async with broker:
        await broker.publish_many("orders", [OLD, *({"n": n} for n in range(50)), {"n": "x"}])
        found = (await check(broker, new_code(settings), 4))["unread"]
        assert (found.checked, found.failed) == (4, 2)
        assert (await check(broker, new_code(settings), 1))["unread"].checked == 1
        finding = SchemaFinding("orders", "billing", "bill", "unread")
        model = type("Odd", (BaseModel,), {"__annotations__": {f"f{n}": int for n in range(40)}})
        for n in range(40):
            wide = Broker()

            def take(payload: Any, message: Message) -> None: ...

            take.__annotations__["payload"] = model
            wide.handler("orders", group="billing")(take)
            data = json.dumps({f"f{each}": 1 for each in range(40) if each != n}).encode()
            handler = wide.handlers[0]
            await finding.add(handler, 0, (b"1-0", [b"data", data]), PayloadReader(handler.decode))
        assert (len(finding.errors), finding.errors[OTHERS], finding.failed) == (21, 20, 40)
