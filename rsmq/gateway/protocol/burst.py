"""Packets that come together and differ little: a busy client sends most of its messages and acknowledgements so.

Whatever is longer than usual, or not as it should be, is left for `decode`.
"""

from __future__ import annotations

from typing import Final

from rsmq.gateway.protocol.packet import NO_ID, V5, Publish

PUBLISH_QOS_1: Final = 0x32
"""The first byte of a PUBLISH of QoS 1 that is not retained."""
NOT_DUP: Final = 0xF7
SHORTEST: Final = 6
"""Bytes of a PUBLISH of QoS 1 with a topic name of one character."""
PUBACK_FIRST: Final = 0x40


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
    payloads, packet_ids = first.payloads, first.packet_ids
    while room > 0 and size - at > SHORTEST:
        if data.startswith(head, at):
            end, middle = at + whole, at + len(head)
        elif data[at] & NOT_DUP != PUBLISH_QOS_1:
            break
        else:
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
        if level == V5:
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
    found = list[int]()
    last = len(data) - 4
    while at <= last and data[at] == PUBACK_FIRST and data[at + 1] == 2:
        packet_id = data[at + 2] << 8 | data[at + 3]
        if not packet_id:
            break
        found.append(packet_id)
        at += 4
    return found
