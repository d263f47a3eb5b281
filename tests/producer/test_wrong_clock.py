"""A publisher whose wall clock is hours off: durations count by the server, and its messages are found by their ids."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from tests.compiler import MISSING, compiler, library
from tests.patience import until

HERE = Path(__file__).parent
PUBLISH = """
import json, time
from rsmq import SyncBroker
with SyncBroker() as broker:
    print(json.dumps({
        "clock": time.time(),
        "ids": [str(broker.publish("orders", n, key="k")) for n in range(3)]
            + [str(each) for each in broker.publish_many("orders", [3, 4], key=lambda _: "k")],
        "both": str(broker.publish("orders", 5, key="k", delay="1ms", expires="30m")),
        "later": str(broker.publish("orders", 6, key="k", delay="1h", expires="3h")),
    }))
"""


@pytest.fixture(scope="module")
def shifted_clock() -> Path:
    """The library that moves a process's clock."""
    if compiler() is None:
        pytest.skip(MISSING)
    return library(HERE / "shifted_clock.c")


async def is_settled(broker: Broker, identity: str) -> bool:
    """As `look` finds it, by the text of its id alone."""
    group = (await broker.look(identity, topic="orders")).group("g")
    return group is not None and group.state == "settled"


@pytest.mark.parametrize("hours", [2, -2, 24 * 400])
async def test_publisher_with_a_wrong_clock_loses_nothing_and_its_messages_are_found(
    settings: Settings, server_url: str, shifted_clock: Path, hours: int
) -> None:
    """No message expires early, and the text of an id is enough to find it."""
    wrong = {"LD_PRELOAD": str(shifted_clock), "SHIFT": str(3600 * hours)}
    own = {"RSMQ_URL": server_url, "RSMQ_PREFIX": settings.prefix, "RSMQ_PREFLIGHT": "warn"}
    done = await anyio.run_process([sys.executable, "-c", PUBLISH], env=os.environ | own | wrong, stderr=None)
    made = json.loads(done.stdout)
    assert abs(made["clock"] - time.time() - 3600 * hours) < 600, "the clock was not moved"
    broker, seen = Broker(settings), list[Any]()

    @broker.handler("orders", group="g")
    async def handle(order: int) -> None:
        seen.append(order)

    async with broker.running():
        await until(lambda: len(seen) >= 6, "all but the last one are handled")
        assert seen == [0, 1, 2, 3, 4, 5]
        for identity in (*made["ids"], made["both"]):
            await until(partial(is_settled, broker, identity), f"{identity} is settled")
        assert (await broker.look(made["later"], topic="orders")).state == "delayed"
        assert type(await broker.cancel(made["later"], topic="orders")).__name__ == "Cancelled"
