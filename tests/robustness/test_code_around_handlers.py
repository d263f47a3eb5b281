"""Code of an application beside its handlers: functions of limits, context variables, tasks, programs, threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.lowlevel
import pytest
from fast_depends import Depends

from rsmq import (
    Breaker,
    Broker,
    Concurrency,
    ConfigError,
    Message,
    Rate,
    Reject,
    Retry,
    RetryPolicy,
    Settings,
    SyncBroker,
)
from rsmq.handler.middleware import Call
from tests.contract.witness import Witness, letters_of, settled
from tests.patience import until
from tests.robustness.test_other_systems import run


class Panic(BaseException):
    """As an extension module raises it whose own code has failed: it is no Exception."""


class Silent(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Nameless:
    """What is no text, and cannot become any."""

    def __str__(self) -> str:
        raise Panic("no text")


@pytest.fixture
def witness() -> Witness:
    """What handlers have seen."""
    return Witness()


def function_that(what: str) -> Callable[..., Any]:
    """A function of a message, or of a tenant, that does this for the message `bad`."""

    def function(about: Any) -> Any:
        if (about if isinstance(about, str) else about.data.decode()) != "bad":
            return None
        if what == "nameless":
            return Nameless()
        raise {"panic": Panic("index out of bounds"), "exit": SystemExit(2), "silent": Silent()}[what]

    return function


def named(message: Message) -> str:
    """The tenant of a message."""
    return message.data.decode()


OPTIONS: dict[str, Callable[[Callable[..., Any]], dict[str, Any]]] = {
    "rate": lambda function: {"rate": Rate(100, by=function)},
    "rates": lambda function: {"rate": [Rate(100, by=function), Rate(100, by="key")]},
    "cost": lambda function: {"rate": Rate(100, cost=lambda message: function(message) or 1)},
    "calls": lambda function: {"group_concurrency": Concurrency(2, by=function)},
    "breaker": lambda function: {"breaker": Breaker(failures=3, by=function)},
    "tenant": lambda function: {"tenant": function},
    "weights": lambda function: {"tenant": named, "weights": lambda name: function(name) or 1},
}


@pytest.mark.parametrize("takes_message", [False, True])
@pytest.mark.parametrize("what", ["panic", "exit", "silent", "nameless"])
@pytest.mark.parametrize("option", OPTIONS)
async def test_function_of_a_limit_that_fails_ends_nothing(
    settings: Settings, witness: Witness, option: str, what: str, takes_message: bool
) -> None:
    """All are handled, also the one with which it fails. Before, an error that is no Exception, or cannot be shown,
    ended the worker, and the next one, and so on."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))

    async def by_payload(text: str) -> None:
        witness.note(text)

    async def by_message(message: Message) -> None:
        witness.note(message.data.decode())

    broker.handler("t", group="g", **OPTIONS[option](function_that(what)))(by_message if takes_message else by_payload)
    async with broker, broker.running():
        for text in ("first", "bad", "last"):
            await broker.publish("t", text, key=text)
        await witness.sees(["first", "bad", "last"])
        await settled(broker, "t")


@pytest.mark.parametrize("what", ["panic", "exit", "silent"])
async def test_time_rule_that_fails_with_anything_is_a_failed_attempt(
    settings: Settings, witness: Witness, what: str
) -> None:
    """Of its message; it ended the worker if its error was no Exception."""
    broker, fails = Broker(replace(settings, preflight="warn", partitions=1)), function_that(what)

    def rule(message: Message) -> datetime | None:
        found: datetime | None = fails(message)
        return found

    @broker.handler("t", group="g", when=rule, retry=RetryPolicy(max_attempts=1))
    async def handle(text: str) -> None:
        witness.note(text)

    async with broker.running():
        for text in ("first", "bad", "last"):
            await broker.publish("t", text, key=text)
        await witness.sees(["first", "last"])
        await until(lambda: letters_of(broker, "t", "g"), "it is a dead letter")


class Array:
    """As that of numpy: `==` gives an array, which is neither true nor false."""

    def __eq__(self, other: object) -> Any:
        return Array()

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


WEIGHTS: ContextVar[Array | None] = ContextVar("weights", default=None)


