"""Secrets in arguments, results and rows: neither errors nor logs have them. Run by tests/django/test_planted.py."""

import logging
import os
import signal
from pathlib import Path

import pytest
import shop
from billing.worker import outbox
from django.core.management import call_command
from django.db import Error, connection, transaction
from settings import SERVER
from waiting import finished

from rsmq.django.backend import RsmqBackend
from rsmq.django.tasks import task_backends
from rsmq.errors import RsmqError
from tests.forks import start
from tests.security.test_planted import MARK, leaks, said

HERE = Path(__file__).parent
TIGHT = "alter table rsmq_outbox add constraint tight check (char_length(aggregatetype) < 2)"
TRIGGER = """
create trigger tight before insert on rsmq_outbox when length(new.aggregatetype) > 1
begin select raise(abort, 'tight'); end
"""


@pytest.fixture(scope="session", autouse=True)
def _tables():
    call_command("migrate", run_syncdb=True, verbosity=0)


@pytest.fixture
def _no_row_is_taken():
    is_file = connection.vendor == "sqlite"
    with connection.cursor() as cursor:
        cursor.execute(TRIGGER if is_file else TIGHT)
    yield
    with connection.cursor() as cursor:
        cursor.execute("drop trigger tight" if is_file else "alter table rsmq_outbox drop constraint tight")


def publish():
    outbox.publish("orders", {MARK: MARK}, key=f"{MARK}-key", headers={"token": MARK})


def publish_many():
    outbox.publish_many("orders", [{MARK: MARK}, {MARK: 2}], key=str, headers={"token": MARK})


def enqueue():
    options = {**SERVER, "topic": "boxed", "outbox": True}
    RsmqBackend("plain", {"OPTIONS": options}).enqueue(shop.add, [MARK], {"b": MARK})


@pytest.mark.usefixtures("_no_row_is_taken")
@pytest.mark.parametrize("add", [publish, publish_many, enqueue])
def test_no_error_of_a_transaction_shows_a_row_that_a_constraint_refuses(add, caplog):
    """Of the outbox, and of a task that goes through it."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Error) as caught, transaction.atomic():
        add()
    assert "tight" in said(caught.value)
    assert leaks(said(caught.value), caplog.text) == []


def test_no_log_or_refusal_of_a_task_shows_its_arguments_or_its_result(caplog):
    """A worker whose log is at the lowest level; what this process logs; a result that a reader has no key for."""
    caplog.set_level(logging.DEBUG)
    backend, log = task_backends["retrying"], Path(os.environ["PROJECT_DIR"], "worker.log")
    environment = {**os.environ, "RSMQ_URL": SERVER["url"], "RSMQ_PREFIX": SERVER["prefix"]}
    with log.open("w") as file:
        worker = start(
            "rsmq", "worker", "rsmq.django.worker:brokers.retrying", "--log-level", "debug",
            cwd=HERE, env=environment, stdout=file, stderr=file,
        )  # fmt: skip
        results = [
            finished(each.using(backend="retrying").enqueue(*args))
            for each, args in (
                (shop.add, (MARK, f"{MARK}-b")), (shop.add, (MARK, 1)), (shop.keep_set, (MARK,)),
                (shop.add, (MARK,) * 3),
            )
        ]  # fmt: skip
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    assert [result.status.value for result in results] == ["SUCCESSFUL", "FAILED", "FAILED", "FAILED"]
    texts = [each.traceback for result in results for each in result.errors]
    assert len(texts) > 3
    for use in (
        lambda: RsmqBackend("other", {"OPTIONS": {**SERVER, "topic": "retrying"}}).get_result(results[0].id),
        lambda: shop.add.using(backend="retrying").enqueue({MARK}),
        lambda: shop.add.using(backend="retrying").enqueue(MARK.encode() + b"\xff"),
        lambda: shop.add.using(backend="retrying").enqueue({(MARK, 1): MARK}),
    ):
        with pytest.raises((RsmqError, TypeError, ValueError)) as caught:
            use()
        texts.append(said(caught.value))
    shown = [backend, backend.configuration, backend.broker, outbox]
    assert "moved to dead letters" in log.read_text()
    assert leaks(log.read_text(), caplog.text, *texts, *map(repr, shown)) == []
