"""`by="key"`: a call has all messages of one key that were stored within `linger`. Order, counts and bounds hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest

from rsmq import Broker, ConfigError, Message, MessageRef, Reject, Retry, RetryPolicy
from rsmq.control import Cancelled
from tests.contract.witness import ask, cut_connections, dies, settled
from tests.patience import until

Make = Callable[..., Broker]
QUICKLY = RetryPolicy(max_attempts=3, wait=lambda _: 0.01)


class Mail:
    """A handler of one partition that gathers messages by key. `windows` lasts a day: a test ends it with `end`."""

    def __init__(self, broker: Broker, **options: Any) -> None:
        self.broker = broker
        self.calls: list[tuple[list[str], int]] = []
        self.act: Callable[[list[Message]], Any] = lambda _: None
        chosen = {"group": "g", "batch": 100, "by": "key", "linger": "23h", "partitions": 1, "retry": QUICKLY}
        broker.handler("t", **{**chosen, **options})(self.handle)

    async def handle(self, payloads: list[str], messages: list[Message]) -> Any:
        self.calls.append((payloads, messages[0].attempt))
        assert len({message.attempt for message in messages}) == 1
        result = self.act(messages)
        return await result if hasattr(result, "__await__") else result

    async def publish(self, data: str, key: str | None = "ada", **options: Any) -> MessageRef:
        return await self.broker.publish("t", data, key=key, **options)

    @property
    def waits_key(self) -> str:
        return self.broker.keys.waits("t", 0, "g")

    async def counts(self) -> list[int]:
        rows = await ask(self.broker, "XPENDING", self.broker.keys.stream("t", 0), "g", "-", "+", 10_000)
        return [row[3] for row in rows]

    async def wait_for_counts(self, *counts: int) -> None:
        with anyio.fail_after(30):
            while await self.counts() != list(counts):
                await anyio.sleep(0.01)

    async def wait_for_windows(self, number: int) -> None:
        with anyio.fail_after(30):
            while await ask(self.broker, "ZCARD", self.waits_key) != number:
                await anyio.sleep(0.01)

    async def end(self) -> None:
        """The windows of all keys are over now."""
        for entry_id in await ask(self.broker, "ZRANGE", self.waits_key, 0, -1):
            await ask(self.broker, "ZADD", self.waits_key, 2, entry_id)
        await ask(self.broker, "PUBLISH", self.broker.keys.changes("t", "g"), "")

    async def records(self) -> dict[str, str]:
        flat = await ask(self.broker, "HGETALL", self.broker.keys.calls("t", 0, "g"))
        found = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        return {key.decode(): last.decode() for key, last in found.items()}

    async def has_called(self, number: int) -> None:
        await until(lambda: len(self.calls) >= number, f"{number} calls")


async def test_call_has_all_messages_of_its_key_and_what_waits_has_a_count_of_0(broker: Broker) -> None:
    """Each key has a window of its own, that begins with its oldest message; a message without a key waits for none."""
    mail = Mail(broker)
    async with broker.running():
        for data, key in (("a1", "ada"), ("b1", "bob"), ("a2", "ada"), ("alone", None), ("a3", "ada")):
            await mail.publish(data, key)
        await mail.has_called(1)
        await mail.wait_for_windows(2)
        await mail.wait_for_counts(0, 0, 0, 0)
        assert broker.worker is not None
        (consumer,) = broker.worker.consumers
        assert (consumer.work.waiting_for_time, consumer.work.backlog) == (4, 0)
        assert mail.calls == [(["alone"], 1)]
        await mail.end()
        await mail.has_called(3)
        await settled(broker, "t")
        assert sorted(mail.calls[1:]) == [(["a1", "a2", "a3"], 1), (["b1"], 1)]
        await mail.wait_for_windows(0)


async def test_window_ends_by_the_servers_clock_linger_after_its_oldest_message(broker: Broker) -> None:
    """What is stored meanwhile does not prolong it, and what comes later has a window of its own."""
    mail = Mail(broker, linger="200ms")
    async with broker.running():
        first, _ = await broker.publish_many("t", ["a1", "a2"], key=lambda _: "ada")  # within a window on any machine
        await mail.has_called(1)
        seconds, micros = await ask(broker, "TIME")
        assert mail.calls == [(["a1", "a2"], 1)]
        status = await broker.look(first, topic="t")
        assert int(seconds) * 1000 + int(micros) // 1000 >= int(str(status.stream_id).partition("-")[0]) + 200
        await mail.publish("a3")
        await mail.has_called(2)
        await settled(broker, "t")
    assert mail.calls == [(["a1", "a2"], 1), (["a3"], 1)]


async def test_batch_ends_a_window_before_its_time(broker: Broker) -> None:
    """Calls of one key come one after the other, in order."""
    mail = Mail(broker, batch=3)
    async with broker.running():
        for number in range(7):
            await mail.publish(f"m{number}")
        await mail.has_called(2)
        await mail.wait_for_windows(1)
        await mail.wait_for_counts(0)
    assert mail.calls == [(["m0", "m1", "m2"], 1), (["m3", "m4", "m5"], 1)]


async def test_after_an_outage_a_call_has_all_that_was_stored_before_its_window_ended(make_broker: Make) -> None:
    """All were stored an hour ago, within a window: one call for each key, also with a small memory and many reads."""
    mail = Mail(make_broker(prefetch=20), linger="1m")
    async with mail.broker.running():  # makes the group
        pass
    async with mail.broker:
        stored, stream = int((await ask(mail.broker, "TIME"))[0]) * 1000 - 3_600_000, mail.broker.keys.stream("t", 0)
        await mail.broker.client.pipelined(
            [("XADD", stream, f"{stored + n}-0", "data", n, "key", f"k{n % 10}") for n in range(300)]
        )
    async with mail.broker.running():
        await mail.has_called(10)
        await settled(mail.broker, "t")
    assert sorted(len(payloads) for payloads, _ in mail.calls) == [30] * 10
    assert all(payloads == sorted(payloads, key=int) for payloads, _ in mail.calls)


async def test_retry_has_the_same_messages_and_later_ones_wait(broker: Broker) -> None:
    """The attempt counts for all; what came meanwhile is the next call, with a window of its own."""
    mail = Mail(broker)

    async def fail(messages: list[Message]) -> None:
        if messages[0].data == b"a1" and messages[0].attempt < 3:
            await mail.publish(f"later{messages[0].attempt}")
            raise ValueError("not now")

    mail.act = fail
    async with broker.running():
        await mail.publish("a1")
        await mail.publish("a2")
        await mail.wait_for_windows(1)
        await mail.end()
        await mail.has_called(3)
        await mail.wait_for_counts(0, 0)
        await mail.wait_for_windows(1)
        await mail.end()
        await mail.has_called(4)
        await settled(broker, "t")
    assert mail.calls == [(["a1", "a2"], 1), (["a1", "a2"], 2), (["a1", "a2"], 3), (["later1", "later2"], 1)]


async def test_call_fails_as_one(broker: Broker) -> None:
    """After the last attempt all of its messages are dead letters, in order."""
    mail = Mail(broker, retry=RetryPolicy(max_attempts=2, wait=lambda _: 0.01))

    def fail(messages: list[Message]) -> None:
        raise ValueError("never")

    mail.act = fail
    async with broker.running():
        await mail.publish("a1")
        await mail.publish("a2")
        await mail.wait_for_windows(1)
        await mail.end()
        assert await dies(broker, "t", "g", 2) == [("failed", b"a1"), ("failed", b"a2")]
        await settled(broker, "t")
    assert mail.calls == [(["a1", "a2"], 1), (["a1", "a2"], 2)]


async def test_attempt_that_does_not_count_has_the_same_messages(broker: Broker) -> None:
    """Also when more came meanwhile."""
    mail = Mail(broker)

    async def wait(messages: list[Message]) -> None:
        if len(mail.calls) == 1:
            await mail.publish("later")
            raise Retry(after=timedelta(milliseconds=10), counts=False)

    mail.act = wait
    async with broker.running():
        await mail.publish("a1")
        await mail.publish("a2")
        await mail.wait_for_windows(1)
        await mail.end()
        await mail.has_called(2)
        await mail.wait_for_counts(0)
    assert mail.calls == [(["a1", "a2"], 1), (["a1", "a2"], 1)]


async def test_outcomes_of_a_call_let_it_go_on_from_the_first_retry(broker: Broker) -> None:
    """What is before it is settled or dead, what is behind it is tried again with it."""
    mail = Mail(broker)

    def outcomes(messages: list[Message]) -> Any:
        first = [None, Reject("bad"), Retry(), None]
        return first if len(messages) == 4 else None

    mail.act = outcomes
    async with broker.running():
        for number in range(4):
            await mail.publish(f"a{number}")
        await mail.wait_for_windows(1)
        await mail.end()
        await mail.has_called(2)
        assert await dies(broker, "t", "g", 1) == [("rejected", b"a1")]
        await settled(broker, "t")
    assert mail.calls == [(["a0", "a1", "a2", "a3"], 1), (["a2", "a3"], 2)]


async def test_next_owner_keeps_windows_and_messages_of_a_call(make_broker: Make) -> None:
    """A worker stops while a call runs and others wait: the call is repeated without what came later."""
    first = Mail(make_broker(stop_grace=timedelta(milliseconds=1)))
    started = anyio.Event()

    async def hang(messages: list[Message]) -> None:
        started.set()
        await anyio.sleep_forever()

    first.act = hang
    async with first.broker.running():
        await first.publish("a1")
        await first.publish("a2")
        await first.publish("b1", "bob")
        await first.wait_for_windows(2)
        ada = (await ask(first.broker, "ZRANGE", first.waits_key, 0, 0))[0]
        await ask(first.broker, "ZADD", first.waits_key, 2, ada)
        await ask(first.broker, "PUBLISH", first.broker.keys.changes("t", "g"), "")
        await started.wait()
        await first.publish("a3")
        await first.wait_for_counts(1, 1, 0, 0)
    second = Mail(make_broker())
    async with second.broker.running():
        await second.has_called(1)
        await second.wait_for_windows(2)
        await second.wait_for_counts(0, 0)
        await second.end()
        await second.has_called(3)
        await settled(second.broker, "t")
    assert second.calls[0] == (["a1", "a2"], 1)
    assert sorted(second.calls[1:]) == [(["a3"], 1), (["b1"], 1)]


async def test_cancelled_messages_leave_their_call(broker: Broker) -> None:
    """Also the first one: the others wait for the window of the next one."""
    mail = Mail(broker)
    async with broker.running():
        refs = [await mail.publish(f"a{number}") for number in range(4)]
        await mail.wait_for_counts(0, 0, 0, 0)
        for ref in (refs[0], refs[2]):
            assert isinstance(await broker.cancel(ref), Cancelled)
        await mail.wait_for_counts(0, 0, 0)
        await mail.wait_for_windows(1)
        assert mail.calls == []
        await mail.end()
        await mail.has_called(1)
        await settled(broker, "t")
    assert mail.calls == [(["a1", "a3"], 1)]


async def test_rescheduled_message_ends_its_window(broker: Broker) -> None:
    """A look says until when it waits, and behind whom the others do."""
    mail = Mail(broker)
    async with broker.running():
        first, second = await mail.publish("a1"), await mail.publish("a2")
        await mail.wait_for_counts(0, 0)
        await mail.wait_for_windows(1)
        states = [(await broker.look(ref)).group("g") for ref in (first, second)]
        assert [each and each.state for each in states] == ["waiting_for_time", "waiting_for_key"]
        assert await broker.reschedule(first, delay=timedelta(0)) is not None
        await mail.has_called(1)
        await settled(broker, "t")
    assert mail.calls == [(["a1", "a2"], 1)]


async def test_outputs_of_a_call_leave_with_its_first_message(broker: Broker) -> None:
    """All is settled in one step with them."""
    mail = Mail(broker)

    async def publish(messages: list[Message]) -> None:
        for message in messages:
            await message.publish("out", message.data.decode())

    mail.act = publish
    async with broker.running():
        for number in range(3):
            await mail.publish(f"a{number}")
        await mail.wait_for_windows(1)
        await mail.end()
        await mail.has_called(1)
        await settled(broker, "t")
        topic = await broker.topics.find("out")
        assert topic is not None
        rows = [await ask(broker, "XRANGE", broker.keys.stream("out", number), "-", "+") for number in topic.numbers]
    assert sorted(fields[1] for row in rows for _, fields in row) == [b"a0", b"a1", b"a2"]


async def test_server_forgets_the_record_of_a_call_that_is_settled(broker: Broker) -> None:
    """With the next call: records do not pile up."""
    mail = Mail(broker, linger="1ms")
    async with broker.running():
        for number in range(5):
            await mail.publish("m", f"k{number}")
            await mail.has_called(number + 1)
            await settled(broker, "t")
        assert set(await mail.records()) == {"k4"}


@pytest.mark.parametrize("loss", ["reset", "flush", "waits"])
async def test_windows_outlive_a_loss(broker: Broker, loss: str) -> None:
    """A reset begins them anew, after a FLUSHALL nothing is left, and lost times are noted again."""
    mail = Mail(broker)
    async with broker.running():
        await mail.publish("a1")
        await mail.publish("a2")
        await mail.wait_for_counts(0, 0)
        await mail.wait_for_windows(1)
        if loss == "reset":
            await broker.reset_group("t", "g")
        elif loss == "flush":
            keys = broker.keys
            await ask(
                broker, "DEL", keys.stream("t", 0), mail.waits_key, keys.lease("t", 0, "g"), keys.calls("t", 0, "g")
            )
            await until(lambda: waiting(broker) == 0, "nothing waits any more")
            await mail.publish("a1")
            await mail.publish("a2")
        else:
            await ask(broker, "DEL", mail.waits_key)
            await cut_connections(broker)
        await mail.wait_for_windows(1)
        await mail.wait_for_counts(0, 0)
        assert mail.calls == []
        await mail.end()
        await mail.has_called(1)
        await settled(broker, "t")
    assert mail.calls == [(["a1", "a2"], 1)]


def waiting(broker: Broker) -> int:
    """How many messages wait for a time in a worker."""
    assert broker.worker is not None
    return sum(consumer.work.waiting_for_time for consumer in broker.worker.consumers)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"by": "tenant"}, "by='tenant' is unknown"),
        ({"batch": None}, "by='key' needs batch"),
        ({"batch": 1001}, "batch=1001 is above 1000"),
        ({"linger": "25h"}, "linger='25h' is above 24h"),
        ({"ordering": "none"}, "by='key' needs the owner of a key"),
        ({"distribution": "shared"}, "by='key' needs the owner of a key"),
        ({"tenant": lambda _: "a"}, "leave tenant out"),
        ({"when": lambda _: None}, "publish the result into a topic whose handler has it"),
    ],
)
def test_digest_that_cannot_hold_is_refused(broker: Broker, options: dict[str, Any], text: str) -> None:
    """The error says what to do."""

    async def many(data: list[Any]) -> None: ...

    with pytest.raises(ConfigError, match=text):
        broker.handler("t", **{"group": "g", "batch": 10, "by": "key", **options})(many)  # type: ignore[misc]
