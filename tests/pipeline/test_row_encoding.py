"""Writes beside encrypted messages and letters: rows are encrypted, too, or the write is refused with what to do."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from typing import Any

import pyarrow as pa
import pytest

from rsmq import Broker, ConfigError, Settings
from rsmq.codecs import Encrypt, Keyring
from rsmq.errors import TooLarge
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.packing import pack_fields
from rsmq.pipeline.format.columns import PACKED
from rsmq.pipeline.format.options import write_options
from rsmq.pipeline.format.topic_sink import TaskResult
from rsmq.pipeline.format.writer import write_rows
from tests.contract.witness import ask

KEY = b"K" * 32
IN_ENVIRONMENT = f"k1={b64encode(KEY).decode()}"


class Writer:
    """Writes rows to a topic or an inbox, without Spark, and reads what is stored there."""

    def __init__(self, connection: dict[str, str], broker: Broker, target: str) -> None:
        self._broker, self._target = broker, target
        self._connection = connection

    async def write(self, columns: dict[str, Any] | None = None, **options: str) -> TaskResult:
        """One task with one row."""
        rows = {"value": [b'{"to":"ada"}'], **({"device": ["d"]} if self._target == "inbox" else {}), **(columns or {})}
        given = {**self._connection, "target": self._target, "topic": "orders", **options}
        batches = iter([pa.RecordBatch.from_pydict(rows)])
        return await asyncio.to_thread(lambda: write_rows(write_options(given), batches))

    async def newest(self) -> tuple[bool, bytes]:
        """Whether the newest entry is encrypted, and its payload as the broker reads it."""
        broker = self._broker
        if self._target == "inbox":
            [seq] = await ask(broker, "ZREVRANGE", broker.keys.inbox("d"), 0, 0)
            raw = await ask(broker, "GET", broker.keys.letter("d", int(seq)))
            return b"a256gcm=k1" in raw, (await broker.devices.peek("d", count=1000))[-1].data
        [(entry_id, fields)] = await ask(broker, "XREVRANGE", broker.keys.stream("orders", 0), "+", "-", "COUNT", 1)
        message = Message(MessageOrigin("orders", 0, ""), entry_id, fields)
        message.open(broker.encoding)
        return b"enc" in fields[::2], message.data


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """It encrypts."""
    return Broker(settings.url, prefix=settings.prefix, preflight="warn", codecs=[Encrypt(Keyring({"k1": KEY}))])


@pytest.mark.parametrize("target", ["topic", "inbox"])
async def test_a_row_is_stored_as_the_newest_entry_is(
    connection: dict[str, str], broker: Broker, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, keys decide; beside encrypted ones a write without keys is refused with what to do."""
    writer, data = Writer(connection, broker, target), b'{"to":"ada"}'
    async with broker:
        await broker.topics.ensure("orders", 1)
        monkeypatch.setenv("RSMQ_KEYS", IN_ENVIRONMENT)
        for columns in (
            None,
            {"type": ["text/plain"], "headers": [[{"key": "a", "value": b"b"}]], "key": ["k"]},
        ):  # the first is alone
            assert (await writer.write(columns if target == "topic" else None)).stored == 1
            assert await writer.newest() == (True, data)
        monkeypatch.delenv("RSMQ_KEYS")
        with pytest.raises(
            ConfigError, match=r"encrypted \(key k1\), and there are no keys here: set RSMQ_KEYS"
        ) as error:
            await writer.write()
        assert '.option("encode", "none")' in str(error.value)
        with pytest.raises(ConfigError, match="encode=all needs keys"):
            await writer.write(encode="all")
        assert (await writer.write(encode="none")).stored == 1
        assert await writer.newest() == (False, data)
        monkeypatch.setenv("RSMQ_KEYS", IN_ENVIRONMENT)
        assert (await writer.write()).stored == 1
        assert await writer.newest() == (False, data)
        await writer.write(encode="all")
        assert await writer.newest() == (True, data)


async def test_a_row_that_is_encoded_already_is_copied(
    connection: dict[str, str], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fields that a read keeps of it; a restore changes nothing either, and a row gets an id only if it has
    none."""
    monkeypatch.setenv("RSMQ_KEYS", IN_ENVIRONMENT)
    fields = [b"data", b"sealed", b"id", b"m-1", b"enc", b"a256gcm=k0"]
    packed = {"headers": [[{"key": PACKED, "value": pack_fields(fields)}]]}
    place = {"partition": [0], "id_ms": [1], "id_seq": [0]}
    async with broker:
        await broker.topics.ensure("orders", 1)
        writer, stream = Writer(connection, broker, "topic"), broker.keys.stream("orders", 0)
        await writer.write(place, idempotence="id")
        await writer.write(packed)
        await writer.write({"id": ["m-2"]}, encode="all")
        stored = [fields for _, fields in await ask(broker, "XRANGE", stream, "-", "+")]
    assert stored[0] == [b"data", b'{"to":"ada"}']
    assert stored[1] == fields
    assert (stored[2][::2], stored[2][3]) == ([b"data", b"id", b"enc"], b"m-2")


async def test_a_row_that_encryption_makes_too_large_is_refused(
    connection: dict[str, str], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts what is stored."""
    monkeypatch.setenv("RSMQ_KEYS", IN_ENVIRONMENT)
    monkeypatch.setenv("RSMQ_PAYLOAD_LIMIT", "1kB")
    value = {"value": [random.Random(1).randbytes(990)]}
    for target in ("topic", "inbox"):
        writer = Writer(connection, broker, target)
        assert (await writer.write(value, encode="none")).stored == 1
        with pytest.raises(TooLarge):
            await writer.write(value, encode="all")
