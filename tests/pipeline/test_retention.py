"""Retention keeps what the archive has not committed, and names the archive as the holder."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from rsmq.broker import Broker
from rsmq.inspector.retention_holds import retention_holds
from rsmq.model.settings import Settings
from rsmq.redis.topics import Topic
from tests.patience import until
from tests.pipeline.vault import Vault


async def test_a_running_worker_trims_behind_the_archive(vault: Vault, settings: Settings) -> None:
    """Everything is settled and nothing goes, until the archive has committed; then the worker trims it by itself."""
    eager = replace(settings, retention_interval=timedelta(milliseconds=50))
    async with Broker(eager) as broker:
        handled: list[int] = []

        @broker.handler("orders", group="billing")
        async def bill(order: dict[str, int]) -> None:
            handled.append(order["n"])

        topic = await broker.topics.ensure("orders", 2)
        topic = await broker.topics.change("orders", retention_length=0, archive="required")
        vault.add("orders", range(600))

        async def is_held_by_the_archive_alone() -> bool:
            return await holders(broker, topic) == {"archive"}

        async def is_held_by_nightly() -> bool:
            return "archive nightly" in await holders(broker, topic)

        async with broker.running():
            await until(lambda: len(handled) == 600, "all messages are handled", seconds=60)
            await until(is_held_by_the_archive_alone, "only the archive needs messages", seconds=60)
            vault.archive("orders", name="nightly")
            # a stream drops whole nodes of about a hundred entries
            await until(lambda: max(lengths(vault)) <= 100, "what is archived is trimmed")
            vault.add("orders", range(600, 610))
            await until(is_held_by_nightly, "the archive needs the new messages", seconds=60)
    assert vault.archived("orders") == list(range(600))


async def test_what_was_published_before_a_resize_is_kept_until_the_archive_has_it(
    light: Vault, settings: Settings
) -> None:
    """The archive takes the partitions before and those that follow; then the worker trims both."""
    eager = replace(settings, retention_interval=timedelta(milliseconds=50))
    async with Broker(eager) as broker:
        handled: list[int] = []

        @broker.handler("orders", group="billing", ordering="key")
        async def bill(order: dict[str, int]) -> None:
            handled.append(order["n"])

        async def is_held_by_the_archive_alone() -> bool:
            return await holders(broker, topic) == {"archive"}

        async def is_resized() -> bool:
            return (await broker.topics.resize("orders", 4)).partitions == 4

        await broker.topics.ensure("orders", 2)
        await broker.topics.change("orders", retention_length=0, archive="required")
        async with broker.running():
            await broker.publish_many("orders", [{"n": n} for n in range(600)], key=key_of)
            await until(is_resized, "the topic has grown", seconds=60)
            await broker.publish_many("orders", [{"n": n} for n in range(600, 1200)], key=key_of)
            await until(lambda: len(handled) == 1200, "all messages are handled", seconds=60)
            topic = await broker.topics.existing("orders")
            streams = [light.keys.stream("orders", number) for number in topic.numbers]
            await until(is_held_by_the_archive_alone, "only the archive needs messages", seconds=60)
            assert sum(light.raw("XLEN", stream) for stream in streams) == 1200
            light.archive_by_arrow("orders")
            await until(lambda: max(light.raw("XLEN", stream) for stream in streams) <= 100, "it is trimmed")
    assert light.archived("orders") == list(range(1200))


def key_of(order: dict[str, int]) -> str:
    """One of twenty keys."""
    return str(order["n"] % 20)


async def holders(broker: Broker, topic: Topic) -> set[str]:
    """Who needs a message of any partition; limits of the topic do not count."""
    asked = [await retention_holds(broker.client, broker.keys, topic, number) for number in topic.numbers]
    holds = [each for found in asked for each in found]
    return {each.holder for each in holds if not each.is_limit}


def lengths(vault: Vault) -> list[int]:
    """Entries in each partition."""
    return [vault.raw("XLEN", vault.keys.stream("orders", number)) for number in (0, 1)]
