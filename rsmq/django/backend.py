"""The task backend: stores a task as a message, and finds the result of one by its id."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any

from django.apps import apps
from django.core import checks
from django.db import connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from rsmq.broker.sync_broker import SyncBroker
from rsmq.django.options import BANDS, BackendOptions, band_of, read_options, topic_of
from rsmq.django.result import aware, checked_id, open_result, read_result, seal_result, set_fields, write_result
from rsmq.django.tasks import (
    BaseTaskBackend,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from rsmq.errors import ConfigError
from rsmq.model.clock import to_ms
from rsmq.model.encoding import Codec
from rsmq.model.message import new_message_id
from rsmq.model.settings import Settings

BROKERS: dict[str, SyncBroker] = {}
LOCK = threading.Lock()


def broker_for(settings: Settings, codecs: Sequence[Codec]) -> SyncBroker:
    """One broker, and so one connection, for all threads of the process: Django makes a backend for each of them."""
    name = f"{settings!r} {codecs!r}"
    with LOCK:
        if name not in BROKERS:
            BROKERS[name] = SyncBroker(settings, codecs=codecs)
        return BROKERS[name]


class RsmqBackend(BaseTaskBackend):
    """A backend of Django's tasks with priority, `run_after`, results and coroutines.

    Inside a transaction a task is enqueued when it commits. Workers: `manage.py rsmq worker`.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self._read: BackendOptions | None = None

    @property
    def configuration(self) -> BackendOptions:
        """The options, read at first use: a mistake is found by `manage.py check`, and does not hinder imports."""
        if self._read is None:
            try:
                self._read = read_options(self.options, self.queues)
            except ConfigError as error:
                raise ConfigError(f"TASKS[{self.alias!r}]: {error}") from None
        return self._read

    @cached_property
    def broker(self) -> SyncBroker:
        """The broker that enqueues, connected at its first call."""
        broker = broker_for(self.configuration.settings, self.configuration.codecs)
        for queue in self.queues:
            broker.topic(topic_of(self.configuration, queue), str, bands=BANDS)
        return broker

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """Store a task and return its result, whose id finds it again.

        Inside a transaction it is stored after the commit, unless the option `on_commit` is False.
        """
        self.validate_task(task)
        options = self.configuration
        result = TaskResult(
            task=task, id=new_message_id(), status=TaskResultStatus.READY, enqueued_at=None, started_at=None,
            last_attempted_at=None, finished_at=None, args=args, kwargs=kwargs, backend=self.alias, errors=[],
            worker_ids=[],
        )  # fmt: skip
        store = partial(self._store, result)
        if not (options.on_commit and is_in_transaction(options.database)):
            store()
        elif options.outbox:
            self._add_to_outbox(result)
            transaction.on_commit(partial(self._announce, result), using=options.database, robust=True)
        else:
            transaction.on_commit(store, using=options.database)
        return result

    @cached_property
    def outbox(self) -> Any:
        """The `rsmq.django.database.DjangoOutbox` of the option of this name, which needs the extra `sql`, or None."""
        if not self.configuration.outbox:
            return None
        made = import_string("rsmq.django.database.DjangoOutbox")
        options = self.configuration
        return made(options.database, prefix=options.settings.prefix, codecs=options.codecs)

    def _add_to_outbox(self, result: TaskResult) -> None:
        """As a row of the transaction."""
        set_fields(result, enqueued_at=timezone.now())
        topic, band = topic_of(self.configuration, result.task.queue_name), band_of(result.task.priority)
        outbox_row = import_string("rsmq.sql.outbox.outbox_row")  # tasks without an outbox need no SQLAlchemy
        due = aware(result.task.run_after)
        self.outbox.add([outbox_row(self.outbox, topic, write_result(result), at=due, band=band, identity=result.id)])

    def _announce(self, result: TaskResult) -> None:
        """After the commit: the result can be found before a worker begins, unless a worker was faster."""
        self._keep(result, "NX")
        task_enqueued.send(type(self), task_result=result)

    def _store(self, result: TaskResult) -> None:
        """The result first: from then on it can be found, and the worker changes it."""
        set_fields(result, enqueued_at=timezone.now())
        text = self._keep(result)
        topic, band = topic_of(self.configuration, result.task.queue_name), band_of(result.task.priority)
        self.broker.publish(topic, text, at=aware(result.task.run_after), message_id=result.id, band=band)
        task_enqueued.send(type(self), task_result=result)

    def _keep(self, result: TaskResult, *how: str) -> str:
        """Store a result in the server; returns it as text."""
        text, due = write_result(result), aware(result.task.run_after)
        wait = timedelta(0) if due is None else max(timedelta(0), due - datetime.now(UTC))
        ttl = to_ms(self.configuration.result_ttl + wait)
        kept = seal_result(self.configuration.encoding, result.id, text)
        self.broker.client.execute_command("SET", self.broker.keys.task(result.id), kept, "PX", ttl, *how)
        return text

    def get_result(self, result_id: str) -> TaskResult:
        """The task's result as the server has it. Raises TaskResultDoesNotExist, and CannotDecode without its key."""
        broker = self.broker
        kept = broker.client.execute_command("GET", broker.keys.task(checked_id(result_id)))
        if kept is None:
            raise TaskResultDoesNotExist(result_id)
        return read_result(open_result(self.configuration.encoding, result_id, kept))

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """The answers for `manage.py check`: it reads the settings, and asks no server."""
        yield from super().check(**kwargs)
        try:
            options = self.configuration
        except ConfigError as error:
            yield checks.Error(str(error), hint="See docs/django.md for the options.", id="rsmq.E001")
            return
        if options.on_commit and options.database not in connections.databases:
            yield checks.Error(
                f"TASKS[{self.alias!r}]: DATABASES has no {options.database!r}",
                hint="Set the option `database` to the one whose commits tasks wait for, or `on_commit` to False.",
                id="rsmq.E002",
            )
        if options.outbox and not apps.is_installed("rsmq.django.database"):
            yield checks.Error(
                f"TASKS[{self.alias!r}]: the option `outbox` needs the tables of 'rsmq.django.database'",
                hint="Add it to INSTALLED_APPS, and run `manage.py migrate`.",
                id="rsmq.E003",
            )
        if not apps.is_installed("rsmq.django"):
            yield checks.Warning(
                "INSTALLED_APPS has no 'rsmq.django', so there is no `manage.py rsmq worker`",
                hint="Add it, or run `rsmq worker rsmq.django.worker:brokers.default`.",
                id="rsmq.W001",
            )


def is_in_transaction(database: str) -> bool:
    """Whether this thread is in a transaction of this database. Does not connect."""
    return database in connections.databases and transaction.get_connection(database).in_atomic_block
