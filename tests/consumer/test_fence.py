"""What a message says of its owner: the fence grows with each owner, the run with each reset."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from rsmq import Broker, Message, Settings
from rsmq.redis.streams import delete_group
from tests.contract.witness import ask, patient, settled
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker with a prefix of its own."""
    return Broker(replace(settings, preflight="warn"))


def note(broker: Broker, seen: list[Message], **options: object) -> None:
    """A handler that keeps its messages."""

    @broker.handler("t", group="g", partitions=1, **options)  # type: ignore[arg-type]
    async def handle(message: Message) -> None:
        seen.append(message)


async def test_fence_of_a_later_owner_is_greater_also_after_flushall(broker: Broker) -> None:
    """A store that refuses smaller numbers accepts the owner after FLUSHALL."""
    seen = list[Message]()
    note(broker, seen)
    async with broker.running():
        await broker.publish("t", "before")
        await until(lambda: len(seen) == 1, "it is handled")
        everything = await ask(broker, "KEYS", f"{broker.settings.prefix}:*")
        await ask(broker, "DEL", *everything)  # FLUSHALL, for this prefix
        await patient(broker.publish)("t", "after")
        await until(lambda: len(seen) == 2, "the next is handled, too")
        assert 0 < seen[0].fence < seen[1].fence
        assert pickle.loads(pickle.dumps(seen[0])).fence == seen[0].fence


async def test_run_grows_with_a_reset_and_a_replay_has_a_new_stream_id(broker: Broker) -> None:
    """A store that remembers run and stream id lets the handler work again after both.

    A message that was read before the worker learns of the reset still belongs to the old run, and cannot be settled.
    """
    seen = list[Message]()
    note(broker, seen)
    async with broker.running():
        await broker.publish("t", "again")
        await until(lambda: len(seen) == 1, "it is handled")
        await patient(broker.reset_group)("t", "g")
        await until(lambda: seen[-1].run > 0, "it is handled again")
        assert {message.stream_id for message in seen} == {seen[0].stream_id}
        assert {message.run for message in seen} == {0, seen[-1].run}
        assert seen[-1].fence > seen[0].fence
        assert pickle.loads(pickle.dumps(seen[-1])).run == seen[-1].run
        await settled(broker, "t")
        topic = await broker.topics.existing("t")
        stream = broker.keys.dlq("t", 0, "g")
        await ask(broker, "XADD", stream, "*", "data", "x", "dlq.reason", "failed")
        assert await broker.dead_letters.replay(topic, "g") == 1
        await until(lambda: seen[-1].stream_id != seen[0].stream_id, "the dead letter is handled")


async def test_group_that_is_deleted_and_made_again_begins_a_new_run(broker: Broker, settings: Settings) -> None:
    """A store that remembers what the old group has handled lets the new one handle it again."""
    old, new = list[Message](), list[Message]()
    note(broker, old)
    async with broker.running():
        await broker.publish("t", "again")
        await until(lambda: len(old) == 1, "it is handled")
        await settled(broker, "t")
    again = Broker(broker.settings)
    note(again, new)
    async with again:
        await delete_group(again.client, again.keys, await again.topics.existing("t"), "g")
        assert await ask(again, "PTTL", again.keys.lease("t", 0, "g")) > 0
        async with again.running():
            await until(lambda: len(new) == 1, "it is handled again")
            assert new[0].stream_id == old[0].stream_id
            assert new[0].run > old[0].run
            assert await ask(again, "PTTL", again.keys.lease("t", 0, "g")) == -1


async def test_fence_and_run_of_shared_distribution_are_zero(broker: Broker) -> None:
    """There are no owners."""
    seen = list[Message]()
    note(broker, seen, distribution="shared")
    async with broker.running():
        await broker.publish("t", "x")
        await until(lambda: len(seen) == 1, "it is handled")
        assert (seen[0].fence, seen[0].run) == (0, 0)
