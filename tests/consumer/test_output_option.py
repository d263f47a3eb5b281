"""The option `output`: what a handler returns is published. A pool of processes outlives a test, so it has a file."""

from __future__ import annotations

import pytest

from rsmq import Broker, ConfigError
from tests.consumer.test_outputs import broker, stored
from tests.contract.witness import settled

__all__ = ["broker"]


def double(number: int) -> int | None:
    """For a handler in another process."""
    return 2 * number or None


@pytest.mark.parametrize("execution", ["inline", "thread", "process"])
async def test_return_value_is_the_output(broker: Broker, execution: str) -> None:
    """With the key of its input; None publishes nothing."""

    async def inline(number: int) -> int | None:
        return double(number)

    register = broker.handler("in", group="g", output="out", execution=execution)  # type: ignore[arg-type]
    register(inline if execution == "inline" else double)
    async with broker.running():
        for number in (0, 1, 2):
            await broker.publish("in", number, key="k")
        await settled(broker, "in")
        assert [(entry[b"data"], entry[b"key"]) for entry in await stored(broker)] == [(b"2", b"k"), (b"4", b"k")]


@pytest.mark.parametrize("batch", [None, 2])
async def test_return_value_goes_into_each_topic_of_a_list(broker: Broker, batch: int | None) -> None:
    """Of a message and of each item of a batch; a topic cannot be named twice."""

    @broker.handler("in", group="g", output=["out", "copies"], batch=batch)
    async def work(found: list[int]) -> list[int]:
        return found

    async with broker.running():
        await broker.publish_many("in", [1, 2] if batch else [[1], [2]])
        await settled(broker, "in")
        expected = {b"1", b"2"} if batch else {b"[1]", b"[2]"}
        assert [{each[b"data"] for each in await stored(broker, topic)} for topic in ("out", "copies")] == [
            expected
        ] * 2


@pytest.mark.parametrize(("output", "text"), [(["a", "a"], "names a topic twice"), (5, "is no topic")])
def test_wrong_output_is_refused(output: object, text: str) -> None:
    """With a sentence."""
    with pytest.raises(ConfigError, match=text):
        Broker().handler("in", group="g", output=output)(double)  # type: ignore[arg-type]