@pytest.mark.parametrize("options", [{}, {"batch": 1}, {"concurrency": 1}], ids=repr)
@pytest.mark.parametrize("takes_message", [False, True])
async def test_context_variable_that_cannot_be_compared_ends_nothing(
    settings: Settings, witness: Witness, options: dict[str, Any], takes_message: bool
) -> None:
    """It is another value, so the next message does not see it. Before, the comparison ended the worker."""
    broker, own = Broker(replace(settings, preflight="warn", partitions=1)), Array()
    WEIGHTS.set(own)
    seen = list[bool]()

    def note(text: str) -> None:
        seen.append(WEIGHTS.get() is own)
        WEIGHTS.set(Array())
        witness.note(text)

    async def by_payload(text: str) -> None:
        note(text)

    async def by_message(text: str, message: Message) -> None:
        note(text)

    async def batch(texts: list[str]) -> None:
        note(texts[0])

    async def batch_of_messages(texts: list[str], messages: list[Message]) -> None:
        note(texts[0])

    several = batch_of_messages if takes_message else batch
    single = by_message if takes_message else by_payload
    broker.handler("t", group="g", **options)(several if "batch" in options else single)
    async with broker.running():
        for number in range(6):
            await broker.publish("t", str(number))
        await witness.sees([str(number) for number in range(6)])
    assert all(seen)


FACTORIES: dict[str, Any] = {"old": lambda loop, coroutine: asyncio.Task(coroutine, loop=loop)}
if sys.version_info >= (3, 12):
    FACTORIES["eager"] = asyncio.eager_task_factory
if sys.version_info >= (3, 13):
    del FACTORIES["old"]  # from 3.13.3 on a factory gets all arguments


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("options", [{}, {"batch": 4}], ids=repr)
async def test_worker_runs_under_the_task_factory_of_an_application(
    settings: Settings, witness: Witness, factory: str, options: dict[str, Any]
) -> None:
    """One that takes no context, as before Python 3.11, and one that starts tasks at once. The worker ended."""
    broker, loop = Broker(replace(settings, preflight="warn", partitions=1)), asyncio.get_running_loop()

    async def note(number: int, message: Message) -> None:
        if number % 3 == 0:
            await anyio.lowlevel.checkpoint()
        if number == 4 and message.attempt == 1:
            raise Retry("later", after="0s")
        witness.note(number)

    async def note_all(numbers: list[int]) -> None:
        for number in numbers:
            witness.note(number)

    broker.handler("t", group="g", **options)(note_all if options else note)
    before = loop.get_task_factory()
    loop.set_task_factory(FACTORIES[factory])
    try:
        async with broker.running():
            await broker.publish_many("t", range(12), key=lambda number: str(number % 2))
            await witness.sees(range(12))
            await settled(broker, "t")
    finally:
        loop.set_task_factory(before)


def returned(text: str) -> Any:
    """What a handler returns for this text."""
    return {"retry": Retry("later", after="0s"), "reject": Reject("no"), "fine": None}[text]


