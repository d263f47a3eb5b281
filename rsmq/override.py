"""What `Settings(...)` and `Broker(...)` take: each setting by name, so that a type checker sees a wrong one.

A test holds it to the fields of the settings, which have the defaults and the reasons.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict


class Overrides(TypedDict, total=False):
    """All of them, none required. Durations also as ISO 8601 (`PT6S`), sizes also with a unit (`256KiB`)."""

    url: str | None
    allow_insecure: bool
    prefix: str
    partitions: int
    connect_timeout: timedelta | str
    command_timeout: timedelta | str
    unavailable_timeout: timedelta | str
    block: timedelta | str | None
    lease_ttl: timedelta | str
    heartbeat: timedelta | str | None
    presence_grace: timedelta | str
    presence_interval: timedelta | str
    stop_grace: timedelta | str
    prefetch: int
    prefetch_bytes: int | str
    payload_limit: int | str
    dedup_window: timedelta | str
    delay_resolution: timedelta | str
    recovery_batch: int
    retention_age: timedelta | str
    retention_length: int
    retention_interval: timedelta | str
    max_length: int
    on_full: Literal["reject", "trim"]
    dlq_length: int
    inbox_ttl: timedelta | str
    inbox_limit: int
    inbox_poll: timedelta | str
    metrics: str | None
    stall_limit: timedelta | str
    preflight: Literal["refuse", "warn"]
