"""The history of hours: a sample a minute, in a stream of the server, so that a restart does not lose it."""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import anyio
import anyio.abc
from pydantic import Field, TypeAdapter

from rsmq.errors import RsmqError
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.state import Snapshot
from rsmq.inspector.trend import Board, compare
from rsmq.model.clock import EPOCH, from_epoch_ms, now_ms
from rsmq.model.keys import Keys
from rsmq.model.record import moment
from rsmq.redis.client.connector import Client

log = logging.getLogger("rsmq.dashboard")

EVERY: Final = 60
"""Seconds between two samples."""
KEPT: Final = 24 * 60
MOST_RELEASES: Final = 5
"""Of a group in a minute."""
GAP: Final = timedelta(seconds=2.5 * EVERY)
"""Between two samples of one unbroken line."""

MOST_BYTES: Final = 16 << 20
"""A stored minute that is larger unpacked is none."""

GROUP_FIELDS: Final = ("settled", "unread", "ready", "running", "waiting", "dead letters", "failed", "retried")
FIRST_FIELDS: Final = 6
"""Fields that each minute has, also those that earlier versions have stored."""


@dataclass(frozen=True, slots=True)
class HistoryMinute:
    """One minute: the rate of each topic, and of each group GROUP_FIELDS. What has nothing to say is left out.

    `starts`: of each group, how many of its processes have started in this minute; `releases`: which versions.
    """

    at: datetime
    topics: dict[str, float | None]
    groups: dict[str, list[float | None]]
    starts: dict[str, int] = field(default_factory=dict)
    releases: dict[str, list[str]] = field(default_factory=dict)

    def total(self, name: str, seen: Collection[str], group: str | None = None) -> float | None:
        """The sum of a field over the topics that a visitor sees, or of one group."""
        if name == "in":
            return total(value for topic, value in self.topics.items() if topic in seen)
        at = GROUP_FIELDS.index(name)
        return total(
            values[at] if at < len(values) else None for each, values in self.groups.items() if is_of(each, seen, group)
        )

    def started(self, seen: Collection[str], group: str | None = None) -> int:
        """How many processes have started, at least: one that serves several groups counts once."""
        return max((number for each, number in self.starts.items() if is_of(each, seen, group)), default=0)

    def released(self, seen: Collection[str], group: str | None = None) -> list[str]:
        """The versions of what has started."""
        return sorted({name for each, names in self.releases.items() if is_of(each, seen, group) for name in names})


def is_of(name: str, seen: Collection[str], group: str | None) -> bool:
    """Whether `topic/group` is among the topics that are seen, and is the group, if one is wanted."""
    return name.partition("/")[0] in seen and group in (None, name.partition("/")[2])


def total(values: Any) -> float | None:
    """The sum of the known ones; None if none of some is known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known or not found else None


def sample_of(at: datetime, board: Board) -> HistoryMinute:
    """A board as it is kept."""
    groups: dict[str, list[float | None]] = {}
    for each in board.groups:
        out = None if each.rate_out is None else round(each.rate_out, 2)
        values: list[float | None] = [
            out,
            each.unread,
            each.work.ready,
            each.work.running,
            each.work.waiting,
            each.dead_letters,
            per_second(each.new_calls.failed, board.span),
            per_second(each.new_calls.retried, board.span),
        ]
        if any(value != 0 for value in values):
            groups[f"{each.topic}/{each.name}"] = values
    rates = {each.name: None if each.rate_in is None else round(each.rate_in, 2) for each in board.topics}
    starts, releases = starts_of(at, board)
    return HistoryMinute(at, {name: value for name, value in rates.items() if value != 0}, groups, starts, releases)


def per_second(number: int, span: timedelta | None) -> float | None:
    """A rate, if the time is known."""
    return round(number / span.total_seconds(), 3) if span else None


def starts_of(at: datetime, board: Board) -> tuple[dict[str, int], dict[str, list[str]]]:
    """How many processes of each group have started in the minute before this one, and of which versions: by now all
    have told it."""
    found, releases = Counter[str](), dict[str, set[str]]()
    for each in board.groups:
        for member in each.members:
            started, name = member.process.started, f"{each.topic}/{each.name}"
            if started is not None and at - timedelta(seconds=EVERY) <= started < at:
                found[name] += 1
                if member.process.release:
                    releases.setdefault(name, set()).add(member.process.release)
    return dict(found), {name: sorted(some)[:MOST_RELEASES] for name, some in releases.items()}


Figure = Annotated[float, Field(allow_inf_nan=False)] | None
Groups = dict[str, Annotated[list[Figure], Field(min_length=FIRST_FIELDS)]]
Starts = dict[str, Annotated[int, Field(ge=0)]]
READER: Final = TypeAdapter(
    tuple[dict[str, Figure], Groups, Starts, dict[str, list[str]]]
    | tuple[dict[str, Figure], Groups, Starts]
    | tuple[dict[str, Figure], Groups]
)


class HistorySampler:
    """Takes a sample a minute. Of several dashboards the first one stores the minute."""

    def __init__(self, client: Client, keys: Keys, inspector: Inspector) -> None:
        self._client = client
        self._key = keys.history
        self._inspector = inspector
        self._before: Snapshot | None = None
        self._is_stored = True
        self.samples: deque[HistoryMinute] = deque(maxlen=KEPT)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read what is stored, then sample until cancelled."""
        task_status.started()
        is_read = False
        while True:
            try:
                if not is_read:
                    await self.load()
                    is_read = True
                await self.take()
            except RsmqError as error:
                self._before = None
                log.debug("no history: %s", error)
            except Exception:
                log.exception("unexpected error in the history")
            await anyio.sleep(EVERY - now_ms() / 1000 % EVERY)

    async def load(self) -> None:
        """Read the samples of other dashboards, and of this one before its restart."""
        rows = await self._client.execute_command("XREVRANGE", self._key, "+", "-", "COUNT", KEPT)
        self.samples = deque((read(*row) for row in reversed(rows)), maxlen=KEPT)

    async def take(self) -> None:
        """One sample. The first snapshot has no rates, so it makes none."""
        after = await self._inspector.snapshot()
        before, self._before = self._before, after
        if before is not None:
            minute = now_ms() // (EVERY * 1000) * EVERY * 1000
            found = sample_of(from_epoch_ms(minute), compare(before, after))
            self.samples.append(found)
            await self._store(minute, found)

    async def _store(self, minute: int, found: HistoryMinute) -> None:
        packed = zlib.compress(json.dumps([found.topics, found.groups, found.starts, found.releases]).encode())
        try:
            await self._client.execute_command("XADD", self._key, "MAXLEN", KEPT, f"{minute}-0", "z", packed)
        except RsmqError as error:
            is_stored = "equal or smaller" in str(error)  # another dashboard was faster
            if self._is_stored and not is_stored:
                log.warning("the history is kept in memory only: %s", error)
            self._is_stored = is_stored


def read(entry_id: bytes, fields: list[bytes]) -> HistoryMinute:
    """A stored sample; one that cannot be read is empty."""
    at = moment(entry_id.partition(b"-")[0]) or EPOCH
    try:
        unpacker = zlib.decompressobj()
        topics, groups, *starts = READER.validate_json(unpacker.decompress(fields[1], MOST_BYTES))
    except (ValueError, zlib.error, IndexError):  # ValidationError is a ValueError
        return HistoryMinute(at, {}, {})
    return HistoryMinute(at, topics, groups, *starts)
