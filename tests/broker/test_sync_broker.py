"""`SyncBroker`: every method of `Broker` for code without an event loop, in threads, forks, and with signals."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rsmq import Broker, BrokerError, ConfigError, Letter, Message, Publication, Router, Settings, SyncBroker, TooLarge
from rsmq.broker.sync_broker import SyncClient, SyncDeadLetters, SyncDevices, SyncSession, SyncTopic, SyncTopics
from rsmq.broker.typed_topic import TypedTopic
from rsmq.dlq import DeadLetters, Selection
from rsmq.persistence import Devices, Session
from rsmq.redis.client.client import Client
from rsmq.redis.topics import Topics
from rsmq.testing import Harness
from tests.forks import start
from tests.servers import Server, wait_until

ROOT = Path(__file__).parents[2]

INTERNAL = {"make_producer", "declared", "cancelled", "encoding"}
"""Names of `Broker` that the reference hides."""


@pytest.fixture
def broker(settings: Settings) -> Iterator[SyncBroker]:
    """A broker that connects at its first call."""
    broker = SyncBroker(settings)
    yield broker
    broker.close()


# -- the two surfaces -------------------------------------------------------------------------------------------------


def public(kind: object) -> set[str]:
    """The public names of a class or an object."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_sync_broker_has_every_public_name_of_broker() -> None:
    """Methods, properties and attributes; a new one of `Broker` fails here until it has its blocking form."""
    one, other = Broker(), SyncBroker()
    assert public(one) - INTERNAL - public(other) == set()
    assert public(other) - public(one) == {"asynchronous", "close"}


PAIRS = [
    (SyncBroker, Broker), (SyncTopic, TypedTopic), (SyncTopics, Topics), (SyncDevices, Devices),
    (SyncDeadLetters, DeadLetters), (SyncSession, Session),
]  # fmt: skip
ELSEWHERE = {Broker: INTERNAL}


@pytest.mark.parametrize(("blocking", "original"), PAIRS, ids=lambda kind: kind.__name__)
def test_methods_have_the_same_parameters(blocking: type, original: type) -> None:
    """And none of them is a coroutine."""
    names = {name for name in public(original) if callable(getattr(original, name))} - ELSEWHERE.get(original, set())
    assert names
    for name in names:
        ours, theirs = getattr(blocking, name), getattr(original, name)
        assert parameters(ours) == parameters(theirs), name
        assert not inspect.iscoroutinefunction(ours), name
        assert not inspect.isasyncgenfunction(ours), name
        assert inspect.getdoc(ours), name


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    """Names, kinds and defaults, without those of a running event loop."""
    found = inspect.signature(function).parameters.values()
    return {each.name: (each.kind is each.KEYWORD_ONLY, each.default) for each in found
            if each.name not in ("self", "task_status")}  # fmt: skip


def test_the_client_has_its_two_ways_to_ask() -> None:
    """Of the 300 commands of redis-py it has the one that takes any of them."""
    assert public(SyncClient) == {"execute_command", "pipelined"}
    assert parameters(SyncClient.execute_command) == parameters(Client.execute_command)


# -- one behaviour each -----------------------------------------------------------------------------------------------


class Order(BaseModel):
    """A payload."""

    n: int


def stored(broker: SyncBroker, topic: str) -> int:
    """The entries of all partitions."""
    partitions = range(broker.settings.partitions)
    return sum(broker.client.execute_command("XLEN", broker.keys.stream(topic, each)) for each in partitions)


def test_publishing_inside_with_disconnects_after_the_last_block(settings: Settings) -> None:
    """Blocks may be nested; after the last of them the thread has ended."""
    broker = SyncBroker(settings, headers={"source": "script"})
    before = threading.active_count()
    with broker:
        with broker as same:
            assert same is broker
            assert broker.publish("orders", {"n": 1}, message_id="one") == "one"
        assert broker.publish_sync("orders", {"n": 2}, message_id="two") == "two"
        assert len(broker.publish_many("orders", [{"n": 3}, {"n": 4}], key=lambda item: str(item["n"]))) == 2
        assert stored(broker, "orders") == 4
        assert broker.url.startswith("redis") or broker.url.startswith("unix")
        assert repr(broker) == "<SyncBroker 0 handlers>"
    assert threading.active_count() == before


