"""What clients get, and how they subscribe: traps 16, 39 to 62, against one running gateway."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rsmq import Broker
from rsmq.gateway.connections.delivery import Delivery
from rsmq.model.partition import partition_for
from rsmq.persistence.letter import EXPIRES, seal_mqtt
from tests.gateway import packets as p
from tests.gateway.raw_client import RawClient
from tests.patience import until

Make = Callable[..., RawClient]
KEPT = {"clean": False, "raw_props": b"\x11\0\0\0\x3c"}


async def test_unacknowledged_messages_come_again_with_the_same_ids(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name, **KEPT), await client().connect(f"{name}-s")
    await one.subscribe((name, 1), (f"{name}/2", 2))
    for number in range(3):
        await sender.publish(name, b"%d" % number, 1)
        await sender.publish(f"{name}/2", b"%d" % number, 2)
    before = [await one.take(3) for _ in range(6)]
    assert not any(each.dup for each in before)
    assert await one.is_silent()  # nothing is repeated inside a connection
    received = [each for each in before if each.qos == 2]
    one.send(p.ack(5, received[0].packet_id))
    assert (await one.take(6)).packet_id == received[0].packet_id
    one.abort()
    again = await client(5).connect(name, **KEPT)
    after = [await again.take() for _ in range(6)]
    assert [each.packet_id for each in after] == [each.packet_id for each in before]
    for old, new in zip(before, after, strict=True):
        if old is received[0]:
            assert new.kind == 6  # released, not sent again
        else:
            assert (new.kind, new.dup, new.payload, new.topic) == (3, True, old.payload, old.topic)


async def test_pubrels_leave_in_the_order_of_pubrecs(client: Make, name: str) -> None:
    one, sender = await client().connect(name), await client().connect(f"{name}-s")
    await one.subscribe((name, 2))
    for number in range(5):
        await sender.publish(name, b"%d" % number, 2)
    ids = [(await one.take(3)).packet_id for _ in range(5)]
    order = [ids[3], ids[0], ids[4], ids[1], ids[2]]
    one.send(b"".join(p.ack(5, each) for each in order))
    assert [(await one.take(6)).packet_id for _ in range(5)] == order
    one.send(b"".join(p.ack(7, each) for each in order))
    assert await one.is_silent()


async def test_many_requests_at_once_are_all_answered_in_order(client: Make, name: str) -> None:
    one = await client(5).connect(name)
    ids = range(1, 201)
    one.send(b"".join(p.subscribe([(f"{name}/{n % 3}", 0)], n, 5) for n in ids))
    assert [(await one.take(9)).packet_id for _ in ids] == list(ids)


async def test_what_is_published_after_a_suback_comes_once_also_if_it_is_retained(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name), await client(5).connect(f"{name}-s")
    for number in range(20):
        await one.subscribe((f"{name}/{number}/#", 0))
        await sender.publish(f"{name}/{number}/x", b"%d" % number, 0, retain=True)
        got = await one.message()
        assert (got.payload, got.retain) == (b"%d" % number, False)
        assert await one.subscribe((f"{name}/other", 0)) == b"\0"  # its answer comes behind all of the first
        assert await one.is_silent()
        await sender.publish(f"{name}/{number}/x", b"", 0, retain=True)
        assert (await one.message()).payload == b""


async def test_wrong_acknowledgements_end_the_connection(client: Make, name: str) -> None:
    for number, (qos, kind) in enumerate([(1, 5), (2, 4), (2, 7)]):
        one, sender = await client(5).connect(f"{name}-{number}"), await client().connect(f"{name}-s")
        await one.subscribe((f"{name}/{number}", qos))
        await sender.publish(f"{name}/{number}", b"x", qos)
        one.send(p.ack(kind, (await one.take(3)).packet_id))
        last = await one.ended()
        assert last is not None
        assert last.reason == 0x82
    late = await client(5).connect(f"{name}-late")
    late.send(p.ack(4, 1234) + p.ack(7, 1234))
    assert await late.is_silent()
    late.send(p.ack(5, 1234))
    assert (await late.take(6)).reason == 0x92
    late.send(p.ack(5, 1234, 0x97, 0))
    assert await late.is_silent(), "behind a PUBREC with an error comes no PUBREL"


async def test_an_error_in_an_ack_removes_the_message(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name, **KEPT), await client().connect(f"{name}-s")
    await one.subscribe((name, 2))
    for qos in (1, 2):
        await sender.publish(name, b"x", qos)
        got = await one.take(3)
        one.send(p.ack(4 if qos == 1 else 5, got.packet_id, 0x83))
    assert await one.is_silent()
    await one.disconnect()
    again = await client(5).connect(name, **KEPT)
    assert await again.is_silent()


async def test_receive_maximum_1_gets_a_backlog_one_by_one(client: Make, name: str, broker: Broker) -> None:
    letters = ((name, b"%d" % number) for number in range(300))
    await broker.send_many(letters, topic="backlog")
    one = await client(5).connect(name, clean=False, raw_props=b"\x11\0\0\0\x3c\x21\0\1")
    for number in range(300):
        got = await one.take(3)
        assert got.payload == b"%d" % number
        if number % 100 == 0:
            assert await one.is_silent()
        one.send(p.ack(4, got.packet_id))


async def test_the_qos_is_the_lower_of_both(client: Make, name: str) -> None:
    one, sender = await client().connect(name), await client().connect(f"{name}-s")
    assert await one.subscribe((f"{name}/0", 0), (f"{name}/1", 1), (f"{name}/2", 2)) == b"\0\1\2"
    for sent in (0, 1, 2):
        for asked in (0, 1, 2):
            await sender.publish(f"{name}/{asked}", b"x", sent, 9)
            got = await one.message()
            assert got.qos == min(sent, asked)
            if got.qos == 2:
                one.send(p.ack(5, got.packet_id))
                assert (await one.take(6)).packet_id == got.packet_id
                one.send(p.ack(7, got.packet_id))
            assert await one.is_silent()


async def test_messages_that_need_no_acknowledgement_come_once(client: Make, name: str) -> None:
    """Stored messages for a subscription of QoS 0, several in a page."""
    one, sender = await client().connect(name), await client().connect(f"{name}-s")
    await one.subscribe((name, 0))
    for first in range(0, 200, 20):
        sender.send(b"".join(p.publish(name, b"%d" % number, 1, number + 1) for number in range(first, first + 20)))
        for _ in range(20):
            await sender.take(4)
    for number in range(200):
        assert (await one.take(3)).payload == b"%d" % number
    assert await one.is_silent()


async def test_overlapping_filters_give_one_copy_with_the_highest_qos_and_all_identifiers(
    client: Make, name: str
) -> None:
    one, sender = await client(5).connect(name), await client().connect(f"{name}-s")
    await one.subscribe((f"{name}/#", 0), raw_props=b"\x0b\x05")
    await one.subscribe((f"{name}/+", 2), raw_props=b"\x0b\x80\x01")
    await one.subscribe((f"{name}/a", 1))
    await sender.publish(f"{name}/a", b"x", 1)
    got = await one.message()
    assert got.qos == 1
    assert sorted(got.properties[11]) == [5, 128]
    sender.send(p.publish(f"{name}/a", b"y", 0))
    got = await one.message()
    assert got.qos == 0
    assert sorted(got.properties[11]) == [5, 128]
    assert await one.is_silent()


@pytest.mark.parametrize(("behind_ms", "left"), [(500, 100), (0, 100), (-1, 100), (-1000, 99), (-99_999, 1)])
def test_what_is_left_of_an_expiry_is_never_more_than_it_was(behind_ms: int, left: int) -> None:
    """A gateway knows the server's clock as of its last beat: it may be behind by as long as the answer took."""
    sent, published = list[bytes](), 1_700_000_000_000
    stamp = b"\1" + published.to_bytes(6, "big") + (published + 100_000).to_bytes(6, "big")
    delivery = Delivery(
        sent.append, lambda: published - behind_ms, lambda _: True, lambda _: None, level=5, largest=1 << 20
    )
    delivery.reader = cast(Any, object())  # it is only asked for letters that are acknowledged at once
    delivery.letters([1], [stamp + seal_mqtt(1 | EXPIRES, b"x", b"", b"data")], 0)
    got = p.read_server_packet(sent[0][0], sent[0][2:], 5)
    assert got.properties[2] == [left]


