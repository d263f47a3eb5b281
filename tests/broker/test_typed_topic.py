"""Typed topics: what publishes, handles and refuses; tests/typing says what type checkers see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from rsmq import Broker, ConfigError, Message, Settings, TypedTopic
from tests.patience import until


class Order(BaseModel):
    """A payload."""

    number: int


class Large(Order):
    """A class below it."""


@dataclass
class Job:
    """Another payload."""

    name: str


class Row(TypedDict):
    """A payload that is a dict."""

    n: int


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """On the shared server."""
    return Broker(replace(settings, preflight="warn"))


async def test_payloads_reach_the_handlers_as_their_type(broker: Broker) -> None:
    """Singles and batches, published one by one, many at once and without an event loop."""
    orders = broker.topic("orders", Order)
    seen: list[Order] = []
    batches: list[Order] = []

    @orders.handler(group="billing")
    async def bill(order: Order, message: Message) -> None:
        assert message.topic == "orders"
        seen.append(order)

    @orders.handler(group="audit", batch=10)
    async def audit(orders: list[Order]) -> None:
        batches.extend(orders)

    async with broker.running():
        await orders.publish(Order(number=1), key="ada")
        await orders.publish_many([Order(number=2), Order(number=3)], key=lambda order: "ada")
        orders.publish_sync(Large(number=4), key="ada")
        await until(lambda: len(seen) == len(batches) == 4, "all are handled")
    assert [type(each) for each in (*seen, *batches)] == [Order] * 8
    assert [each.number for each in seen] == [each.number for each in batches] == [1, 2, 3, 4]
    broker._portal.close()


async def test_a_handler_without_annotation_or_of_a_class_above_gets_the_type(broker: Broker) -> None:
    """The topic decides what the payload becomes."""
    orders = broker.topic("orders", Order)
    seen: list[Any] = []

    @orders.handler(group="bare")
    async def bare(order) -> None:  # type: ignore[no-untyped-def]
        seen.append(order)

    @orders.handler(group="above")
    async def above(order: BaseModel) -> None:
        seen.append(order)

    @orders.handler(group="bare-batch", batch=10)
    async def bare_batch(orders) -> None:  # type: ignore[no-untyped-def]
        seen.extend(orders)

    async with broker.running():
        await orders.publish(Order(number=1))
        await until(lambda: len(seen) == 3, "all are handled")
    assert seen == [Order(number=1)] * 3


@pytest.mark.parametrize("annotation", [Row, Any, object])
async def test_a_handler_of_a_typed_dict_is_registered(broker: Broker, annotation: Any) -> None:
    """A class that takes part in no `issubclass`."""

    async def handle(row: Any) -> None:
        return

    handle.__annotations__["row"] = annotation
    broker.topic("rows", Row).handler(group="g")(handle)
    assert broker.handlers[0].signature.payload is Row


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (Order, Order(number=1), {"number": 1}), (Order, Large(number=1), Job("x")), (Job, Job("x"), "x"),
        (Row, {"n": 1}, None), (float, 1, None), (dict[str, int], {"n": 1}, None), (Order | str, "x", None),
    ],
)  # fmt: skip
async def test_a_payload_of_another_class_is_refused(broker: Broker, kind: Any, right: Any, wrong: Any) -> None:
    """At publishing, where the type is a class; nothing is stored. Other types are left to the type checker."""
    topic: TypedTopic[Any] = broker.topic("things", kind)
    async with broker:
        assert await topic.publish(right)
        if wrong is not None:
            for attempt in (lambda: topic.publish(wrong), lambda: topic.publish_many([right, wrong])):
                with pytest.raises(ConfigError, match=f"topic 'things' has payloads of {kind.__name__}, not"):
                    await attempt()
            with pytest.raises(ConfigError, match="has payloads of"):
                topic.publish_sync(wrong)


def test_a_handler_of_another_type_is_refused(broker: Broker) -> None:
    """When it is registered, with what to write."""
    orders = broker.topic("orders", Order)

    async def wrong(job: Job) -> None: ...
    async def below(order: Large) -> None: ...
    async def many(orders: list[Job]) -> None: ...

    for function, options in ((wrong, {}), (below, {}), (many, {"batch": 10})):
        register: Any = orders.handler(group="g", **options)
        with pytest.raises(ConfigError, match=r"but its topic has payloads of Order: annotate the payload with Order"):
            register(function)
    assert broker.handlers == []


def test_a_topic_of_a_wrong_name_or_type_is_refused(broker: Broker) -> None:
    """Where it is declared."""
    with pytest.raises(ConfigError, match="topic name 'a b'"):
        broker.topic("a b", Order)
    with pytest.raises(ConfigError, match="a payload cannot become"):
        broker.topic("orders", Broker)
