"""Two deployments with equal names of topics and groups share one database: neither knows of the other."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import pytest
from fast_depends import Depends
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from rsmq import Broker, ConfigError, RetryPolicy, Settings
from rsmq.sql import Effects, Outbox, create_tables
from rsmq.sql.outbox import outbox_row
from rsmq.sql.tables import OUTBOX
from tests.contract.witness import ask
from tests.patience import until

CREATE = text("CREATE TABLE done (deployment varchar(64), number int)")
INSERT = text("INSERT INTO done VALUES (:deployment, :number)")


class Deployment:
    """A broker with a prefix of its own, whose handler writes what it gets."""

    def __init__(self, url: str, prefix: str, engine: AsyncEngine) -> None:
        self.prefix = prefix
        self.broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", partitions=1))
        self.effects, self.outbox = Effects(async_sessionmaker(engine)), Outbox(engine)
        self.broker.include(self.outbox)

        @self.broker.handler("work", group="g", retry=RetryPolicy(max_attempts=1))
        async def work(number: int, session: Annotated[AsyncSession, Depends(self.effects.session)]) -> None:
            await session.execute(INSERT, {"deployment": prefix, "number": number})

    async def sent(self) -> list[bytes]:
        """The payloads that are published here by the outbox."""
        stream = self.broker.keys.stream("sent", 0)
        return [fields[1] for _, fields in await ask(self.broker, "XRANGE", stream, "-", "+")]


async def test_two_deployments_share_a_database(server_url: str, prefix: str, engine: AsyncEngine) -> None:
    """Each handles its messages once, even if the other has raised a fence, and relays its rows."""
    async with engine.begin() as connection:
        await connection.execute(CREATE)
    two = [Deployment(server_url, f"{prefix}{name}", engine) for name in ("eu", "us")]
    first, second = two
    async with first.broker.running():
        await first.broker.publish("work", 0, key="a")
        async with second.broker.running():  # its leases are newer
            for number in range(1, 6):
                for each in two:
                    await each.broker.publish("work", number, key="a")
                    async with engine.begin() as connection:
                        await each.outbox.publish(connection, "sent", each.prefix, key="k")

            async def are_done() -> bool:
                async with engine.connect() as connection:
                    return (await connection.scalar(text("SELECT count(*) FROM done"))) == 11

            await until(are_done, "all are handled")
            for each in two:
                await until(lambda each=each: has_sent(each), "its rows are relayed")  # type: ignore[misc]
                assert await each.sent() == [each.prefix.encode()] * 5
                letters = await ask(each.broker, "XLEN", each.broker.keys.dlq("work", 0, "g"))
                assert letters == 0


async def has_sent(deployment: Deployment) -> bool:
    """Whether its five rows have arrived."""
    return len(await deployment.sent()) >= 5


async def test_rows_of_a_prefix_that_no_worker_has_are_named_in_the_log(
    server_url: str, prefix: str, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay says whose they are and what to do. Fresh rows of another deployment are no fault."""
    long_ago = datetime.now(UTC) - timedelta(minutes=5)
    lost, fresh = Outbox(engine, prefix=f"{prefix}lost"), Outbox(engine, prefix=f"{prefix}fresh")
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)  # fresh, however slow this machine is
    own = Deployment(server_url, f"{prefix}own", engine)
    async with engine.begin() as connection:
        rows = [{**outbox_row(lost, "sent", number), "created_at": long_ago} for number in range(3)]
        rows += [{**outbox_row(fresh, "sent", 0), "created_at": in_an_hour}]
        rows += [{**outbox_row(own.outbox, "sent", 0), "created_at": long_ago}]
        await connection.execute(insert(OUTBOX), rows)
    async with own.broker.running():
        await until(lambda: f"RSMQ_PREFIX={lost.deployment}" in caplog.text, "they are named")
        await until(lambda: is_relayed(own), "its own row is relayed")
    warnings = [each.getMessage() for each in caplog.records if "belong to the prefix" in each.getMessage()]
    assert len(warnings) == 1, "once, and no word of the others"
    assert warnings[0].startswith("3 rows of the outbox")
    assert f"this worker has the prefix '{own.prefix}'" in warnings[0]


async def is_relayed(deployment: Deployment) -> bool:
    """Whether something has arrived."""
    return bool(await deployment.sent())


async def test_an_outbox_of_two_prefixes_is_refused(pg: AsyncEngine, server_url: str) -> None:
    """Its rows can belong to one deployment only."""
    outbox = Outbox(pg)
    Broker(Settings(url=server_url, prefix="eu")).include(outbox)
    assert outbox.deployment == "eu"
    with pytest.raises(ConfigError, match="belongs to the prefix 'eu'"):
        Broker(Settings(url=server_url, prefix="us")).include(outbox)


def test_tables_of_an_older_layout_are_refused_with_what_to_do(sync_engine: Engine) -> None:
    """They have no column for the deployment."""
    with sync_engine.begin() as connection:
        connection.execute(text("DROP TABLE rsmq_fence"))
        connection.execute(text("CREATE TABLE rsmq_fence (group_name varchar(128), epoch bigint)"))
    again = create_engine(sync_engine.url)
    with again.begin() as connection, pytest.raises(ConfigError, match="made by an older version of rsmq"):
        create_tables(connection)
    again.dispose()
