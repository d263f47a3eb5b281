"""Requests: the answer of a handler comes back, errors too, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from tenacity import wait_fixed

from rsmq import (
    Broker,
    ConfigError,
    Malformed,
    Message,
    Reject,
    RequestFailed,
    RequestTimeout,
    Retry,
    RetryPolicy,
    Settings,
    SyncBroker,
)
from rsmq.broker import requests
from rsmq.broker.requests import request_of
from rsmq.control import Cancelled
from rsmq.model.message import MessageOrigin
from tests.patience import until
from tests.servers import Server

ROOT = Path(__file__).parents[2]


class Quote(BaseModel):
    """A question, and an answer."""

    cents: int


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """On the shared server."""
    return Broker(replace(settings, preflight="warn"))


async def left(broker: Broker) -> list[bytes]:
    """Keys of answers that are still there."""
    keys = await broker.client.execute_command("KEYS", f"{broker.keys.prefix}:{{%reply*")
    return list(keys)


async def test_the_caller_gets_what_the_handler_returns(broker: Broker) -> None:
    """A model, text, bytes, None; from coroutines and from functions; decoded as asked for."""

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(quote: Quote, message: Message) -> Quote:
        return Quote(cents=quote.cents * 2)

    @broker.handler("echo", group="pricing", replies=True)
    def echo(payload: Any) -> Any:
        return {"text": "grüße", "bytes": b"\x00\n\xff", "none": None}[payload["want"]]

    async with broker.running():
        answer = await broker.request("quotes", Quote(cents=4), timeout="20s", returns=Quote, key="ada")
        assert answer == Quote(cents=8)
        assert await broker.request("quotes", Quote(cents=1), timeout="20s", headers={"a": "b"}) == {"cents": 2}
        assert await broker.request("echo", {"want": "text"}, timeout="20s") == "grüße"
        assert await broker.request("echo", {"want": "bytes"}, timeout="20s") == b"\x00\n\xff"
        assert await broker.request("echo", {"want": "none"}, timeout="20s") is None
        with pytest.raises(Malformed):
            await broker.request("echo", {"want": "none"}, timeout="20s", returns=Quote)
        await broker.publish("quotes", Quote(cents=1))  # no request: nothing is answered
        assert await left(broker) == []
        channels = await broker.client.execute_command("PUBSUB", "SHARDCHANNELS", f"{broker.keys.prefix}*reply*")
        assert channels == []


async def test_many_requests_at_once_get_their_own_answers(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two brokers, whose answers do not mix. The rings alone bring them: nothing is polled."""
    monkeypatch.setattr(requests, "POLL", 3600)
    other = Broker(broker.settings)

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(quote: Quote) -> int:
        return quote.cents

    answers: dict[int, int] = {}

    async def ask(asking: Broker, n: int) -> None:
        answers[n] = await asking.request("quotes", Quote(cents=n), timeout="30s")

    async with broker.running(), other, anyio.create_task_group() as tasks:
        for n in range(200):
            tasks.start_soon(ask, other if n % 2 else broker, n)
    assert answers == {n: n for n in range(200)}


async def test_an_error_comes_back_when_it_is_the_last(broker: Broker) -> None:
    """With the reason of the dead letter; an attempt that is repeated is not the end."""
    attempts: list[int] = []

    @broker.handler("quotes", group="pricing", replies=True, retry=RetryPolicy(max_attempts=2, wait=wait_fixed(0)))
    async def price(quote: Quote, message: Message) -> int:
        attempts.append(message.attempt)
        if quote.cents == 0 and message.attempt == 1:
            raise ConnectionError("not yet")
        if quote.cents == 1:
            raise ValueError("unlucky")
        if quote.cents == 2:
            raise Reject("no such customer")
        return quote.cents

    async with broker.running():
        assert await broker.request("quotes", Quote(cents=0), timeout="30s") == 0
        assert attempts == [1, 2]
        for payload, reason, text in [
            (Quote(cents=1), "failed", "ValueError: unlucky"),
            (Quote(cents=2), "rejected", "no such customer"),
            ("no quote", "malformed", ""),
        ]:
            with pytest.raises(RequestFailed, match="became a dead letter") as caught:
                await broker.request("quotes", payload, timeout="30s")
            assert (caught.value.reason, caught.value.topic) == (reason, "quotes")
            assert text in caught.value.error
        assert await left(broker) == []


