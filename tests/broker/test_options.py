"""What the constructor takes, and durations at every place of the API that has one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from rsmq import Broker, ConfigError, Rate, Retry, Settings
from tests.servers import Server


async def test_broker_with_a_url_publishes(server: Server, prefix: str) -> None:
    """The first argument may be the URL; other settings stand beside it by name."""
    async with Broker(server.url, prefix=prefix, preflight="warn", lease_ttl="8s") as broker:
        await broker.publish("orders", {"n": 1})
        assert await broker.topics.names() == ["orders"]
        assert (broker.url, broker.settings.lease_ttl) == (server.url, timedelta(seconds=8))


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("redis://a",), {"url": "redis://b"}, "the URL is given twice"),
        ((Settings(),), {"prefix": "shop"}, r"settings are given twice: put prefix into Settings\(...\)"),
        ((6379,), {}, "6379 is not a server: write Broker"),
        ((), {"lease_ttl": 6}, "RSMQ_LEASE_TTL: a duration is"),
    ],
)
def test_wrong_arguments_of_a_broker_are_refused(arguments: Any, options: Any, says: str) -> None:
    """At the constructor, with what to write."""
    with pytest.raises(ConfigError, match=says):
        Broker(*arguments, **options)


PLACES: dict[str, Callable[[Broker, Any], Awaitable[object]]] = {
    "delay": lambda broker, value: broker.publish("orders", 1, delay=value),
    "expires": lambda broker, value: broker.send("phone", 1, expires=value),
    "retention_age": lambda broker, value: broker.topics.change("orders", retention_age=value),
}


@pytest.mark.parametrize("name", PLACES)
async def test_every_duration_takes_text_and_refuses_a_number(settings: Settings, name: str) -> None:
    """The same answer everywhere."""
    async with Broker(settings) as broker:
        await broker.topics.ensure("orders", 1)
        await PLACES[name](broker, "1h")
        await PLACES[name](broker, timedelta(hours=1))
        for wrong in (5, "5"):
            with pytest.raises(ConfigError, match=f"{name}={wrong!r} is not a duration.*write {name}='5s'"):
                await PLACES[name](broker, wrong)
        with pytest.raises(ConfigError, match=f"{name}='soon' is not a duration: write {name}='5s'"):
            await PLACES[name](broker, "soon")


async def test_dead_letters_take_text(settings: Settings) -> None:
    """The time between two replays, and the age of what is purged."""
    async with Broker(settings) as broker:
        topic = await broker.topics.ensure("orders", 1)
        assert await broker.dead_letters.replay(topic, "billing", every="20ms") == 0
        assert await broker.dead_letters.purge(topic, "billing", older_than="30d") == 0
        with pytest.raises(ConfigError, match=r"older_than=30 .*write older_than='30s'"):
            await broker.dead_letters.purge(topic, "billing", older_than=30)  # type: ignore[arg-type]


async def test_a_time_that_is_none_is_refused(settings: Settings) -> None:
    """`at` is a moment: a duration is answered with `delay`."""
    async with Broker(settings) as broker:
        with pytest.raises(ConfigError, match=r"at='5m' is not a time: .*write delay='5m'"):
            await broker.publish("orders", 1, at="5m")  # type: ignore[arg-type]


def test_values_keep_timedeltas() -> None:
    """What is given as text is a timedelta afterwards."""
    assert Retry(after="5m").after == timedelta(minutes=5)
    assert Rate(10, "1m").per == timedelta(minutes=1)
    assert Rate(10, "60s") == Rate(10, per=timedelta(minutes=1)) != Rate(10)
    with pytest.raises(ConfigError, match="a rate per 2 days is not possible: write per='1s', at most a day"):
        Rate(10, "2d")
