"""Mistakes that a type checker must find, each marked with what it says; never run."""

from __future__ import annotations

from datetime import timedelta

from rsmq import Broker, Rate

broker = Broker()
broker.handler("orders", group="g", ordering="random")  # mistake: no such order
broker.handler("orders")  # mistake: no group
broker.handler("orders", group="g", rate=100)  # mistake: a bare number is no rate
broker.every(3600, "ticks")  # mistake: a bare number is no time
broker.publish_sync("orders", {}, delay=5)  # mistake: a bare number is no time
broker.publish_sync("orders", {}, kye="k")  # mistake: no such option
Rate(1, per=timedelta(seconds=1), over="all")  # mistake: over the group or the member
