"""A deployment on paper: how many masters, how much memory and how many partitions a load needs, from measured costs.

Arithmetic over what `benchmarks.growth` and `benchmarks.scale` measured on one machine; nothing was run at that size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.table import figure, table

AT: Final = 8
"""Partitions at which the cost of a message is taken from benchmarks/results/growth.json."""
CASES: Final = (1, 4, 64)
"""Publishes on their way at once."""
MANY_DEVICES: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, what one message and one device cost, and what follows. CPU in microseconds, memory in bytes.

    `load` is how much of its one core a master may use, so that a failover, a rewrite and a burst fit.
    """

    publish_server_us: float
    consume_server_us: float
    publish_client_us: float
    consume_client_us: float
    publish_commands: float
    consume_commands: float
    entry_bytes: float
    device_bytes: float
    session_bytes: float
    letter_us: float
    messages: int = 1_000_000
    groups: int = 1
    devices: int = 10_000_000
    connected_share: float = 0.2
    letters: int = 10_000
    outage_seconds: int = 600
    replay_length: int = 10_000
    load: float = 0.4
    per_core: float = 0.7
    gateway_bytes: float = 0.0
    subscription_bytes: float = 0.0
    """Of a subscription to a topic name, on the server."""
    publish_at_once_us: Sequence[tuple[int, float]] = ()
    """How many publishes of one process are on their way at once, and the server CPU of one of them."""
    node_gib: float = 26.0

    @property
    def server_cores(self) -> float:
        """Cores that commands take, over all masters."""
        per_message = self.publish_server_us + self.groups * self.consume_server_us
        return (self.messages * per_message + self.letters * self.letter_us) / 1e6

    @property
    def masters_by_cpu(self) -> int:
        """A master runs commands on one core."""
        return math.ceil(self.server_cores / self.load)

    @property
    def partitions(self) -> int:
        """Four for each master, so that members and slots can be balanced."""
        return 4 * self.masters

    @property
    def backlog_bytes(self) -> float:
        """What waits while the consumers are away, beside what is kept for a replay."""
        kept = self.messages * self.outage_seconds + 4 * self.masters_by_cpu * self.replay_length
        return kept * self.entry_bytes

    @property
    def devices_bytes(self) -> float:
        """All inboxes, and the sessions of those that are connected."""
        return self.devices * (self.device_bytes + self.connected_share * self.session_bytes)

    @property
    def masters_by_memory(self) -> int:
        """So that all of it fits."""
        return math.ceil((self.backlog_bytes + self.devices_bytes) / (self.node_gib * (1 << 30)))

    @property
    def masters(self) -> int:
        """As many as the largest need asks for; Redis Cluster has three at least."""
        return max(3, self.masters_by_cpu, self.masters_by_memory)

    @property
    def publisher_cores(self) -> float:
        """Processes that publish in batches."""
        return self.messages * self.publish_client_us / 1e6 / self.per_core

    @property
    def worker_cores(self) -> float:
        """Processes whose handlers do nothing: add what yours do."""
        return self.messages * self.groups * self.consume_client_us / 1e6 / self.per_core

    def page(self) -> list[str]:
        """What the page says of it."""
        gib = 1 << 30
        rows: list[tuple[str, Any, str]] = [
            ("server CPU a message, µs", self.publish_server_us + self.groups * self.consume_server_us,
             f"publish {figure(self.publish_server_us)} + {self.groups} group × {figure(self.consume_server_us)}"),
            ("cores for commands", self.server_cores,
             f"{self.messages:,} messages/s and {self.letters:,} letters/s of {figure(self.letter_us)} µs"),
            ("masters by CPU", self.masters_by_cpu, f"one core each, {self.load:.0%} of it used"),
            ("backlog, GiB", self.backlog_bytes / gib,
             f"{self.outage_seconds} s without consumers, {self.replay_length:,} entries a partition for replay, "
             f"{figure(self.entry_bytes)} bytes each"),
            ("devices, GiB", self.devices_bytes / gib,
             f"{self.devices:,} with three letters of {figure(self.device_bytes)} bytes together, "
             f"{self.connected_share:.0%} connected at {figure(self.session_bytes)} bytes"),
            ("gateways' memory, GiB", self.devices * self.connected_share * self.gateway_bytes / gib,
             f"{figure(self.gateway_bytes)} bytes of Python's a session; its connection to the device is not in it"),
            ("masters by memory", self.masters_by_memory, f"{figure(self.node_gib)} GiB of data each"),
            ("**masters**", self.masters, "the larger of both; as many replicas, or twice, for failover"),
            ("partitions of the topic", self.partitions, "four a master"),
            ("messages/s of a partition", self.messages / self.partitions, "read by one member of each group"),
            ("commands a message", self.publish_commands + self.groups * self.consume_commands,
             f"in batches: publish {self.publish_commands:.3f}, consume {self.consume_commands:.3f} (at "
             f"{AT} partitions)"),
            ("publishing cores", self.publisher_cores, f"{figure(self.publish_client_us)} µs a message in batches, "
             f"{self.per_core:.0%} used"),
            ("worker cores", self.worker_cores, f"{figure(self.consume_client_us)} µs a message, handlers that do "
            "nothing"),
        ]  # fmt: skip
        return [
            f"### On paper: {self.messages:,} messages/s and {self.devices:,} devices",
            "",
            "Computed by `benchmarks/plan.py` from the measured costs of growth and scale, "
            "on one machine. It has not been",
            "run at that size. Replication, TLS, fsync and the network are not in it: they take "
            "other cores, and a share",
            "of a master's own that only a trial on your machines tells. Messages of about 200 bytes.",
            "",
            *table(("", "figure", "from"), rows),
            "",
            "What follows: CPU is cheap, memory is not. A second of backlog at this rate is "
            f"{self.messages * self.entry_bytes / gib:.2f} GiB, so `max_length` and `retention_length` "
            "are what decides the",
            "size of the cluster; the default `retention_length` of 100,000 a partition would keep "
            f"{self.partitions * 100_000 * self.entry_bytes / gib:.0f} GiB. On a cluster a member reads each partition",
            "over a connection of its own: with one member a partition and group that is one connection each.",
            "",
            *self.cases(),
        ]

    def cases(self) -> list[str]:
        """How the masters depend on the way of publishing, and on the number of devices."""
        consume = self.groups * self.consume_server_us
        ways = [("in batches, as above", self)] + [
            (f"`publish`, {count:,} at once" if count > 1 else "`publish`, one by one",
             replace(self, publish_server_us=cost)) for count, cost in sorted(self.publish_at_once_us, reverse=True)
        ]  # fmt: skip
        rows = [
            (name, plan.publish_server_us + consume, plan.masters_by_cpu, plan.masters_by_cpu / self.masters_by_cpu)
            for name, plan in ways
        ]
        large = replace(self, devices=MANY_DEVICES)
        gib = 1 << 30
        return [
            "The table takes full batches. Publishers that wait for each message cost the server more:",
            "",
            *table(("messages are published", "server CPU a message, µs", "masters by CPU", "× batches"), rows),
            "",
            f"{MANY_DEVICES:,} devices instead: {figure(large.devices_bytes / gib)} GiB of letters and sessions, "
            f"{figure(large.devices * large.connected_share * large.gateway_bytes / gib)} GiB in gateways, "
            f"{large.masters_by_memory} masters by memory and {large.masters_by_cpu} by CPU: for messages that are "
            "published in full batches. What each device has subscribed to is not in it: for a topic name each they "
            f"are {figure(MANY_DEVICES * self.subscription_bytes / gib)} GiB more on the masters. Filters with "
            "wildcards are held by every gateway process. Commands that are sent with `broker.send` need neither.",
            "",
        ]


