"""The fifteen reports of `reported.md`, tried with rsmq. Those that have a test beside their part are not repeated."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from rsmq import Breaker, Broker, Cancelled, ConfigError, Hold, Message, Reject, Retry, RetryPolicy, Settings
from rsmq.errors import BrokerError, RequestFailed
from tests.contract.witness import letters_of, settled
from tests.patience import until
from tests.redis.answers import AnsweringProxy
from tests.servers import Server

ROOT = Path(__file__).parents[2]


def run(settings: Settings, directory: Path, *arguments: str, **files: str) -> str:
    """What a Python process prints, which finds these files."""
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    environment = {
        **os.environ, "RSMQ_URL": str(settings.url), "RSMQ_PREFIX": settings.prefix, "RSMQ_PREFLIGHT": "warn",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, check=True, capture_output=True, text=True,
        timeout=60,
    ).stdout  # fmt: skip


async def test_delays_at_the_ends_of_their_type(settings: Settings) -> None:
    """Weeks, a year and the last day that there is are waited for; the first day is past, also as an expiry."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[Any]()
    broker.handler("orders", group="g")(told(seen))
    async with broker.running():
        for options in ({"delay": "25d"}, {"delay": "365d"}, {"at": datetime.max.replace(tzinfo=UTC)}):
            await broker.publish("orders", [3], **options)  # type: ignore[arg-type]
        after_the_last = datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))  # in UTC it is in the year 10000
        last = await broker.publish("orders", [4], at=after_the_last)
        await broker.publish("orders", [5], expires=datetime.min.replace(tzinfo=UTC))
        await broker.publish("orders", [1], at=datetime.min.replace(tzinfo=UTC))
        for delay in (timedelta(milliseconds=-1), timedelta.max):
            with pytest.raises(ConfigError, match="is not possible"):
                await broker.publish("orders", [2], delay=delay)
        await until(lambda: seen == [[1]], "the one in the past is handled")
        assert await broker.client.execute_command("ZCARD", broker.keys.delayed("orders", 0)) == 4
        assert last in [hit.id for hit in (await broker.find("orders", state="delayed")).hits]


def returns_error(text: str) -> object:
    """Written by mistake for `raise`."""
    return {"retry": Retry("later", after="0s"), "reject": Reject("no"), "error": ValueError("wrong")}[text]


async def awaits_and_returns_error(text: str, message: Message) -> object:
    """The same, after something that suspends it, for some."""
    if message.key:
        await anyio.lowlevel.checkpoint()
    return returns_error(text)


async def returns_error_at_once(text: str) -> object:
    """The same, with a payload alone."""
    return returns_error(text)


@pytest.mark.parametrize("options", [{}, {"execution": "process"}, {"output": "out"}, {"replies": True}])
@pytest.mark.parametrize("function", [returns_error, awaits_and_returns_error, returns_error_at_once])
async def test_error_that_a_handler_returns_counts_as_raised(
    settings: Settings, function: Any, options: dict[str, Any]
) -> None:
    """`return Retry()` and `return Reject()` settled the message, as if it had been handled."""
    if options.get("execution") and function is not returns_error:
        return
    broker = Broker(replace(settings, preflight="warn", partitions=1))
    broker.handler("t", group="g", retry=RetryPolicy(max_attempts=2), **options)(function)
    async with broker.running():
        for text in ("retry", "reject", "error"):
            await broker.publish("t", text, key=text if text != "retry" else None)
        await until(lambda: are_dead(broker, 3), "all are dead letters")
        letters = {letter.data: letter for letter in await letters_of(broker, "t", "g")}
    assert [(letters[text].reason, letters[text].attempts) for text in (b"retry", b"reject", b"error")] == [
        ("failed", 2), ("rejected", 1), ("failed", 2),
    ]  # fmt: skip


async def are_dead(broker: Broker, count: int) -> bool:
    """Whether there are so many dead letters."""
    return len(await letters_of(broker, "t", "g")) == count


class WithoutDuration(Hold):
    """Its `__init__` does not call that of `Hold`."""

    def __init__(self) -> None:
        pass


