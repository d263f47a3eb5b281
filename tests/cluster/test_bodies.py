"""Large payloads on a cluster: bodies of outputs on their way between slots, too."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rsmq import Broker, Message
from rsmq.codecs import Offload
from rsmq.control import Bodies
from tests.codecs.stores import MemoryStore
from tests.contract.witness import Witness, ask, settled


async def test_bodies_of_messages_and_outputs_are_named_on_every_node(
    make_broker: Callable[..., Broker], witness: Witness
) -> None:
    """While outputs wait in out-streams, and when they have come: a sweep deletes none."""
    store = MemoryStore()
    broker = make_broker()
    large = Broker(broker.settings, offload=Offload(store, above="1kB"))

    @large.handler("orders", group="billing", partitions=3)
    async def bill(order: dict[str, Any], message: Message) -> None:
        await message.publish("invoices", order, key=str(order["n"]))

    @large.handler("invoices", group="post", partitions=3)
    async def post(invoice: dict[str, Any]) -> None:
        witness.note((invoice["n"], len(invoice["x"])))

    async with large:
        bodies = Bodies(
            large.client, large.keys, large.topics, large.encoding.bodies, keep=timedelta(0), grace=timedelta(0),
        )  # type: ignore[arg-type]  # fmt: skip
        for n in range(6):
            await large.publish("orders", {"n": n, "x": "x" * 2000}, key=str(n))
        await large.topics.ensure("invoices", 3)
        out = large.keys.out("orders", 0, "billing")
        await ask(large, "XGROUP", "CREATE", large.keys.stream("orders", 0), "billing", "0", "MKSTREAM")
        ref = await large.publish("invoices", {"n": 7, "x": "y" * 2000}, key="7")
        (entry,) = [
            fields
            for number in range(3)
            for _, fields in await ask(large, "XRANGE", large.keys.stream("invoices", number), "-", "+")
        ]
        await ask(large, "XADD", out, "*", *entry, "out.topic", "invoices", "out.partition", ref.home.partition)
        for number in range(3):
            await ask(large, "XTRIM", large.keys.stream("invoices", number), "MAXLEN", 0)
        for _ in range(2):
            assert [(each.topic, each.named, each.removed) for each in await bodies.sweep()] == [
                ("invoices", 1, 0), ("orders", 6, 0),
            ]  # fmt: skip
        async with large.running():
            await witness.sees([(n, 2000) for n in (*range(6), 7)])
            await settled(large, "invoices")
