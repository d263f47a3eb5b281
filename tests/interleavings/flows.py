"""What a member keeps only as ids: the flows of its lane, as in `rsmq.consumer.waiting.flows`, and its calls for them.

A message behind a taken key, or of a name that has something in memory, is put aside: only its number is kept, until
`read_again` brings it. `Rules.room` says how many of a key or name may wait in memory. `Rules.without` names a rule
that is left out, for a search that must find what the rule is good for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tests.interleavings.commands import number_of
from tests.interleavings.rules import Rules
from tests.interleavings.world import AWAY, DONE, HANDLED, PARKED, READY, SETTLING, Item, Lane

OVER: Final = (DONE, SETTLING, HANDLED)


def arrived(lane: Lane, item: Item, rules: Rules, *, is_read_again: bool = False) -> Lane:
    """A message is read, taken over, or leaves the flow of its name."""
    number, key = item.number, rules.keys[item.number - 1]
    name = rules.names[number - 1] if rules.names else ""
    flow = "" if is_read_again else _flow_of(lane, key, rules)
    if not flow and _is_taken(lane, key, rules):
        behind = [each for each in lane.items if rules.keys[each.number - 1] == key and not each.flow]
        is_far = any(each.phase == AWAY for each in behind) or sum(each.phase == READY for each in behind) >= (
            rules.room or 0
        )
        if is_read_again and "the key of what leaves a name" in rules.without:
            return lane._replace(items=(item, *lane.items))
        return _put_away(lane, item, "", rules) if is_far else lane._replace(items=(*lane.items, item))
    if not flow and name and not is_read_again:
        of_name = [each for each in lane.items if rules.names[each.number - 1] == name]
        is_crowded = any(each.phase == READY or each.flow == name for each in of_name)
        flow = name if is_crowded else ""
    return _put_away(lane, item, flow, rules) if flow else lane._replace(items=(*lane.items, item))


def _is_taken(lane: Lane, key: str, rules: Rules) -> bool:
    """Whether a message of a key runs, or is ready, parked, or waits behind it as an id."""
    of_key = [each for each in lane.items if rules.keys[each.number - 1] == key and each.phase not in OVER]
    waits = "keys that only wait" not in rules.without
    return bool(key) and any(not each.flow and (waits or each.phase != AWAY) for each in of_key)


def _flow_of(lane: Lane, key: str, rules: Rules) -> str:
    """The name in whose flow the last message of a key waits."""
    if not key or "the last place of a key" in rules.without:
        return ""
    flows = [each.flow for each in lane.items if each.flow and rules.keys[each.number - 1] == key]
    return flows[-1] if flows else ""


def is_behind(lane: Lane, number: int, rules: Rules) -> bool:
    """Whether a message has earlier ones of its key here, so it is not parked by itself."""
    key = rules.keys[number - 1]
    return _is_taken(lane, key, rules) or bool(_flow_of(lane, key, rules))


def _put_away(lane: Lane, item: Item, flow: str, rules: Rules) -> Lane:
    """Keep only the number. A first delivery is to be told to the server; the others keep their counts."""
    number = item.number
    if not item.is_again or "counts of what was charged" in rules.without:
        lane = lane._replace(aside=(*lane.aside, number))
    else:
        lane = lane._replace(kept=max(lane.kept, number))
    return lane._replace(items=(*lane.items, Item(number, 0, AWAY, flow=flow)))


# -- calls --------------------------------------------------------------------------------------------------------


def next_call(lane: Lane, rules: Rules) -> tuple[str, tuple[Any, ...], Lane] | None:
    """What to ask the server next: kind, arguments, and the lane that waits for the answer."""
    call = lane.calls + 1
    if lane.aside:
        return "put_aside", (call, *lane.aside), lane._replace(calls=call)
    asked = _page(lane, rules)
    if not asked:
        return None
    return "read_again", (call, lane.kept, *asked), lane._replace(calls=call, asked=asked)


def _page(lane: Lane, rules: Rules) -> tuple[int, ...]:
    """The first of each flow that has nothing ready in memory."""
    asked, most = list[int](), max(1, rules.room or 0)
    away = [each for each in lane.items if each.phase == AWAY]
    for name in sorted({each.flow for each in away if each.flow}):
        if not any(each.phase == READY and rules.names[each.number - 1] == name for each in lane.items):
            asked += [each.number for each in away if each.flow == name][:most]
    for key in sorted({rules.keys[each.number - 1] for each in away if not each.flow}):
        of_key = [each for each in lane.items if rules.keys[each.number - 1] == key and not each.flow]
        if not any(each.phase in (READY, PARKED) for each in of_key):
            asked += [each.number for each in of_key if each.phase == AWAY][:most]
    return tuple(asked)


def put_aside(lane: Lane, reply: list[Any], numbers: Iterable[int]) -> Lane:
    """The server knows that these have not started, or has made dead letters of them."""
    lane = lane._replace(aside=tuple(each for each in lane.aside if each not in numbers))
    return _without(lane, [number_of(each) for ids in reply[1:] for each in ids])


def read_again(lane: Lane, reply: list[Any], rules: Rules) -> Lane:
    """Bodies have come. The server has lost writes if it does not know one of them as delivered."""
    asked, lane = lane.asked, lane._replace(asked=())
    rows = {number_of(row[0]): row[1:] for row in reply[1:]}
    if any(row[0] == b"UNDELIVERED" for row in rows.values()):
        return lane._replace(is_held=False)
    for number in [each for each in asked if each in rows]:
        was = next(item for item in lane.items if item.number == number)
        if len(rows[number]) == 1:
            lane = _without(lane, [number])
            continue
        is_first = number > lane.kept
        item = Item(number, 1 if is_first else rows[number][0] + 1, is_again=not is_first)
        if was.flow:
            lane = arrived(_without(lane, [number]), item, rules, is_read_again=True)
        else:
            lane = lane._replace(items=tuple(item if each is was else each for each in lane.items))
    return lane


def given_back(lane: Lane, rules: Rules) -> tuple[Lane, list[tuple[int, int]]]:
    """All ids are forgotten. Returns those that the server may believe to have started, with their attempt."""
    unsure = {*lane.aside, *(each for each in lane.asked if each > lane.kept)}
    if "what a call has asked for" in rules.without:
        unsure = set(lane.aside)
    rest = tuple(each for each in lane.items if each.phase != AWAY)
    return lane._replace(items=rest, aside=(), asked=()), [(number, 1) for number in sorted(unsure)]


def _without(lane: Lane, numbers: Iterable[int]) -> Lane:
    return lane._replace(items=tuple(each for each in lane.items if each.number not in numbers))


# -- what must hold -----------------------------------------------------------------------------------------------


def not_at_rest(lane: Lane, counts: dict[int, int]) -> list[int]:
    """First deliveries that wait as ids, told to the server, and that it counts as started all the same."""
    told = [each.number for each in lane.items if each.phase == AWAY and each.number not in (*lane.aside, *lane.asked)]
    return [number for number in told if number > lane.kept and counts.get(number, 0) > 0]
