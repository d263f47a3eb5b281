"""What a lifespan yields is for handlers, as long as a worker runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import pytest
from fast_depends import Depends

from rsmq import Broker, ConfigError
from rsmq.testing import HarnessFixture


class Pool:
    is_open = True


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_handlers_get_what_a_lifespan_has_opened(kind: str, rsmq_harness: HarnessFixture) -> None:
    broker = Broker()
    seen: list[Pool] = []

    @broker.lifespan
    @asynccontextmanager
    async def pool() -> AsyncIterator[Pool]:
        opened = Pool()
        yield opened
        opened.is_open = False

    async def handle(_: int, to: Annotated[Pool, Depends(pool.value)]) -> None:
        assert to.is_open
        seen.append(to)

    def plain(_: int, to: Annotated[Pool, Depends(pool.value)]) -> None:
        assert to.is_open
        seen.append(to)

    broker.handler("t", group="g", partitions=1)(handle if kind == "async" else plain)
    for _ in range(2):
        async with rsmq_harness(broker) as test:
            outcomes = [await test.publish_and_handle("t", n) for n in range(2)]
            assert all(outcome.is_done for [outcome] in outcomes)
    assert [each.is_open for each in seen] == [False] * 4
    assert len(set(map(id, seen))) == 2  # one for each worker
    with pytest.raises(ConfigError, match="lifespan pool is not open here"):
        pool.value()