@pytest.mark.parametrize("level", [4, 5])
def test_letters_of_one_page_are_sent_as_if_each_came_alone(level: int) -> None:
    """Most of a page differ in their payload only, and the gateway encodes what they share once."""
    published = b"\1" + (1_700_000_000_000).to_bytes(6, "big")
    kinds = [(flags, b"a", b"") for flags in (1, 0, 2, 1 | 4, 1 | EXPIRES)]
    kinds += [(1, b"ab", b""), (1, b"a", b"\x01\x01"), (1, b"+", b"")]
    choose = random.Random(level)
    letters = [seal_mqtt(*kinds[0], b"%03d" % n) for n in range(5)]
    for n in range(300):
        payload = bytes(choose.choice([0, 3, 3, 3, 200, 20_000])) if n % 9 else b"x" * 30_000
        letters += [seal_mqtt(*choose.choice(kinds), payload)] * choose.choice([1, 1, 3])
    ends = [(1_700_000_100_000 + 1000 * n).to_bytes(6, "big") for n in range(len(letters))]
    letters = [b"" if n % 50 == 49 else published + ends[n] + each for n, each in enumerate(letters)]
    seqs = list(range(65_400, 65_400 + len(letters)))  # the packet ids begin again on the way

    def sent(pages: list[slice]) -> tuple[bytes, list[str]]:
        packets, dropped, acked = list[bytes](), list[str](), list[str]()
        delivery = Delivery(
            lambda *each: packets.extend(each), lambda: 1_700_000_000_000, lambda topic: topic != "ab", dropped.append,
            level=level, largest=25_000,
        )  # fmt: skip
        delivery.reader = cast(Any, SimpleNamespace(ack=lambda packet_id: acked.append(str(packet_id))))
        for page in pages:
            delivery.letters(seqs[page], letters[page], 65_402)
        return b"".join(packets), dropped + acked

    alone = sent([slice(n, n + 1) for n in range(len(letters))])
    assert sent([slice(None)]) == alone
    assert sent([slice(n, n + 100) for n in range(0, len(letters), 100)]) == alone
    assert len(alone[0]) > 100_000


