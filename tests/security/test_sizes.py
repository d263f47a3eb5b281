"""Sizes are bounded on both ways: by the publisher, and by the reader against what other clients write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rsmq import Broker, Message, Settings, TooLarge
from rsmq.errors import ConfigError, Malformed, Oversized
from rsmq.model.headers import MOST_PUBLISHED
from rsmq.model.message import (
    LARGEST_HEADERS,
    LARGEST_PAYLOAD,
    MessageOrigin,
    read_headers,
    refuse_oversized,
    write_headers,
)
from rsmq.model.words import LONGEST_SHOWN
from rsmq.producer.batch import MOST_BYTES, MOST_MESSAGES
from rsmq.redis.topics import lookup_topic
from tests.contract.witness import Witness, dies, settled


@pytest.fixture
def make_broker(server_url: str, prefix: str) -> Callable[..., Broker]:
    """A broker on the shared server."""
    return lambda **changes: Broker(Settings(url=server_url, prefix=prefix, preflight="warn", **changes))


def test_the_limits_are_what_the_page_says() -> None:
    """Payloads 256 KiB by default and 1 MiB at most, headers 24 and 32 KiB, a write 500 messages or about 4 MiB."""
    assert (Settings().payload_limit, LARGEST_PAYLOAD) == (256 << 10, 1 << 20)
    assert (MOST_PUBLISHED, LARGEST_HEADERS) == (24 << 10, 32 << 10)
    assert (MOST_MESSAGES, MOST_BYTES) == (500, 4 << 20)
    with pytest.raises(ConfigError, match="PAYLOAD_LIMIT"):
        Settings(payload_limit=(1 << 20) + 1)


def test_headers_have_a_limit_on_both_ways() -> None:
    """A reader takes what a publisher may write, and what is added on the way, and nothing more."""
    for most in (MOST_PUBLISHED, LARGEST_HEADERS):
        largest = {"a": "x" * (most - 8)}
        raw = write_headers(largest, most)
        assert len(raw) == most
        assert read_headers(raw) == largest
    with pytest.raises(ConfigError, match="use at most 24576"):
        write_headers({"a": "x" * (MOST_PUBLISHED - 7)})
    for headers in ({"a": "x" * LARGEST_HEADERS}, {"a": "\x01" * (LARGEST_HEADERS // 4)}):
        with pytest.raises(ConfigError, match="put large values into the payload"):
            write_headers(headers)
    with pytest.raises(Malformed, match="more than 32768"):
        read_headers(b"{" + b" " * LARGEST_HEADERS + b"}")


async def test_a_publisher_is_refused_before_anything_is_sent(make_broker: Callable[..., Broker]) -> None:
    """Payload, headers, key, message id, a letter's headers: each over its limit, and the server has seen nothing."""
    async with make_broker() as broker:
        stream = broker.keys.stream("t", 0)
        await broker.topics.ensure("t", 1)
        with pytest.raises(TooLarge):
            await broker.publish("t", b"x" * (256 << 10) + b"x")
        with pytest.raises(TooLarge):
            await broker.publish("t", b"", key="k" * (300 << 10))
        with pytest.raises(ConfigError, match="the headers have"):
            await broker.publish("t", b"", headers={"a": "x" * (40 << 10)})
        with pytest.raises(ConfigError, match="message_id"):
            await broker.publish("t", b"", message_id="x" * 257)
        with pytest.raises(ConfigError, match="the headers have"):
            await broker.send("phone", b"", headers={"a": "x" * (40 << 10)})
        assert await broker.client.execute_command("XLEN", stream) == 0


def test_an_entry_beyond_every_publisher_is_oversized() -> None:
    """By its payload, or by all its fields together."""
    origin = MessageOrigin("t", 0, "g")
    with pytest.raises(Oversized):
        refuse_oversized(Message(origin, b"1-1", [b"data", b"x" * (LARGEST_PAYLOAD + 1)]))
    refuse_oversized(Message(origin, b"1-1", [b"data", b"x" * LARGEST_PAYLOAD]))
    with pytest.raises(Oversized):
        Message(origin, b"1-1", [b"data", b"", b"other", b"x" * (2 * LARGEST_PAYLOAD)])