class WithoutTruth(Exception):
    """As an array has none."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@pytest.mark.parametrize("options", [{}, {"batch": 10}, {"breaker": Breaker(failures=9)}], ids=repr)
async def test_error_that_cannot_be_read_ends_nothing_but_its_message(
    settings: Settings, options: dict[str, Any]
) -> None:
    """Each becomes a dead letter, and the worker goes on."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[str]()

    async def raise_named(name: str) -> None:
        seen.append(name)
        if name != "last":
            raise {"duration": WithoutDuration, "truth": WithoutTruth}[name]

    async def raise_each(names: list[str]) -> None:
        for name in names:
            await raise_named(name)

    handler = broker.handler("orders", group="g", retry=RetryPolicy(max_attempts=1), **options)
    handler(raise_each if "batch" in options else raise_named)
    async with broker.running():
        for name in ("duration", "truth", "last"):
            await broker.publish("orders", name)
            await until(lambda name=name: name in seen, f"{name} is handled")  # type: ignore[misc]
        topic = await broker.topics.existing("orders")
        errors = [letter.error async for letter in broker.dead_letters.iterate(topic, "g")]
    assert "WithoutDuration cannot be read" in errors[0]
    assert errors[1] == "WithoutTruth"


def told(seen: list[Any]) -> Any:
    async def handle(payload: Any) -> None:
        seen.append(payload)

    return handle


async def test_second_run_of_a_broker_is_refused_and_the_first_one_stops(settings: Settings) -> None:
    """As where the lifespan of an application and its start both run the handlers."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[Any]()
    broker.handler("orders", group="g")(told(seen))
    async with broker.running():
        with pytest.raises(ConfigError, match="runs its handlers already"):
            async with broker.running():
                pass
        with pytest.raises(ConfigError, match="runs its handlers already"):
            await broker.run()
        assert broker.failure is None
        await broker.publish("orders", 1)
        await until(lambda: seen == [1], "the worker goes on")
    async with broker.running():
        await broker.publish("orders", 2)
        await until(lambda: seen == [1, 2], "it runs again")


LOGGING = """
import logging, logging.handlers, queue
from rsmq import SyncBroker

class Publishes(logging.Handler):
    def emit(self, record):
        if not record.name.startswith(("rsmq", "asyncio")):
            broker.publish("logs", {"text": record.getMessage()})

with SyncBroker() as broker:
    records = queue.Queue()
    logging.basicConfig(level="DEBUG", handlers=[logging.handlers.QueueHandler(records)])
    listener = logging.handlers.QueueListener(records, Publishes())
    listener.start()
    logging.getLogger("shop").info("hello")
    listener.stop()
"""


async def test_log_records_are_published_behind_a_queue(settings: Settings, tmp_path: Path) -> None:
    """As the page shows it: without the queue, `logging` holds the lock of the handler that waits for rsmq."""
    run(settings, tmp_path, "main.py", main=LOGGING)
    broker, seen = Broker(replace(settings, preflight="warn")), list[Any]()
    broker.handler("logs", group="g", start="earliest")(told(seen))
    async with broker.running():
        await until(lambda: seen == [{"text": "INFO:shop:hello"}], "the record is a message")


def test_type_under_type_checking_is_named(settings: Settings, tmp_path: Path) -> None:
    """The error says which name, and where the import belongs."""
    source = (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nfrom rsmq import Broker, ConfigError\n"
        "if TYPE_CHECKING:\n    from decimal import Decimal\n"
        "async def handle(price: Decimal) -> None: ...\n"
        "try:\n    Broker().handler('a', group='g')(handle)\nexcept ConfigError as error:\n    print(error)\n"
    )
    printed = run(settings, tmp_path, "main.py", main=source)
    assert "name 'Decimal' is not defined" in printed
    assert "TYPE_CHECKING" in printed


HANDLES = """
import anyio
from rsmq import Broker
broker = Broker()

@broker.handler("orders", group="g", execution="process")
def handle(order: dict) -> None:
    with open("handled", "a") as file:
        print(order, file=file)

if __name__ == "__main__":
    broker.publish_sync("orders", {"n": 1})
"""
SERVES = """
import anyio, pathlib
from main import broker

async def serve():
    async with broker.running():
        while not pathlib.Path("handled").exists() or not pathlib.Path("handled").read_text():
            await anyio.sleep(0.01)

if __name__ == "__main__":
    anyio.run(serve)