async def test_message_expiry_is_counted_down_and_ends_a_message(client: Make, name: str) -> None:
    """But not one that has been sent [4.3.3-7]: it comes again."""
    one, sender = await client(5).connect(name, **KEPT), await client(5).connect(f"{name}-s")
    await one.subscribe((name, 1), (f"{name}/2", 2))
    for qos, topic in ((1, name), (2, f"{name}/2")):
        await sender.publish(topic, b"sent", qos, raw_props=b"\x02\0\0\0\1")
    sent = [await one.take(3), await one.take(3)]
    await one.disconnect()
    for seconds, payload in ((0, b"never"), (1, b"late"), (100, b"soon"), (2**32 - 1, b"ever")):
        await sender.publish(name, payload, raw_props=b"\x02" + seconds.to_bytes(4, "big"))
    waiting = await client(5).connect(f"{name}-w", keep_alive=1)
    assert (await waiting.ended()) is not None  # more than a second later
    again = await client(5).connect(name, **KEPT)
    for each in sent:
        got = await again.take(3)
        assert (got.payload, got.dup, got.qos, got.packet_id) == (b"sent", True, each.qos, each.packet_id)
        again.send(p.ack(3 + got.qos, got.packet_id))
        if got.qos == 2:
            assert (await again.answer(6)).packet_id == got.packet_id
            again.send(p.ack(7, got.packet_id))
    soon, ever = await again.message(), await again.message()
    assert soon.payload == b"soon"
    assert 0 < soon.properties[2][0] < 100
    assert ever.payload == b"ever"
    assert await again.is_silent()


async def test_a_message_above_the_maximum_packet_size_is_skipped(client: Make, name: str) -> None:
    one = await client(5).connect(name, raw_props=b"\x27\0\0\1\0")
    sender = await client().connect(f"{name}-s")
    await one.subscribe((name, 1))
    await sender.publish(name, bytes(300))
    await sender.publish(name, b"small")
    assert (await one.message()).payload == b"small"


