"""A topic whose messages are encrypted, and lie in a store, grows: no body is lost, whatever its message waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import anyio
from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, RetryPolicy, Settings
from rsmq.codecs import Encrypt, Keyring, Offload
from rsmq.control import Bodies
from tests.codecs.stores import MemoryStore
from tests.contract.witness import dies
from tests.matrix.way import steady_connections
from tests.patience import until

pytestmark = steady_connections

NOW = timedelta(0)
LARGE = "x" * 2000


async def test_bodies_go_over_a_resize(settings: Settings) -> None:
    """Of what is unread, delayed, parked, dead and replayed, and of the ticks of a schedule with a key: each is handled
    after the resize, with sweeps before and after each step. A replay into a new partition copies the entry with the
    name of its body, so it goes on while the store is away; its handler waits for the store, without an attempt."""
    store = MemoryStore()
    broker = Broker(
        replace(settings, preflight="warn", partitions=2),
        codecs=[Encrypt(Keyring({"k1": b"1" * 32}))],
        offload=Offload(store, above="1kB"),
    )
    handled, attempts, fails = Counter[str](), dict[str, int](), [True]
    tried = anyio.Event()

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=9, wait=wait_fixed(0.05)))
    async def take(payload: str, message: Message) -> None:
        word = payload.removesuffix(LARGE)
        if fails[0] and word == "dead":
            raise Reject("no")
        if fails[0] and word == "parked":
            tried.set()
            raise OSError("not yet")
        handled[word] += 1
        attempts[word] = message.attempt

    async def swept() -> list[str]:
        """What is lost after two sweeps without a wait, none of which deletes anything that is named."""
        assert broker.encoding.bodies is not None
        bodies = Bodies(broker.client, broker.keys, broker.topics, broker.encoding.bodies, keep=NOW, grace=NOW)
        for _ in range(2):
            await bodies.sweep()
        return [name for each in await bodies.status() for name in each.lost]

    async with broker:
        await broker.topics.ensure("t", 2)
        async with broker.running():
            await broker.publish("t", "dead" + LARGE, key="a")
            await dies(broker, "t", "g", 1)
            await broker.publish("t", "parked" + LARGE, key="b")
            await until(tried.is_set, "it waits for a retry")
        later = [await broker.publish("t", f"delayed{n}{LARGE}", key=f"k{n}", delay="1h") for n in range(6)]
        for n in range(6):
            await broker.publish("t", f"unread{n}{LARGE}", key=f"k{n}")
        await broker.schedules.upsert("clock", "100ms", "t", "tick" + LARGE, key="c")
        assert await swept() == []
        await broker.topics.resize("t", 6)
        topic = await broker.topics.existing("t")
        assert topic.partitions == 6
        assert await swept() == []
        store.is_away = True
        assert await broker.dead_letters.replay(topic, "g") == 1
        fails[0] = False
        async with broker.running():
            for ref in later:
                await broker.reschedule(ref, delay="0s")
            store.is_away = False
            words = {"dead", "parked", "tick", *(f"{kind}{n}" for kind in ("unread", "delayed") for n in range(6))}
            await until(lambda: words <= {*handled}, "each is handled")
            assert await swept() == []
        assert {handled[word] for word in words - {"tick"}} == {1}
        assert attempts["dead"] == 1