"""


def test_module_that_is_also_a_main_program_without_docstrings(settings: Settings, tmp_path: Path) -> None:
    """`python -OO main.py` publishes as `__main__`, and a worker handles it as `main`: no name of code is stored."""
    run(settings, tmp_path, "-OO", "main.py", main=HANDLES)
    run(settings, tmp_path, "-OO", "serve.py", main=HANDLES, serve=SERVES)
    assert (tmp_path / "handled").read_text() == "{'n': 1}\n"


async def test_keys_and_tuples_come_back_as_they_are_annotated(settings: Settings) -> None:
    """JSON has neither; who writes no types gets text and lists."""
    broker, typed, plain = Broker(replace(settings, preflight="warn")), list[Any](), list[Any]()

    @broker.handler("orders", group="typed")
    async def take(order: dict[int, tuple[int, int]]) -> None:
        typed.append(order)

    broker.handler("orders", group="plain")(told(plain))
    async with broker.running():
        await broker.publish("orders", {1: (2, 3)})
        await until(lambda: typed and plain, "both have it")
    assert (typed, plain) == ([{1: (2, 3)}], [{"1": [2, 3]}])


async def test_publish_after_a_connection_was_forgotten_on_its_way(settings: Settings) -> None:
    """A load balancer drops what is idle and tells neither end: the message is stored once, on a new connection."""
    with Server(tcp=True) as server:
        async with AnsweringProxy(server.port) as proxy:
            broker = Broker(
                replace(settings, url=proxy.url, preflight="warn", partitions=1, command_timeout=timedelta(seconds=1))
            )
            async with broker:
                await broker.publish("orders", 1)
                proxy.answer = "silence"
                proxy.move(server.port)
                await broker.publish("orders", 2)
                with server.client() as client:
                    assert client.xlen(broker.keys.stream("orders", 0)) == 2


async def test_worker_goes_on_after_its_server_had_no_name(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing name server is as a server that is away."""
    failed = list[int]()

    def fail(*_: Any, **__: Any) -> Any:
        failed.append(1)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    with Server(tcp=True) as server, server.client() as client:
        client.ping()
        url = server.url.replace("127.0.0.1", "localhost")
        broker = Broker(replace(settings, url=url, preflight="warn", lease_ttl=timedelta(seconds=2)))
        seen = list[Any]()
        broker.handler("orders", group="g")(told(seen))
        async with broker.running():
            with monkeypatch.context() as patch:
                patch.setattr(socket, "getaddrinfo", fail)
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                await until(lambda: len(failed) > 5, "it asks for the name again and again")
            await broker.publish("orders", 1)
            await until(lambda: seen == [1], "it handles")


async def test_server_without_info_and_config(settings: Settings) -> None:
    """Providers take commands away. Those that rsmq only looks with may be missing; any other one is named."""
    with Server("--rename-command", "INFO", "", "--rename-command", "CONFIG", "", tcp=True) as server:
        broker, seen = Broker(replace(settings, url=server.url, preflight="warn")), list[Any]()
        broker.handler("orders", group="g")(told(seen))
        async with broker.running():
            await broker.publish("orders", 1)
            await until(lambda: seen == [1], "it is handled")
    named = r"unknown command 'CLIENT'.*rsmq needs this command. docs/keys.md"
    with Server("--rename-command", "CLIENT", "", tcp=True) as server, pytest.raises(BrokerError, match=named):
        async with Broker(replace(settings, url=server.url, preflight="warn")) as broker:
            await broker.publish("orders", 1)


async def test_handler_may_take_longer_than_a_lease(settings: Settings) -> None:
    """The lease is renewed beside it, so its message stays its own."""
    lease = timedelta(seconds=1)
    broker, attempts = Broker(replace(settings, preflight="warn", lease_ttl=lease)), list[int]()

    @broker.handler("orders", group="g")
    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        heartbeat = broker.worker.heartbeat if broker.worker else None
        assert heartbeat is not None
        begun = heartbeat.last_confirmed
        while heartbeat.last_confirmed < begun + 2 * lease.total_seconds():
            await anyio.sleep(0.01)
        attempts.append(0)

    async with broker.running():
        await broker.publish("orders", 1)
        await until(lambda: attempts and attempts[-1] == 0, "it has ended")
    assert attempts == [1, 0]


async def test_id_of_a_cancelled_message_stays_taken(settings: Settings) -> None:
    """A publish that is sent again brings nothing back; its ref says that it is not new. A unique name replaces."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[Any]()
    broker.handler("orders", group="g")(told(seen))
    async with broker.running():
        for is_first in (True, False):
            ref = await broker.publish("orders", [1], message_id="session-1", key="k", delay="1h")
            assert ref.is_new is is_first
            assert isinstance(await broker.cancel(ref), Cancelled)
        ref = await broker.publish("orders", [1], message_id="session-1", key="k")
        assert ref.is_new is False
        for n in range(2, 5):
            await broker.publish("orders", [n], unique="session", delay="1h" if n < 4 else "0s", on_conflict="replace")
        await until(lambda: seen != [], "the last one is handled")
        await settled(broker, "orders")
    assert seen == [[4]]


async def test_message_that_is_moved_again_and_again_comes_when_it_is_due_last(settings: Settings) -> None:
    """Each move counts from its own moment; none is forgotten, and none makes it come at once."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[datetime]()

    @broker.handler("orders", group="g")
    async def handle(_: Any) -> None:
        seen.append(datetime.now(UTC))

    async with broker.running():
        ref = await broker.publish("orders", 1, delay="1h")
        for _ in range(20):
            await broker.reschedule(ref, delay="1h")
        due = await broker.reschedule(ref, delay="500ms")
        await until(lambda: seen != [], "it is handled")
    assert seen[0] >= due - timedelta(milliseconds=1)


