"""Packets that come together and differ little: a busy client sends most of its messages and acknowledgements so.

Whatever is longer than usual, or not as it should be, is left for `decode`.
"""

from __future__ import annotations

import re
from typing import Final

from rsmq.gateway.protocol.packet import NO_ID, V5, Publish

PUBLISH_QOS_1: Final = 0x32
"""The first byte of a PUBLISH of QoS 1 that is not retained."""
NOT_DUP: Final = 0xF7
SHORTEST: Final = 6
"""Bytes of a PUBLISH of QoS 1 with a topic name of one character."""
PUBACK_FIRST: Final = 0x40
PUBACKS: Final = re.compile(rb"(?:\x40\x02..)+", re.DOTALL)
"""PUBACKs of four bytes each."""


def read_more(first: Publish, data: bytes, start: int, at: int, limit: int, level: int, room: int) -> int:
    """Add the messages behind a message of QoS 1 to it, at most `room`. Returns where the next packet begins.

    The first one is at `start`, those behind it begin at `at`. Nearly all have the same topic name and length: then
    this is all that is done for each of them.
    """
    body = start + 2
    while data[body - 1] & 128:
        body += 1
    front = data[body : body + 2 + (data[body] << 8 | data[body + 1])]
    head, width, whole, size = data[start : body + len(front)], len(front), at - start, len(data)
    id_at, is_v5 = len(head), level == V5
    behind_id = id_at + 2
    payload_at = behind_id + is_v5
    payloads, packet_ids = first.payloads, first.packet_ids
    while room > 0 and size - at > SHORTEST:
        while room > 0 and data.startswith(head, at):  # each part is where it is in the first one
            end, packet_id = at + whole, data[at + id_at : at + behind_id]
            if end > size or packet_id == NO_ID or (is_v5 and data[at + behind_id]):
                return at
            payloads.append(data[at + payload_at : end])
            packet_ids.append(packet_id)
            at, room = end, room - 1
        if room <= 0 or size - at <= SHORTEST or data[at] & NOT_DUP != PUBLISH_QOS_1:
            break
        length, middle = data[at + 1], at + 2
        if length & 128:
            high = data[middle]
            if not 0 < high < 128:
                break
            length, middle = length & 127 | high << 7, middle + 1
        end = middle + length
        if end - at > limit or not data.startswith(front, middle):
            break
        middle += width
        packet_id = data[middle : middle + 2]
        middle += 2
        if end > size or packet_id == NO_ID:
            break
        if is_v5:
            if middle >= end or data[middle]:
                break
            middle += 1
        if middle > end:
            break
        payloads.append(data[middle:end])
        packet_ids.append(packet_id)
        at, room = end, room - 1
    return at


def read_pubacks(data: bytes, at: int) -> list[int]:
    """The packet ids of the PUBACKs that begin at `at` and have nothing but an id, each four bytes long."""
    match = PUBACKS.match(data, at)
    if match is None:
        return []
    run = match[0]
    found = [high << 8 | low for high, low in zip(run[2::4], run[3::4], strict=True)]
    return found[: found.index(0)] if 0 in found else found
