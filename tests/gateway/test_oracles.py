"""Other implementations agree with the codec: what they write we read, and what we write they read, to the same."""

from __future__ import annotations

from typing import Any

import mqtt5
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from rsmq.gateway.protocol import encode, packet
from rsmq.gateway.protocol.decode import decode, read_frame
from rsmq.gateway.protocol.machine import ClientLimits, Machine
from rsmq.gateway.protocol.packet import AckPacket, Connect, Publish, ReasonCode, Subscribe, Unsubscribe
from rsmq.gateway.protocol.properties import Property, read_properties, write_properties

texts = st.text(st.characters(exclude_characters="\0+#", exclude_categories=("Cs",)), min_size=1, max_size=12)
PAHO = {
    Property.SESSION_EXPIRY: "SessionExpiryInterval", Property.ASSIGNED_CLIENT_ID: "AssignedClientIdentifier",
    Property.SERVER_KEEP_ALIVE: "ServerKeepAlive", Property.RECEIVE_MAXIMUM: "ReceiveMaximum",
    Property.TOPIC_ALIAS_MAXIMUM: "TopicAliasMaximum", Property.MAXIMUM_QOS: "MaximumQoS",
    Property.RETAIN_AVAILABLE: "RetainAvailable", Property.MAXIMUM_PACKET_SIZE: "MaximumPacketSize",
    Property.SHARED_AVAILABLE: "SharedSubscriptionAvailable", Property.REASON_STRING: "ReasonString",
    Property.PAYLOAD_FORMAT: "PayloadFormatIndicator", Property.MESSAGE_EXPIRY: "MessageExpiryInterval",
    Property.CONTENT_TYPE: "ContentType", Property.RESPONSE_TOPIC: "ResponseTopic",
    Property.CORRELATION_DATA: "CorrelationData", Property.TOPIC_ALIAS: "TopicAlias",
    Property.USER_PROPERTY: "UserProperty",
}  # fmt: skip
VALUES: dict[int, Any] = {
    Property.SESSION_EXPIRY: st.integers(0, 2**32 - 1), Property.ASSIGNED_CLIENT_ID: texts,
    Property.SERVER_KEEP_ALIVE: st.integers(0, 65_535), Property.RECEIVE_MAXIMUM: st.integers(1, 65_535),
    Property.TOPIC_ALIAS_MAXIMUM: st.integers(0, 65_535), Property.MAXIMUM_QOS: st.integers(0, 1),
    Property.RETAIN_AVAILABLE: st.integers(0, 1), Property.MAXIMUM_PACKET_SIZE: st.integers(1, 2**28 - 1),
    Property.SHARED_AVAILABLE: st.integers(0, 1), Property.REASON_STRING: texts,
    Property.PAYLOAD_FORMAT: st.integers(0, 1), Property.MESSAGE_EXPIRY: st.integers(0, 2**32 - 1),
    Property.CONTENT_TYPE: texts, Property.RESPONSE_TOPIC: texts, Property.CORRELATION_DATA: st.binary(max_size=20),
    Property.TOPIC_ALIAS: st.integers(1, 65_535),
    Property.USER_PROPERTY: st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
}  # fmt: skip
IN_CONNACK = [n for n in VALUES if 17 <= n <= 19 or (n >= 31 and n != Property.TOPIC_ALIAS)]
IN_PUBLISH = [n for n in VALUES if n <= 9 or n in (Property.TOPIC_ALIAS, Property.USER_PROPERTY)]
some_connack = st.fixed_dictionaries({}, optional={n: VALUES[n] for n in IN_CONNACK})
some_publish = st.fixed_dictionaries({}, optional={n: VALUES[n] for n in IN_PUBLISH})


@settings(max_examples=60)
@given(some_connack)
def test_paho_reads_the_properties_that_we_write(properties: dict[int, Any]) -> None:
    theirs = PahoProperties(PacketTypes.CONNACK)
    theirs.unpack(write_properties(properties))
    assert {n: getattr(theirs, PAHO[Property(n)]) for n in properties} == properties


@settings(max_examples=60)
@given(some_publish)
def test_we_read_the_properties_that_paho_writes(properties: dict[int, Any]) -> None:
    theirs = PahoProperties(PacketTypes.PUBLISH)
    for number, value in properties.items():
        setattr(theirs, PAHO[Property(number)], value)
    raw = theirs.pack()
    found, _, end = read_properties(raw, 0, len(raw), packet.PUBLISH)
    assert found == properties
    assert end == len(raw)