def test_errors_and_wrong_options_are_those_of_broker(broker: SyncBroker) -> None:
    """The connection survives them."""
    with pytest.raises(TooLarge):
        broker.publish("orders", b"x" * (broker.settings.payload_limit + 1))
    with pytest.raises(ConfigError, match=r"publish: unknown option 'kye'\. Did you mean key\?"):
        broker.publish("orders", {}, kye="a")  # type: ignore[arg-type]
    assert broker.publish("orders", {})


def test_topics(broker: SyncBroker) -> None:
    """Each method of `broker.topics`."""
    assert broker.topics.ensure("orders", 3).partitions == 3
    assert broker.topics.find("nothing") is None
    assert [topic.name for topic in broker.topics.find_all(["orders", "nothing"])] == ["orders"]
    assert broker.topics.change("orders", max_length=9).max_length == 9
    assert broker.topics.existing("orders").max_length == 9
    assert broker.topics.names() == ["orders"]
    broker.topics.delete("orders")
    with pytest.raises(ConfigError, match="there is no topic 'orders'"):
        broker.topics.existing("orders")


def test_client(broker: SyncBroker) -> None:
    """Raw commands and raw replies."""
    key = f"{broker.settings.prefix}:{{mine}}"
    assert broker.client.execute_command("SET", key, "1") == b"OK"
    assert broker.client.pipelined([("GET", key), ("DEL", key)]) == [b"1", 1]


def test_devices_and_sessions(broker: SyncBroker) -> None:
    """Letters are sent, peeked, read, acknowledged and purged."""
    broker.send("phone", {"n": 1})
    broker.send_many([("phone", {"n": 2}), ("tablet", {"n": 3})])
    assert sorted(broker.devices.names()) == ["phone", "tablet"]
    assert {device.client_id: device.backlog for device in broker.devices.iterate()} == {"phone": 2, "tablet": 1}
    assert [letter.seq for letter in broker.devices.peek("phone")] == [1, 2]
    letters: list[Letter] = []
    with broker.connect("phone", window=5) as session:
        for letter in session:
            letters.append(letter)
            session.receive(letter)
            session.ack(letter)
            if len(letters) == 2:
                break
        session.flush()
    assert [letter.payload for letter in letters] == [{"n": 1}, {"n": 2}]
    found = broker.devices.find("phone")
    assert found is not None
    assert (found.backlog, found.gateway) == (0, None)
    assert broker.devices.purge("tablet") == 1


def test_a_session_outside_with_keeps_its_connection_until_it_ends(broker: SyncBroker) -> None:
    """The last `with broker` of another piece of code does not close a session's connection under it."""
    broker.send("phone", {"n": 1})
    with broker.connect("phone") as session:
        with broker:
            pass
        assert next(session).payload == {"n": 1}


def shop(broker: SyncBroker) -> list[tuple[str, int]]:
    """Handlers of every kind of registration; returns the list of what they saw."""
    seen: list[tuple[str, int]] = []
    orders = broker.topic("orders", Order)
    router = Router()

    @orders.handler(group="billing")
    def bill(order: Order, message: Message) -> None:
        seen.append((message.headers["by"], order.n))
        if order.n == 13:
            raise ValueError("unlucky")
        broker.publish("bills", {"n": order.n})  # its own thread: this does not block the worker

    @router.handler("bills", group="mail")
    def mail(bill: dict[str, int]) -> None:
        seen.append(("mail", bill["n"]))

    @broker.middleware
    async def note(message: Any, call_next: Any) -> Any:
        seen.append(("middleware", 0))
        return await call_next(message)

    @broker.on_error
    def report(message: Message, error: BaseException) -> None:
        seen.append((type(error).__name__, 0))

    @broker.before_publish
    def sign(publication: Publication) -> None:
        publication.headers["by"] = "shop"

    @broker.lifespan
    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        seen.append(("lifespan", 0))
        yield

    @broker.every("1h", "ticks", missed="skip")
    def tick() -> str:
        return "tick"

    broker.include(router)
    broker.deliver("alerts", to=lambda alert: alert["device"])

    @broker.handler("audit", group="audit", start="latest")
    def audit(text: str) -> None:
        seen.append(("audit", 0))

    return seen


