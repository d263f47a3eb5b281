"""The harness: runs a broker's handlers in the test, with a real worker and server and a clock that can be moved."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack

from pydantic_core import from_json

from rsmq.broker import Broker
from rsmq.broker.broker import pointed_at
from rsmq.broker.sync_broker import SyncBroker
from rsmq.consumer.consumer import Consumer
from rsmq.consumer.waiting.lane import Lane
from rsmq.dlq import DeadLetter
from rsmq.errors import ConfigError
from rsmq.handler.handler import Handler
from rsmq.handler.middleware import Call
from rsmq.handler.retry import BatchRolledBack, batch_outcomes
from rsmq.handler.schedule import Schedule, payload_of
from rsmq.handler.service import Belongs
from rsmq.model.clock import epoch_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.json import decode_json
from rsmq.model.message import JSON, TEXT, Message, MessageOrigin, encode_payload
from rsmq.model.publish_options import PublishOptions
from rsmq.model.settings import Settings
from rsmq.model.words import count, duration
from rsmq.producer.output import Output
from rsmq.testing.idle import bring_forward, until_idle

ANYTHING: Final[Any] = object()
"""A payload or key that an assertion does not compare."""

ROWS: Final[ContextVar[list[OutboxEntry] | None]] = ContextVar("rsmq_harness_rows", default=None)
"""Where the handler call around this code notes the rows that it makes."""
QUICK: Final = timedelta(milliseconds=10)
Status = Literal["done", "waiting", "dead", "handed_on", "expired", "cancelled"]


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A message that a handler has put into an outbox."""

    topic: str
    payload: Any = field(repr=False)
    key: str | None
    headers: Mapping[str, str] = field(repr=False)
    message_id: str


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a handler for one message. `error` is what it raised, or returned for this item of a batch."""

    topic: str
    group: str
    message_id: str
    attempt: int
    result: Any = field(repr=False)
    error: BaseException | None
    outputs: tuple[Output, ...] = ()
    """What it published with `message.publish`, or by the option `output`. Nothing of it is stored if it failed."""
    rows: tuple[OutboxEntry, ...] = ()
    """What it put into an outbox, in its process. It is published if its transaction commits."""


@dataclass(frozen=True, slots=True)
class HandedOn:
    """The message in the fallback topic that another one has become. `outcomes(topic, message_id)` has its outcomes."""

    topic: str
    message_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A message in one group. `done`: settled; `waiting`: for its retry or due time; `dead`: a dead letter;
    `handed_on`: it has gone to the fallback topic of its handler, as the message `fallback`; `expired`: its time was
    over, and it was dropped; `cancelled`: it is not handled any more.

    `error` and `result` are of the last run; `runs` are all of them, `dead_letter` is set when it is dead.
    """

    topic: str
    group: str
    handler: str
    message_id: str
    status: Status
    runs: tuple[Run, ...]
    dead_letter: DeadLetter | None = None
    fallback: HandedOn | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is settled."""
        return self.status == "done"

    @property
    def attempts(self) -> int:
        """How often its handler has run."""
        return len(self.runs)

    @property
    def error(self) -> BaseException | None:
        """The error of the last run; None if it succeeded or there was no run yet."""
        return self.runs[-1].error if self.runs else None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs of the last run, which were stored with its settlement; none if it failed. Each has `topic`,
        `payload`, `key`, `headers` and `message_id`."""
        return self.runs[-1].outputs if self.runs else ()

    @property
    def rows(self) -> tuple[OutboxEntry, ...]:
        """What the last run has put into an outbox; none if it failed. Each has the attributes of an output."""
        return self.runs[-1].rows if self.runs else ()

    @property
    def result(self) -> Any:
        """The return value of the handler in the last run."""
        return self.runs[-1].result if self.runs else None


def runs_of(
    work: Message | Sequence[Message],
    handler: Handler,
    result: Any,
    error: BaseException | None,
    rows: Sequence[OutboxEntry] = (),
) -> list[Run]:
    """One run per message of a handler call, which returned `result` or raised `error`, and made `rows`."""
    messages = [work] if isinstance(work, Message) else list(work)
    is_batch = handler.batch is not None
    errors = [error] * len(messages)
    if error is None and is_batch:
        errors = batch_outcomes(result, messages)
    is_rolled_back = isinstance(error, BatchRolledBack)
    if isinstance(error, BatchRolledBack):
        errors = batch_outcomes(error.outcomes, messages)
    return [
        Run(
            message.topic,
            message.group,
            message.id,
            message.attempt,
            result,
            each,
            outputs_of(message) if each is None else (),
            tuple(rows) if each is None else (),
        )
        for message, each in zip(messages, errors, strict=True)
        if each is not None or not is_rolled_back  # the others run again
    ]


