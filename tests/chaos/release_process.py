"""A process of any version of rsmq: `python -m tests.chaos.release_process '<ReleaseJob as JSON>'`.

It imports only public names of rsmq that every version has, and writes the ledger without the package, so that an old
version runs this file as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Literal

from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy, SessionTaken, Settings

TOPIC, GROUP = "work", "workers"
Style = Literal["hash", "shared", "batches", "payloads", "inboxes"]
Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ReleaseJob:
    """What the process does. Times in seconds.

    `role`: a worker, a publisher, or a gateway that connects `devices`. `style`: what the workers' handler is like;
    with `inboxes` it feeds the devices.
    """

    module: ClassVar[str] = "tests.chaos.release_process"
    role: Literal["worker", "publisher", "gateway"]
    style: Style
    url: str
    prefix: str
    ledger: str
    lease: float = 2.0
    attempts: int = 5
    many: int = 20
    pause: float = 0.1
    devices: list[str] = field(default_factory=list)
    seed: int = 1

    def broker(self) -> Broker:
        """A broker of this version."""
        return Broker(
            Settings(
                url=self.url, prefix=self.prefix, lease_ttl=timedelta(seconds=self.lease),
                block=timedelta(seconds=0.5), prefetch=2000, preflight="warn",
            )
        )  # fmt: skip


class Notes:
    """Writes the ledger: lines of `tests.chaos.ledger.Event`."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def note(self, what: str, key: str = "", n: int = 0, attempt: int = 0) -> None:
        """One event."""
        self.note_all(what, [(key, n)], attempt)

    def note_all(self, what: str, names: Iterable[Name], attempt: int = 0) -> None:
        """One event for each message, in one write."""
        head = {"what": what, "pid": os.getpid(), "at": time.monotonic(), "attempt": attempt}
        lines = [json.dumps({**head, "key": key, "n": n}) for key, n in names]
        os.write(self._file, "\n".join(["", *lines, ""]).encode())


def name_of(order: dict[str, object]) -> Name:
    """The message of an order."""
    return str(order["key"]), int(str(order["n"]))


# -- workers ----------------------------------------------------------------------------------------------------------


def register(broker: Broker, job: ReleaseJob, notes: Notes) -> None:
    """Register the handler of a worker."""
    retry = RetryPolicy(max_attempts=job.attempts, wait=wait_fixed(0.1))
    if job.style == "inboxes":
        broker.deliver(TOPIC, group=GROUP, to=lambda order: order["device"], retry=retry, batch=50)
        return

    async def each(order: dict[str, object], message: Message) -> None:
        await work(notes, order, message.attempt)

    async def batch(orders: list[dict[str, object]], messages: list[Message]) -> list[Exception | None]:
        outcomes = list[Exception | None]()
        failed = set[object]()
        for order, message in zip(orders, messages, strict=True):
            outcome: Exception | None = None
            try:
                if order["key"] in failed:
                    raise ValueError("it waits for an earlier one")
                await work(notes, order, message.attempt)
            except ValueError as error:
                failed.add(order["key"])
                outcome = error
            outcomes.append(outcome)
        return outcomes

    tried = set[Name]()

    async def payloads(orders: list[dict[str, object]]) -> None:
        failing = {name_of(order) for order in orders if order.get("do") == "fail once"} - tried
        if failing:
            tried.update(failing)
            raise ValueError("the first attempt fails")
        for order in orders:
            await work(notes, order, 2)

    if job.style in ("batches", "payloads"):
        function = batch if job.style == "batches" else payloads
        broker.handler(TOPIC, group=GROUP, retry=retry, concurrency=8, batch=20)(function)
    else:
        broker.handler(TOPIC, group=GROUP, retry=retry, concurrency=16, distribution=job.style)(each)


async def work(notes: Notes, order: dict[str, object], attempt: int) -> None:
    """Handle one message."""
    key, n = name_of(order)
    notes.note("start", key, n, attempt)
    try:
        if order.get("do") == "raise" or (order.get("do") == "fail once" and attempt == 1):
            raise ValueError("this attempt fails")
        await asyncio.sleep(float(str(order.get("seconds", 0))))
    except BaseException:
        notes.note("fail", key, n, attempt)
        raise
    notes.note("commit", key, n, attempt)


