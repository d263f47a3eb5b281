"""The harness: a broker's own handlers, run in the test by a real worker on a real server, with a clock to move."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self

from pydantic_core import from_json

from rsmq.broker import Broker
from rsmq.clock import epoch_ms
from rsmq.consumer.consumer import Consumer
from rsmq.dlq import DeadLetter
from rsmq.errors import ConfigError
from rsmq.handler import Handler
from rsmq.message import JSON, TEXT, Message, Place, encode_payload
from rsmq.middleware import Call
from rsmq.payload import decode_json
from rsmq.schedule import Every
from rsmq.settings import Settings
from rsmq.testing.ending import end
from rsmq.testing.outcome import Outcome, Run, Status, runs_of
from rsmq.testing.quiet import bring_forward, until_quiet
from rsmq.ticker import payload_of

ANYTHING: Final[Any] = object()
"""Stands for a payload or key that an assertion does not look at."""

QUICK: Final = timedelta(milliseconds=10)


class Harness:
    """Runs the handlers of `broker` in this process and tells what became of messages.

    Inside `async with` the broker itself works on `url`, under `prefix`: handlers that publish through it do so there,
    too. Everything is the real thing but the clock, which `advance` moves for retries and delayed messages.
    `patience` is how long the handlers may take before a wait fails.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        url: str,
        prefix: str,
        patience: timedelta = timedelta(seconds=30),
        **overrides: Any,
    ) -> None:
        self.broker = broker
        chosen = {"delay_resolution": QUICK, "preflight": "warn", **broker.settings.model_dump(exclude_unset=True)}
        self.settings = Settings(**{**chosen, **overrides, "url": url, "prefix": prefix})
        self._patience = patience.total_seconds()
        self._runs: list[Run] = []
        self._schedules: dict[str, Every] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.broker.pointed_at(self.settings, around=self._observe))
            self._hold_schedules(stack)
            await stack.enter_async_context(self._serving())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return await end(self._stack, kind, error, at)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """A worker, if there is anything to work on."""
        async with self.broker.running() if self.broker.handlers else self.broker:
            yield

    def _hold_schedules(self, stack: AsyncExitStack) -> None:
        """What comes by the clock on the wall would come into one test and not into the next."""
        schedules, self.broker.schedules = self.broker.schedules, []
        self._schedules = {every.name: every for every in schedules}
        stack.callback(setattr, self.broker, "schedules", schedules)

    async def _observe(self, work: Any, call_next: Call) -> Any:
        """A middleware: what each call of a handler came to."""
        first = work if isinstance(work, Message) else work[0]
        place = (first.topic, first.group)
        handler = next(each for each in self.broker.handlers if (each.topic, each.group) == place)
        try:
            result = await call_next(work)
        except BaseException as error:
            self._runs += runs_of(work, handler, None, error)
            raise
        self._runs += runs_of(work, handler, result, None)
        return result

    # -- acting ---------------------------------------------------------------------------------------------------

    async def publish_and_handle(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
    ) -> list[Outcome]:
        """Publish one message, let the handlers do all there is to do now, and return one outcome a group.

        What they publish themselves is handled as well. A message that failed waits for its retry: see `advance`.
        Raises ConfigError when no handler has the topic, AssertionError when they do not come to an end.
        """
        if not self._handlers(topic):
            known = ", ".join(sorted({handler.topic for handler in self.broker.handlers})) or "none at all"
            raise ConfigError(f"no handler of this broker has the topic {topic!r}; it has: {known}")
        identity = await self.broker.publish(
            topic, payload, key=key, headers=headers, delay=delay, at=at, message_id=message_id
        )
        await self.handle()
        return await self.outcomes(topic, identity)

    async def handle(self) -> None:
        """Let the handlers do all there is to do now, whoever published it."""
        await until_quiet(self.broker.client, self.broker.keys, self._consumers, self._patience)

    async def advance(self, span: timedelta) -> None:
        """Move the clock: retries and delayed messages that are due within `span` are handled before it returns."""
        if span < timedelta(0):
            raise ConfigError(f"the clock cannot be moved by {span}: only forward")
        await self.handle()
        await bring_forward(self.broker.client, self.broker.keys, self._consumers, span)
        await self.handle()

    async def tick(self, schedule: str, at: datetime) -> str | None:
        """Publish one tick of a schedule (`broker.every`), as a worker would at that time, and let it be handled.

        Returns the message id, None if the function published nothing. Schedules never tick by themselves here.
        """
        every = self._schedules.get(schedule)
        if every is None:
            known = ", ".join(sorted(self._schedules)) or "none at all"
            raise ConfigError(f"the broker has no schedule {schedule!r}; it has: {known}")
        payload = await payload_of(every, epoch_ms(at))
        if payload is None:
            return None
        message_id = every.message_id(epoch_ms(at))
        await self.broker.publish(every.topic, payload, key=every.key, headers=every.headers, message_id=message_id)
        await self.handle()
        return message_id

    # -- asking ---------------------------------------------------------------------------------------------------

    async def outcomes(self, topic: str, message_id: str) -> list[Outcome]:
        """Where a message is now: one outcome for each group that has a handler here."""
        return [await self._outcome(handler, message_id) for handler in self._handlers(topic)]

    async def _outcome(self, handler: Handler, message_id: str) -> Outcome:
        place = (handler.topic, handler.group, message_id)
        runs = tuple(run for run in self._runs if (run.topic, run.group, run.message_id) == place)
        letters = await self.dead_letters(handler.topic, handler.group)
        letter = next((letter for letter in letters if letter.message_id == message_id), None)
        status: Status = "dead" if letter is not None else "done" if runs and runs[-1].error is None else "waiting"
        return Outcome(handler.topic, handler.group, handler.name, message_id, status, runs, letter)

    async def published(self, topic: str) -> list[Message]:
        """Everything that was published to a topic and is due, oldest first, with decoded `payload`; handled or not."""
        found = await self.broker.topics.find(topic)
        messages = []
        for partition in range(0 if found is None else found.partitions):
            place = Place(topic, partition, "")
            stream = self.broker.keys.stream(topic, partition)
            for entry_id, fields in await self.broker.client.execute_command("XRANGE", stream, "-", "+"):
                message = Message(place, entry_id, fields)
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
        """`count` messages with this payload and key (as far as given) are in the topic; returns them."""
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
            there = "".join(f"\n  {message.payload!r} key={message.key!r}" for message in messages[:20])
            raise AssertionError(
                f"{topic!r} has {len(found)} messages{wanted}, not {count}; it has:{there or ' nothing'}"
            )
        return found

    async def assert_dead_letter(self, topic: str, group: str, *, reason: str | None = None) -> DeadLetter:
        """The group has exactly one dead letter, for this reason if given (`failed`, `rejected`, ...); returns it."""
        letters = await self.dead_letters(topic, group)
        if len(letters) != 1 or reason not in (None, letters[0].reason):
            wanted = "one dead letter" + ("" if reason is None else f" that was {reason}")
            raise AssertionError(f"{topic}/{group} has not {wanted} but {len(letters)}:{_listed(letters) or ' none'}")
        return letters[0]

    async def assert_no_dead_letters(self) -> None:
        """No group that has a handler here has a dead letter."""
        letters = [each for handler in self.broker.handlers for each in await self._dead_of(handler)]
        if letters:
            raise AssertionError(f"there are {len(letters)} dead letters:{_listed(letters)}")

    # -- within ---------------------------------------------------------------------------------------------------

    async def _dead_of(self, handler: Handler) -> list[DeadLetter]:
        return await self.dead_letters(handler.topic, handler.group)

    @property
    def _consumers(self) -> Sequence[Consumer]:
        return self.broker.worker.consumers if self.broker.worker is not None else ()

    def _handlers(self, topic: str) -> list[Handler]:
        return [handler for handler in self.broker.handlers if handler.topic == topic]

    def __repr__(self) -> str:
        return f"<Harness of {self.broker!r} under {self.settings.prefix}>"


def readable(message: Message) -> Any:
    """A payload as an assertion wants it: JSON decoded, text as str, anything else as it is."""
    if message.type == JSON:
        return decode_json(message)
    return message.data.decode() if message.type.startswith("text/") else message.data


def as_published(payload: Any) -> Any:
    """A payload as `readable` would give it back: a model as a dict."""
    data, kind = encode_payload(payload)
    return from_json(data) if kind == JSON else data.decode() if kind == TEXT else data


def _listed(letters: Sequence[DeadLetter]) -> str:
    return "".join(f"\n  {each.topic}/{each.group} {each.reason}: {each.error}" for each in letters[:20])