def test_registration_and_a_running_worker(settings: Settings) -> None:
    """The same registrations as at `Broker`; handlers that are plain functions publish by the same object."""
    broker = SyncBroker(settings)
    seen = shop(broker)
    assert [handler.topic for handler in broker.handlers] == ["orders", "bills", "alerts", "audit"]
    assert [schedule.name for schedule in broker.declared_schedules] == ["tick"]
    assert (broker.services, broker.prefix, broker.worker, broker.failure) == ([], "", None, None)
    with broker.running() as same:
        assert same is broker
        assert broker.worker is not None
        orders = broker.topic("orders", Order)
        orders.publish(Order(n=1))
        orders.publish_many([Order(n=2)])
        with pytest.raises(ConfigError, match="has payloads of Order, not int"):
            orders.publish_many([3])  # type: ignore[list-item]
        wait_until(lambda: {("mail", 1), ("mail", 2)} <= set(seen), "both bills are mailed")
        broker.publish("alerts", {"device": "phone"})
        wait_until(lambda: broker.devices.find("phone"), "the alert is delivered")
    assert broker.worker is None
    assert {("lifespan", 0), ("middleware", 0), ("shop", 1)} <= set(seen)


def test_groups_and_dead_letters(settings: Settings) -> None:
    """Pause, resume, reset; and the dead letter of a handler that gives up."""
    broker = SyncBroker(settings)
    seen: list[int] = []

    @broker.handler("orders", group="billing")
    def bill(order: Order) -> None:
        seen.append(order.n)

    with broker:
        broker.topics.ensure("orders", 1)
        broker.publish("orders", "malformed", message_id="bad")
        with broker.running():
            topic = broker.topics.existing("orders")
            wait_until(lambda: broker.dead_letters.count(topic, "billing"), "it is dead")
            [letter] = broker.dead_letters.iterate(topic, "billing")
            assert [each.id for each in broker.dead_letters.select(topic, "billing", Selection())] == [letter.id]
            assert broker.dead_letters.get(topic, "billing", letter.id) is not None
            assert broker.dead_letters.replay(topic, "billing", [letter.id]) == 1
            wait_until(lambda: broker.dead_letters.count(topic, "billing"), "it is dead again")
            assert broker.dead_letters.replay_selected(topic, "billing", Selection(reasons=("malformed",))) == 1
            wait_until(lambda: broker.dead_letters.count(topic, "billing"), "and again")
            assert broker.dead_letters.purge(topic, "billing") == 1
            broker.pause_group("orders", "billing")
            broker.publish("orders", Order(n=1))
            broker.resume_group("orders", "billing")
            wait_until(lambda: seen == [1], "it is handled after the pause")
            broker.reset_group("orders", "billing")
            # what the worker read before it learned of the reset is not settled, and is handled again
            wait_until(lambda: len(seen) >= 2, "it is handled after the reset")
        assert set(seen) == {1}


def test_run_ends_by_stop_and_by_quiet_from_another_thread(settings: Settings) -> None:
    """Also from a handler in a thread."""
    for end in ("stop", "quiet"):
        broker = SyncBroker(settings)

        @broker.handler("orders", group=end)
        def bill(order: dict[str, int], broker: SyncBroker = broker, end: str = end) -> None:
            getattr(broker, end)()

        broker.publish("orders", {"n": 1})
        broker.run()
        assert broker.worker is None
        broker.close()


def test_an_async_handler_is_told_to_use_the_asynchronous_broker(settings: Settings) -> None:
    """A blocking call in the event loop that must answer it would wait for ever."""
    broker, results = SyncBroker(settings), list[str]()

    @broker.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        try:
            broker.publish("bills", order)
        except ConfigError as error:
            results.append(str(error))
        results.append(await broker.asynchronous.publish("bills", order, message_id="bill"))
        broker.stop()

    broker.publish("orders", {"n": 1})
    broker.run()
    assert "await broker.asynchronous.publish(...)" in results[0]
    assert results[1] == "bill"
    broker.close()


@pytest.mark.anyio
async def test_the_harness_takes_a_sync_broker(server: Server, settings: Settings) -> None:
    """What the handlers publish by the object itself goes to the server of the test."""
    broker = SyncBroker("redis://127.0.0.1:1")
    seen = shop(broker)
    async with Harness(broker, url=str(settings.url), prefix=settings.prefix) as harness:
        [outcome] = await harness.publish_and_handle("orders", Order(n=1))
        assert outcome.is_done
        await harness.handle()
        assert ("mail", 1) in seen


# -- threads, forks, signals, the end ---------------------------------------------------------------------------------