async def test_many_messages_that_are_due_late_hold_back_no_nearer_one(settings: Settings) -> None:
    """More than any page has."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[Any]()
    broker.handler("orders", group="g")(told(seen))
    async with broker.running():
        await broker.publish_many("orders", [[n] for n in range(3000)], delay="7d")
        await broker.publish("orders", [-1], delay="300ms")
        await until(lambda: seen == [[-1]], "the nearer one is handled")


async def test_broker_that_runs_again_handles_each_message_once(settings: Settings) -> None:
    """No handler is registered twice, and no consumer is left in the group."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[Any]()
    broker.handler("orders", group="g")(told(seen))
    for n in range(4):
        async with broker.running():
            await broker.publish("orders", [n])
            await settled(broker, "orders")
            consumers = await broker.client.execute_command("XINFO", "CONSUMERS", broker.keys.stream("orders", 0), "g")
            assert len(consumers) == 1
    assert seen == [[0], [1], [2], [3]]


@pytest.mark.parametrize("form", ["async", "thread", "batch"])
async def test_sys_exit_in_a_handler_fails_its_message(settings: Settings, form: str) -> None:
    """With the text that a library gives to it. The worker goes on."""
    broker, seen = Broker(replace(settings, preflight="warn", partitions=1)), list[int]()
    once = RetryPolicy(max_attempts=1)

    def judge(n: int) -> None:
        if n == 0:
            sys.exit("I cannot go on")
        seen.append(n)

    async def judge_async(n: int) -> None:
        judge(n)

    async def judge_many(numbers: list[int]) -> None:
        for n in numbers:
            judge(n)

    function: Any = {"async": judge_async, "thread": judge, "batch": judge_many}[form]
    broker.handler("orders", group="g", retry=once, batch=1 if form == "batch" else None)(function)
    async with broker.running():
        for n in (0, 1):
            await broker.publish("orders", n)
        await until(lambda: seen == [1], "the next one is handled")
        await settled(broker, "orders")
        (letter,) = await letters_of(broker, "orders", "g")
    assert (letter.reason, letter.error) == ("failed", "SystemExit: I cannot go on")


async def test_handler_that_waits_for_its_own_topic_ends(settings: Settings) -> None:
    """With one slot the answer cannot come. The request ends by its timeout, and so does the one from outside."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))

    @broker.handler("orders", group="g", replies=True, concurrency=1, retry=RetryPolicy(max_attempts=1))
    async def handle(n: int) -> int:
        return 0 if n == 0 else await broker.request("orders", n - 1, timeout=timedelta(milliseconds=300)) + 1

    async with broker.running():
        with pytest.raises(RequestFailed, match=r"RequestTimeout: no answer within 0\.3 s"):
            await broker.request("orders", 1, timeout=timedelta(minutes=1))
        assert await broker.request("orders", 0, timeout=timedelta(minutes=1)) == 0


STARTS = """
import subprocess
from rsmq import Broker
broker = Broker()
def end(name):
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    try:
        code = child.wait(30)
    finally:
        child.kill()
    open(name, "w").write(str(code))
@broker.handler("t", group="async")
async def in_loop(n: int): end("async")
@broker.handler("t", group="thread")
def in_thread(n: int): end("thread")
@broker.handler("t", group="process", execution="process")
def in_process(n: int): end("process")
"""


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_program_that_a_handler_starts_can_be_ended(settings: Settings, tmp_path: Path, processes: str) -> None:
    """A worker that blocks signals would pass that on to all that its handlers start."""
    (tmp_path / "app.py").write_text(STARTS)
    environment = {
        **os.environ, "RSMQ_URL": str(settings.url), "RSMQ_PREFIX": settings.prefix, "RSMQ_PREFLIGHT": "warn",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "rsmq", "worker", "app:broker", "--processes", processes]
    worker = subprocess.Popen(  # noqa: ASYNC220
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    names = ("async", "thread", "process")

    def are_there() -> bool:
        return all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in names)

    try:
        async with Broker(replace(settings, preflight="warn")) as broker:
            await broker.publish("t", 1)
        await until(are_there, "all have ended one")
    finally:
        worker.terminate()
        await anyio.to_thread.run_sync(worker.wait)
    assert [(tmp_path / name).read_text() for name in names] == ["-15"] * 3