@pytest.mark.parametrize("moment", ["stored", "waiting", "running", "without a group"])
async def test_a_request_that_is_cancelled_ends_at_once(broker: Broker, moment: str) -> None:
    """It waited for its whole timeout, although no handler would answer. Nothing is left behind."""
    started = anyio.Event()

    async def price(payload: int) -> int:
        if payload == 0:
            started.set()
            await anyio.sleep_forever()
        return payload

    if moment == "waiting":

        @broker.handler("quotes", group="pricing", replies=True, retry=RetryPolicy(2, wait_fixed(3600)))
        async def fail(_payload: int) -> int:
            started.set()
            raise ConnectionError("not yet")
    else:
        broker.handler("quotes", group="pricing", replies=True)(price)
    caught = list[RequestFailed]()

    async def ask() -> None:
        with pytest.raises(RequestFailed, match="was cancelled") as error:
            await broker.request("quotes", 0, timeout="10s")
        caught.append(error.value)

    async def stored() -> list[str]:
        rows = await broker.client.execute_command("XRANGE", broker.keys.stream("quotes", 0), "-", "+")
        return [dict(zip(fields[::2], fields[1::2], strict=True))[b"id"].decode() for _, fields in rows]

    async with broker, AsyncExitStack() as worker:
        await broker.topics.ensure("quotes", 1)
        if moment == "stored":
            made = ("XGROUP", "CREATE", broker.keys.stream("quotes", 0), "pricing", "0", "MKSTREAM")
            await broker.client.execute_command(*made)
        if moment in ("waiting", "running"):
            await worker.enter_async_context(broker.running())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(stored, "it is stored")
            if moment in ("waiting", "running"):
                await started.wait()
            (identity,) = await stored()
            answer = await broker.cancel(identity, topic="quotes", running=True)
            assert isinstance(answer, Cancelled)
        assert (caught[0].reason, caught[0].message_id) == ("cancelled", identity)
        assert await left(broker) == []


async def test_a_time_out_leaves_an_answer_that_expires(broker: Broker) -> None:
    """The message is handled all the same; and so is one to a topic without a handler that answers."""
    asked, go, done = anyio.Event(), anyio.Event(), anyio.Event()

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(quote: Quote) -> int:
        asked.set()
        await go.wait()
        done.set()
        return 1

    async with broker.running():
        with pytest.raises(RequestTimeout, match=r"within 0.5 s: message .* will be handled, unless it is canc"):
            await broker.request("quotes", Quote(cents=1), timeout="500ms")
        with pytest.raises(TimeoutError):
            await broker.request("nothing", Quote(cents=1), timeout="200ms")
        await asked.wait()
        go.set()
        await done.wait()

        async def answered() -> bool:
            return await left(broker) != []

        await until(answered, "the handler has answered")
        [key] = await left(broker)
        assert 0 < await broker.client.execute_command("PTTL", key) <= 500

        async def is_gone() -> bool:
            return await left(broker) == []

        await until(is_gone, "the answer has expired")


async def test_an_answer_survives_a_broken_subscription(broker: Broker) -> None:
    """The ring is lost with its connection, and the answer is there."""
    asked, go = anyio.Event(), anyio.Event()

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(quote: Quote) -> int:
        asked.set()
        await go.wait()
        return 7

    answers: list[int] = []

    async def ask() -> None:
        answers.append(await broker.request("quotes", Quote(cents=1), timeout="30s"))

    async with broker.running(), anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await asked.wait()
        pattern = f"{broker.keys.prefix}*reply*"
        await until_listening(broker, pattern)
        await broker.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        go.set()
    assert answers == [7]


async def until_listening(broker: Broker, pattern: str) -> None:
    """Wait for the subscription."""

    async def listening() -> bool:
        return bool(await broker.client.execute_command("PUBSUB", "SHARDCHANNELS", pattern))

    await until(listening, "the caller listens")


CALLER = """
import asyncio, sys
from rsmq import Broker

async def main():
    async with Broker(sys.argv[1], prefix=sys.argv[2], preflight="warn") as broker:
        await broker.request("quotes", {"cents": 1}, timeout="1s")

asyncio.run(main())
"""


