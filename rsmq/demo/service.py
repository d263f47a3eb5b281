"""The worker's side of the demo: `rsmq worker rsmq.demo.service:broker`."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from tenacity import wait_fixed

from rsmq.broker import Broker
from rsmq.demo.channel import notify
from rsmq.demo.flight import Departure
from rsmq.demo.ledger import NO_CHANNEL, VARIABLE, Entry, Ledger, now_ns
from rsmq.errors import ConfigError
from rsmq.message import Message
from rsmq.retry import Reject, RetryPolicy

TOPIC, NOTIFIER, AUDITOR = "departures", "notifier", "auditor"

if VARIABLE not in os.environ:
    raise ConfigError(f"this module serves `rsmq demo`: it needs {VARIABLE}, the directory of the ledgers")

broker = Broker()
ledger = Ledger(Path(os.environ[VARIABLE]))


def entry(group: str, departure: Departure, message: Message, channel: str = NO_CHANNEL) -> Entry:
    """What the ledger keeps of one handled departure."""
    return Entry(
        now_ns(), group, departure.number, departure.aircraft, departure.turn, message.attempt, channel
    )  # fmt: skip


@broker.handler(TOPIC, group=NOTIFIER, retry=RetryPolicy(max_attempts=8, wait=wait_fixed(0.1)))
async def tell_passengers(departure: Departure, message: Message) -> None:
    """Tell the passengers of a late flight, by whichever channel works."""
    if departure.is_planted:
        raise Reject("this aircraft does not exist")
    channel = notify(departure, message.attempt) if departure.is_late else NO_CHANNEL
    ledger.write([entry(NOTIFIER, departure, message, channel)])


@broker.handler(TOPIC, group=AUDITOR, batch=500, linger=timedelta(milliseconds=50))
async def audit(departures: list[Departure], messages: list[Message]) -> None:
    """Write down everything, in batches."""
    ledger.write(entry(AUDITOR, departure, message) for departure, message in zip(departures, messages, strict=True))
