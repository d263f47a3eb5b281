"""Chaos: runs your handlers in worker processes that are killed, paused and cut off, and then judges the run."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.abc
from pydantic_core import to_jsonable_python

from rsmq.broker import Broker
from rsmq.errors import BrokerError, ConfigError, PublishUnknown
from rsmq.handler.handler import Handler
from rsmq.inspector.retention_holds import group_needs
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.own_tasks import Beside
from rsmq.model.settings import Settings
from rsmq.testing.ledger import Event, Ledger
from rsmq.testing.proxy import Proxy
from rsmq.testing.server import ThrowawayServer
from rsmq.testing.verdict import Order, RunHistory, StoredEntry, Verdict, Where, judge
from rsmq.testing.worker_process import Job, WorkerProcess

LEASE: Final = timedelta(seconds=2)
"""Shorter than the default of six seconds: a run waits for it after each fault."""


class Chaos:
    """Runs `workers` processes that serve `target` (`module:broker`), on a server of its own, through a proxy.

    A worker that ends is replaced, as a service manager would do. `broker` publishes and inspects without the proxy.
    Faults are recorded: they excuse messages that are handled again, and nothing else.
    """

    def __init__(self, target: str, *, workers: int = 2, patience: Duration = "60s", **settings: Any) -> None:
        self._target, self._workers = target, workers
        self._patience = checked_duration("patience", patience).total_seconds()
        self._settings = {"lease_ttl": LEASE, "preflight": "warn", "prefix": f"c{uuid.uuid4().hex[:12]}", **settings}
        self.server = ThrowawayServer(tcp=True, durable=True)
        self.proxy = Proxy(self.server.port)
        self.processes: list[WorkerProcess] = []
        self._confirmed: list[tuple[str, str]] = []
        self._excused: dict[int, str] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._workers < 1:
            raise ConfigError(f"workers={self._workers} is not possible: use 1 or more")
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rsmq-chaos-")))
            self.ledger = Ledger(directory / "ledger", Event)
            self._log = directory / "log"
            stack.enter_context(self.server)
            await stack.enter_async_context(self.proxy)
            settings = to_jsonable_python(Settings(url=self.proxy.url, **self._settings).changed())
            self._job = Job(self._target, str(self.ledger.path), settings)
            self._groups = groups_of(self._job.broker())
            self.broker = Broker(Settings(url=self.server.url, **self._settings))
            await stack.enter_async_context(self.broker)
            stack.callback(self._kill_all)
            for _ in range(self._workers):
                self._start_worker()
            await self._until(self._all_ready, "workers serve")
            await stack.enter_async_context(Beside(self._replace_dead))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, at)

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, payload: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> str:
        """Publish one message. Every group that has a handler must handle it or make it a dead letter.

        Waits while the server is away; a publish without an answer is repeated under the same id.
        """
        message_id = str(uuid.uuid4())
        deadline = time.monotonic() + self._patience
        while True:
            try:
                await self.broker.publish(topic, payload, key=key, headers=headers, message_id=message_id)
            except (PublishUnknown, BrokerError):
                if time.monotonic() > deadline:
                    raise
                await anyio.sleep(0.05)
                continue
            self._confirmed.append((topic, message_id))
            return message_id

    async def handled(self, count: int) -> None:
        """Wait until so many messages have been handled since the start, counted over all groups."""
        await self._until(
            lambda: sum(event.what == "commit" for event in self.ledger.events()) >= count,
            f"{count} messages are handled",
        )

    # -- faults ---------------------------------------------------------------------------------------------------

    def kill(self, worker: WorkerProcess | None = None) -> WorkerProcess:
        """SIGKILL a worker, by default the busiest one; a new one replaces it."""
        return self._strike(worker, "was killed", WorkerProcess.kill)

    def pause(self, worker: WorkerProcess | None = None) -> WorkerProcess:
        """SIGSTOP a worker, by default the busiest one, until `resume`: its sockets stay open."""
        return self._strike(worker, "was paused", WorkerProcess.pause)

    def resume(self) -> None:
        """SIGCONT all workers that are paused."""
        for worker in self.processes:
            if worker.is_paused:
                worker.resume()

    def cut(self) -> None:
        """Let nothing pass between the workers and the server, until `mend`."""
        self._excuse_all("was cut off")
        self.proxy.cut()

    def mend(self) -> None:
        """Let everything pass again."""
        self.proxy.mend()

    def reset(self) -> None:
        """Break every connection of every worker."""
        self._excuse_all("had its connections broken")
        self.proxy.reset()

    def restart_server(self) -> None:
        """SIGKILL the server and start it again, with what it had written."""
        self._excuse_all("lost its server")
        self.server.restart()  # blocks for a moment, in this thread: the server ends with the thread that starts it

    def busiest(self) -> WorkerProcess:
        """The worker that has the most messages in flight: the worst one to lose."""
        running = {worker.pid: worker for worker in self.processes if worker.is_running and not worker.is_paused}
        if not running:
            raise ConfigError("no worker runs now: wait with `await chaos.handled(1)`, or resume() one")
        in_flight = dict.fromkeys(running, 0)
        for event in self.ledger.events():
            if event.pid in in_flight:
                in_flight[event.pid] += {"start": 1, "commit": -1}.get(event.what, 0)
        return running[max(in_flight, key=lambda pid: in_flight[pid])]

    def _strike(self, worker: WorkerProcess | None, why: str, act: Callable[[WorkerProcess], None]) -> WorkerProcess:
        victim = self.busiest() if worker is None else worker
        self._excused[victim.pid] = why
        act(victim)
        return victim

    def _excuse_all(self, why: str) -> None:
        self._excused.update({worker.pid: why for worker in self.processes})

    # -- the end --------------------------------------------------------------------------------------------------

    async def verdict(self) -> Verdict:
        """End all faults, wait until everything is settled, and judge the run."""
        self.resume()
        self.mend()
        holds = await self._settled()
        history = RunHistory(
            self._groups, await self._stored(), list(self._confirmed), await self._dead(), list(self.ledger.events()),
            dict(self._excused), holds,
        )  # fmt: skip
        return judge(history)

    def log(self, size: int = 6000) -> str:
        """The last part of what the workers have printed."""
        return self._log.read_text(errors="replace")[-size:] if self._log.exists() else ""

    async def _settled(self) -> list[str]:
        """Wait until the server holds nothing for any group; returns what it still holds when the patience is over."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                holds = await self._holds()
            except BrokerError as error:  # the server has just come back and the pool still had an old connection
                holds = [f"the server does not answer: {error}"]
            if not holds or time.monotonic() > deadline:
                return holds
            await anyio.sleep(0.05)

    async def _holds(self) -> list[str]:
        found = []
        for topic, partition in await self._partitions():
            for needs in await group_needs(self.broker.client, self.broker.keys, topic, partition):
                found += [f"{topic}.{partition}: {needs}"] if needs.is_holding else []
        return found

    async def _partitions(self) -> list[tuple[str, int]]:
        topics = [await self.broker.topics.find(name) for name in dict.fromkeys(topic for topic, _ in self._groups)]
        return [(topic.name, number) for topic in topics if topic is not None for number in topic.numbers]

    async def _stored(self) -> list[StoredEntry]:
        """All entries of the topics that have handlers, also those that handlers published."""
        found = []
        for topic, partition in await self._partitions():
            stream = self.broker.keys.stream(topic, partition)
            for entry_id, fields in await self.broker.client.execute_command("XRANGE", stream, "-", "+"):
                message = Message(MessageOrigin(topic, partition, ""), entry_id, fields)
                found.append(StoredEntry(topic, partition, message.key, message.id))
        return found

    async def _dead(self) -> frozenset[Where]:
        dead = set()
        for name, group in self._groups:
            topic = await self.broker.topics.find(name)
            if topic is not None:
                letters = self.broker.dead_letters.iterate(topic, group)
                dead |= {Where(name, group, letter.message_id) async for letter in letters}
        return frozenset(dead)

    # -- the workers ----------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self.processes.append(WorkerProcess(self._job, self._log))

    def _all_ready(self) -> bool:
        ready = {event.pid for event in self.ledger.events() if event.what == "ready"}
        return all(worker.pid in ready for worker in self.processes)

    async def _replace_dead(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        task_status.started()
        replaced = set[int]()
        while True:
            for worker in list(self.processes):
                if not worker.is_running and worker.pid not in replaced:
                    replaced.add(worker.pid)
                    self._start_worker()
            await anyio.sleep(0.02)

    def _kill_all(self) -> None:
        for worker in self.processes:
            worker.kill()

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self._patience
        while not condition():
            if time.monotonic() > deadline or not any(worker.is_running for worker in self.processes):
                raise AssertionError(f"gave up waiting until {what}. The workers' log:\n{self.log()}")
            await anyio.sleep(0.01)

    def __repr__(self) -> str:
        return f"<Chaos {self._target} {self.processes}>"


def groups_of(broker: Broker) -> dict[tuple[str, str], Order]:
    """The order that each (topic, group) of a broker keeps."""
    return {(handler.topic, handler.group): order_of(handler) for handler in broker.handlers}


def order_of(handler: Handler) -> Order:
    """The order of one handler."""
    if handler.ordering == "none":
        return "none"
    return "single" if handler.batch is None else "batch"
