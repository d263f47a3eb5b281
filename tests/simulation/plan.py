"""What a run has: members, messages, handlers. A seed varies it, because a defect often needs one particular shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from rsmq.handler.options import Distribution, Ordering
from tests.simulation.world import Choices

TOPIC: Final = "orders"
GROUP: Final = "billing"
Fault = Literal[
    "kill", "freeze", "nap", "cut", "stop", "cancel", "late", "hold", "drop", "usurp", "restart", "flush", "step",
    "unlease", "reset", "failover", "unconsume", "wipe",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    "kill", "kill", "freeze", "freeze", "nap", "cut", "cut", "stop", "stop", "cancel", "late", "late",
    "hold", "hold", "hold", "hold", "drop", "drop", "usurp", "restart", "flush", "step", "unlease", "reset", "failover",
)  # fmt: skip
FEED_FAULTS: tuple[Fault, ...] = tuple(each for each in FAULTS if each != "usurp")
AUDITED_FAULTS: tuple[Fault, ...] = ("unconsume", "unconsume", "flush")
"""What happens where consumers are deleted: if their worker ends, or gives a partition away, before it has found out,
messages are lost.
"""
COMMANDS: tuple[str, ...] = (
    "start_message", "park_message", "unpark_messages", "claim_pending", "bury_message", "hand_back",
    "settle_messages", "take_lease", "release_lease", "renew_lease", "restore_pending", "touch_messages", "XREADGROUP",
    "XREADGROUP", "XREADGROUP",
)  # fmt: skip
"""Those that a fault waits for."""
LAST_COMMANDS: tuple[str, ...] = ("hand_back", "hand_back", "hand_back", "settle_messages", "release_lease")
"""What a worker sends when it stops."""
TAKING: tuple[str, ...] = ("take_lease", "take_lease", "claim_pending")
OUTPUT_COMMANDS: tuple[str, ...] = ("settle_outputs", "settle_outputs", "settle_outputs", "settle_outputs", *COMMANDS)
RATE_COMMANDS: tuple[str, ...] = ("keep_starts", "keep_starts", "keep_starts", "keep_starts", *COMMANDS)
GROUP_RATE_COMMANDS: tuple[str, ...] = ("take_starts", "take_starts", "take_starts", "start_message", *COMMANDS)
HOT_COMMANDS: tuple[str, ...] = (
    "put_aside", "put_aside", "read_again", "read_again", "read_again", "claim_ids", "claim_ids", *COMMANDS,
)  # fmt: skip
DIGEST_COMMANDS: tuple[str, ...] = ("start_call", "start_call", "start_call", "put_aside", "keep_waits", *COMMANDS)
QUIET_COMMANDS: tuple[str, ...] = ("keep_waits", "keep_waits", "keep_waits", "put_aside", "read_again", *COMMANDS)
RESIZE_COMMANDS: tuple[str, ...] = ("are_finished", "are_finished", "resize_topic", "resize_topic", "change_layout")
FEED_COMMANDS: tuple[str, ...] = ("add_letters", "add_letters", "add_letters", *COMMANDS)
DEVICE_COMMANDS: tuple[str, ...] = ("open_session", "page_letters", "ack_letters", "close_session")
GATEWAY_COMMANDS: tuple[str, ...] = ("open_session", "begin_mqtt_session", "page_letters", "ack_clients", "ack_clients")
STYLES: tuple[tuple[Ordering, Distribution, int], ...] = (
    ("key", "hash", 0), ("key", "hash", 0), ("key", "hash", 7), ("partition", "hash", 5), ("none", "hash", 0),
    ("none", "hash", 7), ("none", "shared", 0), ("none", "shared", 7),
)  # fmt: skip
"""Ordering, distribution, and the size of a batch (0: one message a call)."""
BACKLOG: Final = {"ordering": ("partition", "key"), "partitions": (1, 2), "keys": (1, 2), "busy": (0.4,)}
"""An order that a read which comes late can break, because messages wait to be read."""
CALLS: Final = ((1, False), (2, False), (3, False), (1, True), (2, True))
BANDS: Final = ("urgent", "normal", "bulk")
AIMS: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = {
    "late call": {"busy": (0.4, 1.0), "failing": (0.3,), "timeout": (1.0,), "ordering": ("key", "none")},
    "late claim": {"busy": (0.1, 0.4), "prefetch": (10, 2000), "burst": (10, 40)},
    "lost retry": {"ordering": ("none",), "failing": (0.4,), "prefetch": (10, 2000)},
    "late read": {**BACKLOG, "prefetch": (1, 3), "burst": (40,)},
    "lapse": {**BACKLOG, "partitions": (1,), "prefetch": (1, 3), "burst": (10,), "members": (1, 2)},
    "usurpation": {**BACKLOG, "prefetch": (1, 3), "burst": (40,)},
    "late audit": {"timeout": (20.0,), "ordering": ("none", "key")},
    "stop in a grant": {"partitions": (2, 5)},
    "no script": {"busy": (0.0, 0.1)},
    "clock back": {"ordering": ("none",), "failing": (0.4,)},
    "cut in a pause": {},
    "return": {"members": (2, 3)},
    "short return": {"members": (2, 3)},
}
"""Races that need several things within milliseconds, and the shape in which they show (`aims.py`)."""


@dataclass(frozen=True)
class Plan:
    """The shape of a run. Spans are in virtual seconds.

    `noise`: the share of commands and replies that take long. `busy`: the longest a handler works. `burst`: how many
    messages are published at a time. `failing`: the share of attempts that fail; `poison`: the share of messages that
    must become dead letters. Members have one of the `leases`. `inboxes`: the share of seeds in which the topic feeds
    the inboxes of devices; `audited`: that in which consumers are deleted. `outputs`: the share of those without
    inboxes in which handlers publish an output for each message. `schedule`: seconds between two ticks of a schedule
    (0: none). `cancels`, `moves`, `expires`: the shares of messages that the publisher cancels, or reschedules, and
    that expire. `has_hook`: whether the group has an `on_dead`; `has_fallback`: a fallback topic. `rate`: how many
    messages of a key may start in how many seconds (0: any number); `group_rate`: how many of a name, over all members.
    `uniques`: how many unique names messages are published under, beside the others. `halts`: a worker dies while it
    stops; `hangs`: one loses connections, and its next attempts to connect hang. `aims`: the share of seeds with an
    `aim`. They are plain but for what this race needs, and most have no other faults. `timeout`: that of a command.
    `banded`: the share of seeds in which the topic has `bands`; they are declared, or added after so many seconds.
    `hot`: the share of seeds with order per key in which most messages are of one key, with little memory. `tenanted`:
    that of seeds with owners in which messages have a tenant, a key several of them. `calls`: how many calls may run at
    once over all members, and whether of each name. `holding`: the share of attempts that hold their name.
    `quiet`: the share of seeds with owners and single messages in which these wait for a time.
    `digests`: the share of seeds with order per key and batches in which a call has the messages of one key that are
    stored within `linger` seconds (0: a batch may have several keys).
    `batched`: the share of seeds, of those in which all ends can be counted, with all messages `in_batch`.
    `noted`: the share of seeds without inboxes in which handlers have a step and say how far they are, and each message
    that is handled alone has a result.
    `large`: the share of seeds in which the group has more members than `watchers`.
    `encodes`: the share of seeds in which messages are `encoded`: compressed and encrypted with one of two keys, and of
    half of them the bodies lie in a store, which is slow, goes away, and is swept. Letters are encrypted.
    `resizes`: the share of seeds in which the topic grows, by each factor of `growth` in turn, from so many seconds on.
    `mqtt`: the share of seeds in which the inboxes are those of MQTT clients, whose letters gateways read (`is_mqtt`).
    `unwatches`: the share of seeds in which all watchers go at once, by `unwatched`, and nothing else happens.
    """

    unwatches: float = 0.0
    mqtt: float = 0.0
    unwatched: Literal["", "die", "sleep", "split"] = ""
    resizes: float = 0.0
    growth: tuple[int, ...] = ()
    grows_after: float = 0.0

    batched: float = 0.25
    in_batch: bool = False
    noted: float = 0.15
    has_notes: bool = False
    large: float = 0.3
    watchers: int = 8
    encodes: float = 0.0
    encoded: Literal["", "sealed", "stored"] = ""
    digests: float = 0.45
    linger: float = 0.0

    banded: float = 0.2
    bands: tuple[str, ...] = ()
    bands_after: float = 0.0
    hot: float = 0.7
    is_hot: bool = False
    tenanted: float = 0.42
    has_tenants: bool = False
    read_ahead: int = 100_000
    aims: float = 0.13
    aim: str = ""
    timeout: float = 5.0
    inboxes: float = 0.15
    audited: float = 0.04
    outputs: float = 0.4
    schedule: float = 0.0
    cancels: float = 0.0
    moves: float = 0.0
    expires: float = 0.0
    has_hook: bool = False
    has_fallback: bool = False
    rate: tuple[int, float] = (0, 0.0)
    group_rate: tuple[int, float] = (0, 0.0)
    calls: tuple[int, bool] = (0, False)
    holding: float = 0.0
    quiet: float = 0.25
    has_quiet: bool = False
    uniques: int = 0
    halts: bool = False
    hangs: bool = False
    members: int = 3
    partitions: int = 3
    keys: int = 4
    messages: int = 80
    seconds: float = 12.0
    patience: float = 120.0
    leases: tuple[float, ...] = (3.0,)
    ordering: Ordering = "key"
    distribution: Distribution = "hash"
    batch: int = 0
    faults: tuple[Fault, ...] = FAULTS
    failing: float = 0.1
    poison: float = 0.0
    noise: float = 0.02
    prefetch: int = 2000
    concurrency: int = 4
    busy: float = 0.1
    burst: int = 1
    delayed: float = 0.0
    is_inbox: bool = False
    is_mqtt: bool = False
    has_outputs: bool = False
    retention: float = 3600.0

    def _aimed(self, choices: Choices) -> Plan:
        """A seed with an aim."""
        aim = choices.among(tuple(AIMS), "which aim")
        shapes: dict[str, Sequence[Any]] = {
            "members": (2, 3, 4), "partitions": (1, 2, 3), "keys": (2, 4, 12), "prefetch": (3, 10, 2000),
            "burst": (1, 10, 40), "concurrency": (1, 4, 16), "has_outputs": (False, True),
            "faults": ((), (), (), self.faults), **AIMS[aim],
        }  # fmt: skip
        aimed = replace(
            self, aim=aim, **{name: choices.among(options, f"aim {name}") for name, options in shapes.items()}
        )
        return aimed._crowded(choices)

    def _unwatched(self, choices: Choices) -> Plan:
        """A seed in which all watchers go. Leases are long: what is taken over before they end was found by looking."""
        shapes: dict[str, Sequence[Any]] = {
            "unwatched": ("die", "die", "sleep", "split"), "watchers": (1, 2, 3), "members": (5, 6, 7),
            "partitions": (3, 5, 8), "keys": (4, 12), "leases": ((15.0,), (30.0,)), "burst": (1, 10),
            "concurrency": (1, 4, 16), "has_outputs": (False, True), "faults": ((),), "noise": (0.0,),
        }  # fmt: skip
        return replace(self, **{name: choices.among(options, f"unwatched {name}") for name, options in shapes.items()})

    def _crowded(self, choices: Choices) -> Plan:
        """Few members watch all others."""
        if choices.unit("large group") >= self.large or self.members < 2:
            return self
        return replace(
            self, watchers=choices.among([1, 1, 2][: self.members], "watchers"), members=max(3, self.members)
        )

    @property
    def lease(self) -> float:
        """The longest of its leases."""
        return max(self.leases)

    @property
    def work(self) -> float:
        """Seconds that one worker needs for all messages, one at a time, each for as long as a handler may work."""
        return self.messages * self.busy

    @property
    def limited(self) -> float:
        """Seconds that the slowest rate needs for all messages if they are of one key and one name."""
        return max(self.messages * per / limit if limit else 0.0 for limit, per in (self.rate, self.group_rate))

    def varied(self, choices: Choices) -> Plan:
        """The same with what depends on the seed."""
        if choices.unit("resized") < self.resizes:
            # no deleted consumers: a resize hands partitions over, before their owner has found that out
            return replace(self, resizes=0.0, aims=0.0, audited=0.0).varied(choices)._grown(choices)
        if choices.unit("unwatched") < self.unwatches:
            return self._unwatched(choices)
        if choices.unit("aim") < self.aims and not self.mqtt:
            return self._aimed(choices)
        ordering, distribution, batch = choices.among(STYLES, "style")
        is_mqtt = choices.unit("mqtt") < self.mqtt
        is_inbox = is_mqtt or choices.unit("inbox") < self.inboxes
        if is_inbox:
            ordering, distribution, batch = "partition", "hash", 20
        is_shared = distribution == "shared" and not batch
        has_hook = not is_inbox and choices.among([False, True, False, False, False], "hook")
        has_fallback = not is_inbox and choices.unit("fallback") < 0.15
        rates = [*[(0, 0.0)] * 4, (1, 0.3), (2, 1.0), (5, 3.0), *[(0, 0.0)] * 3]
        rate = choices.among(rates, "rate") if ordering == "key" and not batch and not is_inbox else (0, 0.0)
        is_audited = distribution == "hash" and not is_inbox and choices.unit("audited") < self.audited
        # not with deleted consumers: what waits for its rate longer than retention keeps it would be lost
        has_group_rate = not (batch or is_inbox or is_audited) and choices.unit("group rate") < 0.15
        has_limits = distribution == "hash" and not (is_inbox or is_audited) and choices.unit("limits") < 0.3
        is_hot = ordering == "key" and not is_inbox and choices.unit("hot key") < self.hot
        varied = replace(
            self,
            faults=FEED_FAULTS if is_inbox else AUDITED_FAULTS if is_audited else self.faults,
            noise=0.0 if is_audited else self.noise,  # a slow start moves partitions later on
            schedule=0.0 if is_inbox else choices.among([0.0, 0.0, 0.0, 0.7], "schedule"),
            ordering=ordering,
            distribution=distribution,
            batch=batch,
            prefetch=choices.among([1, 3, 10, 2000], "prefetch"),
            concurrency=choices.among([1, 4, 16], "concurrency"),
            busy=choices.among([0.0, 0.02, 0.1, 3.0 if is_shared else 0.4], "busy"),
            burst=choices.among([1, 1, 10, 40], "burst"),
            keys=choices.among([1, 2, 4, 12], "keys"),
            partitions=choices.among([1, 2, 3, 5], "partitions"),
            members=choices.among([2, 3, 4], "members"),
            delayed=choices.among([0.0, 0.3], "delayed") if ordering == "none" else 0.0,
            poison=0.0 if is_inbox else 0.15 if has_hook or has_fallback else choices.among([0.0, 0.05], "poison"),
            expires=0.0 if is_inbox or is_audited else choices.among([0.5, 0.0, 0.0, 0.0, 0.0], "share of expiring"),
            has_hook=has_hook,
            has_fallback=has_fallback,
            rate=rate,
            group_rate=choices.among([(1, 0.2), (3, 0.5), (10, 2.0)], "rate of a name") if has_group_rate else (0, 0.0),
            calls=choices.among(CALLS, "calls") if has_limits and not batch else (0, False),
            holding=0.03 if has_limits and choices.unit("holds") < 0.5 else 0.0,
            is_inbox=is_inbox,
            is_mqtt=is_mqtt,
            uniques=0 if is_inbox or is_audited else choices.among([0, 0, 0, 0, 3], "uniques"),
            halts=not (is_inbox or is_audited) and choices.unit("halt") < 0.1,
            hangs=not (is_inbox or is_audited) and choices.unit("hang") < 0.1,
            cancels=0.0 if is_inbox or is_audited else choices.among([0.0, 0.0, 0.3], "cancels"),
            moves=0.0 if is_inbox or is_audited else choices.among([0.0, 0.0, 0.0, 0.0, 0.5], "moved messages"),
            has_outputs=not is_inbox and choices.unit("outputs") < self.outputs,
            leases=choices.among([(3.0,), (3.0,), (3.0, 15.0) if is_shared else (3.0, 6.0)], "leases"),
            # a deleted consumer's messages look settled until the audit has found them
            retention=3600.0 if is_audited else choices.among([3600.0, 5.0], "retention"),
        )
        may_be_batch = not (is_inbox or is_audited or has_fallback or varied.uniques)
        varied = replace(varied, in_batch=may_be_batch and choices.unit("in a batch") < self.batched)
        may_note = not (is_inbox or is_audited or has_fallback or varied.uniques or varied.moves)
        if may_note and choices.unit("notes") < self.noted:
            # most without what may make a step, or a message, come again: then nothing may
            losses = () if choices.unit("notes and losses") < 0.2 else ("reset", "failover")
            varied = replace(varied, has_notes=True, faults=tuple(each for each in varied.faults if each not in losses))
        if is_hot:
            varied = varied._hot(choices)
        if is_inbox and not is_mqtt and choices.unit("encoded letters") < self.encodes:
            return replace(varied, encoded="sealed")
        if not is_inbox and choices.unit("encoded") < self.encodes:
            varied = replace(varied, encoded=choices.among(["sealed", "stored"], "how encoded"))
        may_be_quiet = distribution == "hash" and ordering != "partition" and not (batch or is_inbox or is_audited)
        if may_be_quiet and choices.unit("quiet") < self.quiet:
            varied = replace(varied, has_quiet=True)
        may_gather = ordering == "key" and bool(batch) and not (is_inbox or is_audited)
        if may_gather and choices.unit("key calls") < self.digests:
            linger = choices.among([0.02, 0.5, 2.0], "linger")
            varied = replace(varied, linger=linger, batch=choices.among([2, 7, 100], "batch of a digest"))
            return varied._banded(choices)._crowded(choices)
        has_tenants = ordering != "partition" and distribution == "hash" and choices.unit("tenants") < self.tenanted
        varied = varied._tenanted(choices) if has_tenants else varied
        varied = varied if is_inbox or is_audited else varied._banded(choices)
        return varied._crowded(choices)

    def _tenanted(self, choices: Choices) -> Plan:
        """Messages have a tenant, and memory has room for few: a fifth of all seeds."""
        options: dict[str, Sequence[Any]] = {
            "prefetch": (4, 8, 16), "burst": (10, 40), "keys": (2, 4, 12, 40), "partitions": (1, 2),
            "messages": (80, 200), "read_ahead": (5, 100_000, 100_000),
        }  # fmt: skip
        return replace(
            self, has_tenants=True, **{name: choices.among(each, f"tenants {name}") for name, each in options.items()}
        )

    def _banded(self, choices: Choices) -> Plan:
        """The topic has bands: from the start, or they are added while all goes on."""
        if choices.unit("bands") >= self.banded:
            return self
        after = choices.among([0.0, 0.0, self.seconds / 4, self.seconds / 2], "when bands are added")
        return replace(self, bands=BANDS, bands_after=after)

    def _grown(self, choices: Choices) -> Plan:
        """The topic grows, and the server may lose everything."""
        return replace(
            self,
            growth=choices.among([(2,), (3,), (2, 2), (2, 3)], "growth"),
            grows_after=choices.between(0.5, self.seconds / 2, "grows after"),
            partitions=choices.among([1, 2, 3], "partitions that grow"),
            faults=(*self.faults, "wipe", "failover") if self.faults == FAULTS else self.faults,
        )

    def _hot(self, choices: Choices) -> Plan:
        """Most messages are of one key, and more than memory has room for: a fifth of all seeds."""
        options: dict[str, Sequence[Any]] = {
            "prefetch": (4, 8, 16), "concurrency": (4, 16), "busy": (0.02, 0.1), "burst": (10, 40), "keys": (2, 4, 12),
            "partitions": (1, 2), "messages": (80, 200), "read_ahead": (5, 100_000, 100_000),
        }  # fmt: skip
        return replace(
            self, is_hot=True, **{name: choices.among(each, f"hot {name}") for name, each in options.items()}
        )
