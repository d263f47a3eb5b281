"""Runs the tasks of a Django project: `rsmq worker rsmq.django.worker:brokers.default`, which manage.py writes for you.

`brokers` has a broker for each backend of TASKS that is rsmq's. Importing this module sets Django up.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import anyio
import django
from anyio import to_thread
from django.apps import apps
from django.db import close_old_connections
from django.utils import timezone

from rsmq.broker import Broker
from rsmq.django.backend import RsmqBackend
from rsmq.django.options import BANDS, topic_of
from rsmq.django.result import (
    described,
    failed,
    is_finished,
    open_result,
    read_result,
    seal_result,
    set_fields,
    write_result,
)
from rsmq.django.tasks import (
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from rsmq.errors import ConfigError
from rsmq.handler.dead_hook import Burial
from rsmq.handler.retry import Bury, decide, readable_error
from rsmq.model.clock import to_ms
from rsmq.model.message import Message
from rsmq.redis.client.connector import retrying

GROUP = "workers"


class Slots:
    """Bounds the tasks that run at once. A free slot goes to the task with the highest priority, the oldest first."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def taken(self, priority: int) -> AsyncIterator[None]:
        """Hold a slot."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-priority, next(self._order), turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class TaskGivenUp(Exception):
    """The class of the error of a task whose workers have died in it again and again, or that has expired."""


class TaskRunner:
    """Runs the tasks of one backend in threads, as handlers of the broker."""

    def __init__(self, backend: RsmqBackend) -> None:
        self._backend = backend
        self._options = backend.configuration
        self._encoding = self._options.encoding
        self.broker = Broker(self._options.settings, codecs=self._options.codecs)
        self._slots = Slots(self._options.concurrency)
        self._threads = anyio.CapacityLimiter(self._options.concurrency)
        for queue in sorted(backend.queues):
            topic = topic_of(self._options, queue)
            self.broker.topic(topic, str, bands=BANDS)
            self.broker.handler(
                topic, group=GROUP, distribution="shared", concurrency=len(BANDS) * self._options.settings.prefetch,
                retry=self._options.retry,
            )(self.run)  # fmt: skip
            self.broker.on_dead(topic, group=GROUP)(self.fail)
        if backend.outbox is not None:
            self.broker.include(backend.outbox)

    async def run(self, text: str, message: Message) -> None:
        """Run one task, and keep its result. An error of the task is the error of the message."""
        stored = await self._kept(message) or text
        try:
            result = read_result(stored)
        except Exception as error:  # this code has no such task
            await self._keep(message.id, failed(stored, *described(error)), self._options.result_ttl)
            raise
        if result.status == TaskResultStatus.SUCCESSFUL:
            return  # it ran before, and the worker died before the message was settled
        async with self._slots.taken(result.task.priority):
            now = timezone.now()
            set_fields(
                result, status=TaskResultStatus.RUNNING, started_at=result.started_at or now, last_attempted_at=now,
                finished_at=None,
            )  # fmt: skip
            result.worker_ids.append(self._member())
            await self._save(result)
            failure = await to_thread.run_sync(self._execute, result, message, limiter=self._threads)
            await self._save(result)
        if failure is not None:
            raise failure

    async def fail(self, message: Message, burial: Burial) -> None:
        """A task that is given up is a dead letter. Its result has failed, unless an attempt has said how it ended."""
        stored = await self._kept(message) or message.data
        if is_finished(stored):
            return
        error = TaskGivenUp(burial.error)
        text = failed(stored, *described(error))
        await self._keep(message.id, text, self._options.result_ttl)
        await to_thread.run_sync(self._tell, text, error)

    def _tell(self, text: str, error: TaskGivenUp) -> None:
        """Send Django's signal of a task that has ended: in a thread, and where Django logs it with its error."""
        close_old_connections()
        try:
            raise error
        except TaskGivenUp:
            task_finished.send(sender=type(self._backend), task_result=read_result(text))
        finally:
            close_old_connections()

    def _execute(self, result: TaskResult, message: Message) -> BaseException | None:
        """In a thread: the task, its signals, and the database connections, which are this thread's."""
        close_old_connections()
        try:
            task_started.send(sender=type(self._backend), task_result=result)
            return self._call(result, message)
        finally:
            close_old_connections()

    def _call(self, result: TaskResult, message: Message) -> BaseException | None:
        context = (TaskContext(task_result=result),) if result.task.takes_context else ()
        try:
            value = normalize_json(result.task.call(*context, *result.args, **result.kwargs))
        except BaseException as raised:
            error = readable_error(raised)
            self._note(error, result, message)
            if result.is_finished:
                task_finished.send(sender=type(self._backend), task_result=result)  # here: Django logs the traceback
            return error
        set_fields(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
        task_finished.send(sender=type(self._backend), task_result=result)
        return None

    def _note(self, error: BaseException, result: TaskResult, message: Message) -> None:
        """The task has failed, or is ready for its next attempt."""
        path, text = described(error)
        result.errors.append(TaskError(exception_class_path=path, traceback=text))
        decision = decide(error, message.attempt, self._options.retry, datetime.now(UTC) - message.timestamp)
        if isinstance(decision, Bury):
            set_fields(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
        else:
            set_fields(result, status=TaskResultStatus.READY)

    def _member(self) -> str:
        return "" if self.broker.worker is None else self.broker.worker.member

    async def _save(self, result: TaskResult) -> None:
        longer = timedelta(hours=1 if result.status == TaskResultStatus.RUNNING else 0)
        await self._keep(result.id, write_result(result), self._options.result_ttl + longer)

    async def _keep(self, task: str, text: str, ttl: timedelta) -> None:
        """Store a result in the server."""
        kept = seal_result(self._encoding, task, text)
        await self._ask("SET", self.broker.keys.task(task), kept, "PX", to_ms(ttl))

    async def _kept(self, message: Message) -> str | bytes | None:
        """The result in the server. Raises CannotDecode without its key."""
        kept = await self._ask("GET", self.broker.keys.task(message.id))
        return kept and open_result(self._encoding, message.id, kept)

    async def _ask(self, *command: Any) -> Any:
        """Ask the server, also while it fails over: the command may be repeated."""
        async for attempt in retrying(self._options.settings):
            with attempt:
                reply = await self.broker.client.execute_command(*command)
        return reply


def made_brokers() -> SimpleNamespace:
    """A broker for each backend of rsmq in TASKS. Raises ConfigError if there is none."""
    found = {alias: task_backends[alias] for alias in task_backends}
    brokers = {name: TaskRunner(each).broker for name, each in found.items() if isinstance(each, RsmqBackend)}
    if not brokers:
        raise ConfigError(
            "TASKS has no backend of rsmq: write TASKS = {'default': {'BACKEND': 'rsmq.django.RsmqBackend'}}"
        )
    return SimpleNamespace(**brokers)


if not apps.ready:
    django.setup()
brokers = made_brokers()
