"""The service: delivers each departure to the inboxes of its passengers' phones.

cd examples/devices
rsmq worker service:broker
"""

import os

from passenger import passengers

from rsmq import Broker
from rsmq.cli.demo.flight import Departure

TOPIC = "departures"
PHONES = int(os.environ.get("PHONES", "10000"))

broker = Broker()


def on_board(departure: Departure) -> list[str]:
    """The phones that a departure is delivered to."""
    return passengers(departure, PHONES)


broker.deliver(TOPIC, to=on_board)