async def test_acknowledgements_that_leave_together_may_be_larger_than_the_maximum_packet_size(
    client: Make, name: str
) -> None:
    one = await client(5).connect(name, raw_props=b"\x27\0\0\0\x40")
    one.send(b"".join(p.publish(name, b"x", 1, n, level=5) for n in range(1, 21)))
    assert [(await one.answer(4)).packet_id for _ in range(20)] == list(range(1, 21))


async def test_no_local_spares_the_publisher_only(client: Make, name: str) -> None:
    one, two = await client(5).connect(name), await client(5).connect(f"{name}-2")
    for each in (one, two):
        await each.subscribe((name, 1 | 4))
    await one.publish(name, b"from one")
    await two.publish(name, b"from two")
    one.send(p.publish(name, b"zero", 0, level=5))
    assert (await one.message()).payload == b"from two"
    assert sorted([(await two.message()).payload, (await two.message()).payload]) == [b"from one", b"zero"]
    assert await one.is_silent()


async def test_subscribing_again_replaces_and_sends_retained_by_its_handling(client: Make, name: str) -> None:
    one = await client(5).connect(name)
    await one.publish(f"{name}/r", b"kept", retain=True)
    for options, wanted in ((1, True), (1, True), (1 | 1 << 4, False), (1 | 2 << 4, False)):
        await one.subscribe((f"{name}/#", options))
        if wanted:
            got = await one.message()
            assert (got.payload, got.retain) == (b"kept", True)
        assert await one.is_silent()
    two = await client(5).connect(f"{name}-2")
    await two.subscribe((f"{name}/+", 1 | 1 << 4))
    assert (await two.message()).payload == b"kept"
    await two.publish(f"{name}/x", b"once")
    assert (await two.message()).payload == b"once"
    assert await two.is_silent()


async def test_the_retain_flag_is_set_for_retained_messages_only(client: Make, name: str) -> None:
    plain, faithful = await client(5).connect(name), await client(5).connect(f"{name}-2")
    await plain.subscribe((name, 1))
    await faithful.subscribe((name, 1 | 8))
    sender = await client().connect(f"{name}-s")
    await sender.publish(name, b"x", retain=True)
    assert not (await plain.message()).retain
    assert (await faithful.message()).retain
    late = await client(4).connect(f"{name}-3")
    await late.subscribe((name, 1))
    assert (await late.message()).retain


async def test_an_empty_retained_message_removes_and_is_passed_on(client: Make, name: str) -> None:
    one, sender = await client().connect(name), await client().connect(f"{name}-s")
    await one.subscribe((name, 1))
    for qos in (1, 2, 0):
        await sender.publish(name, b"x", 1, retain=True)
        await sender.publish(name, b"", qos, retain=True)
        got = [await one.message(), await one.message()]
        assert sorted(each.payload for each in got) == [b"", b"x"]
        assert not any(each.retain for each in got)
        if qos:  # of QoS 0 no packet says when it is done
            late = await client().connect(f"{name}-late")
            await late.subscribe((name, 1))
            assert await late.is_silent()
            await late.disconnect()


async def test_a_client_finds_its_own_retained_message_after_its_ack(client: Make, name: str) -> None:
    one = await client(5).connect(name)
    for number in range(30):
        assert await one.publish(f"{name}/{number}", b"%d" % number, 1, 1, retain=True) == 0
        await one.subscribe((f"{name}/{number}", 1))
        assert (await one.message()).payload == b"%d" % number


async def test_retained_messages_expire(client: Make, name: str) -> None:
    sender = await client(5).connect(f"{name}-s")
    await sender.publish(f"{name}/1", b"short", retain=True, raw_props=b"\x02\0\0\0\1")
    await sender.publish(f"{name}/2", b"long", retain=True, raw_props=b"\x02\0\0\0\x64")
    waiting = await client(5).connect(f"{name}-w", keep_alive=1)
    await waiting.ended()
    one = await client(5).connect(name)
    await one.subscribe((f"{name}/#", 1))
    got = await one.message()
    assert got.payload == b"long"
    assert got.properties[2][0] < 100
    assert await one.is_silent()


