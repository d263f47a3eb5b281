"""Effects, outbox, outputs and fence in each kind of handler at once: what each must have done once, and in order."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from fast_depends import Depends
from sqlalchemy import URL, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tenacity import wait_fixed

from rsmq import Broker, Message, Retry, RetryPolicy
from rsmq.sql import Effects, Outbox, create_tables
from tests.contract.witness import ask, settled
from tests.patience import until

COUNT = 12
KEYS = 3
QUICK = RetryPolicy(max_attempts=5, wait=wait_fixed(0.01))
INSERT = text("INSERT INTO done VALUES (:who, :number)")
Done = tuple[str, int]
"""A group and the number of a message."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One handler."""

    piece: Literal["effects", "outputs"]
    order: Literal["key", "none", "shared"]
    is_batch: bool
    is_plain: bool

    @property
    def group(self) -> str:
        """Its name."""
        kind = "batch" if self.is_batch else "single", "plain" if self.is_plain else "async"
        return "-".join((self.piece, self.order, *kind))

    def options(self) -> dict[str, Any]:
        """Those of `broker.handler`."""
        order = {"distribution": "shared"} if self.order == "shared" else {"ordering": self.order}
        return {**order, "retry": QUICK, "partitions": 2, **({"batch": 10} if self.is_batch else {})}


COMBINATIONS = [
    Combination(piece, order, is_batch, is_plain)
    for piece, order, is_batch, is_plain in product(
        ("effects", "outputs"), ("key", "none", "shared"), (False, True), (False, True)
    )
    if (piece, order) != ("effects", "shared")  # refused: without a lease there is no fence
]
PAIRS = [each for each in COMBINATIONS if (each.is_batch == each.is_plain) == (each.order != "none")]
"""Half of them: each two properties meet in one."""


def key_of(number: int) -> str:
    """The key of a message, and of what comes of it."""
    return f"k{number % KEYS}"


def outcomes(messages: list[Message]) -> list[Retry | None]:
    """Some fail once, after their work."""
    return [Retry("not yet") if int(each.data) % 7 == 3 and each.attempt == 1 else None for each in messages]


def raise_first(found: list[Retry | None]) -> None:
    """The same in a handler of single messages."""
    for outcome in found:
        if outcome is not None:
            raise outcome


class Combinations:
    """Handlers on one broker, and what they have done."""

    def __init__(self, broker: Broker, database: URL, wanted: list[Combination]) -> None:
        self.broker, self.wanted = broker, wanted
        self.engine = create_async_engine(database.set(drivername="postgresql+asyncpg"))
        self.plain_engine = create_engine(database.set(drivername="postgresql+psycopg"))
        self.outbox = Outbox(self.engine)
        self.fences = defaultdict[str, set[int]](set)
        broker.include(self.outbox)
        make = {"effects": self._effects, "outputs": self._outputs}
        for each in wanted:
            single, batch = make[each.piece](each.group, is_plain=each.is_plain)
            broker.handler("orders", group=each.group, **each.options())(batch if each.is_batch else single)

    def _note(self, group: str, messages: list[Message]) -> Iterable[tuple[Message, Any]]:
        for message in messages:
            self.fences[group].add(message.fence)
            yield message, {"who": group, "number": int(message.data)}

    def _effects(self, group: str, *, is_plain: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        effects = Effects(async_sessionmaker(self.engine))
        plain_effects = Effects(sessionmaker(self.plain_engine))
        plain_outbox = Outbox(self.plain_engine, prefix=self.broker.keys.prefix)

        async def work(session: AsyncSession, messages: list[Message]) -> list[Retry | None]:
            for message, values in self._note(group, messages):
                await session.execute(INSERT, values)
                await self.outbox.publish(session, "receipts", values, key=message.key)
            return outcomes(messages)

        def work_plain(session: Session, messages: list[Message]) -> list[Retry | None]:
            for message, values in self._note(group, messages):
                session.execute(INSERT, values)
                plain_outbox.publish(session, "receipts", values, key=message.key)
            return outcomes(messages)

        async def single(message: Message, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
            raise_first(await work(session, [message]))

        async def batch(messages: list[Message], session: Annotated[AsyncSession, Depends(effects.session)]) -> Any:
            return await work(session, messages)

        def single_plain(message: Message, session: Annotated[Session, Depends(plain_effects.session)]) -> None:
            raise_first(work_plain(session, [message]))

        def batch_plain(messages: list[Message], session: Annotated[Session, Depends(plain_effects.session)]) -> Any:
            return work_plain(session, messages)

        return (single_plain, batch_plain) if is_plain else (single, batch)

    def _outputs(self, group: str, *, is_plain: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        async def batch(messages: list[Message]) -> Any:
            for message, values in self._note(group, messages):
                await message.publish("outputs", values, key=message.key)
            return outcomes(messages)

        def batch_plain(messages: list[Message]) -> Any:
            for message, values in self._note(group, messages):
                message.publish_sync("outputs", values, key=message.key)
            return outcomes(messages)

        async def single(message: Message) -> None:
            raise_first(await batch([message]))

        def single_plain(message: Message) -> None:
            raise_first(batch_plain([message]))

        return (single_plain, batch_plain) if is_plain else (single, batch)

    async def run(self) -> None:
        """Publish, wait until all is settled and relayed, and check what each group has done."""
        async with self.engine.begin() as connection:
            await connection.run_sync(create_tables)
            await connection.execute(text("CREATE TABLE done (who text, number int)"))
        async with self.broker.running():
            for number in range(COUNT):
                await self.broker.publish("orders", number, key=key_of(number))
            await settled(self.broker, "orders")
            for topic in ("receipts", "outputs"):
                wanted = {each.group for each in self.wanted if (each.piece == "outputs") == (topic == "outputs")}
                await until(lambda: self._has(topic, len(wanted) * COUNT), f"all {topic} are there")  # noqa: B023
                self._check(await self._stored(topic), wanted)
            async with self.engine.connect() as connection:
                rows = [(who, number) for who, number in await connection.execute(text("SELECT who, number FROM done"))]
            effects = {each.group for each in self.wanted if each.piece == "effects"}
            assert Counter(rows) == Counter((who, number) for who in effects for number in range(COUNT))
        await self.engine.dispose()
        self.plain_engine.dispose()
        for each in self.wanted:
            assert all((fence > 0) == (each.order != "shared") for fence in self.fences[each.group]), each

    def _check(self, found: list[Done], groups: set[str]) -> None:
        """Each once, and those of a key in order if the group has key order."""
        assert Counter(found) == Counter((who, number) for who in groups for number in range(COUNT))
        ordered = {each.group for each in self.wanted if each.order == "key"}
        for who in ordered & groups:
            for key in {key_of(number) for number in range(COUNT)}:
                numbers = [number for each, number in found if each == who and key_of(number) == key]
                assert numbers == sorted(numbers), (who, key, numbers)

    async def _has(self, topic: str, count: int) -> bool:
        return len(await self._stored(topic)) >= count

    async def _stored(self, topic: str) -> list[Done]:
        """The messages of a topic, partition by partition in their order."""
        found, there = list[Done](), await self.broker.topics.find(topic)
        for partition in () if there is None else there.numbers:
            for _, flat in await ask(self.broker, "XRANGE", self.broker.keys.stream(topic, partition), "-", "+"):
                values = json.loads(dict(zip(flat[::2], flat[1::2], strict=True))[b"data"])
                found.append((values["who"], values["number"]))
        return found