def test_one_thread_serves_many_and_closing_waits_for_their_calls(settings: Settings) -> None:
    """A `with` block that ends in one thread does not break the calls of the others; they connect again."""
    broker = SyncBroker(settings)
    before = threading.active_count()

    def publish(n: int) -> str:
        if n % 5 == 0:
            with broker:
                return broker.publish("orders", {"n": n})
        return broker.publish("orders", {"n": n})

    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(publish, range(100)))
    assert len(set(ids)) == 100
    assert stored(broker, "orders") == 100
    broker.close()
    assert threading.active_count() <= before


def test_closing_ends_a_waiting_session_with_an_error(broker: SyncBroker) -> None:
    """It would wait for the next letter without end."""
    errors: list[BaseException] = []
    waiting = threading.Event()

    def listen() -> None:
        try:
            with broker.connect("phone") as session:
                waiting.set()
                next(session)
        except BrokerError as error:
            errors.append(error)

    listener = threading.Thread(target=listen)
    listener.start()
    assert waiting.wait(60)
    wait_until(lambda: broker._portal._endless, "it waits for a letter")
    broker.close()
    listener.join(60)
    assert not listener.is_alive()
    assert "another thread closed the broker" in str(errors[0])


FAR = "redis://10.255.255.1:6379"


@pytest.mark.parametrize(
    ("mode", "code", "entries", "output"),
    [
        ("exit", 0, 1, ""),
        ("exit in a thread", 0, 2, ""),
        ("fork", 0, 4, ""),
        ("interrupt a session", -signal.SIGINT, 0, ""),
        ("interrupt connecting", -signal.SIGINT, 0, ""),
        ("interrupt the worker", -signal.SIGINT, 1, "handled 1 None\n"),
    ],
)
def test_a_script_ends(settings: Settings, tmp_path: Path, mode: str, code: int, entries: int, output: str) -> None:
    """At its end, after a fork, and by Ctrl-C, which ends a wait at once and a worker when its handlers are done."""
    url = FAR if mode == "interrupt connecting" else str(settings.url)
    printed, errors = tmp_path / "stdout", tmp_path / "stderr"
    with printed.open("wb") as stdout, errors.open("wb") as stderr:
        done = start(
            "tests.broker.sync_script", mode, url, settings.prefix,
            cwd=ROOT, env=os.environ, stdout=stdout, stderr=stderr,
        )  # fmt: skip
        done.wait(50)
    complaint = errors.read_text()
    assert (done.returncode, printed.read_text()) == (code, output), complaint
    assert ("Traceback" in complaint) == (code != 0), complaint
    assert ("KeyboardInterrupt" in complaint) == (code != 0), complaint
    broker = SyncBroker(settings)
    assert stored(broker, "orders") == entries
    broker.close()


def test_a_sync_broker_asks_for_results(settings: Settings) -> None:
    """`SyncBroker.result` waits as `Broker.result` does; a plain function keeps a step and tells its progress."""
    broker = SyncBroker(settings)

    @broker.handler("orders", group="billing")
    def bill(payload: int, message: Message) -> int:
        message.progress_sync(0.5, "half")
        with message.step("add") as step:
            step.result = payload + 1
        return int(step.result)

    with broker.running():
        ref = broker.publish("orders", 1, keep_result="1h")
        assert broker.result(ref, group="billing", timeout="20s", returns=int) == 2


def test_a_sync_broker_opens_batches(settings: Settings) -> None:
    """`with broker.batch(...)` closes the batch at its end, and leaves it open if the block fails."""
    broker = SyncBroker(settings)
    told = threading.Event()

    @broker.handler("sms", group="sender")
    def send(payload: int) -> None: ...

    @broker.handler("reports", group="office")
    def report(result: dict[str, Any]) -> None:
        if (result["total"], result["done"], result["state"]) == (3, 3, "complete"):
            told.set()

    with broker.running():
        with broker.batch("campaign", group="sender", on_complete="reports") as batch:
            for number in range(3):
                batch.publish("sms", number, key=str(number))
        assert told.wait(40)

        def fails() -> None:
            with broker.batch("other", group="sender") as batch:
                batch.publish("sms", 1)
                raise OSError("no paper")

        with pytest.raises(OSError, match="paper"):
            fails()
        other = broker.find_batch("other")
        assert other is not None
        assert (other.state, other.total) == ("open", 1)
        assert {each.name for each in broker.batches()} == {"campaign", "other"}
        broker.cancel_batch("other")
