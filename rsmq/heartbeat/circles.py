"""Topics that wait for each other: handlers publish into full topics whose handlers publish back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rsmq.model.keys import Keys
from rsmq.model.member import read_info
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import MEASURE_MEMBERS
from rsmq.redis.streams import group_names

WAITS_FOR: Final = "outputs_wait_for"
"""What members report in their vitals: the full topics for which outputs of their messages wait."""
MOST_TOPICS: Final = 50


def targets_of(vitals: Mapping[str, Any]) -> list[str]:
    """The topics in the vitals of a member. Another client may have written anything there."""
    found = vitals.get(WAITS_FOR)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def circle_through(source: str, waits: Mapping[str, Iterable[str]]) -> list[str]:
    """The topics of a shortest circle, from `source` on; empty if it is in none. `waits`: what each topic waits for."""
    paths, seen = deque([[source]]), {source}
    while paths:
        path = paths.popleft()
        for target in sorted(waits.get(path[-1], ())):
            if target == source:
                return path
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return []


async def standing_circle(client: Client, keys: Keys, source: str, target: str) -> list[str]:
    """The topics of a circle in which `source` waits for `target`, as the members report it; empty: there is none."""
    waits, left = {source: {target}}, [target]
    while left and len(waits) < MOST_TOPICS:
        topic = left.pop()
        if topic not in waits:
            waits[topic] = await waits_of(client, keys, topic)
            left += waits[topic]
    return circle_through(source, waits)


async def waits_of(client: Client, keys: Keys, topic: str) -> set[str]:
    """The full topics for which outputs of a topic's messages wait, in any of its groups."""
    found = set[str]()
    for group in await group_names(client, keys, topic, 0):
        names = (keys.group(topic, group), keys.members(topic, group), keys.alive(topic, group, ""))
        reply = await MEASURE_MEMBERS(client, (*names, keys.vitals(topic, group, "")))
        for at in range(4, len(reply), 4):
            found.update(targets_of(read_info(reply[at + 3])))
    return found
