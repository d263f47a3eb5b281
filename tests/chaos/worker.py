"""A worker process of the chaos tests: `python -m tests.chaos.worker '<Job as JSON>'`.

Each message says what its handler shall do; the handler records in the ledger what it did.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal
from zlib import crc32

import anyio
from tenacity import wait_fixed

import rsmq.worker.worker
from rsmq import Broker, Concurrency, Message, Rate, Reject, Retry, RetryPolicy, Settings
from tests.chaos.bank import Till
from tests.chaos.ledger import EventWriter
from tests.chaos.recorder import RecordingSettler, install

TOPIC, GROUP, OUTPUT_TOPIC = "work", "workers", "receipts"
MOST_CALLS, MOST_CALLS_OF_NAME, PERMIT = 4, 2, "provider"
"""The permits of the group, or of each name."""
GATHERED = 50
"""Messages of a call that has all of a key."""
LEDGER = "CHAOS_LEDGER"
"""Environment variable with the path of the ledger, for a handler in a process of its own."""


@dataclass(frozen=True, slots=True)
class Job:
    """How a worker runs. Times in seconds; `more` are further settings, as strings like in the environment.

    `cycles`: start and stop the broker so often before serving. `member`: a fixed member id instead of a unique one.
    `bank`: the address of a database: handlers book their messages there; `is_plain`: without effects and outbox.
    `limits`: of the group (`group`), of each `provider_of` its messages (`name`), or a `permit` that the handler takes.
    `waits`: a message starts up to so many seconds after it was stored: `due_of` says when. `linger`: a call has all
    messages of a key that are stored within so many seconds.
    `output`: handlers publish to `receipts`: with their message, or by the broker. `log`: a file, not standard error.
    """

    module: ClassVar[str] = "tests.chaos.worker"
    url: str
    prefix: str
    ledger: str
    lease: float = 2.0
    block: float = 0.5
    distribution: Literal["hash", "shared"] = "hash"
    ordering: Literal["key", "none"] | None = None
    attempts: int = 5
    timeout: float | None = None
    concurrency: int = 16
    prefetch: int = 2000
    execution: Literal["inline", "process"] = "inline"
    stop_grace: float = 25.0
    cycles: int = 0
    member: str = ""
    output: Literal["", "message", "broker"] = ""
    limits: Literal["", "group", "name", "permit"] = ""
    waits: float = 0.0
    linger: float = 0.0
    bank: str = ""
    is_plain: bool = False
    log: str = ""
    more: dict[str, str] = field(default_factory=dict)

    def settings(self) -> Settings:
        """The settings of every process of a run."""
        given = {"preflight": "warn", **self.more}
        return Settings(
            url=self.url,
            prefix=self.prefix,
            lease_ttl=timedelta(seconds=self.lease),
            block=timedelta(seconds=self.block),
            prefetch=self.prefetch,
            stop_grace=timedelta(seconds=self.stop_grace),
            **given,
        )


async def act(order: dict[str, object], message: Message) -> None:
    """Do what the message says: `exit` ends the process, `block` holds the event loop, `hang` never ends, ..."""
    seconds = float(str(order.get("seconds", 0)))
    match order.get("do", "work"):
        case "exit":
            os._exit(1)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "block":
            time.sleep(seconds)  # noqa: ASYNC251 - the fault under test
        case "hold the GIL" if message.attempt == 1:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # like a bad regular expression: no other thread runs
        case "hang":
            await anyio.sleep_forever()
        case "wait":
            while not Path(str(order["path"])).exists():
                await asyncio.sleep(0.02)
        case "swallow":
            await swallow(seconds)
        case "raise":
            raise ValueError("every attempt fails")
        case "fail once" if message.attempt == 1:
            raise ValueError("the first attempt fails")
        case "wait once" if message.attempt == 1:
            raise Retry("the first attempt waits", after="1s")
        case "hang once" if message.attempt == 1:
            await anyio.sleep_forever()
        case _:
            await asyncio.sleep(seconds)


async def swallow(seconds: float) -> None:
    """Ignore cancellation for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BaseException):
            await asyncio.sleep(end - time.monotonic())


def provider_of(key: str) -> str:
    """What limits count a message by: one of three names."""
    return f"p{sum(key.encode()) % 3}"


def due_of(message: Message, waits: float) -> datetime:
    """From when on a message may start. It ends with its digits, so messages of a key have several times."""
    stored = int(message.stream_id.partition("-")[0])
    return datetime.fromtimestamp(stored / 1000 + waits * (crc32(message.data) % 100) / 100, UTC)


def limits_of(job: Job) -> dict[str, Any]:
    """The options of the handler. What is counted by a name can be held."""
    if not job.limits:
        return {}

    def provider(message: Message) -> str:
        return provider_of(message.key or "")

    found: dict[str, Any] = {"rate": Rate(100_000, by=provider)}
    match job.limits:
        case "group":
            found["group_concurrency"] = MOST_CALLS
        case "name":
            found["group_concurrency"] = Concurrency(MOST_CALLS_OF_NAME, by=provider)
        case "permit":
            found["permits"] = {PERMIT: Concurrency(MOST_CALLS)}
    return found


