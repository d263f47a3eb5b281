"""Messages in every state, a ledger of what was done to each, and `broker.look` for random ids of it.

    python -m tests.control.ledger [LOOKS] [MESSAGES]     # 100 000 and 20 000

The ledger knows nothing of the server: it has what the publisher asked for and what the handler was to do. The short
form is in `tests/control/test_look.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final, NamedTuple

from rsmq import Broker, Cancelled, Message, Reject, Retry, RetryPolicy, Settings
from rsmq.consumer.consumer import Consumer
from rsmq.control.status import MOST_BEFORE, MessageStatus
from rsmq.model.message import new_message_id
from rsmq.model.partition import partition_for
from rsmq.redis.streams import trim
from rsmq.testing.server import ThrowawayServer
from tests.contract.witness import ask
from tests.patience import until

HOUR: Final = timedelta(hours=1)
AT_ONCE: Final = 32
BUSY: Final = 20
"""Messages that run at the end."""
IDLE: Final = "audit"
"""A group without a worker: everything that is stored is undelivered for it."""


class Entry(NamedTuple):
    """What `look` is to answer. `state`: of the message if it is not stored, else for `billing`. `before`: how many are
    before it for IDLE; None if it is not undelivered there. `error`: of its failed attempt, or of its dead letter."""

    topic: str
    key: str | None
    state: str
    before: int | None = None
    error: str | None = None


class Ledger:
    """Makes the messages, with a worker of this process, and writes down what it has done."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._partitions = broker, broker.settings.partitions
        self._go_on, self._started, self._stored = asyncio.Event(), set[str](), Counter[int]()
        self.entries = dict[str, Entry]()

        @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=3), concurrency=2 * BUSY)
        async def handle(message: Message) -> None:
            match message.headers["do"]:
                case "waiting_for_retry":
                    raise Retry("out of paper", after=HOUR)
                case "dead":
                    raise Reject("no such customer")
                case "running":
                    self._started.add(message.id)
                    await self._go_on.wait()

        @broker.handler("old", group="billing")
        async def settle(_: Message) -> None: ...

    async def make(self, messages: int) -> None:
        """All of them. The worker runs on, and has some in its hands."""
        broker, part = self._broker, max(20, messages // 50)
        for partition in range(self._partitions):
            stream = broker.keys.stream("orders", partition)
            await ask(broker, "XGROUP", "CREATE", stream, IDLE, "0", "MKSTREAM")
        await self._make_removed(part)
        for number in range(part):
            ref = await broker.publish("orders", "delayed", key=f"d{number}", delay=HOUR)
            self.entries[ref] = Entry("orders", f"d{number}", "delayed")
        parked = await self._publish("waiting_for_retry", part, error="Retry: out of paper")
        await self._publish("dead", part, error="no such customer")
        await self._pause()  # a handler may start a message in its first millisecond
        await self._publish("settled", part, payload="late", expires="1ms")
        await self._publish("dead", part, payload="late", expires="1ms", on_expiry="dead")
        await self._resume_after_expiry()
        running = await self._publish("running", BUSY)
        await self._publish("settled", max(part, messages - len(self.entries)))
        await until(lambda: self._has_ended("orders", sum(self._stored.values()) - BUSY), "all but those end", 900)
        held = [*running[:5], *parked[:10]]
        waiting = list[str]()
        for one in held:
            waiting += await self._publish("waiting_for_key", 3, key=self.entries[one].key)
        await until(lambda: self._are_waiting(waiting), "they are delivered")
        await self._pause()
        undelivered = await self._publish("unread", part)
        delayed = [each for each, entry in self.entries.items() if entry.state == "delayed"]
        for some, group in ((delayed, None), (undelivered, None), (parked[10:], "billing")):
            for each in random.sample(some, part // 5):
                await self._cancel(each, group)
        self.entries |= {new_message_id(): Entry("orders", None, "unknown") for _ in range(part)}

    async def _publish(
        self, state: str, count: int, *, key: str | None = None, payload: str = "", error: str | None = None,
        **options: Any,
    ) -> list[str]:  # fmt: skip
        """Publish so many, with one key or each with a key of its own."""
        keys = [key or f"k{len(self.entries) + number}" for number in range(count)]
        ids = await self._broker.publish_many(
            "orders", range(count), key=lambda number: keys[number], headers={"do": payload or state}, **options
        )
        for each, its_key in zip(ids, keys, strict=True):
            at = partition_for(its_key, self._partitions)
            self.entries[each] = Entry("orders", its_key, state, min(self._stored[at], MOST_BEFORE), error)
            self._stored[at] += 1
        return ids

    async def _make_removed(self, count: int) -> None:
        """Messages that retention has removed, and newer ones in each partition."""
        ids = await self._broker.publish_many("old", range(count))
        await until(lambda: self._has_ended("old", count), "the old ones are settled")
        for partition in range(self._partitions):
            at = (self._broker.client, self._broker.keys, "old", partition)
            await trim(*at, keep_age_ms=0, keep_length=0, exact=True)
        await self._broker.publish_many("old", range(1000))
        self.entries |= {each: Entry("old", None, "removed") for each in ids}

    async def _cancel(self, message_id: str, group: str | None) -> None:
        entry = self.entries[message_id]
        answer = await self._broker.cancel(message_id, topic=entry.topic, key=entry.key, group=group)
        assert isinstance(answer, Cancelled), (message_id, answer)
        before = entry.before if group else None
        self.entries[message_id] = entry._replace(state="cancelled", before=before)

    async def _has_ended(self, topic: str, count: int) -> bool:
        """Whether so many messages are settled, parked or dead."""
        stats = self._consumer(topic).stats
        return stats["settled"] + stats["retried"] + stats["buried"] >= count

    async def _are_waiting(self, ids: Iterable[str]) -> bool:
        looks = [await self._broker.look(each, topic="orders", key=self.entries[each].key) for each in ids]
        return all(each.group("billing").state == "waiting_for_key" for each in looks)  # type: ignore[union-attr]

    def _consumer(self, topic: str) -> Consumer:
        assert self._broker.worker is not None
        return next(each for each in self._broker.worker.consumers if each.topic.name == topic)

    async def _pause(self) -> None:
        """Let the worker read nothing more."""
        await self._broker.pause_group("orders", "billing")
        fetchers = self._consumer("orders").fetchers
        await until(lambda: asyncio.sleep(0, fetchers.is_paused), "it is paused")
        await fetchers.exclude()

    async def _resume_after_expiry(self) -> None:
        """Let it read on when it knows that all is over which was stored for a millisecond."""
        seconds, micros = await ask(self._broker, "TIME")
        due, clock = 1000 * int(seconds) + int(micros) // 1000 + 200, self._consumer("orders").membership.clock
        await until(lambda: clock.now_ms() > due, "their time is over")
        await self._broker.resume_group("orders", "billing")

    def release(self) -> None:
        """Let the handlers end."""
        self._go_on.set()

    async def compare(self, looks: int) -> Counter[str]:
        """Look for so many random ids, of each state as many, with and without their key. Returns how many of each, if
        all answers are those of the ledger."""
        by_state = defaultdict[str, list[str]](list)
        for each, entry in self.entries.items():
            by_state[entry.state].append(each)
        states = list(by_state)
        drawn = (random.choice(by_state[random.choice(states)]) for _ in range(looks))
        seen, wrong = Counter[str](), list[object]()

        async def look() -> None:
            for each in drawn:
                entry = self.entries[each]
                key = entry.key if random.random() < 0.9 else None
                status = await self._broker.look(each, topic=entry.topic, key=key)
                seen[entry.state] += 1
                if seen.total() % 5_000 == 0:
                    print(f"{seen.total()} looked for, {len(wrong)} wrong", flush=True)
                if not equals(entry, status):
                    wrong.append((each, entry, status))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(look())
        assert not wrong, wrong[:3]
        return seen


def equals(entry: Entry, status: MessageStatus) -> bool:
    """Whether the answer is what the ledger has."""
    billing, idle = status.group("billing"), status.group(IDLE)
    if (billing.state if billing else status.state) != entry.state:
        return False
    if (idle.before if idle else None) != entry.before:
        return False
    if billing is None or entry.error is None:
        return True
    failed = [(each.attempt, each.error) for each in billing.failed]
    return failed == [(1, entry.error)] if entry.error.startswith("Retry") else billing.error == entry.error


async def main(looks: int, messages: int) -> None:
    """The long form, on a throw-away server."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    with ThrowawayServer() as server:
        broker = Broker(Settings(url=server.url, preflight="warn", partitions=8))
        ledger, started = Ledger(broker), time.perf_counter()
        async with broker.running():
            await ledger.make(messages)
            print(f"{len(ledger.entries)} messages made in {time.perf_counter() - started:.0f} s")
            started = time.perf_counter()
            seen = await ledger.compare(looks)
            ledger.release()
        print(f"{looks} looks in {time.perf_counter() - started:.0f} s, each as the ledger has it: {dict(seen)}")


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    asyncio.run(main(*(given + [100_000, 20_000][len(given) :])))
