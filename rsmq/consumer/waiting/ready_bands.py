"""What is ready of a topic with bands: which message is next, and which slots are kept for a band. Pure."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from rsmq.consumer.waiting.limits import ConcurrencyLimit
from rsmq.consumer.waiting.named_flows import FlowName
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.consumer.waiting.turns import Turns
from rsmq.handler.bands import AGED_TURN, BandRules
from rsmq.model.clock import to_ms
from rsmq.model.message import Message
from rsmq.model.stream_id import parse_stream_id


class ReadyBands:
    """Messages, or `RawEntries`, that may start, of each band in order. To the queue it looks like a deque.

    The next one is of the highest band that has any, or by weight. Under strict every eighth start is for the oldest
    that waits longer than `aging`. A band whose slots are used up (`ReservedSlots`) is passed over. What `[0]` shows is
    what `popleft` takes.
    """

    def __init__(
        self,
        order: Sequence[str],
        rules: BandRules,
        now_ms: Callable[[], int],
        make: Callable[[], deque[Any]] = deque,
    ) -> None:
        """`make`: what keeps the messages of a band."""
        self.last = order[0]
        """The band of what was taken last."""
        self._admits: Callable[[str], bool] | None = None
        self._ready: dict[str, deque[Any]] = {band: make() for band in order}
        self._make = make
        self._rules = rules
        self._now_ms = now_ms
        self._aging_ms = None if rules.aging is None or rules.weights is not None else to_ms(rules.aging)
        self._starts = 0
        self._credit = dict.fromkeys(order, 0)
        self._shown: str | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """The bands, the highest first."""
        return tuple(self._ready)

    def reserve(self, admits: Callable[[str], bool]) -> None:
        """Slots are kept for bands: `admits` says whether the calling task may start a message of a band now."""
        self._admits = admits

    def counts(self) -> dict[str, int]:
        """How many are ready of each band. May be called from any thread."""
        return {
            band: sum(len(each.entries) if type(each) is RawEntries else 1 for each in list(ready))
            for band, ready in self._ready.items()
        }

    def lengths(self) -> list[tuple[str, int]]:
        """The same, `RawEntries` counted as one."""
        return [(band, len(ready)) for band, ready in self._ready.items()]

    # -- which one is next ----------------------------------------------------------------------------------------

    def next_band(self) -> str | None:
        """The band that is next, of those that have something and may start it."""
        bands = [band for band, ready in self._ready.items() if ready and (self._admits is None or self._admits(band))]
        if len(bands) < 2:
            return bands[0] if bands else None
        if self._rules.weights is not None:
            return max(bands, key=lambda band: self._credit[band] + self._weight(band))
        if self._aging_ms is not None and self._starts % AGED_TURN == AGED_TURN - 1:
            oldest = min(bands, key=lambda band: stored_ms(self._ready[band][0]))
            if stored_ms(self._ready[oldest][0]) < self._now_ms() - self._aging_ms:
                return oldest
        return bands[0]

    def _weight(self, band: str) -> int:
        assert self._rules.weights is not None
        return self._rules.weights.get(band, 1)

    def _took(self, band: str) -> None:
        """Count a start: of those that had something each has earned its weight, and this one has spent all of it."""
        self.last = band
        self._starts += 1
        if self._rules.weights is None:
            return
        spent = 0
        for each, ready in self._ready.items():
            if ready or each == band:
                self._credit[each] += self._weight(each)
                spent += self._weight(each)
            else:
                self._credit[each] = 0
        self._credit[band] -= spent

    # -- as a deque -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def __bool__(self) -> bool:
        return any(self._ready.values())

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable([list(ready) for ready in self._ready.values()])

    def __getitem__(self, first: int) -> Any:
        """What is next; None if no band may start anything."""
        self._shown = self._shown or self.next_band()
        return None if self._shown is None else self._ready[self._shown][first]

    def __setitem__(self, first: int, each: Any) -> None:
        self._ready[each.origin.band][first] = each

    def append(self, each: Any) -> None:
        """It is ready, last of its band."""
        self._shown = None
        self._of(each).append(each)

    def appendleft(self, each: Any) -> None:
        """It is ready, first of its band."""
        self._shown = None
        self._of(each).appendleft(each)

    def extend(self, some: Iterable[Any]) -> None:
        """All of them are ready, in this order."""
        for each in some:
            self.append(each)

    def extendleft(self, some: Iterable[Any]) -> None:
        """All of them are ready, each before the one before."""
        for each in some:
            self.appendleft(each)

    def popleft(self) -> Any:
        """The next one, which starts now. Raises IndexError if none may."""
        band, self._shown = self._shown or self.next_band(), None
        if band is None:
            raise IndexError("no band may start anything")
        taken = self._ready[band].popleft()
        self._took(band)
        return taken

    def remove(self, each: Any) -> None:
        """It does not start. Raises ValueError if it is not there."""
        self._shown = None
        self._of(each).remove(each)

    def clear(self) -> None:
        """Nothing is ready."""
        self._shown = None
        for ready in self._ready.values():
            ready.clear()

    def parts(self) -> list[deque[Any]]:
        """What keeps the messages of each band. May be called from any thread."""
        return list(self._ready.values())

    def part_of(self, each: Any) -> deque[Any]:
        """What keeps the messages of the band of a message."""
        return self._of(each)

    def _of(self, each: Any) -> deque[Any]:
        """The place of a message. A band that the order does not name (it was made meanwhile) is the lowest."""
        ready = self._ready.get(each.origin.band)
        if ready is None:
            ready = self._ready[each.origin.band] = self._make()
            self._credit[each.origin.band] = 0
        return ready

    def __repr__(self) -> str:
        return f"<ReadyBands {dict(self.lengths())}>"


class TurnsOfBands:
    """The turns of tenants in each band, for the queue as if they were one. `before`: those of all messages, from the
    time when the topic had no bands; what they hold they let go."""

    def __init__(self, bands: ReadyBands, before: Turns | TurnsOfBands) -> None:
        self._bands = bands
        self._before = before
        self._holders: dict[Message, Turns] = {}

    def _turns(self) -> list[Turns]:
        return cast("list[Turns]", self._bands.parts())

    def hold(self, message: Message) -> None:
        """It was taken, and waits for its rate."""
        turns = self._holders[message] = cast(Turns, self._bands.part_of(message))
        turns.hold(message)

    def let_go(self, message: Message) -> None:
        """It waits no more."""
        turns = self._holders.pop(message, None)
        (self._before if turns is None else turns).let_go(message)  # one in which nothing is ready is false

    def is_closed(self, flow: FlowName) -> bool:
        """Whether what this flow has waits for a rate, in one band. May be called from any thread."""
        return any(each.is_closed(flow) for each in self._turns())

    def waiting(self) -> Counter[FlowName]:
        """How many messages of each flow are here and may not start. May be called from any thread."""
        return sum((Counter(each.waiting()) for each in self._turns()), Counter[FlowName]())

    def ready(self) -> Counter[str | None]:
        """How many messages each tenant has here. May be called from any thread."""
        return sum((each.ready() for each in self._turns()), Counter[str | None]())


def stored_ms(each: Any) -> int:
    """When the server stored a message, or the first of raw entries."""
    entry_id = each.entries[0][0] if type(each) is RawEntries else each.entry_id
    return parse_stream_id(entry_id)[0]


class ReservedSlots(ConcurrencyLimit):
    """The slots of the pool where some are kept for a band: it starts at once, however long all others run.

    A band may use its own slots, and of the others as many as are free. `unreserved` is how many these are. `inner` is
    the limit over the group, if there is one.
    """

    def __init__(
        self,
        reserve: Mapping[str, int],
        unreserved: Callable[[], int],
        bands: Callable[[], ReadyBands],
        inner: ConcurrencyLimit | None,
    ) -> None:
        self._reserve, self._unreserved = reserve, unreserved
        self._ready, self._inner = bands, inner
        self._band_of: dict[asyncio.Task[Any] | None, str] = {}

    def _used(self, running: Counter[str]) -> int:
        """How many slots are in use that are kept for no band."""
        return sum(max(0, number - self._reserve.get(band, 0)) for band, number in running.items())

    def admits_band(self, band: str) -> bool:
        """Whether the calling task may start a message of a band now."""
        running, own = Counter(self._band_of.values()), self._band_of.get(asyncio.current_task())
        if own is not None:
            running[own] -= 1
        return running[band] < self._reserve.get(band, 0) or self._used(running) < self._unreserved()

    @property
    def is_full(self) -> bool:
        """Whether as many calls of the group run as may."""
        return self._inner is not None and self._inner.is_full

    def admits(self) -> bool:
        """Whether the calling task may start a message now."""
        return (self._inner is None or self._inner.admits()) and self._ready().next_band() is not None

    def room(self) -> int:
        """How many further tasks may start a message now."""
        count = self.startable()
        return count if self._inner is None or not count else min(count, self._inner.room())

    def startable(self) -> int:
        """How many further tasks could start a message if the group allowed it."""
        running = Counter(self._band_of.values())
        free, count = self._unreserved() - self._used(running), 0
        for band, ready in self._ready().lengths():
            kept = min(ready, max(0, self._reserve.get(band, 0) - running[band]))
            shared = max(0, min(ready - kept, free))
            free -= shared
            count += kept + shared
        return count

    def enter(self) -> None:
        """The calling task starts a message."""
        self._band_of[asyncio.current_task()] = self._ready().last
        if self._inner is not None:
            self._inner.enter()

    def leave(self, following: asyncio.Task[Any] | None = None) -> None:
        """The calling task starts nothing more for now. If it counts, `following` does in its place."""
        band = self._band_of.pop(asyncio.current_task(), None)
        if band is not None and following is not None:
            self._band_of[following] = band
        if self._inner is not None:
            self._inner.leave(following)

    def __repr__(self) -> str:
        return f"<ReservedSlots {dict(Counter(self._band_of.values()))}>"
