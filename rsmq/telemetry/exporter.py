"""The exporter: metrics of all topics and groups for Prometheus, read from the server: no single worker knows them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, get_args
from urllib.parse import parse_qsl

from pydantic_core import to_json

from rsmq.errors import ConfigError, RsmqError
from rsmq.inspector.observer import Observer
from rsmq.inspector.schedules import ScheduleState
from rsmq.inspector.state import GroupState, MemberState, TopicState, most_owners
from rsmq.inspector.trend import members_of, stalled, untold, work_of
from rsmq.model.clock import monotonic
from rsmq.model.held_name import HoldKind
from rsmq.telemetry import metric
from rsmq.telemetry.endpoint import page_of
from rsmq.telemetry.listener import Address, Answer, Listener
from rsmq.telemetry.metric import Sample
from rsmq.telemetry.scaler import NotKnown, Scaler

OWNING = ("hash", "")
"""Distributions in which each partition has an owner; of a group that no worker has joined it is not known."""

log = logging.getLogger("rsmq.exporter")

FRESH: Final = 1.0
"""Seconds for which an answer serves several scrapers: the server is asked once a second at most."""
MOST_SCHEDULES: Final = 200
"""Schedules with metrics."""
PATIENCE: Final = 9.0
"""Seconds to ask the server; Prometheus itself gives up after 10."""


class Exporter:
    """Asks the server when it is scraped, in the event loop, and answers from threads.

    When the server does not answer, the page has `rsmq_up 0` and no other metric of rsmq: no value is ever stale.
    """

    def __init__(self, take: Callable[[], Awaitable[Sequence[Sample]]], scaler: Scaler | None = None) -> None:
        self._take, self._scaler = take, scaler
        self._page = page_of(self._read)
        self._lock = asyncio.Lock()
        self._seen: Sequence[Sample] = ()
        self._seen_at = float("-inf")
        self._is_up = False
        self._trouble = "the server was not asked yet"
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def serving(self, address: Address) -> AsyncIterator[Address]:
        """Answer for the length of the block; gives the address, with its port."""
        self._loop = asyncio.get_running_loop()
        routes = {"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz}
        listener = Listener(address, routes, {} if self._scaler is None else {"/scale": self._scale})
        try:
            yield listener.address
        finally:
            self._loop = None
            listener.close()

    def _read(self) -> Sequence[Sample]:
        """The samples of one scrape, called in its thread."""
        loop = self._loop
        if loop is None:
            return ()
        return asyncio.run_coroutine_threadsafe(self._ask(), loop).result(PATIENCE + 1)

    async def _ask(self) -> Sequence[Sample]:
        async with self._lock:
            if monotonic() - self._seen_at >= FRESH:
                try:
                    self._seen, is_up = await asyncio.wait_for(self._take(), PATIENCE), True
                except (RsmqError, TimeoutError) as error:
                    (log.warning if self._is_up else log.debug)("the server does not answer: %s", error)
                    self._seen, is_up = (), False
                    self._trouble = str(error) or f"no answer within {PATIENCE:g} s"
                self._is_up = is_up
                self._seen_at = monotonic()
            return [Sample(metric.UP, (), self._is_up), *self._seen]

    def _scale(self, query: str) -> Answer:
        """`/scale?topic=orders&group=billing`: the number of workers that the group needs."""
        loop, scaler = self._loop, self._scaler
        if loop is None or scaler is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"stopping\n"
        try:
            asked = asyncio.run_coroutine_threadsafe(scaler.answer(dict(parse_qsl(query))), loop)
            return HTTPStatus.OK, "application/json", to_json(asked.result(PATIENCE + 1)) + b"\n"
        except NotKnown as error:
            return HTTPStatus.NOT_FOUND, "text/plain", f"{error}\n".encode()
        except (ConfigError, ValueError) as error:
            return HTTPStatus.BAD_REQUEST, "text/plain", f"{error}\n".encode()
        except (RsmqError, TimeoutError) as error:  # an autoscaler keeps what it has while it gets no answer
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode()

    def _metrics(self, accept: str) -> Answer:
        return (HTTPStatus.OK, *self._page(accept))

    def _livez(self, _accept: str) -> Answer:
        return HTTPStatus.OK, "application/json", b'{"status": "ok"}\n'

    def _readyz(self, _accept: str) -> Answer:
        self._read()
        if self._is_up:
            return self._livez(_accept)
        answer = {"status": "failing", "troubles": [self._trouble]}
        return HTTPStatus.SERVICE_UNAVAILABLE, "application/json", to_json(answer) + b"\n"

    def __repr__(self) -> str:
        return f"<Exporter {'up' if self._is_up else 'down'}>"


async def group_samples(observer: Observer) -> list[Sample]:
    """One snapshot as samples: O(partitions), nothing is changed. Raises what the connection raises."""
    started = monotonic()
    seen = await observer.snapshot()
    samples = [sample for topic in seen.topics for sample in of_topic(topic)]
    samples += [sample for group in seen.groups for sample in of_group(group, members_of(seen, group))]
    samples += of_schedules(await observer.schedules(seen))
    return [*samples, Sample(metric.ASKING, (), monotonic() - started)]


def of_schedules(schedules: Sequence[ScheduleState]) -> Iterator[Sample]:
    """The samples of the schedules: those that fail first, because each customer may have one."""
    for state in sorted(schedules, key=lambda each: -each.failures)[:MOST_SCHEDULES]:
        labels = (state.topic, state.name)
        yield Sample(metric.SCHEDULE_FAILURES, labels, state.failures)
        yield Sample(metric.SCHEDULE_LED, labels, bool(state.leader or state.paused or state.is_added))
        if state.last is not None:
            yield Sample(metric.SCHEDULE_LAST, labels, state.last.timestamp())


def of_topic(topic: TopicState) -> Iterator[Sample]:
    """The samples of one topic."""
    yield Sample(metric.STORED, (topic.topic.name,), topic.length)
    yield Sample(metric.DELAYED, (topic.topic.name,), topic.delayed)


def of_group(group: GroupState, members: Sequence[MemberState]) -> Iterator[Sample]:
    """The samples of one group."""
    silent = sum(member.heard_ago is None for member in members)
    ages = [share.oldest_in_stream.total_seconds() for share in group.shares if share.oldest_in_stream is not None]
    work, labels = work_of(group, members), (group.topic, group.name)
    values = {
        metric.BACKLOG: group.unread + work.backlog,
        metric.UNREAD: group.unread,
        metric.UNREAD_EXACT: group.is_unread_exact,
        metric.OLDEST: max(ages, default=0.0),
        metric.OVERDUE: 0.0 if group.overdue is None else group.overdue.total_seconds(),
        metric.GROUP_RUNNING: work.running,
        metric.GROUP_READY: work.ready,
        metric.DEAD: group.dead_letters,
        metric.MEMBERS: len(members) - silent,
        metric.SILENT: silent,
        metric.UNTOLD: len(untold(members)),
        metric.STALLED: span.total_seconds() if (span := stalled(group, members)) is not None else 0.0,
        metric.UNOWNED: sum(not share.is_owned for share in group.shares) if group.distribution in OWNING else 0,
        metric.PAUSED: group.is_paused,
    }
    yield from (Sample(kind, labels, value) for kind, value in values.items())
    if group.distribution in OWNING:
        yield Sample(metric.OWNERS, labels, group.follows or most_owners(group.shares, group.bands))
    for band in group.bands:
        named = (*labels, band.name)
        yield Sample(metric.BAND_BACKLOG, named, band.unread + band.pending)
        yield Sample(metric.BAND_OLDEST, named, 0.0 if band.oldest is None else band.oldest.total_seconds())
    yield from (Sample(metric.GROUP_WAITING, (*labels, reason), count) for reason, count in work.reasons.items())
    held = Counter(each.kind for each in group.holds)
    yield from (Sample(metric.HELD, (*labels, kind), held[kind]) for kind in get_args(HoldKind))
