"""The forms of a handler, middleware and lifespan."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import rsmq
from rsmq import Broker, Message, RetryPolicy
from tests.contract.witness import Witness, dies, letters_of, settled
from tests.matrix.way import steady_connections
from tests.patience import until


class Model(BaseModel):
    """A payload as a pydantic model."""

    n: int
    note: str = ""


@dataclass
class Record:
    """A payload as a dataclass."""

    n: int
    note: str = ""


@pytest.mark.parametrize(
    ("annotation", "payload", "expected"),
    [
        (Model, Model(n=1, note="é"), Model(n=1, note="é")),
        (Record, Record(1, "x"), Record(1, "x")),
        (dict, {"n": 1}, {"n": 1}),
        (list[int], [1, 2], [1, 2]),
        (str, "grüße", "grüße"),
        (bytes, b"\x00\xff", b"\x00\xff"),
        (Model, {"n": 7}, Model(n=7)),
    ],
)
async def test_payload_is_decoded_by_the_annotation(
    broker: Broker, annotation: Any, payload: Any, expected: Any
) -> None:
    """The payload arrives as the type of the handler's annotation."""
    got: list[Any] = []

    async def handle(payload: Any) -> None:
        got.append(payload)

    handle.__annotations__["payload"] = annotation
    broker.handler("t", group="g")(handle)
    async with broker.running():
        await broker.publish("t", payload)
        await until(lambda: got, "the message comes")
    assert got == [expected]


async def test_a_payload_that_does_not_fit_is_no_attempt(broker: Broker) -> None:
    """A payload of the wrong type is malformed: it is not retried and the handler is not called."""
    seen: list[Model] = []

    @broker.handler("t", group="g")
    async def handle(model: Model) -> None:
        seen.append(model)

    async with broker.running():
        await broker.publish("t", {"n": "many"})
        await broker.publish("t", {"n": 2})
        assert await dies(broker, "t", "g", 1) == [("malformed", b'{"n":"many"}')]
        await settled(broker, "t")
    assert seen == [Model(n=2)]


async def test_a_plain_function_runs_in_a_thread(broker: Broker, witness: Witness) -> None:
    """It may block: up to `concurrency` of them run at the same time outside the event loop."""
    together = threading.Barrier(4)

    @broker.handler("t", group="g", concurrency=4)
    def handle(order: dict[str, int]) -> None:
        together.wait(30)
        assert threading.current_thread() is not threading.main_thread()
        witness.note(order["n"])

    async with broker.running():
        await broker.publish_many("t", [{"n": n} for n in range(8)])
        await witness.sees(range(8))
        await settled(broker, "t")


def square(order: dict[str, int], message: Message) -> None:
    """Runs in another process, so it reports through a file."""
    with open(message.headers["file"], "a") as file:
        file.write(f"{order['n'] ** 2}\n")


@steady_connections
async def test_a_process_handler_gets_payload_and_message(broker: Broker, tmp_path: Any) -> None:
    """execution="process": payload and message are sent to the process."""
    broker.handler("t", group="g", execution="process", concurrency=1)(square)
    results = tmp_path / "results"
    async with broker.running():
        for n in range(4):
            await broker.publish("t", {"n": n}, key="k", headers={"file": str(results)})
        await settled(broker, "t")
    assert results.read_text().split() == ["0", "1", "4", "9"]


@steady_connections
async def test_process_handler_under_rsmq_worker_does_not_start_the_command_again(
    broker: Broker, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process imports the main module of its program. Under `rsmq worker --processes 2` that is rsmq/__main__.py:
    before, every process handler failed there."""
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(Path(rsmq.__file__).parent / "__main__.py"), raising=False
    )
    broker.handler("t", group="g", execution="process", concurrency=1)(square)
    async with broker.running():
        await broker.publish("t", {"n": 2}, headers={"file": str(tmp_path / "results")})
        await settled(broker, "t")
    assert (tmp_path / "results").read_text() == "4\n"


@steady_connections
@pytest.mark.parametrize("line", ["asyncio.run(broker.run())", "broker.publish_sync('t', {'n': 3})"])
async def test_process_handler_of_a_program_without_main_guard_fails_with_what_to_do(
    broker: Broker, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Before, its process became one more worker, or published the next message for each one that failed."""
    program = tmp_path / "program.py"
    settings = f"{broker.settings.url!r}, prefix={broker.settings.prefix!r}, preflight='warn'"
    program.write_text(f"import asyncio, rsmq\nbroker = rsmq.Broker({settings})\n{line}\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
    broker.handler("t", group="g", execution="process", concurrency=1, retry=RetryPolicy(max_attempts=1))(square)
    async with broker.running():
        await broker.publish("t", {"n": 2})
        await dies(broker, "t", "g", 1)
        (letter,) = await letters_of(broker, "t", "g")
    assert 'put the lines that do so under `if __name__ == "__main__":`' in letter.error


async def test_a_batch_is_full_or_waits_for_linger(broker: Broker, witness: Witness) -> None:
    """Up to `batch` at a time, fewer after `linger`."""
    sizes: list[int] = []

    @broker.handler("t", group="g", batch=40, linger=timedelta(milliseconds=100))
    async def handle(orders: list[dict[str, int]]) -> None:
        sizes.append(len(orders))
        for order in orders:
            witness.note(order["n"])

    async with broker:
        await broker.publish_many("t", [{"n": n} for n in range(100)])
        async with broker.running():
            await witness.sees(range(100))
            await broker.publish("t", {"n": 100})
            await witness.sees(range(101))
            await settled(broker, "t")
    assert max(sizes) <= 40
    assert len(sizes) < 50
    assert sum(sizes) == 101


async def test_middleware_surrounds_every_handler(broker: Broker) -> None:
    """The first registered is the outermost; it may change the message, and its errors are the handler's."""
    story: list[Any] = []

    @broker.middleware
    async def outer(message: Message, call_next: Any) -> None:
        story.append("outer in")
        await call_next(message)
        story.append("outer out")

    @broker.middleware
    async def inner(message: Message, call_next: Any) -> None:
        story.append("inner in")
        await call_next(message)
        story.append("inner out")

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        story.append(order["n"])

    async with broker.running():
        await broker.publish("t", {"n": 1})
        await settled(broker, "t")
    assert story == ["outer in", "inner in", 1, "inner out", "outer out"]


async def test_lifespan_surrounds_the_worker(broker: Broker) -> None:
    """Entered before the first message, left after the last one."""
    story: list[str] = []

    @broker.lifespan
    @asynccontextmanager
    async def resources() -> AsyncIterator[None]:
        story.append("open")
        yield
        story.append("closed")

    @broker.handler("t", group="g")
    async def handle(_order: dict[str, int]) -> None:
        story.append("handled")

    async with broker:
        await broker.publish("t", {"n": 1})
        async with broker.running():
            await settled(broker, "t")
            await until(lambda: "handled" in story, "it is handled")
    assert story == ["open", "handled", "closed"]


async def test_a_handler_publishes_to_the_next_topic(broker: Broker, witness: Witness) -> None:
    """A handler may publish: a chain of topics."""

    @broker.handler("t", group="g")
    async def first(order: dict[str, int], message: Message) -> None:
        await broker.publish("next", {"n": order["n"] + 1}, key=message.key)

    @broker.handler("next", group="g")
    async def second(order: dict[str, int]) -> None:
        witness.note(order["n"])

    async with broker.running():
        await broker.publish("t", {"n": 1}, key="k")
        await witness.sees([2])
        await settled(broker, "t")
        await settled(broker, "next")
