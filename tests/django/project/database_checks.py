"""Effects and outbox inside a Django project, with workers. Run by tests/django/test_database.py."""

import json
import os
import signal
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Annotated

import pytest
import shop
from billing.models import Invoice
from billing.worker import bill, broker, effects, outbox
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.test import override_settings
from fast_depends import Depends
from settings import SERVER
from tenacity import wait_fixed
from waiting import finished, wait_until

from rsmq import Broker, ConfigError, RetryPolicy, Settings, SyncBroker
from rsmq.django.backend import RsmqBackend
from rsmq.django.tasks import TaskResultDoesNotExist
from rsmq.model.message import Message, MessageOrigin
from tests.forks import start

HERE = Path(__file__).parent
sync = SyncBroker(Settings(**SERVER))


def start_worker(target="billing.worker:broker"):
    """`rsmq worker`."""
    environment = {**os.environ, "RSMQ_URL": SERVER["url"], "RSMQ_PREFIX": SERVER["prefix"]}
    return start("rsmq", "worker", target, "--log-level", "error", cwd=HERE, env=environment, stdout=1, stderr=2)


@pytest.fixture(scope="session", autouse=True)
def _tables():
    call_command("migrate", run_syncdb=True, verbosity=0)


@pytest.fixture(scope="session")
def workers():
    """Three: two of them die."""
    processes = [start_worker() for _ in range(3)]
    yield processes
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()


def counts(*numbers):
    """How many invoices there are for each order."""
    connection.close()  # not a snapshot of before
    return [Invoice.objects.filter(order=number).count() for number in numbers]


def published(topic="invoices"):
    """The payloads in a topic, sorted."""
    client, keys = sync.client, sync.keys
    found = []
    for partition in range(2):
        for _, fields in client.execute_command("XRANGE", keys.stream(topic, partition), "-", "+"):
            found.append(json.loads(dict(zip(fields[::2], fields[1::2], strict=True))[b"data"]))
    return sorted(found)


def marks():
    """How many messages have one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM rsmq_handled")
        return cursor.fetchone()[0]


def waiting():
    """How many rows are in the outbox."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM rsmq_outbox")
        return cursor.fetchone()[0]


def test_migrations_are_complete_and_can_be_reversed():
    """`makemigrations` finds nothing to do, and `sqlmigrate` shows what is run."""
    call_command("makemigrations", "rsmq_database", check=True, dry_run=True, verbosity=0)
    shown = StringIO()
    call_command("sqlmigrate", "rsmq_database", "0001", stdout=shown)
    assert shown.getvalue().count("CREATE TABLE IF NOT EXISTS rsmq_") == 5
    call_command("migrate", "rsmq_database", "zero", verbosity=0)
    with (
        pytest.raises(ConfigError, match="has no table rsmq_outbox: add 'rsmq"),
        transaction.atomic(),
    ):
        outbox.publish("invoices", 1)
    call_command("migrate", "rsmq_database", verbosity=0)


def test_each_message_commits_once(workers):
    """Orders that fail, that drop their work, whose worker dies after its commit, and whose commit has no answer."""
    orders = {1: "", 2: "fail once", 3: "fail apart", 4: "drop", 5: "output", 6: "lose the answer", 7: "die", 8: ""}
    before = marks()
    for number, do in orders.items():
        sync.publish("orders", {"number": number, "do": do})
    wait_until(lambda: marks() == before + len(orders), "all are handled")
    wait_until(lambda: len(published()) >= len(orders) and not waiting(), "all invoices are sent")
    sync.publish("orders", {"number": 9})
    wait_until(lambda: 9 in published(), "what comes later is handled, too")
    assert counts(*orders, -1) == [1] * len(orders) + [0]
    assert published() == [*orders, 9]


def test_without_effects_the_same_death_counts_twice(workers):
    """The control."""
    sync.publish("plain", {"number": 20})
    wait_until(lambda: counts(20) == [2], "it is handled again")
    assert Path(os.environ["PROJECT_DIR"], "plain").exists()


def test_a_batch_commits_without_those_that_fail(workers):
    """These come again."""
    numbers = list(range(100, 130))
    sync.publish_many("many", numbers)
    wait_until(lambda: counts(*numbers) == [1] * 30, "each has one invoice")
    wait_until(lambda: [each for each in published() if each >= 100] == numbers, "each was sent once")


def test_function_that_fails_after_the_commit_makes_no_dead_letter(workers):
    """A replay of that would commit again. The next order of the key comes when the first one is settled."""
    for number in (50, 51):
        sync.publish("hooked", number, key="ada")
    wait_until(lambda: counts(50, 51) == [1, 1], "both have an invoice")
    assert [sync.client.execute_command("XLEN", sync.keys.dlq("hooked", each, "billing")) for each in range(2)] == [
        0,
        0,
    ]