def costs_of(results: Path, studies: dict[str, Any]) -> dict[str, Any]:
    """The measured costs, as arguments of a Plan."""
    growth = json.loads((results / "growth.json").read_text())
    (curve,) = [each for each in growth["curves"] if each["name"] == "partitions"]
    (at_once,) = [each for each in growth["curves"] if each["name"] == "concurrency"]
    single = zip(at_once["values"], at_once["steps"]["publish"], strict=True)
    at = curve["values"].index(AT)
    publish, consume = (curve["steps"][step][at] for step in ("publish_many", "consume"))
    largest = {name: rows[-1] for name, rows in studies.items()}
    return asdict(
        Plan(
            publish_server_us=publish["server_us"], consume_server_us=consume["server_us"],
            publish_client_us=publish["client_us"], consume_client_us=consume["client_us"],
            publish_commands=publish["commands"], consume_commands=consume["commands"],
            entry_bytes=largest["pending"]["server_bytes"], device_bytes=largest["devices"]["server_bytes"],
            session_bytes=largest["devices"]["session_bytes"], letter_us=largest["devices"]["send_us"],
            gateway_bytes=largest["devices"]["gateway_bytes"],
            subscription_bytes=largest["subscriptions"]["server_bytes"],
            publish_at_once_us=[(count, step["server_us"]) for count, step in single if count in CASES],
        )
    )  # fmt: skip