def outputs_of(message: Message) -> tuple[Output, ...]:
    """The outputs of a message so far."""
    lane = message.origin
    entry = lane.outgoing.kept.get(message.entry_id) if isinstance(lane, Lane) else None
    return () if entry is None else tuple(entry.outputs)


class Harness:
    """Runs the handlers of `broker` in this process and reports the outcome of each message.

    Inside `async with` the broker itself uses `url` and `prefix`, also for what handlers publish through it. Everything
    is real except the clock, which `advance` moves for retries and delayed messages. A wait fails after `patience`.
    """

    def __init__(
        self, broker: Broker | SyncBroker, *, url: str, prefix: str, patience: Duration = "30s", **overrides: Any
    ) -> None:
        self.broker = broker = broker.asynchronous if isinstance(broker, SyncBroker) else broker
        chosen = {"delay_resolution": QUICK, "preflight": "warn", **broker.settings.changed()}
        self.settings = Settings(**{**chosen, **overrides, "url": url, "prefix": prefix})
        self._patience = checked_duration("patience", patience).total_seconds()
        self._runs: list[Run] = []
        self._schedules: dict[str, Schedule] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(pointed_at(self.broker, self.settings, around=self._observe, on_row=self._note_row))
            stack.push_async_callback(self._clean_outboxes)
            self._hold_schedules(stack)
            await stack.enter_async_context(self._serving())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, at)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Run a worker if the broker has handlers, or an outbox."""
        async with self.broker.running() if self.broker.handlers or self.broker.services else self.broker:
            yield

    def _hold_schedules(self, stack: AsyncExitStack) -> None:
        """Stop schedules from ticking by the wall clock: they would publish in one test and not in the next."""
        schedules, self.broker.declared_schedules = self.broker.declared_schedules, []
        self._schedules = {schedule.name: schedule for schedule in schedules}
        stack.callback(setattr, self.broker, "declared_schedules", schedules)

    async def _observe(self, work: Any, call_next: Call) -> Any:
        """A middleware that records the result of each handler call."""
        first = work if isinstance(work, Message) else work[0]
        wanted = (first.topic, first.group)
        handler = next(each for each in self.broker.handlers if (each.topic, each.group) == wanted)
        rows = list[OutboxEntry]()
        made_here = ROWS.set(rows)
        try:
            result = await call_next(work)
        except BaseException as error:
            self._runs += runs_of(work, handler, None, error)
            raise
        finally:
            ROWS.reset(made_here)
        self._runs += runs_of(work, handler, result, None, rows)
        return result

    @staticmethod
    def _note_row(row: Mapping[str, Any]) -> None:
        """A row of an outbox is made: by the handler that runs here, in its task or thread, or by the test."""
        rows = ROWS.get()
        if rows is not None and not row["aggregatetype"].startswith("!"):  # that one cancels a message
            headers = from_json(row["headers"]) if row["headers"] else {}
            payload = decoded(row["payload"], row["type"])
            given = from_json(row["options"]).get("message_id") if row["options"] else None
            message_id = given or str(row["id"])
            rows.append(OutboxEntry(row["aggregatetype"], payload, row["aggregateid"], headers, message_id))

    async def _clean_outboxes(self) -> None:
        for outbox in self._outboxes:
            await outbox.remove_rows()

    # -- acting ---------------------------------------------------------------------------------------------------

    async def publish_and_handle(self, topic: str, payload: Any, **options: Unpack[PublishOptions]) -> list[Outcome]:
        """Publish one message, wait until the handlers are idle, and return one outcome per group.

        Messages that the handlers publish are handled as well. A message that failed waits for its retry: see
        `advance`. Raises ConfigError when no handler has the topic, AssertionError when the handlers do not finish.
        """
        if not self._handlers(topic):
            known = ", ".join(sorted({handler.topic for handler in self.broker.handlers})) or "none at all"
            raise ConfigError(f"no handler of this broker has the topic {topic!r}; it has: {known}")
        identity = await self.broker.publish(topic, payload, **options)
        await self.handle()
        return await self.outcomes(topic, identity)

    async def handle(self) -> None:
        """Wait until the handlers have handled everything that is due now, also what other code published.

        Rows of the broker's outboxes are relayed first.
        """
        await until_idle(self.broker.client, self.broker.keys, self._consumers, self._patience, self._outboxes)

    async def advance(self, span: Duration) -> None:
        """Move the clock: retries and delayed messages that are due within `span` are handled before it returns."""
        span = checked_duration("span", span)
        if span < timedelta(0):
            raise ConfigError(f"the clock cannot be moved by {duration(span)}: only forward")
        await self.handle()
        for consumer in self._consumers:
            consumer.membership.clock.moved += span.total_seconds()
        await bring_forward(self.broker.client, self.broker.keys, self._consumers, span)
        await self.handle()

    async def tick(self, schedule: str, at: datetime) -> str | None:
        """Publish one tick of a schedule (`broker.every`), as a worker would at that time, and wait for its handlers.

        Returns the message id, or None if the function published nothing. Inside a harness schedules do not tick by
        themselves.
        """
        found = self._schedules.get(schedule)
        if found is None:
            known = ", ".join(sorted(self._schedules)) or "none at all"
            raise ConfigError(f"the broker has no schedule {schedule!r}; it has: {known}")
        payload = await payload_of(found, epoch_ms(at))
        if payload is None:
            return None
        message_id = found.message_id(epoch_ms(at))
        await self.broker.publish(
            found.topic, payload, key=found.key, headers=found.headers, band=found.band, message_id=message_id
        )
        await self.handle()
        return message_id

    # -- asking ---------------------------------------------------------------------------------------------------

    async def outcomes(self, topic: str, message_id: str) -> list[Outcome]:
        """The current outcome of a message, one for each group that has a handler here."""
        return [await self._outcome(handler, message_id) for handler in self._handlers(topic)]

    async def _outcome(self, handler: Handler, message_id: str) -> Outcome:
        wanted = (handler.topic, handler.group, message_id)
        runs = tuple(run for run in self._runs if (run.topic, run.group, run.message_id) == wanted)
        letters = await self.dead_letters(handler.topic, handler.group)
        letter = next((letter for letter in letters if letter.message_id == message_id), None)
        status: Status = "dead" if letter is not None else "done" if runs and runs[-1].error is None else "waiting"
        fallback = await self._handed_on(handler, message_id) if status == "waiting" and handler.fallback else None
        status = "handed_on" if fallback is not None else status
        if status == "waiting":
            status = await self._without_run(handler, message_id)
        return Outcome(handler.topic, handler.group, handler.name, message_id, status, runs, letter, fallback)

    async def _without_run(self, handler: Handler, message_id: str) -> Status:
        """What becomes of a message without a handler that has ended well."""
        found = await self.broker.look(message_id, topic=handler.topic)
        if found.state == "cancelled":
            return "cancelled"
        group = found.group(handler.group)
        if group is None or group.state == "cancelled":
            return "waiting" if group is None else "cancelled"
        if group.state == "settled":  # its time is over by the clock of the harness, which the server does not know
            messages = [each for each in await self.published(handler.topic) if each.stream_id == found.stream_id]
            if any(each.expires is not None for each in messages):
                return "expired"
        return "waiting"

    async def _handed_on(self, handler: Handler, message_id: str) -> HandedOn | None:
        """Where a message went that failed for good."""
        found = await self.broker.topics.find(handler.topic)
        for partition in () if found is None else found.numbers:
            records = self.broker.keys.handed_on(handler.topic, partition, handler.group)
            for _, flat in await self.broker.client.execute_command("XREVRANGE", records, "+", "-"):
                record = dict(zip(map(bytes.decode, flat[::2]), map(bytes.decode, flat[1::2]), strict=True))
                if record["id"] == message_id:
                    return HandedOn(record["topic"], record["to"], record["reason"])
        return None

    async def published(self, topic: str) -> list[Message]:
        """All messages of a topic that are due, handled or not, oldest first, with decoded `payload`."""
        found = await self.broker.topics.find(topic)
        messages = list[Message]()
        if found is None:
            return messages
        for partition in found.numbers:
            origin = MessageOrigin(topic, partition, "", band=found.layout.band_of(partition))
            stream = self.broker.keys.stream(topic, partition)
            for entry_id, fields in await self.broker.client.execute_command("XRANGE", stream, "-", "+"):
                message = Message(origin, entry_id, fields)
                if message.is_outside and self.broker.encoding.bodies is not None:
                    message.bring(await self.broker.encoding.bodies.fetch(message.body_name))
                message.undo(self.broker.encoding)
                message.payload = readable(message)
                messages.append(message)
        return sorted(messages, key=lambda message: (message.timestamp, message.stream_id))

    async def dead_letters(self, topic: str, group: str) -> list[DeadLetter]:
        """The dead letters of a group, oldest first."""
        found = await self.broker.topics.find(topic)
        if found is None:
            return []
        return [letter async for letter in self.broker.dead_letters.iterate(found, group)]

    # -- asserting ------------------------------------------------------------------------------------------------

    async def assert_published(
        self, topic: str, payload: Any = ANYTHING, *, key: Any = ANYTHING, count: int = 1
    ) -> list[Message]:
        """Assert that the topic has `count` messages with this payload and key (if given); returns them."""
        messages = await self.published(topic)
        like = ANYTHING if payload is ANYTHING else as_published(payload)
        found = [
            message
            for message in messages
            if (like is ANYTHING or message.payload == like) and (key is ANYTHING or message.key == key)
        ]
        if len(found) != count:
            wanted = "" if payload is ANYTHING else f" {payload!r}"
            wanted += "" if key is ANYTHING else f" with key {key!r}"
            there = "".join(f"\n  {each.payload!r} key={each.key!r}" for each in messages[:20]) or " nothing"
            many = "1 message" if len(found) == 1 else f"{len(found)} messages"
            raise AssertionError(f"{topic!r} has {many}{wanted}, not {count}; it has:{there}")
        return found

    async def assert_dead_letter(self, topic: str, group: str, *, reason: str | None = None) -> DeadLetter:
        """Assert that the group has one dead letter, with this reason if given (`failed`, ...); returns it."""
        letters = await self.dead_letters(topic, group)
        if len(letters) != 1 or reason not in (None, letters[0].reason):
            wanted = "one dead letter" + ("" if reason is None else f" that was {reason}")
            raise AssertionError(f"{topic}/{group} has not {wanted} but {len(letters)}:{_listed(letters) or ' none'}")
        return letters[0]

    async def assert_no_dead_letters(self) -> None:
        """Assert that no group with a handler here has a dead letter."""
        groups = [(handler.topic, handler.group) for handler in self.broker.handlers]
        letters = [letter for topic, group in groups for letter in await self.dead_letters(topic, group)]
        if letters:
            raise AssertionError(
                f"there {'is' if len(letters) == 1 else 'are'} {count(len(letters), 'dead letter')}:{_listed(letters)}"
            )

    # -- internal -------------------------------------------------------------------------------------------------

    @property
    def _consumers(self) -> Sequence[Consumer]:
        return self.broker.worker.consumers if self.broker.worker is not None else ()

    @property
    def _outboxes(self) -> list[Belongs]:
        return [each for each in self.broker.services if isinstance(each, Belongs)]

    def _handlers(self, topic: str) -> list[Handler]:
        return [handler for handler in self.broker.handlers if handler.topic == topic]

    def __repr__(self) -> str:
        return f"<Harness of {self.broker!r} under {self.settings.prefix}>"


def readable(message: Message) -> Any:
    """The payload for assertions: JSON decoded, text as str, other types as bytes."""
    return decoded(message.data, message.type)


def decoded(data: bytes, kind: str) -> Any:
    """A payload by its content type: JSON decoded, text as str, others as bytes."""
    if kind == JSON:
        return decode_json(data)
    return data.decode() if kind.startswith("text/") else data


def as_published(payload: Any) -> Any:
    """The payload as `readable` returns it after publishing: a model becomes a dict."""
    data, kind = encode_payload(payload)
    return from_json(data) if kind == JSON else data.decode() if kind == TEXT else data


def _listed(letters: Sequence[DeadLetter]) -> str:
    return "".join(f"\n  {each.topic}/{each.group} {each.reason}: {each.error}" for each in letters[:20])