async def test_middleware_sees_an_error_that_a_handler_returns(settings: Settings) -> None:
    """It is raised there: a middleware that begins a transaction rolls it back, and one that returns nothing does not
    settle the message."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[str]()

    @broker.middleware
    async def unit_of_work(message: Message, call_next: Call) -> None:
        try:
            await call_next(message)
        except Exception as error:
            seen.append(f"rolled back: {type(error).__name__}")
            raise
        seen.append("committed")

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=1))
    async def handle(text: str) -> Any:
        return returned(text)

    async with broker.running():
        for text in ("fine", "reject", "retry"):
            await broker.publish("t", text)
            await settled(broker, "t")
        letters = await letters_of(broker, "t", "g")
    assert seen == ["committed", "rolled back: Reject", "rolled back: Retry"]
    assert [letter.reason for letter in letters] == ["rejected", "failed"]


STORY = list[str]()


@contextmanager
def in_story() -> Iterator[str]:
    """A session, and a line about how its transaction has ended."""
    try:
        yield "session"
    except Exception as error:
        STORY.append(f"rolled back: {type(error).__name__}")
        raise
    STORY.append("committed")


async def transaction() -> AsyncIterator[str]:
    """A dependency that commits."""
    with in_story() as session:
        yield session


def plain_transaction() -> Iterator[str]:
    """The same for plain functions."""
    with in_story() as session:
        yield session


def both(session: Annotated[str, Depends(transaction)]) -> str:
    """A dependency of another one, which fast-depends fills."""
    return session


async def work(text: str) -> None:
    """What a handler forgets to await."""
    await anyio.lowlevel.checkpoint()
    STORY.append(f"worked on {text}")


async def simple(text: str, session: Annotated[str, Depends(transaction)]) -> Any:
    return work(text) if text == "fine" else returned(text)


async def nested(text: str, session: Annotated[str, Depends(both)]) -> Any:
    return work(text) if text == "fine" else returned(text)


def plain(text: str, session: Annotated[str, Depends(plain_transaction)]) -> Any:
    STORY.append(f"worked on {text}")
    return returned(text)


@pytest.mark.parametrize("function", [simple, nested, plain])
async def test_dependency_closes_when_the_call_has_come_to_its_end(
    settings: Settings, function: Callable[..., Any]
) -> None:
    """Before, it committed: then a coroutine that the handler had returned ran, or its error was raised."""
    STORY.clear()
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    broker.handler("t", group="g", retry=RetryPolicy(max_attempts=1))(function)
    async with broker.running():
        for text in ("fine", "reject", "retry"):
            await broker.publish("t", text)
            await settled(broker, "t")
        letters = await letters_of(broker, "t", "g")
    story = [each for each in STORY if each not in ("worked on reject", "worked on retry")]
    assert story == ["worked on fine", "committed", "rolled back: Reject", "rolled back: Retry"]
    assert [letter.reason for letter in letters] == ["rejected", "failed"]


def forgets(text: str, session: Annotated[str, Depends(plain_transaction)]) -> Awaitable[None]:
    """A plain function cannot wait for it."""
    return work(text)


async def test_plain_handler_that_returns_a_coroutine_to_its_dependencies_fails(settings: Settings) -> None:
    """The coroutine would have run when they are closed."""
    STORY.clear()
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    broker.handler("t", group="g", retry=RetryPolicy(max_attempts=1))(forgets)
    async with broker.running():
        await broker.publish("t", "fine")
        await until(lambda: letters_of(broker, "t", "g"), "it is a dead letter")
        (letter,) = await letters_of(broker, "t", "g")
    assert STORY == ["rolled back: TypeError"]
    assert "forgets returned coroutine, which would run when its dependencies are closed" in letter.error


TASKS = """
from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rsmq import Broker, RetryPolicy

broker = Broker()


@dataclass
class Order:
    number: int


class Unlucky(Exception):
    pass


def work(order: Order) -> int:
    if order.number == 13:
        raise Unlucky(order.number)
    broker.publish_sync("seen", order.number)
    return 2 * order.number


async def main() -> None:
    retry = RetryPolicy(max_attempts=5, retry_on=ConnectionError)
    broker.handler("orders", group="g", execution="process", retry=retry)(work)
    async with broker.running():
        ref = await broker.publish("orders", Order(4), keep_result="1m")
        print(await broker.result(ref, group="g", timeout="60s"))
        await broker.publish("orders", Order(13))
        topic = await broker.topics.existing("orders")
        while not (letters := [each async for each in broker.dead_letters.iterate(topic, "g")]):
            await asyncio.sleep(0.01)
        print(letters[0].attempts, letters[0].error)
"""
MAIN = 'if __name__ == "__main__":\n    asyncio.run(main())\n'
EXPECTED = "8\n1 Unlucky: 13\n"


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["program.py"], {"program.py": TASKS + MAIN}),
        (["-m", "program"], {"program.py": TASKS + MAIN}),
        (["-c", "import asyncio, tasks; asyncio.run(tasks.main())"], {"tasks.py": TASKS}),
        (
            ["-m", "shop.worker"],
            {
                "shop/__init__.py": "",
                "shop/tasks.py": TASKS,
                "shop/worker.py": f"import asyncio\nfrom .tasks import main\n{MAIN}",
            },
        ),
        (
            ["-m", "shop"],
            {
                "shop/__init__.py": "",
                "shop/tasks.py": TASKS,
                "shop/__main__.py": "import asyncio\nfrom .tasks import main\nasyncio.run(main())\n",
            },
        ),
        (["-m", "shop"], {"shop/__init__.py": "", "shop/__main__.py": TASKS + MAIN}),
        (["folder"], {"folder/__main__.py": TASKS + MAIN}),
    ],
    ids=["file", "module", "command", "module of a package", "package", "all in __main__", "folder"],
)
def test_process_of_a_handler_finds_the_program_however_it_was_started(
    settings: Settings, tmp_path: Path, arguments: list[str], files: dict[str, str]
) -> None:
    """Functions, payloads and errors of its main module, and its own package. Before, a program that was started by the
    name of a module could not import from its package, its errors lost their class, and without a file no handler could
    publish."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert run(settings, tmp_path, *arguments) == EXPECTED


