"""Bytes of clients: what is refused, and when. The traps 1 to 18 of the design, without a socket."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsmq.gateway.protocol import encode
from rsmq.gateway.protocol.machine import EARLY_BYTES, Machine, State
from rsmq.gateway.protocol.packet import AckPacket, Connect, Packet, Ping, PubAcks, Publish, ReasonCode, Subscribe
from tests.gateway import packets as p
from tests.gateway.fuzz import LIMITS, VALID, fuzz_machine
from tests.gateway.packets import text


def machine(level: int = 5, *, connected: bool = True) -> Machine:
    made = Machine(LIMITS)
    if connected:
        assert isinstance(made.feed(p.connect(level=level))[0], Connect)
        made.accept(session_present=False)
    return made


def messages(found: list[Packet]) -> list[tuple[str, bytes, int]]:
    """Topic name, payload and packet id of each message: several may have come as one packet."""
    return [
        (each.topic, payload, int.from_bytes(packet_id, "big"))
        for each in found if isinstance(each, Publish)
        for payload, packet_id in zip(each.payloads, each.packet_ids, strict=True)
    ]  # fmt: skip


def refused(data: bytes, level: int = 5, *, connected: bool = True) -> ReasonCode:
    """The reason for which bytes end a connection."""
    one = machine(level, connected=connected)
    one.feed(data)
    assert one.error is not None, f"{data!r} was accepted"
    return one.error.reason


def accepted(data: bytes, level: int = 5, *, connected: bool = True) -> Packet:
    one = machine(level, connected=connected)
    (found,) = one.feed(data)
    assert one.error is None
    return found


@pytest.mark.parametrize("level", [3, 4, 5])
def test_a_wrong_length_is_refused_from_the_header(level: int) -> None:
    assert refused(b"\x30\x80\x80\x80\x80\x01", level) == ReasonCode.MALFORMED_PACKET  # five bytes
    assert refused(b"\x30\x80\x80\x00", level) == ReasonCode.MALFORMED_PACKET  # not minimal
    assert refused(b"\x30\x81\x80\x04", level) == ReasonCode.PACKET_TOO_LARGE  # 65 537: nothing of it has arrived
    one = machine(level)
    assert one.feed(b"\x30\xfb\xff\x03") == []
    assert one.error is None
    one = machine(level, connected=False)
    one.feed(b"\x10\xff\xff\xff\x7f")
    assert one.error is not None
    assert one.held == 0


@pytest.mark.parametrize("level", [4, 5])
def test_packets_cut_at_every_byte_are_read_whole(level: int) -> None:
    stream = b"".join((
        p.publish("a/b", b"1" * 200, 1, 7, level), p.subscribe([("a/#", 1)], 3, level), p.PING,
        p.unsubscribe(["a/#"], 4, level), p.ack(4, 9), p.ack(6, 9),
    ))  # fmt: skip
    whole = [repr(each) for each in machine(level).feed(stream)]
    assert len(whole) == 6
    for cut in range(len(stream) + 1):
        one = machine(level)
        found = one.feed(stream[:cut]) + one.feed(stream[cut:])
        assert [repr(each) for each in found] == whole
    one = machine(level)
    assert [repr(each) for byte in stream for each in one.feed(bytes([byte]))] == whole


def test_a_thousand_packets_in_one_read_are_read_in_order() -> None:
    one = machine()
    found = one.feed(b"".join(p.publish(f"t/{n}", level=5) for n in range(1000)))
    assert [each.topic for each in found if isinstance(each, Publish)] == [f"t/{n}" for n in range(1000)]


HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "data", [p.PING, p.publish("a"), p.subscribe([("a", 0)]), p.DISCONNECT, HTTP, b"\x11\0", b"\x16\x03\x01\x02\x00"]
)
def test_a_first_packet_other_than_connect_is_refused_at_its_first_byte(data: bytes) -> None:
    one = machine(connected=False)
    one.feed(data[:1])
    assert one.error is not None
    assert one.end(one.error.reason) == b""


@pytest.mark.parametrize("level", [3, 4, 5])
def test_a_second_connect_ends_the_connection(level: int) -> None:
    assert refused(p.connect(level=level), level) == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize("level", [4, 5])
def test_reserved_flags_of_every_packet_type_are_refused(level: int) -> None:
    bodies = {4: b"\0\1", 5: b"\0\1", 6: b"\0\1", 7: b"\0\1", 8: p.subscribe([("a", 0)], 1, level)[2:],
              10: p.unsubscribe(["a"], 1, level)[2:], 12: b"", 14: b""}  # fmt: skip
    for kind, body in bodies.items():
        right = 2 if kind in (6, 8, 10) else 0
        for flags in range(16):
            data = p.packet(kind << 4 | flags, body)
            if flags == right:
                accepted(data, level)
            else:
                assert refused(data, level) == ReasonCode.MALFORMED_PACKET
    for flags in range(1, 16):
        one = machine(connected=False)
        one.feed(bytes([0x10 | flags]) + p.connect(level=level)[1:])
        assert one.error is not None


@pytest.mark.parametrize(
    "data",
    [
        p.publish("a", qos=1, packet_id=0, level=5), p.publish("a", qos=2, packet_id=0, level=5),
        p.subscribe([("a", 0)], 0, 5), p.unsubscribe(["a"], 0, 5), p.ack(4, 0), p.ack(6, 0),
    ],
)  # fmt: skip
def test_packet_id_0_is_refused(data: bytes) -> None:
    assert refused(data) == ReasonCode.MALFORMED_PACKET


def test_qos_3_and_dup_with_qos_0_are_refused() -> None:
    assert refused(b"\x36" + p.publish("a", qos=1, level=5)[1:]) == ReasonCode.MALFORMED_PACKET
    assert refused(p.publish("a", dup=True, level=5)) == ReasonCode.MALFORMED_PACKET


@pytest.mark.parametrize("level", [3, 4, 5])
@pytest.mark.parametrize("flags", [0x0A, 0x12, 0x22, 0x1A, 0x1E, 0x3E, 0x03])
def test_will_flags_that_contradict_each_other_are_refused(level: int, flags: int) -> None:
    """Version 3.1 says nothing about the bits that have no meaning: there they are ignored."""
    will = None if not flags & 4 else ("w", b"", 0, False)
    data = p.connect(level=level, flags=flags, will=will)
    if level == 3 and not flags & 4:
        one = machine(connected=False)
        (request,) = one.feed(data)
        assert isinstance(request, Connect)
        assert (request.will, request.clean_start, one.error) == (None, True, None)
    else:
        assert refused(data, connected=False) == ReasonCode.MALFORMED_PACKET


def test_a_password_without_a_user_is_refused_in_3_and_allowed_in_5() -> None:
    for level in (3, 4):
        assert refused(p.connect(level=level, password=b"x"), connected=False) == ReasonCode.MALFORMED_PACKET
    found = accepted(p.connect(level=5, password=b"x"), connected=False)
    assert isinstance(found, Connect)
    assert found.password == b"x"
    assert found.username is None


BAD_TEXTS = [b"\xff", b"a\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3", b"a\0b"]


@pytest.mark.parametrize("bad", BAD_TEXTS)
def test_invalid_utf8_surrogates_and_nul_are_refused_in_each_string(bad: bytes) -> None:
    wrong = ReasonCode.MALFORMED_PACKET
    assert refused(p.publish(bad, level=5)) == wrong
    assert refused(p.packet(0x82, b"\0\1\0", text(bad), b"\0")) == wrong
    assert refused(p.packet(0xA2, b"\0\1\0", text(bad))) == wrong
    for number in (3, 8):
        assert refused(p.publish("a", level=5, raw_props=bytes([number]) + text(bad))) == wrong
    assert refused(p.publish("a", level=5, raw_props=b"\x26" + text(bad) + text("v"))) == wrong
    assert refused(p.publish("a", level=5, raw_props=b"\x26" + text("n") + text(bad))) == wrong
    head = text("MQTT") + b"\5"
    assert refused(p.packet(0x10, head, b"\2\0\0\0", text(bad)), connected=False) == wrong
    assert refused(p.packet(0x10, head, b"\x82\0\0\0", text("c"), text(bad)), connected=False) == wrong
    assert refused(p.packet(0x10, head, b"\6\0\0\0", text("c"), b"\0", text(bad), text("")), connected=False) == wrong
    assert refused(p.packet(0x10, text(bad), b"\5\2\0\0\0", text("c")), connected=False) == wrong


def test_a_byte_order_mark_is_kept() -> None:
    found = accepted(p.publish("\ufeffa", level=5))
    assert isinstance(found, Publish)
    assert found.topic == "\ufeffa"


def test_wrong_properties_are_refused() -> None:
    bad, wrong = ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR
    for raw, reason in [
        (b"\x01\x00\x01\x00", wrong), (b"\x02\0\0\0\1\x02\0\0\0\1", wrong),  # twice
        (b"\x7f\0", bad), (b"\x00", bad), (b"\x04\0", bad), (b"\xff\x01\0", bad),  # unknown
        (b"\x11\0\0\0\1", bad), (b"\x21\0\1", bad), (b"\x18\0\0\0\1", bad), (b"\x1f\0\1x", bad),  # elsewhere
        (b"\x02\0\0\0", bad), (b"\x03\0\5ab", bad), (b"\x26\0\1a", bad), (b"\x01", bad), (b"\x23\0", bad),  # cut off
        (b"\x01\x02", wrong), (b"\x23\0\0", ReasonCode.TOPIC_ALIAS_INVALID),  # impossible values
    ]:  # fmt: skip
        assert refused(p.publish("a", level=5, raw_props=raw)) == reason, raw
    for raw in (b"\x21\0\0", b"\x27\0\0\0\0", b"\x17\x02", b"\x19\x02", b"\x11\0\0\0\1\x11\0\0\0\1"):
        assert refused(p.connect(level=5, raw_props=raw), connected=False) == wrong, raw
    assert refused(p.subscribe([("a", 0)], level=5, raw_props=b"\x0b\0")) == wrong
    assert refused(p.subscribe([("a", 0)], level=5, raw_props=b"\x0b\1\x0b\2")) == wrong
    assert refused(p.connect(level=5, raw_props=b"\x16\0\1x"), connected=False) == wrong  # data without a method
    assert refused(p.packet(0xE0, b"\0", b"\5\x11\0\0\0\1")) == wrong  # a session expiry raised from 0


def test_properties_longer_than_their_packet_are_refused() -> None:
    assert refused(p.packet(0x30, text("a"), b"\x05\x01\x00")) == ReasonCode.MALFORMED_PACKET
    assert refused(p.packet(0x30, text("a"), b"\xff\xff\xff\x7f")) == ReasonCode.MALFORMED_PACKET
    assert refused(p.packet(0x30, text("a"))) == ReasonCode.MALFORMED_PACKET  # not even a length


def test_a_publish_that_a_client_must_not_send_is_refused() -> None:
    assert refused(p.publish("a", level=5, raw_props=b"\x0b\1")) == ReasonCode.PROTOCOL_ERROR  # subscription identifier
    for topic in ("a/+", "#", "a/#/b"):
        assert refused(p.publish("a", level=5, raw_props=b"\x08" + text(topic))) == ReasonCode.MALFORMED_PACKET
        assert refused(p.publish(topic, level=5)) == ReasonCode.MALFORMED_PACKET
    assert refused(p.publish("", level=4), 4) == ReasonCode.PROTOCOL_ERROR
    assert refused(p.publish("", level=5)) == ReasonCode.PROTOCOL_ERROR
    assert refused(p.publish("", level=5, raw_props=b"\x23\0\1")) == ReasonCode.PROTOCOL_ERROR  # an unknown alias
    assert refused(p.publish("a", level=5, raw_props=b"\x23\0\x09")) == ReasonCode.TOPIC_ALIAS_INVALID


@pytest.mark.parametrize("level", [4, 5])
def test_subscriptions_without_filters_or_with_wrong_options_are_refused(level: int) -> None:
    bad, wrong = ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR
    assert refused(p.subscribe([], level=level), level) == wrong
    assert refused(p.unsubscribe([], level=level), level) == wrong
    assert refused(p.subscribe([("a", 3)], level=level), level) == bad
    for bit in (0x40, 0x80) if level == 5 else (4, 8, 16, 32, 64, 128):
        assert refused(p.subscribe([("a", bit)], level=level), level) == bad
    if level == 5:
        assert refused(p.subscribe([("a", 0x30)], level=5)) == wrong  # retain handling 3
        assert refused(p.subscribe([("$share/g/a", 4)], level=5)) == wrong  # no local on a share


@pytest.mark.parametrize("text_", ["a#", "#/a", "a+", "+a/b", "", "a/#/b", "a/b#", "##", "+#"])
def test_a_wrong_filter_is_refused(text_: str) -> None:
    assert refused(p.subscribe([(text_, 0)], level=5)) == ReasonCode.MALFORMED_PACKET
    assert refused(p.unsubscribe([text_], level=5)) == ReasonCode.MALFORMED_PACKET


@pytest.mark.parametrize("text_", ["/", "a//b", "+/+", "#", "+", "/+", "a/+/#", "$SYS/#", "a b", "ä/✓"])
def test_an_unusual_filter_is_accepted(text_: str) -> None:
    found = accepted(p.subscribe([(text_, 1)], level=5))
    assert isinstance(found, Subscribe)
    assert found.subscriptions[0].filter == text_


@pytest.mark.parametrize("text_", ["$share//x", "$share/a+/x", "$share/a", "$share/a/", "$share/#/x", "$share/"])
def test_a_wrong_share_is_refused(text_: str) -> None:
    assert refused(p.subscribe([(text_, 0)], level=5)) == ReasonCode.MALFORMED_PACKET


@pytest.mark.parametrize("data", [b"\x20\x02\0\0", b"\x90\x03\0\1\0", b"\xb0\x02\0\1", b"\xd0\0"])
def test_packets_that_only_servers_send_are_refused(data: bytes) -> None:
    for level in (3, 4, 5):
        assert refused(data, level) == ReasonCode.PROTOCOL_ERROR
    assert refused(b"\xf0\0", 4) == ReasonCode.PROTOCOL_ERROR  # AUTH does not exist there
    assert refused(b"\xf0\0", 5) == ReasonCode.PROTOCOL_ERROR  # and here not without a method


def test_an_unknown_protocol_level_is_refused_in_its_own_words() -> None:
    for level, answer in [(1, b"\x20\2\0\1"), (2, b"\x20\2\0\1"), (6, b"\x20\3\0\x84\0"), (0x85, b"\x20\3\0\x84\0")]:
        one = machine(connected=False)
        one.feed(p.connect(level=level, name="MQTT"))
        assert one.error is not None
        assert one.end(one.error.reason) == answer
    for name, level in [("MQIsdp", 4), ("MQTT", 3)]:
        one = machine(connected=False)
        one.feed(p.connect(level=level, name=name))
        assert one.error is not None
        assert one.end(one.error.reason) == b"\x20\2\0\1"
    one = machine(connected=False)
    one.feed(p.connect(level=4, name="MQTX"))
    assert one.error is not None
    assert one.end(one.error.reason) == b""


def test_what_follows_a_connect_waits_for_its_answer() -> None:
    one = machine(connected=False)
    early = p.publish("a", b"early", level=5)
    assert len(one.feed(p.connect(level=5) + early)) == 1
    assert one.feed(p.PING) == []
    assert one.held == len(early) + 2
    assert one.is_waiting
    one.accept(session_present=False)
    first, second = one.resume()
    assert isinstance(first, Publish)
    assert first.payload == b"early"
    assert type(second).__name__ == "Ping"
    refusing = machine(connected=False)
    refusing.feed(p.connect(level=5) + early)
    assert refusing.end(ReasonCode.NOT_AUTHORIZED) == b"\x20\3\0\x87\0"
    assert refusing.resume() == []
    assert refusing.state is State.CLOSED
    assert EARLY_BYTES == 65_536


def test_the_receive_maximum_counts_messages_that_are_not_acknowledged() -> None:
    one = machine()
    batch = [p.publish("a", qos=1 + n % 2, packet_id=n + 1, level=5) for n in range(20)]
    found = one.feed(b"".join(batch) + p.publish("a", level=5))
    assert len(found) == 21, "QoS 0 does not count"
    pendings = [each.pending for each in found if isinstance(each, Publish) and each.pending is not None]
    assert [(a.kind, a.packet_id) for a in one.inbound.confirm(pendings[0])] == [(4, 1)]
    one.inbound.confirm(pendings[1], (0x87,))  # a refused QoS 2 message gives its place back
    one.feed(p.publish("a", qos=1, packet_id=50, level=5) + p.publish("a", qos=2, packet_id=51, level=5))
    assert one.error is None
    one.feed(p.publish("a", qos=1, packet_id=52, level=5))
    assert one.error is not None
    assert one.error.reason == ReasonCode.RECEIVE_MAXIMUM_EXCEEDED


def test_a_client_that_waits_for_acknowledgements_is_answered() -> None:
    """Behind the most messages that it may have under way, only further messages of QoS 1 and 2 wait."""
    one = machine(4)
    sent = [p.publish("a", qos=1, packet_id=n + 1) for n in range(21)]
    assert len(messages(one.feed(b"".join(sent[:20])))) == 20
    assert one.is_waiting
    found = one.feed(p.PING + p.publish("a") + p.ack(4, 7) + p.ack(6, 8) + sent[20] + p.PING)
    assert [type(each) for each in found] == [Ping, Publish, PubAcks, AckPacket]
    assert one.is_waiting


def test_a_client_of_version_3_waits_at_the_receive_maximum() -> None:
    one = machine(4)
    found = one.feed(b"".join(p.publish("a", qos=1, packet_id=n + 1) for n in range(30)) + p.PING)
    assert len(messages(found)) == 20
    assert one.is_waiting
    for each in found:
        assert isinstance(each, Publish)
        assert each.pending is not None
        one.inbound.confirm(each.pending)
    found = one.resume()
    assert len(messages(found)) == 10
    assert type(found[-1]) is Ping
    assert one.error is None


def test_requests_wait_while_too_many_are_not_answered() -> None:
    one = machine()
    requests = [p.subscribe([(f"{n}", 0)], n, 5) for n in range(1, 16)] + [p.unsubscribe(["1"], n, 5) for n in (16, 17)]
    assert len(one.feed(b"".join(requests) + p.PING)) == 18
    assert not one.holds_back
    assert len(one.feed(b"".join(requests) + p.PING)) == 3
    assert one.holds_back
    one.requests -= 17
    assert len(one.resume()) == 15
    assert not one.holds_back
    assert one.error is None


@pytest.mark.parametrize("request_", [p.subscribe([("a", 0)], 1, 5), p.unsubscribe(["a"], 1, 5)])
@pytest.mark.parametrize("behind", [p.publish("a", level=5), p.publish("a", qos=1, level=5), p.DISCONNECT])
def test_what_follows_a_request_waits_for_its_answer(request_: bytes, behind: bytes) -> None:
    one = machine()
    assert len(one.feed(request_ + p.PING + p.ack(4, 9) + behind)) == 3
    assert one.holds_back
    one.requests -= 1
    assert len(one.resume()) == 1
    assert not one.holds_back


def test_acknowledgements_leave_in_the_order_of_the_messages() -> None:
    one = machine()
    found = one.feed(b"".join(p.publish(f"a/{n}", qos=1, packet_id=n, level=5) for n in (3, 1, 2)))
    third, first, second = [each.pending for each in found if isinstance(each, Publish)]
    assert third
    assert first
    assert second
    assert one.inbound.confirm(second) == []
    assert one.inbound.confirm(first) == []
    assert [each.packet_id for each in one.inbound.confirm(third)] == [3, 1, 2]


@pytest.mark.parametrize("level", [3, 4, 5])
def test_messages_that_differ_in_their_payload_only_are_one_packet(level: int) -> None:
    sizes = (0, 1, 100, 200, 20_000, 5)  # the lengths of these packets have one, two and three bytes
    same = [p.publish("a/b", b"x" * size, 1, n, level) for n, size in enumerate(sizes, 1)]
    others = [
        p.publish("a/c", b"7", 1, 7, level), p.publish("a/b", b"8", 2, 8, level),
        p.publish("a/b", b"9", 1, 9, level, retain=True), p.publish("a/b", b"10", 1, 10, level),
        p.publish("a/b", b"11", 0, 0, level), p.publish("a/b", b"12", 1, 12, level, dup=True),
        p.publish("a/bc", b"13", 1, 13, level), p.publish("a/b", b"14", 1, 14, level),
    ]  # fmt: skip
    found = machine(level).feed(b"".join(same + others))
    wanted = [("a/b", b"x" * size, n) for n, size in enumerate(sizes, 1)]
    wanted += [("a/c", b"7", 7), ("a/b", b"8", 8), ("a/b", b"9", 9), ("a/b", b"10", 10), ("a/b", b"11", 0)]
    assert messages(found) == [*wanted, ("a/b", b"12", 12), ("a/bc", b"13", 13), ("a/b", b"14", 14)]
    assert len(found) == 10, "the first four are one packet, and what follows the long one joins that"


@pytest.mark.parametrize("level", [3, 4, 5])
def test_acknowledgements_that_came_together_are_one_packet(level: int) -> None:
    """But for those with a reason code, and none that is malformed."""
    one = machine(level)
    data = b"".join(p.ack(4, n) for n in (1, 300, 1)) + p.PING + p.ack(4, 7)
    found = one.feed(data + b"\x40\2\0")
    assert [each.packet_ids for each in found if isinstance(each, PubAcks)] == [[1, 300, 1], [7]]
    assert len(found) == 3
    assert one.feed(b"\x09")[0] == PubAcks([9])
    if level == 5:
        first, second, third = one.feed(p.ack(4, 1) + p.ack(4, 2, 0x10) + p.ack(4, 3))
        assert isinstance(second, AckPacket)
        assert (first, second.reason, third) == (PubAcks([1]), 0x10, PubAcks([3]))
    for wrong in (p.ack(4, 0), b"\x41\2\0\1", b"\x40\1\0"):
        one = machine(level)
        assert one.feed(p.ack(4, 5) + wrong) == [PubAcks([5])]
        assert one.error is not None
        assert one.error.reason == ReasonCode.MALFORMED_PACKET


@pytest.mark.parametrize("level", [4, 5])
def test_a_malformed_message_behind_others_is_refused(level: int) -> None:
    """What stands behind the first message of a packet is checked as strictly as that one."""
    first = p.publish("a", b"1", 1, 1, level)
    for wrong in (
        p.publish("a", b"2", 1, 0, level), b"\x32\x82\x00\0\1a", b"\x32\4\0\1a\0", b"\x32\3\0\1a", b"\x36\3\0\1a",
        b"\x32\xff\xff\xff\x7f", b"\x32\x03\0\2aa",
    ):  # fmt: skip
        one = machine(level)
        found = one.feed(first + first + wrong)
        assert one.error is not None, wrong
        assert [payload for _, payload, _ in messages(found)] == [b"1", b"1"]
    if level == 5:
        one = machine(level)
        found = one.feed(first + p.publish("a", b"2", 1, 2, 5, raw_props=b"\x01\1") + first)
        assert [each.properties for each in found if isinstance(each, Publish)] == [None, {1: 1}, None]


def test_messages_of_one_packet_are_acknowledged_together_each_with_its_reason() -> None:
    for level, reasons in [(4, ()), (5, ()), (5, (0, 0x97, 0))]:
        one = machine(level)
        found = one.feed(b"".join(p.publish("a", qos=1, packet_id=n, level=level) for n in (300, 1, 2)))
        assert one.inbound.unconfirmed == 3
        (publish,) = [each for each in found if isinstance(each, Publish)]
        assert publish.pending is not None
        (ready,) = one.inbound.confirm(publish.pending, reasons)
        assert one.inbound.unconfirmed == 0
        assert one.inbound.count == 0
        middle = b"\x40\3\0\1\x97" if reasons else b"\x40\2\0\1"
        assert encode.acks(ready, level) == b"\x40\2\1\x2c" + middle + b"\x40\2\0\2"


def test_topic_aliases_are_set_used_and_changed() -> None:
    one = machine()
    found = one.feed(b"".join((
        p.publish("first", level=5, raw_props=b"\x23\0\1"), p.publish("", level=5, raw_props=b"\x23\0\1"),
        p.publish("second", level=5, raw_props=b"\x23\0\1"), p.publish("", level=5, raw_props=b"\x23\0\1"),
    )))  # fmt: skip
    assert [each.topic for each in found if isinstance(each, Publish)] == ["first", "first", "second", "second"]


def test_random_mutations_end_in_a_packet_or_a_refusal() -> None:
    """A fuzzer: whatever comes, the machine returns packets or sets its error, and raises nothing."""
    rng = random.Random(19)
    refusals = sum(fuzz_machine(rng, VALID) for _ in range(20_000))
    assert refusals > 5_000


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=5), st.booleans())
def test_any_bytes_end_in_a_packet_or_a_refusal(chunks: list[bytes], connected: bool) -> None:
    one = machine(connected=connected)
    for chunk in chunks:
        one.feed(chunk)
    one.end(one.error.reason if one.error else ReasonCode.SUCCESS)


names = st.text(st.characters(exclude_characters="\0+#", exclude_categories=("Cs",)), min_size=1, max_size=20)


@settings(max_examples=200)
@given(
    names, st.binary(max_size=300), st.integers(0, 2), st.integers(1, 65_535), st.booleans(),
    st.lists(st.tuples(names, names), max_size=3),
)  # fmt: skip
def test_a_publish_is_read_as_it_was_written(
    topic: str, payload: bytes, qos: int, packet_id: int, retain: bool, pairs: list[tuple[str, str]]
) -> None:
    raw = b"".join(b"\x26" + text(name) + text(value) for name, value in pairs)
    found = accepted(p.publish(topic, payload, qos, packet_id, 5, retain=retain, raw_props=raw))
    assert isinstance(found, Publish)
    assert (found.topic, found.payload, found.qos, found.retain) == (topic, payload, qos, retain)
    assert found.packet_id == (packet_id if qos else 0)
    assert found.forwarded == raw


@given(
    level=st.sampled_from([4, 5]),
    kinds=st.lists(st.tuples(st.sampled_from("aaabcd"), st.integers(0, 3)), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_packets_that_come_together_mean_what_they_mean_one_by_one(level: int, kinds: list[tuple[str, int]]) -> None:
    """Messages of one length and of several, acknowledgements, and an id of 0, which ends the connection there."""
    parts = list[bytes]()
    for kind, number in kinds:
        match kind:
            case "a":
                parts.append(p.publish("t", b"same%d" % number, 1, number, level))
            case "b":
                parts.append(p.publish("t", b"x" * (number * 60), 1, 1 + number, level, dup=bool(number % 2)))
            case "c":
                parts.append(p.ack(4, number))
            case _:
                parts.append(p.publish("other", b"y", number % 2, 1 + number, level))
    together, apart = machine(level), machine(level)
    found, others = together.feed(b"".join(parts)), [each for part in parts for each in apart.feed(part)]
    assert messages(found) == messages(others)
    assert acked(found) == acked(others)
    assert (together.error is None) == (apart.error is None)


def acked(found: list[Packet]) -> list[int]:
    """Packet ids of the PUBACKs."""
    return [packet_id for each in found if isinstance(each, PubAcks) for packet_id in each.packet_ids]
