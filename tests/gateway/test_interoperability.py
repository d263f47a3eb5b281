"""What public interoperability suites ask for, played with paho's client: two clients and what they see."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.gateway.paho_client import leave
from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import SECONDS

ENDS = itertools.count(1)


def properties(kind: int, **values: Any) -> Properties:
    """Properties of a packet, by paho's names."""
    found = Properties(kind)
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            setattr(found, name, each)
    return found


class Client:
    """A paho client whose calls wait for their answers."""

    def __init__(self, port: int, client_id: str, version: int, **options: Any) -> None:
        self.port, self.version = port, version
        self.inner = paho.Client(
            paho.CallbackAPIVersion.VERSION2,
            client_id,
            protocol=version,
            **options,  # type: ignore[attr-defined]
        )
        self.got: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self.inner.on_connect = lambda _c, _d, flags, reason, found: self._answers.put((flags, reason, found))
        self.inner.on_subscribe = lambda _c, _d, _mid, reasons, _p: self._answers.put(reasons)
        self.inner.on_unsubscribe = lambda _c, _d, _mid, reasons, _p: self._answers.put(reasons)
        self.inner.on_message = lambda _c, _d, message: self.got.put(message)
        self.left = threading.Event()
        self.inner.on_disconnect = lambda *_: self.left.set()

    def connect(self, *, clean: bool = True, **values: Any) -> Any:
        """Returns flags, reason and properties of the CONNACK."""
        options: dict[str, Any] = {}
        if self.version == paho.MQTTv5:
            options = {"clean_start": clean, "properties": properties(PacketTypes.CONNECT, **values)}
        self.left.clear()
        self.inner.connect("127.0.0.1", self.port, **options)
        self.inner.loop_start()
        return self._answers.get(timeout=SECONDS)

    def subscribe(self, *filters: tuple[str, Any], **values: Any) -> list[int]:
        options = {"properties": properties(PacketTypes.SUBSCRIBE, **values)} if values else {}
        self.inner.subscribe(list(filters), **options)  # type: ignore[arg-type]
        return [each.value for each in self._answers.get(timeout=SECONDS)]

    def unsubscribe(self, *filters: str) -> None:
        self.inner.unsubscribe(list(filters))
        self._answers.get(timeout=SECONDS)

    def publish(self, topic: str, payload: bytes, qos: int, *, retain: bool = False, **values: Any) -> None:
        options = {"properties": properties(PacketTypes.PUBLISH, **values)} if values else {}
        self.inner.publish(topic, payload, qos, retain, **options).wait_for_publish(SECONDS)  # type: ignore[arg-type]

    def take(self) -> Any:
        return self.got.get(timeout=SECONDS)

    def rest(self) -> list[Any]:
        """All messages up to one that it publishes to itself now, at each QoS."""
        end = f"end/{next(ENDS)}"
        self.subscribe((end, 2))
        for qos in (0, 1, 2):
            self.publish(end, b"", qos)
        found, ends = list[Any](), 0
        while ends < 3:
            message = self.take()
            if message.topic == end:
                ends += 1
            else:
                found.append(message)
        return found

    def disconnect(self, **values: Any) -> None:
        options = {"properties": properties(PacketTypes.DISCONNECT, **values)} if values else {}
        self.inner.disconnect(**options)
        assert self.left.wait(SECONDS)
        leave(self.inner)


@pytest.fixture
def make(gateway: GatewayProcess, name: str) -> Iterator[Callable[..., Client]]:
    """Makes clients, and disconnects them."""
    made = list[Client]()

    def client(version: int, suffix: str = "", **options: Any) -> Client:
        made.append(Client(gateway.port, f"{name}{suffix}", version, **options))
        return made[-1]

    yield client
    for each in made:
        leave(each.inner)


@pytest.mark.parametrize("version", [paho.MQTTv31, paho.MQTTv311, paho.MQTTv5])
def test_what_happens_while_a_client_is_away_waits_for_it(make: Callable[..., Client], name: str, version: int) -> None:
    """Also what it had got and not acknowledged, and what it had unsubscribed from does not come."""
    kept = {"SessionExpiryInterval": 600} if version == paho.MQTTv5 else {}
    options = {} if version == paho.MQTTv5 else {"clean_session": False}
    reader, writer = make(version, manual_ack=True, **options), make(version, "-w")
    flags, *_ = reader.connect(clean=False, **kept)
    assert not flags.session_present
    reader.subscribe((f"{name}/a/#", 2), (f"{name}/b", 2), (f"{name}/c", 2))
    writer.connect()
    writer.publish(f"{name}/a/1", b"not acknowledged", 1)
    assert reader.take().payload == b"not acknowledged"
    reader.unsubscribe(f"{name}/b")
    reader.disconnect()
    for qos in (1, 2):
        writer.publish(f"{name}/a/2", b"%d" % qos, qos)
        writer.publish(f"{name}/b", b"%d" % qos, qos)
        writer.publish(f"{name}/c", b"%d" % qos, qos)
    flags, *_ = reader.connect(clean=False, **kept)
    if version != paho.MQTTv31:  # it has no such flag
        assert flags.session_present
    got = [(each.topic[len(name) :], each.payload, each.qos) for each in (reader.take() for _ in range(5))]
    assert sorted(got) == sorted(
        [("/a/1", b"not acknowledged", 1)] + [(topic, b"%d" % qos, qos) for topic in ("/a/2", "/c") for qos in (1, 2)]
    )


