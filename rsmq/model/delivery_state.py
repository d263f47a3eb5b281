"""What a member does with a message that it has read: its answer to `broker.look`, and the question."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal, NamedTuple, get_args

from rsmq.model.member import read_info
from rsmq.model.stream_id import is_stream_id

DeliveredState = Literal[
    "running",
    "ready",
    "waiting_for_key",
    "waiting_for_turn",
    "waiting_for_rate",
    "waiting_for_permit",
    "held",
]
"""It runs, starts when a slot is free, or waits: for an earlier message of its key, the turn of its tenant, a rate, a
permit, or the end of a hold."""
LARGEST_COUNT: Final = 10**9
LARGEST_MS: Final = 10**15
LONGEST_REQUEST: Final = 64


@dataclass(frozen=True, slots=True)
class DeliveryState:
    """The state of one message in the member that has it.

    `before`: how many messages start before it, of those that wait for the same thing in its partition; None if that
    is not known. `name`: that of the rate, permit or hold, empty for one of all messages; of a message that runs
    the permit that its handler waits for. `tenant`: whose flow it
    waits in. `until_ms`: the end of the hold, by the server's clock.
    """

    state: DeliveredState
    before: int | None = None
    name: str | None = None
    tenant: str | None = None
    until_ms: int | None = None

    def pack(self) -> str:
        """As JSON, without what is not known."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


def read_delivery_state(packed: bytes) -> DeliveryState | None:
    """From JSON. None for what no member has written: another client may have."""
    found = read_info(packed)
    if found.get("state") not in get_args(DeliveredState):
        return None
    before, until_ms = _whole(found.get("before"), LARGEST_COUNT), _whole(found.get("until_ms"), LARGEST_MS)
    return DeliveryState(found["state"], before, _text(found.get("name")), _text(found.get("tenant")), until_ms)


def _whole(value: object, largest: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= largest else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


class DeliveryQuestion(NamedTuple):
    """Where the message with this stream id is. The answer goes to the reply key of `request`."""

    partition: int
    entry_id: bytes
    request: str

    def pack(self) -> str:
        """As it is published in the channel of the group."""
        return f"look {self.partition} {self.entry_id.decode()} {self.request}"


def read_question(packed: bytes) -> DeliveryQuestion | None:
    """None for anything else, which a newer version may publish."""
    word, *parts = packed.decode(errors="replace").split(" ")
    if word != "look" or len(parts) != 3:
        return None
    partition, entry_id, request = parts
    is_readable = partition.isascii() and partition.isdecimal() and len(partition) < 6
    if (
        not is_readable
        or not is_stream_id(entry_id.encode())
        or not request.isalnum()
        or len(request) > LONGEST_REQUEST
    ):
        return None
    return DeliveryQuestion(int(partition), entry_id.encode(), request)
