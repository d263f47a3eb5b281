"""The service of `rsmq demo --mqtt`: the gateway, the broker and its handler."""

from __future__ import annotations

import os
from pathlib import Path

from rsmq.broker import Broker
from rsmq.cli.demo.flight import Departure
from rsmq.cli.demo.mqtt_result import ANSWERS, GROUP, DepartureConfirmed
from rsmq.cli.demo.result import LEDGER_VARIABLE, TOPIC
from rsmq.errors import ConfigError
from rsmq.gateway import Gateway, GatewayOptions
from rsmq.model.message import Message
from rsmq.testing.ledger import LedgerWriter

if LEDGER_VARIABLE not in os.environ:
    raise ConfigError(f"this module serves `rsmq demo --mqtt`: it needs {LEDGER_VARIABLE}, the path of the ledger")

broker = Broker()
gateway = Gateway(broker, options=GatewayOptions(anonymous=True))
gateway.route(f"{TOPIC}/+", topic=TOPIC)
ledger = LedgerWriter(Path(os.environ[LEDGER_VARIABLE]))


@broker.handler(TOPIC, group=GROUP)
async def confirm(departure: Departure, message: Message) -> None:
    """Record a departure, and answer the aircraft that has published it."""
    ledger.write(
        DepartureConfirmed.now(
            "commit", topic=TOPIC, group=GROUP, message_id=message.id, attempt=message.attempt,
            aircraft=departure.aircraft, turn=departure.turn,
        )
    )  # fmt: skip
    await broker.send(message.headers["mqtt-client"], b"%d" % departure.turn, topic=ANSWERS)
