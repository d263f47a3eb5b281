"""A topic whose payload type is declared once: type checkers check every publish and every handler against it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from rsmq.errors import ConfigError
from rsmq.handler.handler import Handler, build_handler
from rsmq.handler.options import By, SingleOptions
from rsmq.handler.payload import decoder_for, refusal_of
from rsmq.handler.read_back import reader_back
from rsmq.model.duration import Duration
from rsmq.model.keys import check_name
from rsmq.model.message import Message
from rsmq.model.message_ref import MessageRef
from rsmq.model.publish_options import ManyOptions, PublishOptions, refuse_single
from rsmq.producer.publication import BeforePublish, Publication

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

UNCHECKED: Final = {"builtins", "typing"}
"""Modules of types that a type checker treats more loosely than isinstance: an int is a valid float."""


class HandlerDecorator(Protocol[T]):
    """Takes a function of the payload, of the message, or of both. The payload stands first if there is more."""

    @overload
    def __call__(self, function: Callable[Concatenate[T, P], R], /) -> Callable[Concatenate[T, P], R]: ...
    @overload
    def __call__(self, function: Callable[[Message], R], /) -> Callable[[Message], R]: ...
    @overload
    def __call__(self, function: Callable[[Message, T], R], /) -> Callable[[Message, T], R]: ...


class BatchHandlerDecorator(Protocol[T]):
    """Takes a function of the payloads of a batch, of its messages, or of both."""

    @overload
    def __call__(self, function: Callable[Concatenate[list[T], P], R], /) -> Callable[Concatenate[list[T], P], R]: ...
    @overload
    def __call__(self, function: Callable[[list[Message]], R], /) -> Callable[[list[Message]], R]: ...
    @overload
    def __call__(self, function: Callable[[list[Message], list[T]], R], /) -> Callable[[list[Message], list[T]], R]: ...


class Publishes(Protocol):
    """The broker, as far as a typed topic needs it."""

    def publish(self, topic: str, payload: Any, **options: Unpack[PublishOptions]) -> Coroutine[Any, Any, MessageRef]:
        """Store one message."""
        ...

    async def publish_many(self, topic: str, items: Iterable[T], **options: Unpack[ManyOptions[T]]) -> list[str]:
        """Store many messages."""
        ...

    def publish_sync(self, topic: str, payload: Any, **options: Unpack[PublishOptions]) -> MessageRef:
        """Store one message, from code without an event loop."""
        ...


class TypedTopic(Generic[T]):
    """A topic of a broker with the type of its payloads. Make it with `broker.topic("orders", Order)`.

    mypy and pyright refuse another payload and a handler of another payload. Where no type checker runs, a handler that
    is annotated with another type raises ConfigError when it is registered, and so does a payload that is no instance
    of a declared class when it is published. Each payload is read once before it is sent, and refused with ConfigError
    if that is not equal to it.
    """

    def __init__(self, broker: Publishes, add: Callable[[Handler], None], name: str, payload: Any) -> None:
        self.name = check_name("topic", name)
        self.payload = payload
        """The type of the payloads."""
        decoder_for(payload)  # raises for a type that cannot be decoded
        self._refusal = refusal_of(payload)
        self._problem_of = reader_back(payload)
        is_class = isinstance(payload, type) and payload.__module__ not in UNCHECKED and not is_typed_dict(payload)
        self._class: type[T] | None = payload if is_class else None
        self._broker, self._add = broker, add

    async def publish(self, payload: T, **options: Unpack[PublishOptions]) -> MessageRef:
        """Store one message and return its id. The options are those of `Broker.publish`."""
        return await self._broker.publish(self.name, self.checked(payload), **options)

    async def publish_many(self, items: Iterable[T], **options: Unpack[ManyOptions[T]]) -> list[str]:
        """Store many messages and return their ids, as `Broker.publish_many` does."""
        return await self._broker.publish_many(self.name, checked_items(self, items), **options)

    def publish_sync(self, payload: T, **options: Unpack[PublishOptions]) -> MessageRef:
        """`publish` for code without an event loop, as `Broker.publish_sync`."""
        return self._broker.publish_sync(self.name, self.checked(payload), **options)

    @overload
    def handler(
        self, *, batch: int, linger: Duration | None = None, by: By | None = None, **options: Unpack[SingleOptions]
    ) -> BatchHandlerDecorator[T]: ...
    @overload
    def handler(self, **options: Unpack[SingleOptions]) -> HandlerDecorator[T]: ...
    def handler(self, **options: Any) -> Any:
        """Register a function for the messages of this topic, with the options of `Router.handler`.

        The payload is decoded as the type of the topic, so the parameter needs no annotation. A type checker wants it
        before the message where dependencies follow.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self._add(build_handler(function, self.name, payload=self.payload, **options))
            return function

        return register

    def checked(self, payload: T) -> T:
        """The payload. Raises ConfigError for one of another type, or that its type does not read back equal, and
        NotJson."""
        if self._refusal:
            raise ConfigError(f"nothing can be published to the typed topic {self.name!r}: {self._refusal}")
        if self._class is not None and not isinstance(payload, self._class):
            raise ConfigError(
                f"topic {self.name!r} has payloads of {self._class.__name__}, not {type(payload).__name__}: publish "
                f"{self._class.__name__}(...), or declare the topic with another type"
            )
        if self._problem_of is not None and (problem := self._problem_of(payload)):
            raise ConfigError(f"{would_not_come_back(self.name, problem)} of the topic reads, or change that type")
        return payload

    def __repr__(self) -> str:
        return f"<TypedTopic {self.name} of {getattr(self.payload, '__name__', self.payload)}>"


Problems = dict[tuple[str, Any], Callable[[Any], str]]
"""By topic and type of a handler that does not read what it writes: says why a payload would not come back."""


def refusing(problems: Problems) -> BeforePublish:
    """What a broker with such handlers does before it publishes a payload of exactly that type to their topic."""

    def refuse_what_is_lost(publication: Publication) -> None:
        problem_of = problems.get((publication.topic, type(publication.payload)))
        if problem_of is not None and (problem := problem_of(publication.payload)):
            raise ConfigError(
                f"{would_not_come_back(publication.topic, problem)} of its handler reads, or give that type what it "
                f"needs to read its own values: the log said what when the handler was registered"
            )

    return refuse_what_is_lost


def would_not_come_back(topic: str, problem: str) -> str:
    """The beginning of an error."""
    return f"the payload would not come back from topic {topic!r} as it is: {problem}. Publish what the type"


def checked_items(topic: TypedTopic[T], items: Iterable[T]) -> Iterable[T]:
    """Items for a topic, each checked when it is taken."""
    refuse_single(items)
    is_free = topic._class is None and not topic._refusal and topic._problem_of is None
    return items if is_free else map(topic.checked, items)


def is_typed_dict(kind: type) -> bool:
    """Whether a class is a TypedDict, whose instances are dicts."""
    return issubclass(kind, dict) and hasattr(kind, "__total__")
