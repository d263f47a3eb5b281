"""Topic names and topic filters of MQTT: what is valid, and what matches. Not the topics of rsmq.

What is not valid is a malformed packet. The reason codes 0x8F and 0x90 are for those that are correctly formed and not
accepted.
"""

from __future__ import annotations

from typing import Final

from rsmq.gateway.protocol.packet import MalformedPacket, ProtocolError

SHARE: Final = "$share/"


def check_topic_name(name: str) -> None:
    """Raise RefusedPacket for a name to which nothing can be published."""
    if not name:
        raise ProtocolError("the topic name is empty")
    if "+" in name or "#" in name:
        raise MalformedPacket("the topic name has a wildcard")


def is_valid_filter(text: str) -> bool:
    """Whether it is a topic filter: `+` fills a level, and `#` the last one. Without the prefix of a share."""
    if not text:
        return False
    if "+" not in text and "#" not in text:
        return True
    levels = text.split("/")
    return all(level == "+" or "+" not in level for level in levels) and (
        "#" not in text or (text.count("#") == 1 and levels[-1] == "#")
    )


def split_share(text: str) -> tuple[str, str]:
    """The share name (empty: not shared) and the filter. Raises MalformedPacket for a wrong share."""
    if not text.startswith(SHARE):
        return "", text
    name, slash, rest = text[len(SHARE) :].partition("/")
    if not name or not slash or not rest or "+" in name or "#" in name:
        raise MalformedPacket("the shared subscription has no valid name or filter")
    return name, rest


def check_filter(text: str) -> None:
    """Raise MalformedPacket for a filter that does not exist, with or without the prefix of a share."""
    _, rest = split_share(text)
    if not is_valid_filter(rest):
        raise MalformedPacket("the topic filter is not valid")


def is_within(text: str, levels: int, size: int) -> bool:
    """Whether a topic name or filter has at most so many levels and bytes."""
    return text.count("/") < levels and (len(text) * 4 <= size or len(text.encode()) <= size)


def matches(pattern: str, name: str) -> bool:
    """Whether a filter matches a topic name. A wildcard in the first level does not match a name that starts with $."""
    if name[:1] == "$" and pattern[:1] in ("+", "#"):
        return False
    wanted, given = pattern.split("/"), name.split("/")
    for at, level in enumerate(wanted):
        if level == "#":
            return True
        if at >= len(given) or (level != "+" and level != given[at]):
            return False
    return len(wanted) == len(given)


def covers(wide: str, narrow: str) -> bool:
    """Whether everything that `narrow` matches is matched by `wide`, too."""
    if narrow[:1] == "$" and wide[:1] in ("+", "#"):
        return False
    wanted, given = wide.split("/"), narrow.split("/")
    for at, level in enumerate(wanted):
        if level == "#":
            return True
        if at >= len(given) or given[at] == "#" or (level != "+" and level != given[at]):
            return False
    return len(wanted) == len(given)