def test_a_message_is_published_if_and_only_if_its_transaction_commits(workers):
    """Also with a savepoint that is rolled back."""
    with transaction.atomic():
        outbox.publish("sent", 1, key="ada", headers={"a": "b"})
        with suppress(IntegrityError), transaction.atomic():
            outbox.publish("sent", 2)
            Invoice.objects.create(order=1, once=7)
            Invoice.objects.create(order=1, once=7)
        assert len(outbox.publish_many("sent", [3, 4], key=str)) == 2
        assert outbox.publish_many("sent", []) == []
    with suppress(ZeroDivisionError), transaction.atomic():
        outbox.publish("sent", 5)
        _ = 1 / 0
    wait_until(lambda: published("sent") == [1, 3, 4] and not waiting(), "those that committed are sent")
    with pytest.raises(ConfigError, match="outside of a transaction of 'default': write it inside `with transaction"):
        outbox.publish("sent", 6)
    with transaction.atomic(), pytest.raises(ConfigError, match="Did you mean delay"):
        outbox.publish("sent", 6, dely="1s")
    assert published("sent") == [1, 3, 4]


def test_a_task_of_a_transaction_is_enqueued_by_the_outbox(workers):
    """Also when the process dies after the commit; a rollback enqueues nothing."""
    boxed = shop.add.using(backend="outbox")
    with suppress(ZeroDivisionError), transaction.atomic():
        lost = boxed.enqueue(1)
        _ = 1 / 0
    with pytest.raises(TaskResultDoesNotExist):
        lost.refresh()
    with transaction.atomic():
        result = boxed.enqueue(1, b=2)
    result.refresh()
    with transaction.atomic():
        silent = boxed.enqueue(5)
        connection.run_on_commit.clear()  # what a process that dies now does not do
    worker = start_worker("rsmq.django.worker:brokers.outbox")
    assert finished(result).return_value == 3
    wait_until(lambda: sync.client.execute_command("EXISTS", sync.keys.task(silent.id)), "it has begun")
    assert finished(silent).return_value == 6
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_bad_use_says_what_to_write():
    """At registration, or at the call."""
    with pytest.raises(ConfigError, match="is for plain functions, as Django's transactions are"):

        @broker.handler("orders", group="async")
        async def handle(order: int, db: Annotated[None, Depends(effects.atomic)]) -> None: ...

    with pytest.raises(ConfigError, match=r"Annotated\[..., Depends\(effects.atomic\)\]"):
        next(effects.atomic())
    with pytest.raises(ConfigError, match="distribution='shared'"):
        Broker().handler("orders", group="shared", distribution="shared")(bill)
    with override_settings(INSTALLED_APPS=["rsmq.django"]):
        [error] = RsmqBackend("x", {"OPTIONS": {"outbox": True}}).check()
    assert error.id == "rsmq.E003"


def test_database_without_autocommit_is_refused(monkeypatch):
    """`transaction.atomic` would not commit, and the message would be settled."""
    message = Message(MessageOrigin("orders", 0, "billing"), b"1-0", [b"data", b"1", b"id", b"first"])
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    connection.close()
    with pytest.raises(ConfigError, match="AUTOCOMMIT: False"), contextmanager(effects.atomic)(message):
        Invoice.objects.create(order=300)
    connection.close()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="a file ends no connection")
def test_connections_that_the_database_has_ended_are_replaced():
    """PostgreSQL restarts: a connection fails one message at most, in handlers of each kind, and none is given up."""
    worker = SyncBroker(Settings(**SERVER))
    policy = RetryPolicy(max_attempts=3, wait=wait_fixed(0.1))

    @worker.handler("plain-rows", group="g", concurrency=2, ordering="none", retry=policy)
    def plain(number: int) -> None:
        Invoice.objects.create(order=number)

    @worker.handler("async-rows", group="g", concurrency=2, ordering="none", retry=policy)
    async def in_loop(number: int) -> None:
        await Invoice.objects.acreate(order=number)

    with worker.running():
        for first in (1000, 2000):
            for number in range(first, first + 10):
                worker.publish("plain-rows", number)
                worker.publish("async-rows", number + 100)
            numbers = [*range(first, first + 10), *range(first + 100, first + 110)]
            wait_until(lambda numbers=numbers: counts(*numbers) == [1] * 20, f"all from {first} on are stored")
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        for topic in ("plain-rows", "async-rows"):
            assert worker.dead_letters.count(worker.topics.existing(topic), "g") == 0