def test_a_log_line_stays_one_short_line() -> None:
    """Another client's id may be a megabyte, or have a line end in it that would forge a second line."""
    message = Message(
        MessageOrigin("t", 0, "g"), b"1-1", [b"data", b"", b"id", b"x\nERROR forged", b"key", b"k" * 10_000]
    )
    text = repr(message)
    assert "\n" not in text
    assert len(text) < 100 + 2 * LONGEST_SHOWN
    long = Message(MessageOrigin("t", 0, "g"), b"1-1", [b"data", b"", b"id", b"x" * 10_000])
    assert len(repr(long)) < 100 + LONGEST_SHOWN


@pytest.mark.parametrize(("batch", "size"), [(None, 64 << 20), (100, 8 << 20)], ids=["one by one", "in batches"])
async def test_a_giant_is_buried_by_reference(
    make_broker: Callable[..., Broker], witness: Witness, caplog: pytest.LogCaptureFixture, batch: int | None, size: int
) -> None:
    """Its mates are handled, its dead letter names it and holds no copy of it, replay leaves it."""
    broker = make_broker()
    if batch is None:

        @broker.handler("t", group="g", partitions=1)
        async def handle(order: dict[str, Any]) -> None:
            witness.note(order["n"])

    else:

        @broker.handler("t", group="g", partitions=1, batch=batch)
        async def handle_all(orders: list[dict[str, Any]]) -> None:
            for order in orders:
                witness.note(order["n"])

    async with broker:
        await broker.topics.ensure("t", 1)
        stream, dlq = broker.keys.stream("t", 0), broker.keys.dlq("t", 0, "g")
        await broker.publish("t", {"n": 1}, key="k")
        with anyio.fail_after(30):
            giant = await broker.client.execute_command(
                "XADD", stream, "*", "data", b'"' + b"x" * size + b'"', "key", "k"
            )
        await broker.publish("t", {"n": 2}, key="k")
        async with broker.running():
            await witness.sees([1, 2])
            assert await dies(broker, "t", "g", 1) == [("malformed", None)]
            await settled(broker, "t")
        assert await broker.client.execute_command("MEMORY", "USAGE", dlq) < 10_000
        place = await lookup_topic(broker.topics, "t")
        (letter,) = [each async for each in broker.dead_letters.iterate(place, "g")]
        assert (letter.origin.encode(), f"the entry has {size // 10_000}" in letter.error) == (giant, True)
        assert await broker.dead_letters.replay(place, "g") == 0
        assert await broker.dead_letters.count(place, "g") == 1
    assert all(len(record.getMessage()) < 2_000 for record in caplog.records if record.levelno >= logging.INFO)


async def test_a_giant_that_is_taken_over_is_buried_too(make_broker: Callable[..., Broker], witness: Witness) -> None:
    """Also when its first reader died with it in flight."""
    broker = make_broker()

    @broker.handler("t", group="g", partitions=1)
    async def handle(order: dict[str, Any]) -> None:
        witness.note(order["n"])

    async with broker:
        await broker.topics.ensure("t", 1)
        stream = broker.keys.stream("t", 0)
        await broker.client.execute_command("XADD", stream, "*", "data", b"x" * (4 << 20))
        await broker.publish("t", {"n": 1})
        await broker.client.execute_command("XGROUP", "CREATE", stream, "g", "0")
        await broker.client.execute_command("XREADGROUP", "GROUP", "g", "dead", "STREAMS", stream, ">")
        async with broker.running():
            await witness.sees([1])
            assert await dies(broker, "t", "g", 1) == [("malformed", None)]
            await settled(broker, "t")
