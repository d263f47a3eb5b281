"""Rows of an outbox are compressed and encrypted when they are written: the relay needs no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import create_async_engine

from rsmq import Broker, TooLarge
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.sql import Outbox, create_tables
from rsmq.sql.outbox import outbox_row
from rsmq.sql.tables import OUTBOX
from tests.patience import until
from tests.sql.test_outbox import is_empty

CODECS = [Zstd(), Encrypt(Keyring({"k1": b"1" * 32}))]
LONG = {"card": "4111-1111", "text": "hello " * 400}


@pytest.mark.parametrize("own", [False, True], ids=["of the broker", "of its own"])
async def test_a_row_is_ciphertext_and_its_message_is_what_was_published(
    tmp_path: Path, broker: Broker, own: bool
) -> None:
    """The relay copies what is stored, and a broker without the key relays it as well."""
    engine, seen = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"), list[Any]()
    writes = Outbox(engine, codecs=CODECS if own else ())
    reader = Broker(broker.settings, codecs=CODECS)
    if not own:
        reader.include(writes)
    else:
        broker.include(Outbox(engine))  # without any codec: only a relay
        writes.belong_to(broker.keys.prefix)

    @reader.handler("orders", group="billing", partitions=1)
    async def take(order: dict[str, Any]) -> None:
        seen.append(order["card"])

    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
        await writes.publish(connection, "orders", LONG, key="ada")
        await writes.publish_many(connection, "orders", [LONG], key=lambda _: "ada")
        rows = (await connection.execute(select(OUTBOX.c.payload, OUTBOX.c.enc))).all()
    assert [enc for _, enc in rows] == ["zstd;a256gcm=k1"] * 2
    assert not [payload for payload, _ in rows if b"4111" in payload or len(payload) > 200]
    async with reader.running(), broker.running() if own else broker:
        await until(lambda: len(seen) == 2, "both are handled")
        await until(lambda: is_empty(writes), "nothing waits")
    assert seen == ["4111-1111"] * 2
    await engine.dispose()


def test_the_size_that_counts_is_what_is_stored(tmp_path: Path) -> None:
    """A payload above the limit that becomes small is written; one that stays large is refused."""
    outbox = Outbox(create_engine(f"sqlite:///{tmp_path / 'o.db'}"), codecs=CODECS, prefix="p")
    assert len(outbox_row(outbox, "orders", "x" * (1 << 20))["payload"]) < 1000
    with pytest.raises(TooLarge, match="RSMQ_PAYLOAD_LIMIT"):
        outbox_row(Outbox(create_engine("sqlite://"), prefix="p"), "orders", "x" * (1 << 20))


async def test_a_row_with_a_given_id_or_a_unique_name_is_encrypted_for_that_message(
    tmp_path: Path, broker: Broker
) -> None:
    """The id and the key that the message will have, not those of the row."""
    engine, seen = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"), list[Any]()
    outbox, reader = Outbox(engine), Broker(broker.settings, codecs=CODECS)
    reader.include(outbox)

    @reader.handler("orders", group="billing", partitions=1)
    async def take(order: dict[str, Any]) -> None:
        seen.append(order["card"])

    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
        await outbox.publish(connection, "orders", LONG, message_id="m1", expires="1h")
        await outbox.publish(connection, "orders", LONG, unique="cart-7")
        await outbox.publish(connection, "orders", LONG, unique="cart-8", message_id="m2", key="k")
    async with reader.running():
        await until(lambda: len(seen) == 3, "all are handled")
        await until(lambda: is_empty(outbox), "nothing waits")
    assert seen == ["4111-1111"] * 3
    await engine.dispose()
