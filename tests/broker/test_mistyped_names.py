"""Names and texts that nothing has, or that have no bytes: a ConfigError says so, and nothing is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rsmq import Broker, ConfigError, Message, Rate, Settings
from tests.contract.witness import ask
from tests.patience import until

SURROGATE = "a\ud800"
Call = Callable[[Broker], Awaitable[Any]]


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.reset_group("orders", "biling"),
        lambda broker: broker.pause_group("orders", "biling"),
        lambda broker: broker.resume_group("orders", "biling"),
    ],
    ids=["reset", "pause", "resume"],
)
async def test_group_that_is_not_there_is_named_and_not_made(settings: Settings, call: Call) -> None:
    """A group without a worker would hold back retention for good."""
    broker = served(settings)
    async with broker.running():
        with pytest.raises(ConfigError, match="no group 'biling': did you mean billing"):
            await call(broker)
        assert await ask(broker, "EXISTS", broker.keys.group("orders", "biling")) == 0
        groups = await ask(broker, "XINFO", "GROUPS", broker.keys.stream("orders", 0))
        assert len(groups) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.hold("orders", SURROGATE, "1s"),
        lambda broker: broker.pause_group("orders", SURROGATE),
        lambda broker: broker.reset_group("orders", "billing", 5),
        lambda broker: broker.erase(SURROGATE),
    ],
    ids=["hold", "pause", "start", "erase"],
)
async def test_call_with_a_text_that_has_no_bytes_is_a_config_error(settings: Settings, call: Call) -> None:
    """Neither a traceback nor a reply of the server that cannot be read."""
    broker = served(settings)
    async with broker.running():
        with pytest.raises(ConfigError):
            await call(broker)


def served(settings: Settings) -> Broker:
    """A broker with one handler."""
    broker = Broker(replace(settings, preflight="warn", partitions=1))

    @broker.handler("orders", group="billing", rate=Rate(1000, by=lambda _: "all"))
    async def bill(order: dict[str, int]) -> None: ...

    return broker


async def test_progress_with_a_text_that_has_no_bytes_is_a_config_error(settings: Settings) -> None:
    """In the handler, as for the other texts that it cannot take."""
    broker, told = Broker(replace(settings, preflight="warn", partitions=1)), list[str]()

    @broker.handler("orders", group="billing")
    async def bill(message: Message) -> None:
        with pytest.raises(ConfigError, match="lone surrogate"):
            await message.progress(0.5, SURROGATE)
        told.append("refused")

    async with broker.running():
        await broker.publish("orders", 1)
        await until(lambda: told, "it is refused")