async def test_retained_messages_of_qos_2_share_the_packet_ids_of_the_inbox(client: Make, name: str) -> None:
    sender = await client(5).connect(f"{name}-s")
    for number in range(5):
        await sender.publish(f"{name}/{number}", b"x", 2, retain=True)
    one = await client(5).connect(name, **KEPT)
    await one.subscribe((f"{name}/#", 2))
    ids = [(await one.take(3)).packet_id for _ in range(5)]
    assert len(set(ids)) == 5
    one.abort()
    again = await client(5).connect(name, **KEPT)
    assert [(await again.take(3)).packet_id for _ in range(5)] == ids


async def test_every_filter_gets_its_code_in_order(client: Make, name: str) -> None:
    filters = [(f"{name}/a", 1), ("denied/read", 1), ("$share/g/x", 0), (f"{name}/b", 2)]
    five, four = await client(5).connect(name), await client(4).connect(f"{name}-4")
    assert await five.subscribe(*filters) == b"\1\x87\0\2"
    assert await four.subscribe(*filters) == b"\1\x80\0\2"
    five.send(p.unsubscribe([f"{name}/a", "none", f"{name}/b"], 7, 5))
    assert (await five.take(11)).reasons == b"\0\x11\0"
    three = await client(3).connect(f"{name}-3")
    three.send(p.subscribe([("denied/read", 1)], 1))
    assert await three.ended() is None


async def test_a_client_has_a_limit_of_subscriptions(client: Make, name: str) -> None:
    one = await client(5).connect(name)
    assert await one.subscribe(*((f"{name}/{n}", 0) for n in range(52))) == b"\0" * 50 + b"\x97\x97"
    assert await one.subscribe((f"{name}/0", 1)) == b"\1"


async def test_unsubscribing_stops_new_messages_and_what_is_out_is_finished(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name), await client().connect(f"{name}-s")
    await one.subscribe((name, 2))
    await sender.publish(name, b"before", 2)
    got = await one.take(3)
    one.send(p.unsubscribe([name], 3, 5))
    assert (await one.take(11)).reasons == b"\0"
    await sender.publish(name, b"after", 2)
    one.send(p.ack(5, got.packet_id))
    assert (await one.take(6)).packet_id == got.packet_id
    one.send(p.ack(7, got.packet_id))
    assert await one.is_silent()


@pytest.mark.parametrize("topic", ["$SYS/x", "$other/x"])
async def test_wildcards_do_not_match_system_topics(client: Make, name: str, topic: str) -> None:
    """A client without them publishes: those that have them get what other tests publish, at any time."""
    wild, own = await client(5).connect(f"{name}-w"), await client(5).connect(f"{name}-o")
    sender = await client(5).connect(f"{name}-s")
    await wild.subscribe(("#", 1), ("+/x", 1))
    await own.subscribe(("$other/#", 1))
    code = await sender.publish(topic, name.encode(), 1, 3)
    assert code == (0x87 if topic.startswith("$SYS") else 0)
    if code == 0:
        assert (await own.message()).topic == topic
    await sender.publish(f"{name}/x", name.encode())
    found = await wild.message()
    while found.payload != name.encode():
        found = await wild.message()
    assert found.topic == f"{name}/x"


async def test_clean_start_drops_what_has_waited(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name, **KEPT), await client().connect(f"{name}-s")
    await one.subscribe((f"{name}/#", 1))
    await one.disconnect()
    for number in range(20):
        await sender.publish(f"{name}/x", b"%d" % number)
    again = await client(5).connect(name, clean=True)
    assert await again.is_silent()
    await sender.publish(f"{name}/x", b"not wanted")
    await again.subscribe((f"{name}/#", 1))
    await sender.publish(f"{name}/x", b"new")
    assert (await again.message()).payload == b"new"


async def test_a_backlog_comes_before_what_is_new(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name, **KEPT), await client().connect(f"{name}-s")
    await one.subscribe((name, 1))
    await one.disconnect()
    for number in range(300):
        await sender.publish(name, b"%d" % number)
    again = await client(5).connect(name, **KEPT)
    for number in range(300, 400):
        await sender.publish(name, b"%d" % number)
    assert [(await again.message()).payload for _ in range(400)] == [b"%d" % number for number in range(400)]


