"""Routers: handlers of several modules on one broker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rsmq import Broker, ConfigError, Message, Router, Settings
from rsmq.broker.broker import pointed_at
from rsmq.testing import Harness


async def handle(_order: dict[str, int]) -> None:
    """A handler."""


@pytest.fixture
def broker() -> Broker:
    """A broker that is not connected."""
    return Broker(Settings(url="redis://127.0.0.1:1/0"))


def test_prefixes_of_nested_routers_add_up(broker: Broker) -> None:
    """The prefixes of the router, of the including router and of the call come before the topic, outermost first."""
    inner, outer = Router(prefix="orders."), Router(prefix="shop.")
    assert inner.handler("new", group="billing")(handle) is handle
    outer.include(inner, prefix="eu.")
    broker.include(outer)
    broker.include(outer, prefix="test.")
    assert [handler.topic for handler in broker.handlers] == ["shop.eu.orders.new", "test.shop.eu.orders.new"]


async def test_router_middleware_wraps_only_its_handlers(broker: Broker, server_url: str, prefix: str) -> None:
    """It runs inside the middleware of the broker, and not for other handlers."""
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


def test_wrong_registration_is_refused(broker: Broker) -> None:
    """The same group twice, a wrong name, a handler after `include`, a broker, and an object that is no router."""
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


def test_wrong_topic_is_refused_at_once(broker: Broker) -> None:
    """A decorator without its call would register nothing, and say nothing. A topic that is no text is named."""
    with pytest.raises(ConfigError, match=r"write `@broker\.handler\('orders', group='billing'\)`"):
        broker.handler(handle)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="topic name 5 is not allowed"):
        broker.handler(5, group="billing")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="topic name 5 is not allowed"):
        broker.every("1h", 5)  # type: ignore[arg-type]


async def test_registration_while_the_worker_runs_is_refused(broker: Broker, settings: Settings) -> None:
    """The worker serves what it had at its start: a later handler, middleware or lifespan would be silently missing."""
    broker.handler("t", group="g")(handle)
    with pointed_at(broker, replace(settings, preflight="warn")):
        async with broker.running():
            with pytest.raises(ConfigError, match="handler handle comes too late, the worker runs already"):
                broker.handler("u", group="g")(handle)
            with pytest.raises(ConfigError, match="middleware handle comes too late"):
                broker.middleware(handle)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="lifespan handle comes too late"):
                broker.lifespan(handle)  # type: ignore[arg-type]
        broker.handler("u", group="g")(handle)
