"""CloudEvents in binary mode, checked against the `cloudevents` package from outside."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsmq import Broker, ConfigError, Malformed, Message, Settings
from rsmq.cloudevents import CloudEvent, as_cloudevents
from rsmq.testing import Harness

bindings = pytest.importorskip("cloudevents.core.bindings.http")
theirs = pytest.importorskip("cloudevents.core.v1.event")

AT = datetime(2026, 3, 1, 9, 30, 15, 123456, tzinfo=UTC)
ANY = st.text(st.characters(min_codepoint=0x20, exclude_categories=("Cs", "Cc", "Cn")), min_size=1, max_size=30)
TEXT = ANY | st.text('%41é" ', min_size=1)


def same(event: CloudEvent, other: Any) -> None:
    """All attributes and the data are equal."""
    attributes = other.get_attributes()
    assert (event.id, event.type, event.source) == (attributes["id"], attributes["type"], attributes["source"])
    assert (event.subject, event.dataschema) == (attributes.get("subject"), attributes.get("dataschema"))
    assert (event.time, event.datacontenttype) == (attributes.get("time"), attributes.get("datacontenttype"))
    for name, value in event.extensions.items():
        assert attributes[name] == value
    assert event.data == other.get_data()


async def handled(settings: Settings, publish: Any) -> CloudEvent:
    """The event that a handler makes of what `publish` has published to `events`."""
    broker = Broker(settings)
    events: list[CloudEvent] = []

    @broker.handler("events", group="g")
    async def take(message: Message) -> None:
        events.append(CloudEvent.from_message(message))

    async with Harness(broker, url=str(settings.url), prefix=settings.prefix) as harness:
        await publish(broker)
        await harness.handle()
        await harness.assert_no_dead_letters()
    [event] = events
    return event


async def test_an_event_of_ours_is_read_by_the_package(settings: Settings) -> None:
    """Headers and body of the stored message are those of HTTP."""
    event = CloudEvent(
        type="com.shop.placed", source="/shop/é", subject="order 17 \"%", data={"n": 1}, time=AT,
        dataschema="https://example.com/order", extensions={"partitionkey": "ada", "tenant": "blå"},
    )  # fmt: skip
    messages: list[Message] = []
    broker = Broker(settings)

    @broker.handler("events", group="g")
    async def take(order: dict[str, int], message: Message) -> None:
        messages.append(message)

    async with Harness(broker, url=str(settings.url), prefix=settings.prefix) as harness:
        await broker.publish("events", event.data, **event.options)
        await harness.handle()
    [message] = messages
    assert message.key == "ada"
    read = bindings.from_http_event(bindings.HTTPMessage(headers=message.headers, body=message.data))
    back = CloudEvent.from_message(message)
    same(back, read)
    assert back == CloudEvent(**{**fields(event), "datacontenttype": "application/json"})


def fields(event: CloudEvent) -> dict[str, Any]:
    """The arguments that make it."""
    return {name: getattr(event, name) for name in CloudEvent.__dataclass_fields__}


@pytest.mark.parametrize(
    ("data", "kind"),
    [({"n": [1, None]}, "application/json"), ("grüße", "text/plain"), (b"\x00\xff", "application/octet-stream"),
     (b"<order/>", "application/xml"), (b"", "application/octet-stream")],
)  # fmt: skip
async def test_an_event_of_the_package_is_read_by_ours(settings: Settings, data: Any, kind: str) -> None:
    """Of any content; a bridge copies headers and body."""
    other = theirs.CloudEvent(
        {"type": "com.shop.placed", "source": "/shop", "subject": "17 é", "time": AT, "datacontenttype": kind,
         "tenant": "a b"},
        data,
    )  # fmt: skip
    http = bindings.to_binary_event(other)
    body = json.loads(http.body) if kind.endswith("json") else http.body.decode() if kind.startswith("text") else data

    async def publish(broker: Broker) -> None:
        await broker.publish("events", body, headers=dict(http.headers))

    event = await handled(settings, publish)
    same(event, other)
    assert event.datacontenttype == kind


@given(TEXT, TEXT, TEXT)
def test_any_text_survives_both_directions(source: str, subject: str, tenant: str) -> None:
    """Through our headers into the package, and through its headers into ours."""
    event = CloudEvent(type="t", source=source, subject=subject, extensions={"tenant": tenant}, data={}, time=AT)
    read = bindings.from_http_event(bindings.HTTPMessage(headers=event.headers, body=b"{}"))
    same(CloudEvent.from_headers(event.headers, {}), read)
    assert (read.get_source(), read.get_subject(), read.get_extension("tenant")) == (source, subject, tenant)
    written = bindings.to_binary_event(read).headers
    assert CloudEvent.from_headers(written, {}).extensions == {"tenant": tenant}


async def test_each_message_of_a_broker_becomes_an_event(settings: Settings) -> None:
    """Its type is the topic; an event stays as it is."""

    async def publish(broker: Broker) -> None:
        broker_of_events = Broker(settings)
        broker_of_events.before_publish(as_cloudevents("/shop"))
        async with broker_of_events:
            await broker_of_events.publish("events", {"n": 1}, message_id="m-1")

    event = await handled(settings, publish)
    assert (event.type, event.source, event.id, event.data) == ("events", "/shop", "m-1", {"n": 1})


async def test_an_event_is_not_made_twice(settings: Settings) -> None:
    """A broker that makes events passes on those that are."""

    async def publish(broker: Broker) -> None:
        broker_of_events = Broker(settings)
        broker_of_events.before_publish(as_cloudevents("/shop", lambda publication: f"com.{publication.topic}"))
        async with broker_of_events:
            await broker_of_events.publish("events", 1, **CloudEvent(type="mine", source="/me", data=1).options)

    event = await handled(settings, publish)
    assert (event.type, event.source) == ("mine", "/me")


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({}, "no header ce-specversion, ce-id, ce-source, ce-type"),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-type": "t"}, "no header ce-source"),
        ({"CE-SpecVersion": "0.3", "ce-id": "1", "ce-type": "t", "ce-source": "s"}, "version 0.3, and only 1.0"),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-type": "t", "ce-source": "s", "ce-time": "x"}, "isoformat"),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-type": "t", "ce-source": "s", "ce-A b": "x"}, "extension 'a b'"),
    ],
)
def test_what_is_no_event_is_malformed(headers: dict[str, str], text: str) -> None:
    """A handler that reads it makes it a dead letter, and does not retry it."""
    with pytest.raises(Malformed, match=text):
        CloudEvent.from_headers(headers, None)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"type": ""}, "a text as its type"),
        ({"source": None}, "a text as its source"),
        ({"time": datetime(2026, 1, 1)}, "an aware datetime"),
        ({"extensions": {"Tenant": "a"}}, "cannot have an extension 'Tenant'"),
        ({"extensions": {"data": "a"}}, "cannot have an extension 'data'"),
        ({"extensions": {"retries": 3}}, "write retries='3'"),
    ],
)
def test_a_wrong_event_is_refused(wrong: dict[str, Any], text: str) -> None:
    """Where it is made."""
    with pytest.raises(ConfigError, match=text):
        CloudEvent(**{"type": "t", "source": "s", **wrong})