async def test_a_client_that_does_not_read_loses_no_message_of_qos_1(client: Make, name: str) -> None:
    one, sender = await client(5).connect(name, **KEPT), await client().connect(f"{name}-s")
    await one.subscribe((name, 1))
    one._writer.transport.pause_reading()  # type: ignore[attr-defined]
    for number in range(60):
        await sender.publish(name, b"%d" % number + bytes(100_000))
    one._writer.transport.resume_reading()  # type: ignore[attr-defined]
    for number in range(60):
        assert (await one.message()).payload[:2].rstrip(b"\0") == b"%d" % number


async def test_a_will_is_published_unless_its_client_says_goodbye(client: Make, name: str) -> None:
    """Of a gateway that lives: by DISCONNECT 0x04, a protocol error, a closed socket and a takeover."""
    watcher = await client(5).connect(f"{name}-w")
    await watcher.subscribe((f"{name}/#", 1))
    will = (f"{name}/gone", b"bye", 1, True)
    raw = b"\x26" + p.text("why") + p.text("will")
    for way in ("goodbye", "0x04", "error", "closed", "takeover"):
        one = await client(5).connect(name, will=will, will_props=raw)
        if way == "goodbye":
            await one.disconnect()
            assert await watcher.is_silent()
            continue
        if way == "takeover":
            await client(5).connect(name)
        elif way == "closed":
            one.abort()
        else:
            one.send(p.packet(0xE0, b"\x04\0") if way == "0x04" else b"\0\0")
        got = await watcher.message()
        assert (got.topic, got.payload, got.retain) == (f"{name}/gone", b"bye", False)
        assert got.properties[0x26] == [(b"why", b"will")]
    late = await client(5).connect(f"{name}-l")
    await late.subscribe((f"{name}/gone", 1))
    assert (await late.message()).retain
    refused = await client(5).connect(f"{name}-r", will=("denied/write", b"no", 1, False))
    refused.abort()
    assert await watcher.is_silent()


async def test_racing_retained_messages_end_as_one_for_everyone(client: Make, name: str) -> None:
    senders = [await client().connect(f"{name}-{number}") for number in range(4)]
    for number in range(25):
        for at, sender in enumerate(senders):
            sender.send(p.publish(name, f"{at}-{number}".encode(), 1, number + 1, retain=True))
    for sender in senders:
        for _ in range(25):
            await sender.take(4)
    seen = set[bytes]()
    for number in range(5):
        one = await client().connect(f"{name}-r{number}")
        await one.subscribe((name, 1))
        seen.add((await one.message()).payload)
    assert len(seen) == 1
    assert seen <= {b"%d-24" % at for at in range(4)}


async def test_an_inbox_that_cannot_be_written_keeps_no_message_from_other_clients(
    client: Make, name: str, broker: Broker
) -> None:
    """Messages that are routed together are tried one by one when some of their letters fail; none comes twice."""
    good, bad, sender = await client().connect(name), await client().connect(f"{name}-b", clean=False), client()
    for each, topics in ((good, "abc"), (bad, "b")):
        await each.subscribe(*((f"{name}/{topic}", 1) for topic in topics))
    await bad.disconnect()
    await broker.client.execute_command("SET", broker.keys.inbox(f"{name}-b"), "foreign")
    await sender.connect(f"{name}-s")
    sender.send(b"".join(p.publish(f"{name}/{topic}", topic.encode(), 1, n) for n, topic in enumerate("abcabc", 1)))
    assert [(await good.message()).payload for _ in range(6)] == [b"a", b"b", b"c", b"a", b"b", b"c"]
    partition, ask = partition_for(f"{name}-s", 8), broker.client.execute_command
    retry = broker.keys.retry("mqtt", partition, "mqtt")
    await until(lambda: ask("EXISTS", retry), "a message waits for its retry")
    newest = await ask("XREVRANGE", broker.keys.stream("mqtt", partition), "+", "-", "COUNT", 6)
    (parked,) = await ask("ZRANGE", retry, 0, -1)
    assert parked.startswith(newest[-2][0] + b"|"), "only the one that failed: not the first"
    await ask("DEL", broker.keys.inbox(f"{name}-b"))
    await bad.connect(f"{name}-b", clean=False)
    assert [(await bad.message()).payload for _ in range(2)] == [b"b", b"b"]
    assert await good.is_silent()
