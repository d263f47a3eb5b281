"""A message whose payload is encoded already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class EncodedMessage(NamedTuple):
    """What a row of an outbox says: where a message goes, and what is stored there."""

    topic: str
    data: bytes
    type: str
    """Its content type."""
    id: str
    key: str
    headers: Mapping[str, str] | None
    extra: tuple[str, ...]
    """Further fields of its entry, each with its value."""
    due: str
    """When it is to be delivered, as `due_time` writes it; empty: at once."""
    band: str | None
    wait_replicas: int

    def __repr__(self) -> str:
        return f"<EncodedMessage {self.id} for {self.topic} bytes={len(self.data)}>"
