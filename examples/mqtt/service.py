"""The service: the readings of each sensor go into a topic, and every tenth is answered with a mean for the phone.

cd examples/mqtt
rsmq gateway service:gateway --listen mqtt://0.0.0.0:1883 --listen ws://0.0.0.0:8083
rsmq worker service:broker
"""

from collections import defaultdict
from datetime import timedelta
from statistics import mean
from typing import Any

from rsmq import Broker, Message
from rsmq.gateway import Gateway, GatewayOptions

SIZE = 10

broker = Broker()
gateway = Gateway(broker, options=GatewayOptions(anonymous=True, session_expiry=timedelta(hours=1)))
gateway.route("sensors/#", topic="readings", subscribers=False)

windows: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)  # a real service keeps them in a database


@broker.handler("readings", group="means")
async def aggregate(reading: dict[str, Any], message: Message) -> None:
    """Collect the readings of a sensor. One that comes again changes nothing, and is answered again."""
    sensor, number = message.headers["mqtt-client"], reading["number"] // SIZE
    window = windows[sensor, number]
    window[reading["number"]] = reading["value"]
    if len(window) == SIZE:
        answer = {"sensor": sensor, "number": number, "mean": mean(window.values())}
        await broker.send("phone", answer, topic=f"means/{sensor}")