async def run_worker(broker: Broker, job: ReleaseJob, notes: Notes, ended: asyncio.Event) -> None:
    """Serve until SIGTERM."""
    register(broker, job, notes)
    async with broker.running():
        notes.note("ready")
        await ended.wait()


# -- publishers -------------------------------------------------------------------------------------------------------


async def run_publisher(broker: Broker, job: ReleaseJob, notes: Notes, ended: asyncio.Event) -> None:
    """Publish until SIGTERM, in every way: one, many, later, and twice under one id. Any error ends the process."""
    publish = letters if job.devices else messages
    rng, count = random.Random(job.seed), dict[str, int]()

    def next_of(key: str) -> dict[str, object]:
        count[key] = count.get(key, -1) + 1
        order: dict[str, object] = {"key": key, "n": count[key], "seconds": rng.random() * 0.01}
        return {**order, "do": "fail once"} if rng.random() < 0.03 else order

    async with broker:
        notes.note("ready")
        while not ended.is_set():
            await publish(broker, job, notes, rng, next_of)
            await asyncio.sleep(job.pause)


Next = Callable[[str], dict[str, object]]


async def messages(broker: Broker, job: ReleaseJob, notes: Notes, rng: random.Random, next_of: Next) -> None:
    """A batch, a delayed message, and one that is published twice."""
    pid = os.getpid()
    orders = [next_of(f"p{pid}-{rng.randrange(10)}") for _ in range(job.many)]
    async with noted(notes, orders):
        await broker.publish_many(TOPIC, orders, key=lambda order: str(order["key"]))
    late, again = next_of(f"late{pid}-{rng.randrange(10**9)}"), next_of(f"id{pid}")
    async with noted(notes, [late]):
        await broker.publish(TOPIC, late, key=str(late["key"]), delay=timedelta(seconds=rng.random() * 3))
    async with noted(notes, [again]):
        for _ in range(2):
            await broker.publish(TOPIC, again, key=f"id{pid}", message_id=f"id{pid}-{again['n']}")


async def letters(broker: Broker, job: ReleaseJob, notes: Notes, rng: random.Random, next_of: Next) -> None:
    """Into inboxes: by the workers that feed them, and directly."""
    for _ in range(job.many // 4):
        device = rng.choice(job.devices)
        fed, sent = next_of(f"{device}/{os.getpid()}f"), next_of(f"{device}/{os.getpid()}s")
        async with noted(notes, [fed, sent]):
            await broker.publish(TOPIC, {**fed, "device": device}, key=device)
            await broker.send(device, sent)


@asynccontextmanager
async def noted(notes: Notes, orders: list[dict[str, object]]) -> AsyncIterator[None]:
    """Note what is published, before and after."""
    names = [name_of(order) for order in orders]
    notes.note_all("try", names)
    yield
    notes.note_all("ok", names)


# -- gateways ---------------------------------------------------------------------------------------------------------


async def run_gateway(broker: Broker, job: ReleaseJob, notes: Notes, ended: asyncio.Event) -> None:
    """Connect the devices until SIGTERM, or until another gateway has taken a device over."""
    async with broker:
        notes.note("ready")
        tasks = [asyncio.create_task(listen(broker, device, notes)) for device in job.devices]
        await ended.wait()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def listen(broker: Broker, device: str, notes: Notes) -> None:
    """Read and acknowledge."""
    try:
        async with broker.connect(device, window=20) as session:
            async for letter in session:
                key, n = name_of(letter.payload)
                notes.note("start", key, n)
                notes.note("commit", key, n)
                await session.ack(letter)
                await session.flush()
    except SessionTaken:
        pass


ROLES: dict[str, Callable[[Broker, ReleaseJob, Notes, asyncio.Event], Awaitable[None]]] = {
    "worker": run_worker,
    "publisher": run_publisher,
    "gateway": run_gateway,
}


async def main(job: ReleaseJob) -> None:
    """Do the job until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    notes = Notes(job.ledger)
    await ROLES[job.role](job.broker(), job, notes, ended)
    notes.note("bye")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    logging.info("version: %s", sys.modules["rsmq"].__file__)
    asyncio.run(main(ReleaseJob(**json.loads(sys.argv[1]))))
