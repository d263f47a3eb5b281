"""What the inspector answers with: plain dataclasses, and how each comes from what the server has said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic_core import from_json

from rsmq.clock import from_epoch_ms
from rsmq.preflight import Finding
from rsmq.stream import as_dict
from rsmq.topic import Topic


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One stream. The ids are None while it is empty; `delayed` counts messages that are not due yet."""

    partition: int
    length: int
    first_id: str | None
    last_id: str | None
    delayed: int


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic, its groups, and what is in it."""

    topic: Topic
    length: int
    delayed: int
    groups: tuple[str, ...]
    partitions: tuple[PartitionState, ...]


@dataclass(frozen=True, slots=True)
class ShareState:
    """One partition as one group sees it.

    `owner` is empty when no lease runs (always, under shared distribution); `lease_left` is negative for a lease that
    ran out. `lag` is what was never delivered: an upper bound where the server cannot tell (`is_lag_exact`).
    """

    partition: int
    owner: str
    epoch: int
    lease_left: timedelta | None
    lag: int
    is_lag_exact: bool
    pending: int
    parked: int
    dead_letters: int
    consumers: int
    last_delivered_id: str


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group over all partitions; the counts are the sums of its shares."""

    topic: str
    name: str
    distribution: str
    is_paused: bool
    members: tuple[str, ...]
    lag: int
    is_lag_exact: bool
    pending: int
    parked: int
    dead_letters: int
    shares: tuple[ShareState, ...]


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member of one group. `heard_ago` is None when its heartbeat has run out, `partitions` are its leases."""

    topic: str
    group: str
    id: str
    handler: str
    concurrency: int
    heard_ago: timedelta | None
    is_present: bool
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerState:
    """What `rsmq doctor` looks at. `round_trip` is the shortest of a few."""

    url: str
    server: str
    round_trip: timedelta
    topics: int
    groups: int
    python: str
    redis_py: str
    hiredis: str
    is_hiredis_used: bool
    embedded_directory: str | None
    findings: tuple[Finding, ...]
    newer: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether a worker would refuse to start here."""
        return any(finding.level == "refuse" for finding in self.findings)


def partition_state(partition: int, reply: list[Any] | None, delayed: int) -> PartitionState:
    """From XINFO STREAM."""
    if reply is None:
        return PartitionState(partition, 0, None, None, delayed)
    info = as_dict(reply)
    first, last = (info[name][0].decode() if info[name] else None for name in ("first-entry", "last-entry"))
    return PartitionState(partition, info["length"], first, last, delayed)


def share_state(
    partition: int, row: Mapping[str, Any], lease: list[bytes | None], parked: int, dead_letters: int, now_ms: int
) -> ShareState:
    """From XINFO GROUPS and the lease. After a reset to the middle of a stream the server does not know the lag."""
    owner, epoch, until_ms = (part or b"" for part in lease)
    left = from_epoch_ms(int(until_ms)) - from_epoch_ms(now_ms) if owner and until_ms else None
    return ShareState(
        partition=partition,
        owner=owner.decode(),
        epoch=int(epoch or 0),
        lease_left=left,
        lag=row["length"] if row.get("lag") is None else row["lag"],
        is_lag_exact=row.get("lag") is not None,
        pending=row["pending"],
        parked=parked,
        dead_letters=dead_letters,
        consumers=row["consumers"],
        last_delivered_id=row["last-delivered-id"].decode(),
    )


def read_info(info: bytes | None) -> dict[str, Any]:
    """What a member tells about itself; another client's may be anything."""
    try:
        told = from_json(info or b"{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
