"""The worker's side of the demo: `rsmq worker rsmq.cli.demo.service:broker`."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from tenacity import wait_fixed

from rsmq.broker import Broker
from rsmq.cli.demo.flight import Departure, notify
from rsmq.cli.demo.result import AUDITOR, LEDGER_VARIABLE, NO_CHANNEL, NOTIFIER, TOPIC, Handled
from rsmq.errors import ConfigError
from rsmq.handler.retry import Reject, RetryPolicy
from rsmq.model.message import Message
from rsmq.testing.ledger import LedgerWriter

if LEDGER_VARIABLE not in os.environ:
    raise ConfigError(f"this module serves `rsmq demo`: it needs {LEDGER_VARIABLE}, the path of the ledger")

broker = Broker()
ledger = LedgerWriter(Path(os.environ[LEDGER_VARIABLE]))


def handled(message: Message, channel: str = NO_CHANNEL) -> Handled:
    """The record of one handled departure."""
    return Handled.now(
        "commit", topic=TOPIC, group=message.group, message_id=message.id, attempt=message.attempt, channel=channel
    )


@broker.handler(TOPIC, group=NOTIFIER, retry=RetryPolicy(max_attempts=8, wait=wait_fixed(0.1)))
async def notify_passengers(departure: Departure, message: Message) -> None:
    """Notify the passengers of a late flight through the first channel that works."""
    if departure.is_planted:
        raise Reject("this aircraft does not exist")
    channel = notify(departure, message.attempt) if departure.is_late else NO_CHANNEL
    ledger.write(handled(message, channel))


@broker.handler(TOPIC, group=AUDITOR, batch=500, linger=timedelta(milliseconds=50))
async def audit(_departures: list[Departure], messages: list[Message]) -> None:
    """Record everything, in batches."""
    ledger.write(*map(handled, messages))