@pytest.mark.parametrize("word", ["stop", "quiet"])
def test_broker_is_stopped_from_any_thread(settings: Settings, word: str) -> None:
    """In asyncio's debug mode such a call was an error, and the worker went on; otherwise it stopped by luck."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[int]()

    @broker.handler("t", group="g")
    def handle(number: int) -> None:
        seen.append(number)
        getattr(broker, word)()

    SyncBroker(settings).publish("t", 1)
    thread = threading.Thread(target=lambda: asyncio.run(broker.run(), debug=True))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [1]


@pytest.mark.parametrize("items", ["text", b"bytes", {"number": 1}], ids=repr)
async def test_one_payload_in_the_place_of_many_is_refused(settings: Settings, items: Any) -> None:
    """Its characters, or names, would be the payloads."""
    async with Broker(replace(settings, preflight="warn")) as broker:
        with pytest.raises(ConfigError, match="publish_many stores many payloads, and "):
            await broker.publish_many("t", items)
        with pytest.raises(ConfigError, match="publish_many stores many payloads, and "):
            await broker.topic("t", Any).publish_many(items)
        with pytest.raises(ConfigError, match="publish_many stores many payloads, and "):
            await broker.topic("texts", str).publish_many(items)


class Names(str, Enum):  # noqa: UP042  StrEnum shows its value
    """As many applications keep their names. A part of a text, each is `Names.ORDERS`."""

    ORDERS = "orders"
    BILLING = "billing"
    MESSAGE = "message-1"
    UNIQUE = "user-7"
    DEVICE = "phone-42"
    BATCH = "import-1"
    DONE = "done"
    SCHEDULE = "nightly"
    ADDED = "hourly"


async def test_members_of_an_enumeration_are_the_names_that_they_stand_for(
    settings: Settings, witness: Witness
) -> None:
    """Before, a topic that a publisher named by one was another one than that of its text: no handler had it."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=1))
    async def handle(text: str) -> str:
        witness.note(text)
        if text == "bad":
            raise Reject("no")
        return text

    @broker.every("1h", Names.ORDERS, name=Names.SCHEDULE)
    def tick() -> str:
        return "tick"

    async with broker.running():
        named: Any = Names
        first = await broker.publish(named.ORDERS, "first", message_id=named.MESSAGE, keep_result="1m")
        assert not (await broker.publish("orders", "first", message_id="message-1")).is_new
        assert await broker.result(first, group=named.BILLING, timeout="60s") == "first"
        held = await broker.publish(named.ORDERS, "later", unique=named.UNIQUE, delay="1h")
        assert await broker.publish("orders", "later", unique="user-7", delay="1h") == held
        async with broker.batch(named.BATCH, group=named.BILLING, on_complete=named.DONE) as batch:
            await batch.publish(named.ORDERS, "member")
        await broker.publish(named.ORDERS, "bad")
        await broker.publish_many(named.ORDERS, ["many"])
        await witness.sees(["first", "member", "bad", "many"])
        await settled(broker, "orders")
        topic = await broker.topics.existing(named.ORDERS)
        assert await broker.dead_letters.count(topic, named.BILLING) == 1
        await broker.topics.change(named.ORDERS, max_length=1000)
        await broker.schedules.upsert(named.ADDED, "1h", named.ORDERS, "x")
        await broker.schedules.pause(named.ORDERS, named.ADDED)
        await broker.send(named.DEVICE, "letter")
        assert await broker.find_batch("import-1")
        assert (await broker.topics.existing("orders")).max_length == 1000
        assert len(await broker.devices.peek("phone-42")) == 1
        await broker.pause_group(named.ORDERS, named.BILLING)
        await broker.reset_group(named.ORDERS, named.BILLING)
        keys = await broker.client.execute_command("KEYS", f"{broker.keys.prefix}:*")
        fields = [await broker.client.execute_command("HGETALL", key) for key in keys if b":every" in key]
    assert [key for key in (*keys, *fields) if "Names" in str(key)] == []
