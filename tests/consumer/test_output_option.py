"""The option `output`: what a handler returns is published. A pool of processes outlives a test, so it has a file."""

from __future__ import annotations

import pytest

from rsmq import Broker
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
