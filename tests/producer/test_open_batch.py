"""What a publisher keeps of the members of a batch: their numbers, and how each of them has ended. No server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import islice

import pytest

from rsmq.errors import BrokerUnavailable, PublishUnknown
from rsmq.model.batch_member import BatchMember, Numbers, by_block, changes
from rsmq.model.keys import Keys
from rsmq.model.message_ref import MessageRef
from rsmq.producer.batch import Append, encode_member
from rsmq.producer.producer import MemberOnWay
from rsmq.redis.topics import Topic

TOPIC = Topic("sms", 2, 0, "reject", timedelta(0), 0, 0)


@pytest.fixture
def numbers() -> Numbers:
    """Members of one batch."""
    return Numbers("3.9f2c", "sender", is_direct=True)


def append(partition: int) -> Append:
    """An empty batch of plain messages for one partition."""
    keys = Keys("rsmq")
    return Append(keys, TOPIC, partition, keys.stream("sms", partition), deadline=0.0, window_ms=0)


def sent(batch: Append, member: BatchMember, number: int) -> MemberOnWay:
    """A member that is on its way."""
    ref = MessageRef.of(f"id{number}", batch.home, "k")
    entry = encode_member(b"1", str(ref), "k", "application/json", member.field.encode())
    return MemberOnWay(batch, str(ref), ref, entry, 1, member)


def test_a_number_is_given_once_and_a_block_has_a_thousand(numbers: Numbers) -> None:
    given = [numbers.next() for _ in range(2500)]
    assert len(set(given)) == 2500
    assert [len(each) for each in by_block(given).values()] == [1000, 1000, 500]
    assert all(BatchMember.read(each.field.encode()) == each for each in given)


def test_a_number_that_no_block_has_is_no_member() -> None:
    for digits in (b"", b"-1", b"1000", b"07", b"1e2", "\N{ARABIC-INDIC DIGIT ONE}".encode()):
        assert BatchMember.read(b"d3.9f2c sender 9ab1 " + digits) is None


def test_numbers_that_follow_each_other_are_one_change(numbers: Numbers) -> None:
    given = list(islice(iter(numbers.next, None), 1200))
    first, second = given[0].block.name, given[-1].block.name
    assert list(changes(by_block(reversed(given)))) == [second, 0, 199, "counted", first, 0, 999, "counted"]
    twice = [*given[:3], *given[:3], given[5], given[8], given[7]]
    assert list(changes(by_block(twice))) == [
        *(first, 0, 2, "counted"), *(first, 5, 5, "counted"), *(first, 7, 8, "counted"),
    ]  # fmt: skip


@pytest.mark.parametrize("is_resized", [False, True])
@pytest.mark.parametrize("error", [None, BrokerUnavailable("away"), PublishUnknown("id0", "sms")])
async def test_a_member_whose_caller_has_gone_hears_of_its_end(
    numbers: Numbers, is_resized: bool, error: Exception | None
) -> None:
    """Also if its batch was moved to the partitions that follow, before or after the call was cancelled."""
    batch, other = append(0), append(1)
    first, second = (sent(batch, numbers.next(), number) for number in range(2))
    first.cancel()
    if is_resized:
        batch.move(lambda _: other)
        second.cancel()
        batch = other
    else:
        second.cancel()
    ends = asyncio.gather(first.is_unknown(), second.is_unknown())
    await asyncio.sleep(0)
    assert not ends.done()
    if error is None:
        batch.confirm(2)
    else:
        batch.fail(lambda _: error)
    is_unknown = isinstance(error, PublishUnknown)
    assert await ends == [is_unknown, is_unknown]
    assert [first.is_stored, second.is_stored] == [error is None] * 2
    assert first.output.fields[-2:] == ["batch", first.member.field if first.member else None]