def ours(data: bytes) -> Any:
    body, end = read_frame(data, 0, len(data), 1 << 20)
    assert end == len(data)
    return decode(data[0], data, body, end, 5)


def read(data: bytes) -> Any:
    found, size = mqtt5.read(data)
    assert size == len(data)
    return found


@settings(max_examples=100)
@given(data=st.data())
def test_mqtt5_reads_what_we_write(data: st.DataObject) -> None:
    topic, payload = data.draw(texts), data.draw(st.binary(max_size=300))
    qos, packet_id, retain = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 65_535)), data.draw(st.booleans())
    properties = data.draw(some_publish)
    raw = write_properties(properties)
    inner = raw[1:] if raw[0] < 128 else raw[2:]
    got = read(encode.publish(topic, payload, qos, packet_id, 5, retain=retain, dup=False, properties=inner))
    assert (got.topic, got.payload, int(got.qos), got.retain) == (topic, payload, qos, retain)
    assert not qos or got.packet_id == packet_id
    assert got.correlation_data == properties.get(Property.CORRELATION_DATA)
    answer = data.draw(some_connack)
    got = read(encode.connack(ReasonCode.SUCCESS, 5, session_present=True, properties=answer))
    assert got.session_present
    assert got.session_expiry_interval == answer.get(Property.SESSION_EXPIRY)
    for kind in (packet.PUBACK, packet.PUBREC, packet.PUBREL, packet.PUBCOMP):
        reason = data.draw(st.sampled_from((0, 0x92) if kind >= packet.PUBREL else (0, 0x10, 0x80, 0x97)))
        got = read(encode.ack(kind, packet_id, reason, 5))
        assert (got.packet_id, int(got.reason_code)) == (packet_id, reason)
    codes = data.draw(st.lists(st.sampled_from((0, 1, 2, 0x80, 0x87, 0x8F)), min_size=1, max_size=4))
    assert [int(each) for each in read(encode.suback(packet_id, codes, 5)).reason_codes] == codes
    assert [int(each) for each in read(encode.unsuback(packet_id, [0, 0x11], 5)).reason_codes] == [0, 0x11]
    assert int(read(encode.disconnect(0x8E)).reason_code) == 0x8E


def written(theirs: Any) -> bytes:
    return bytes(theirs.write())


@settings(max_examples=100)
@given(data=st.data())
def test_we_read_what_mqtt5_writes(data: st.DataObject) -> None:
    topic, payload, n = data.draw(texts), data.draw(st.binary(max_size=200)), data.draw(st.integers(1, 65_535))
    client = data.draw(texts)
    connect = ours(written(mqtt5.ConnectPacket(client, clean_start=True, keep_alive=n)))
    assert isinstance(connect, Connect)
    assert (connect.client_id, connect.keep_alive) == (client, n)
    qos = data.draw(st.integers(0, 2))
    packet_id = n if qos else None
    got = ours(written(mqtt5.PublishPacket(topic, payload, qos=mqtt5.QoS(qos), packet_id=packet_id)))
    assert isinstance(got, Publish)
    assert (got.topic, got.payload, got.qos) == (topic, payload, qos)
    got = ours(written(mqtt5.SubscribePacket(n, [mqtt5.TopicFilter(topic, max_qos=mqtt5.QoS(qos))])))
    assert isinstance(got, Subscribe)
    assert (got.packet_id, got.subscriptions[0][:2]) == (n, (topic, qos))
    got = ours(written(mqtt5.UnsubscribePacket(n, [topic])))
    assert isinstance(got, Unsubscribe)
    assert (got.packet_id, got.filters) == (n, (topic,))
    got = ours(written(mqtt5.PubRelPacket(n)))
    assert isinstance(got, AckPacket)
    assert (got.kind, got.packet_id) == (packet.PUBREL, n)


def test_paho_writes_a_connect_that_we_read() -> None:
    """A whole packet of paho: it has no encoder of its own, so its bytes are taken from its queue."""
    import paho.mqtt.client as paho

    client = paho.Client(paho.CallbackAPIVersion.VERSION2, "ünï", protocol=paho.MQTTv5)
    client.username_pw_set("user", "secret")
    client.will_set("last/words", b"bye", 1, True)
    client._connect_properties = None
    client._send_connect(30)
    (found,) = Machine(ClientLimits()).feed(bytes(client._out_packet[0]["packet"]))
    assert isinstance(found, Connect)
    assert found.will is not None
    assert (found.client_id, found.username, found.password, found.keep_alive) == ("ünï", "user", b"secret", 30)
    assert (found.will.topic, found.will.payload, found.will.qos, found.will.retain) == ("last/words", b"bye", 1, True)
