"""A database has one server for each prefix: a second one is refused while the first one is alive."""

from typing import Annotated, Any

import pytest
from fast_depends import Depends
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from rsmq import Broker, Settings
from rsmq.errors import OtherServer
from rsmq.sql import Effects, Outbox, deployment
from rsmq.sql.tables import DEPLOYMENT
from tests.contract.witness import ask
from tests.patience import until
from tests.servers import Server


def made(url: str, prefix: str, engine: AsyncEngine, *, has_outbox: bool = True) -> Broker:
    """A broker with effects and an outbox in a database, or with effects alone."""
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", partitions=1))
    effects = Effects(async_sessionmaker(engine))
    if has_outbox:
        broker.include(Outbox(engine))

    @broker.handler("work", group="g")
    async def work(number: int, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
        """Writes nothing of its own."""

    return broker


async def row(engine: AsyncEngine) -> Any:
    """Who has the database, and how often that was renewed."""
    async with engine.connect() as connection:
        return (await connection.execute(select(DEPLOYMENT))).one_or_none()


@pytest.mark.parametrize("has_outbox", [True, False], ids=["outbox", "effects"])
async def test_second_server_with_the_same_prefix_is_refused_until_the_first_has_gone(
    server: Server, prefix: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, has_outbox: bool
) -> None:
    """A database number counts as a server. The first one is not disturbed; afterwards the second one takes over."""
    monkeypatch.setattr(deployment, "KEEP_SECONDS", 0.05)
    first, second = (made(url, prefix, engine, has_outbox=has_outbox) for url in (server.url, server.in_database(3)))
    async with first.running():
        with pytest.raises(OtherServer, match="give one of them a prefix of its own"):
            async with second.running():
                raise AssertionError("it is not refused")
        before = await row(engine)

        async def is_renewed() -> bool:
            return (await row(engine)).renewals > before.renewals

        await until(is_renewed, "the first one goes on")
        assert (await row(engine)).server == before.server
    monkeypatch.setattr(deployment, "WATCH_SECONDS", 0.2)
    again = made(server.in_database(3), prefix, engine, has_outbox=has_outbox)
    async with again.running():
        assert (await row(engine)).server != before.server


async def test_identity_survives_the_loss_of_its_key(
    server: Server, prefix: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After FLUSHALL the workers put it back. If another worker was first with a new one, the row follows it: also one
    that is still starting, and does not know the old one."""
    monkeypatch.setattr(deployment, "KEEP_SECONDS", 0.05)
    broker = made(server.url, prefix, engine)
    async with broker.running():
        key = broker.keys.deployment
        await ask(broker, "DEL", key)

        async def is_back() -> bool:
            found = await ask(broker, "GET", key)
            return found is not None and found == (await row(engine)).server.encode()

        await until(is_back, "the server and the row have the same identity again")
        await ask(broker, "SET", key, "another")

        async def has_followed() -> bool:
            return (await row(engine)).server == "another"

        await until(has_followed, "the row has the new one")
        async with made(server.url, prefix, engine).running():
            assert (await row(engine)).server == "another"