async def test_a_killed_caller_leaves_nothing_behind(server: Server, broker: Broker) -> None:
    """Its answer expires after the timeout of the request, and its subscription ends with it."""
    asked, go = anyio.Event(), anyio.Event()

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(quote: Quote) -> int:
        asked.set()
        await go.wait()
        return 1

    async with broker.running():
        command = [sys.executable, "-c", CALLER, str(broker.settings.url), broker.settings.prefix]
        caller = await anyio.open_process(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        await asked.wait()
        caller.kill()
        await caller.wait()
        go.set()

        async def answered() -> bool:
            return await left(broker) != []

        await until(answered, "the handler has answered")

        async def is_gone() -> bool:
            return await left(broker) == []

        await until(is_gone, "the answer has expired")


async def test_a_sync_broker_asks(broker: Broker) -> None:
    """From a thread, as a view does."""

    @broker.handler("quotes", group="pricing", replies=True)
    async def price(quote: Quote) -> Quote:
        return quote

    sync = SyncBroker(broker.settings)
    async with broker.running():
        ask: Callable[[], Quote] = lambda: sync.request("quotes", Quote(cents=3), timeout="20s", returns=Quote)  # noqa: E731
        assert await anyio.to_thread.run_sync(ask) == Quote(cents=3)
        await anyio.to_thread.run_sync(sync.close)


async def test_what_is_wrong_is_refused(broker: Broker) -> None:
    """Where it is written."""
    with pytest.raises(ConfigError, match="answers one message at a time: leave batch out"):
        broker.handler("a", group="g", batch=5, replies=True)(many)
    with pytest.raises(ConfigError, match="write replies=True"):
        broker.handler("a", group="g", replies="yes")(one)  # type: ignore[arg-type]
    asking: Awaitable[Any]
    for timeout, text in [(5, "timeout=5"), ("0s", "more than 0 and at most 1 day"), ("2d", "at most 1 day")]:
        asking = broker.request("a", {}, timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=text):
            await asking
    with pytest.raises(ConfigError, match="async with broker"):
        await broker.request("a", {}, timeout="1s")


async def many(payloads: list[str]) -> None:
    """A batch."""


async def one(payload: str) -> None:
    """A message."""


@pytest.mark.parametrize(
    "headers",
    ["{}", '{"reply-to":"a"}', '{"reply-to":"a{b}","reply-ttl":"5"}', '{"reply-to":"a","reply-ttl":"-5"}',
     '{"reply-to":"a","reply-ttl":"0"}', '{"reply-to":"a","reply-ttl":"\\u0665"}',
     '{"reply-to":"' + "a" * 65 + '","reply-ttl":"5"}'],
)  # fmt: skip
def test_headers_of_other_clients_that_are_no_request(headers: str) -> None:
    """They are answered nowhere, and no other key can be reached."""
    message = Message(MessageOrigin("quotes", 0, "g"), b"1-0", [b"data", b"{}", b"h", headers.encode()])
    assert request_of(message) is None


async def test_answer_above_the_limit_fails_its_handler(settings: Settings) -> None:
    """As a result that is kept, and a message: the server would keep it for as long as the caller waits."""
    broker = Broker(replace(settings, preflight="warn", payload_limit=1000))

    @broker.handler("quotes", group="pricing", replies=True, retry=RetryPolicy(max_attempts=1))
    async def price(size: int) -> str:
        return "x" * size

    async with broker.running():
        assert len(await broker.request("quotes", 1000, timeout="30s")) == 1000
        with pytest.raises(RequestFailed, match="the limit 1000"):
            await broker.request("quotes", 1001, timeout="30s")


async def test_an_error_that_a_handler_returns_is_no_answer(broker: Broker) -> None:
    """It counts as raised. Before, it could not be written as an answer, so each attempt failed with NotJson."""
    attempts: list[int] = []

    @broker.handler("quotes", group="pricing", replies=True, retry=RetryPolicy(max_attempts=3, wait=wait_fixed(0)))
    async def price(cents: int, message: Message) -> Any:
        attempts.append(message.attempt)
        if cents == 0:
            return Reject("no such customer")
        if cents == 1 and message.attempt == 1:
            return Retry("not yet", after="0s")
        return double(cents) if cents == 2 else cents

    async def double(cents: int) -> int:
        return 2 * cents

    async with broker.running():
        with pytest.raises(RequestFailed, match="no such customer") as caught:
            await broker.request("quotes", 0, timeout="30s")
        assert (caught.value.reason, attempts) == ("rejected", [1])
        assert await broker.request("quotes", 1, timeout="30s") == 1
        assert attempts == [1, 1, 2]
        assert await broker.request("quotes", 2, timeout="30s") == 4


async def test_a_request_that_has_killed_its_workers_too_often_ends_at_once(broker: Broker) -> None:
    """It becomes a dead letter without another attempt. Before, its caller waited until the timeout."""
    caught = list[RequestFailed]()

    @broker.handler("quotes", group="pricing", replies=True, partitions=1, retry=RetryPolicy(max_attempts=2))
    async def price(_: int) -> None:
        raise AssertionError("it does not start")

    async def ask_price() -> None:
        with pytest.raises(RequestFailed, match="became a dead letter") as error:
            await broker.request("quotes", 0, timeout="1h")
        caught.append(error.value)

    stream = broker.keys.stream("quotes", 0)
    async with broker:
        client = broker.client
        await broker.topics.ensure("quotes", 1)
        await client.execute_command("XGROUP", "CREATE", stream, "pricing", "0", "MKSTREAM")

        async def started() -> bool:
            rows = await client.execute_command("XREADGROUP", "GROUP", "pricing", "killed", "STREAMS", stream, ">")
            for entry_id, _ in rows[0][1] if rows else ():
                about = ("RETRYCOUNT", 3, "IDLE", 10**7)
                await client.execute_command("XCLAIM", stream, "pricing", "killed", 0, entry_id, *about)
            return bool(rows)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask_price)
                await until(started, "two workers have died with it")
                async with broker.running():
                    await until(lambda: caught, "its caller has heard of it")
        assert await left(broker) == []
    assert (caught[0].reason, caught[0].error) == ("crashed", "while it ran, its worker died or lost its lease 2 times")