def test_retained_messages_come_by_the_options_of_the_subscription(make: Callable[..., Client], name: str) -> None:
    one = make(paho.MQTTv5)
    one.connect()
    for qos in (0, 1, 2):
        one.publish(f"{name}/{qos}", b"kept", qos, retain=True, UserProperty=[("a", "2"), ("c", "3")])
    one.rest()
    wanted = {0, 1, 2}
    for handling, first, again in ((0, wanted, wanted), (1, wanted, set()), (2, set(), set())):
        for expected in (first, again):
            one.subscribe((f"{name}/+", SubscribeOptions(2, retainHandling=handling)))
            got = [one.take() for _ in expected]
            assert {each.qos for each in got} == expected
            assert all(each.retain and each.properties.UserProperty == [("a", "2"), ("c", "3")] for each in got)
            assert one.rest() == []
        one.unsubscribe(f"{name}/+")
    one.subscribe((f"{name}/x", SubscribeOptions(2, retainAsPublished=True, retainHandling=2)))
    for retain in (False, True):
        one.publish(f"{name}/x", b"x", 1, retain=retain)
        assert one.take().retain is retain


def test_options_identifiers_and_requests_of_version_5(make: Callable[..., Client], name: str) -> None:
    one, two = make(paho.MQTTv5), make(paho.MQTTv5, "-2")
    one.connect()
    two.connect()
    one.subscribe((name, SubscribeOptions(2, noLocal=True)), SubscriptionIdentifier=456_789)
    two.subscribe((name, SubscribeOptions(2, noLocal=True)), SubscriptionIdentifier=2)
    two.subscribe((f"{name}/#", SubscribeOptions(1)), SubscriptionIdentifier=3)
    one.publish(name, b"request", 1, ResponseTopic=name, CorrelationData=b"334", PayloadFormatIndicator=1)
    got = two.take()
    assert (got.properties.ResponseTopic, got.properties.CorrelationData) == (name, b"334")
    assert got.properties.PayloadFormatIndicator == 1
    assert sorted(got.properties.SubscriptionIdentifier) == [2, 3]
    two.publish(got.properties.ResponseTopic, b"response", 1, CorrelationData=got.properties.CorrelationData)
    answer = one.take()
    assert (answer.payload, answer.properties.CorrelationData) == (b"response", b"334")
    assert answer.properties.SubscriptionIdentifier == [456_789]
    assert one.rest() == []
    assert [(each.payload, each.properties.SubscriptionIdentifier) for each in two.rest()] == [(b"response", [3])]
    two.subscribe(("$share/g/shared", 1), ("#", 0))
    assert not any(each.topic.startswith("$") for each in two.rest())


def test_sessions_end_when_they_expire(make: Callable[..., Client], name: str) -> None:
    """Also between two looks for what has expired: a client that comes a moment too late has no session."""
    one, clock = make(paho.MQTTv5), make(paho.MQTTv5, "-clock")

    def present(**values: Any) -> bool:
        flags, *_ = one.connect(clean=False, **values)
        return bool(flags.session_present)

    assert not present(SessionExpiryInterval=0)
    one.disconnect()
    assert not present(SessionExpiryInterval=100)
    one.disconnect()
    assert present(SessionExpiryInterval=1)
    one.disconnect(SessionExpiryInterval=100)
    assert present(SessionExpiryInterval=1)
    one.disconnect()
    clock.connect(SessionExpiryInterval=0)
    clock.subscribe((name, 1))
    will = make(paho.MQTTv5, "-will")
    will.inner.will_set(name, b"1.x s later", 1, properties=properties(PacketTypes.WILLMESSAGE, WillDelayInterval=1))
    will.connect(SessionExpiryInterval=60)
    will.inner._sock_close()  # type: ignore[attr-defined]
    assert clock.take().payload == b"1.x s later"
    assert not present(SessionExpiryInterval=100)
    one.disconnect(SessionExpiryInterval=0)
    assert not present(SessionExpiryInterval=0)