def make_broker(job: Job, ledger: EventWriter) -> tuple[Broker, Till | None]:
    """A broker with one handler, which writes the ledger, and the till of the bank if there is one."""
    broker = Broker(job.settings())
    till = Till(broker, job.bank, is_plain=job.is_plain) if job.bank else None

    async def handle(order: dict[str, object], message: Message) -> None:
        key, n = str(order["key"]), int(str(order["n"]))
        RecordingSettler.names[message.partition, message.entry_id] = (key, n)
        if job.limits == "permit":
            async with message.permit(PERMIT):
                await work(order, message, key, n)
        else:
            await work(order, message, key, n)

    async def work(order: dict[str, object], message: Message, key: str, n: int) -> None:
        if job.waits and datetime.now(UTC) < due_of(message, job.waits) - timedelta(milliseconds=20):
            raise Reject("it starts before its time")  # an unexpected dead letter fails the run
        ledger.note("start", key, n, message.attempt)
        try:
            if job.output == "message":
                await message.publish(OUTPUT_TOPIC, {"key": key, "n": n}, key=key)
            elif job.output == "broker":
                await broker.publish(OUTPUT_TOPIC, {"key": key, "n": n}, key=key)
            await act(order, message)
        except BaseException:
            ledger.note("fail", key, n, message.attempt)
            raise
        ledger.note("commit", key, n, message.attempt)

    async def gathered(orders: list[dict[str, object]], messages: list[Message]) -> list[Exception | None]:
        first = messages[0]
        end = datetime.fromtimestamp(int(first.stream_id.partition("-")[0]) / 1000 + job.linger, UTC)
        is_early = first.attempt == 1 and len(messages) < GATHERED and datetime.now(UTC) < end - timedelta(seconds=0.02)
        if is_early or len({message.key for message in messages}) > 1:
            raise Reject("it is early, or has several keys")  # an unexpected dead letter fails the run
        for at, (order, message) in enumerate(zip(orders, messages, strict=True)):
            try:
                await handle(order, message)
            except ValueError as error:  # what is before it is done
                return [*[None] * at, error, *[Retry("after the one before")] * (len(messages) - at - 1)]
        return [None] * len(messages)

    def booking(till: Till) -> Callable[..., Any]:
        async def book(order: dict[str, object], message: Message, session: Any = till.dependency) -> None:
            await till.book(session, str(order["key"]), int(str(order["n"])))
            await handle(order, message)

        return book

    inline: Callable[..., Any] = handle if till is None else booking(till)
    if job.linger:
        inline = gathered
    broker.handler(
        TOPIC,
        group=GROUP,
        concurrency=job.concurrency,
        distribution=job.distribution,
        ordering=job.ordering,
        retry=RetryPolicy(max_attempts=job.attempts, wait=wait_fixed(0.1)),
        timeout=job.timeout,
        execution=None if job.execution == "inline" else job.execution,
        when=(lambda message: due_of(message, job.waits)) if job.waits else None,
        **({"batch": GATHERED, "by": "key", "linger": timedelta(seconds=job.linger)} if job.linger else {}),
        **limits_of(job),
    )(inline if job.execution == "inline" else handle_apart)
    return broker, till


def handle_apart(order: dict[str, object]) -> None:
    """The handler with `execution="process"`: holding the GIL there does not stop other messages."""
    ledger = EventWriter(Path(os.environ[LEDGER]))
    key, n = str(order["key"]), int(str(order["n"]))
    ledger.note("start", key, n)
    seconds = float(str(order.get("seconds", 0)))
    (ctypes.PyDLL(None).usleep if order.get("do") == "hold the GIL" else ctypes.CDLL(None).usleep)(int(seconds * 1e6))
    ledger.note("commit", key, n)


def descriptors() -> int:
    """Open file descriptors of this process, without the one that counts them."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - 1


def limit_descriptors(room: int) -> None:
    """Allow only so many more open descriptors. Negative: as many as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if room < 0 else descriptors() + room, hard))


async def serve(job: Job, ledger: EventWriter) -> None:
    """Serve until SIGTERM. SIGUSR1 takes all free file descriptors away, SIGUSR2 returns them."""
    broker, till = make_broker(job, ledger)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, broker.stop)
    loop.add_signal_handler(signal.SIGUSR1, limit_descriptors, 0)
    loop.add_signal_handler(signal.SIGUSR2, limit_descriptors, -1)
    for _ in range(job.cycles):
        async with broker.running():
            await asyncio.sleep(0.03)
    async with anyio.create_task_group() as tasks:
        await tasks.start(broker.run)
        ledger.note("ready")
    if till is not None:
        await till.engine.dispose()


def main(job: Job) -> None:
    """Serve, and count the descriptors that are still open at the end."""
    os.environ[LEDGER] = job.ledger
    ledger = EventWriter(Path(job.ledger))
    install(ledger)
    if job.member:
        rsmq.worker.worker.new_member_id = lambda: job.member
    before = descriptors()
    asyncio.run(serve(job, ledger))
    deadline = time.monotonic() + 5
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)  # a heartbeat thread may still wait for its last answer
    ledger.note("bye", n=descriptors() - before)


if __name__ == "__main__":
    job_of_this_process = Job(**json.loads(sys.argv[1]))
    to = {"filename": job_of_this_process.log} if job_of_this_process.log else {}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s", **to)
    with suppress(KeyboardInterrupt):
        main(job_of_this_process)
