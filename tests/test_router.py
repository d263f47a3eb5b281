"""Routers: handlers of several modules on one broker."""

from __future__ import annotations

from typing import Any

import pytest

from rsmq import Broker, ConfigError, Message, Router, Settings
from rsmq.testing import Harness


async def handle(_order: dict[str, int]) -> None:
    """A handler."""


@pytest.fixture
def broker() -> Broker:
    """To be pointed at the shared server."""
    return Broker(Settings(url="redis://127.0.0.1:1/0"))


def test_prefixes_add_up(broker: Broker) -> None:
    """The prefix of the router, of what includes it, and of the call stand before the topic, from the outside in."""
    inner, outer = Router(prefix="orders."), Router(prefix="shop.")
    assert inner.handler("new", group="billing")(handle) is handle
    outer.include(inner, prefix="eu.")
    broker.include(outer)
    broker.include(outer, prefix="test.")
    assert [handler.topic for handler in broker.handlers] == ["shop.eu.orders.new", "test.shop.eu.orders.new"]


async def test_middleware_of_a_router(broker: Broker, server_url: str, prefix: str) -> None:
    """It surrounds the handlers of its router, inside that of the broker; others never meet it."""
    story: list[Any] = []

    def tell(name: str) -> Any:
        async def middleware(message: Message, call_next: Any) -> None:
            story.append(f"{name} {message.topic}")
            await call_next(message)

        return middleware

    router, within = Router(), Router()
    broker.middleware(tell("broker"))
    router.middleware(tell("router"))
    within.middleware(tell("within"))
    within.handler("deep", group="g")(handle)
    router.handler("flat", group="g")(handle)
    broker.handler("own", group="g")(handle)
    router.include(within)
    broker.include(router)
    async with Harness(broker, url=server_url, prefix=prefix) as test:
        for topic in ("own", "flat", "deep"):
            [outcome] = await test.publish_and_handle(topic, {})
            assert outcome.is_done
    assert story == ["broker own", "broker flat", "router flat", "broker deep", "router deep", "within deep"]


def test_mistakes(broker: Broker) -> None:
    """Twice the same group, a wrong name, a handler that comes too late, a broker, and no router at all."""
    router = Router()
    router.handler("t", group="g")(handle)
    broker.include(router)
    with pytest.raises(ConfigError, match="group 'g' of topic 't' has a handler already"):
        broker.include(router)
    with pytest.raises(ConfigError, match="handler handle comes too late, its router is included already"):
        router.handler("u", group="g")(handle)
    with pytest.raises(ConfigError, match="middleware handle comes too late"):
        router.middleware(handle)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"topic name 'a b\.t' is not allowed"):
        broker.include(router, prefix="a b.")
    with pytest.raises(ConfigError, match="a Broker cannot be included"):
        broker.include(Broker(Settings(url="redis://127.0.0.1:1/0")))
    for strange in (broker, Router, None):
        with pytest.raises(ConfigError, match=r"cannot be included here: pass an rsmq\.Router"):
            broker.include(strange)  # type: ignore[arg-type]
