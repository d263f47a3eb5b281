"""Mistakes that a type checker must find: one that it does not find is an ignore too many, and so an error.

Checked by mypy (`make check`) and pyright (`test_typing.py`) in their strict modes; never run.
"""

from __future__ import annotations

from datetime import timedelta

from rsmq import Broker, Rate, Settings

broker = Broker()
broker.handler("orders", group="g", ordering="random")  # type: ignore[arg-type]  # there is no such order
broker.handler("orders")  # type: ignore[call-arg]  # a group is needed
broker.handler("orders", group="g", concurency=8)  # type: ignore[call-arg]  # there is no such option
broker.handler("orders", group="g", rate=100)  # type: ignore[arg-type]  # a bare number is no rate
broker.every(3600, "ticks")  # type: ignore[arg-type]  # a bare number is no time
broker.every("@daily", "ticks", missed="all")  # type: ignore[arg-type]  # the latest of them, or none
broker.publish_sync("orders", {}, delay=5)  # type: ignore[arg-type]  # a bare number is no time
broker.publish_sync("orders", {}, kye="k")  # type: ignore[call-arg]  # there is no such option
Rate(1, per=timedelta(seconds=1), over="all")  # type: ignore[arg-type]  # over the group, or each member
Broker(lease_tll="PT6S")  # type: ignore[call-arg]  # there is no such setting
Broker(5)  # type: ignore[arg-type]  # a server is a URL
Rate(1, per=1)  # type: ignore[arg-type]  # a bare number is no time
Broker(lease_ttl=6)  # type: ignore[arg-type]  # a bare number is no time
Settings(partitions="8", on_full="drop")  # type: ignore[arg-type]  # a count is a number; full topics refuse or trim
