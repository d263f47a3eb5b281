"""The service: a flight's delay goes to the phones of its passengers, wherever they are.

cd examples/devices
rsmq worker service:broker
"""

import os

from passenger import passengers

from rsmq import Broker
from rsmq.demo.flight import Departure

TOPIC = "departures"
PHONES = int(os.environ.get("PHONES", "10000"))

broker = Broker()


def on_board(departure: Departure) -> list[str]:
    """Where a departure goes."""
    return passengers(departure, PHONES)


broker.deliver(TOPIC, to=on_board)
