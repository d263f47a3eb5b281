"""Messages with a unique name: never two alive at once, and no name is held for ever by what has ended."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import anyio

from rsmq import Broker
from rsmq.errors import Malformed
from rsmq.model.packing import unpack_fields
from rsmq.model.stream_id import parse_stream_id
from tests.chaos.checker import Name
from tests.simulation.plan import GROUP, TOPIC

if TYPE_CHECKING:
    from tests.simulation.run import Run

ACCEPTED: Final = 6
"""So many messages of each name are stored, one after the other: a name that is never free ends no run."""


class Uniques:
    """Publishes under a few names, each with a key of its own, and asks the server what is alive.

    Two tasks publish under each name. A message is accepted when its publish says that it is new. Then at most one of
    its name may be delayed, undelivered, pending or parked, unless it is cancelled; until `started`, at most one may be
    delayed or undelivered.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._published = dict[str, set[Name]]()

    async def publish(self, broker: Broker, unique: str, publisher: str) -> None:
        """Store messages of one name until enough of them are accepted."""
        key = unique + publisher
        choices, world = self._run.world.choices, self._run.world
        accepted = n = 0
        until = choices.among(["settled", "settled", "started"], f"until {unique}")
        while accepted < ACCEPTED:
            name = (key, n)
            options: dict[str, Any] = {"on_conflict": choices.among(["keep", "replace", "extend"], f"conflict {name}")}
            if options["on_conflict"] == "extend" or choices.unit(f"unique delayed {name}") < 0.3:
                options["delay"] = timedelta(seconds=choices.between(0.1, 1, f"delay {name}"))
            options |= self._run.expiries.options(name, options.get("delay"))
            await anyio.sleep(choices.between(0, 0.5, f"unique pause {name}"))
            self._published.setdefault(unique, set()).add(name)
            stored = await self._run.store(broker, name, key=unique, unique=unique, until=until, **options)
            n += 1
            if stored is not None and stored.is_new is False:
                world.note(f"   {unique} is held: {name} is not stored")
            elif stored is not None:
                accepted += 1
                self._accept(broker, name, unique, until)

    def _accept(self, broker: Broker, name: Name, unique: str, until: str) -> None:
        run = self._run
        if not run.was_reset and not run.has_lost_writes:  # then what had ended may come again
            alive = self._alive(broker, self._published[unique])
            if until == "started":
                alive = [(other, state) for other, state in alive if state in ("delayed", "undelivered")]
            if len(alive) > 1:
                run.violate(f"{name} is stored, and alive are {sorted(alive)}")
        run.cancels.open |= self._published[unique] - {name}  # it was replaced, or has ended before

    def _alive(self, broker: Broker, wanted: set[Name]) -> list[tuple[Name, str]]:
        """Those of these messages that are not over, by what the server holds."""
        found, keys, ask, begun = list[tuple[Name, str]](), broker.keys, self._run.network.ask, self._run.begun
        for partition in self._run.numbers:
            at = (TOPIC, partition)
            for packed in ask("ZRANGE", keys.delayed(*at), 0, -1):
                try:
                    name = self._name_in(unpack_fields(packed))
                except Malformed:
                    continue
                found += [(name, "delayed")] if name in wanted else []
            rows = ask("XINFO", "GROUPS", keys.stream(*at))
            if isinstance(rows, Exception) or not rows:
                continue
            last = dict(zip(rows[0][::2], rows[0][1::2], strict=True))[b"last-delivered-id"]
            marks = ask("HGETALL", keys.cancels(*at, GROUP))
            pending = {row[0] for row in ask("XPENDING", keys.stream(*at), GROUP, "-", "+", 10_000)}
            parked = {each.partition(b"|")[0] for each in ask("ZRANGE", keys.retry(*at, GROUP), 0, -1)}
            for entry_id, fields in ask("XRANGE", keys.stream(*at), "-", "+"):
                name = self._name_in(fields)
                is_marked = entry_id in marks and name not in begun  # what is replaced never begins
                if name not in wanted:
                    continue
                is_undelivered = parse_stream_id(entry_id) > parse_stream_id(last)
                state = "undelivered" if is_undelivered else "parked" if entry_id in parked else "pending"
                if not is_marked and (state != "pending" or entry_id in pending):
                    found.append((name, state))
        return found

    def _name_in(self, fields: list[bytes]) -> Name:
        """Which message it is."""
        order = self._run.encoded.order(dict(zip(fields[::2], fields[1::2], strict=True)))
        return order["key"], order["n"]
