"""Which handlers a worker serves."""

from __future__ import annotations

import pytest

from rsmq import Broker, ConfigError
from rsmq.handler.selection import Serving


def some() -> Broker:
    broker = Broker("redis://localhost:1")
    for topic, group in (("sms", "twilio"), ("sms", "audit"), ("push", "apns"), ("orders", "audit")):
        broker.handler(topic, group=group)(handle)
    return broker


async def handle(_payload: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ((), ["sms/twilio", "sms/audit", "push/apns", "orders/audit"]),
        (("sms",), ["sms/twilio", "sms/audit"]),
        (("sms/*",), ["sms/twilio", "sms/audit"]),
        (("*/audit",), ["sms/audit", "orders/audit"]),
        (("sms/twilio", "push"), ["sms/twilio", "push/apns"]),
        (("[op]*",), ["push/apns", "orders/audit"]),
    ],
)
def test_patterns_choose_by_topic_and_group(only: tuple[str, ...], chosen: list[str]) -> None:
    assert [f"{each.topic}/{each.group}" for each in Serving(only).chosen(some().handlers)] == chosen


def test_a_pattern_that_chooses_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"only='smss' chooses no handler. Did you mean.*There are: orders"):
        Serving(("sms", "smss")).chosen(some().handlers)


def test_concurrency_takes_the_place_of_that_of_each_handler() -> None:
    assert {each.concurrency for each in Serving(concurrency=3).chosen(some().handlers)} == {3}
    assert {each.concurrency for each in some().handlers} == {64}


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"max_messages": 0}, {"max_messages": True}])
def test_a_number_that_is_not_possible_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="is not possible: use 1 or more"):
        Serving(**wrong)  # type: ignore[arg-type]
