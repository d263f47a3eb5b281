"""Publish middleware: what each message of a broker passes before it is encoded. No I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rsmq.errors import ConfigError
from rsmq.model.duration import Duration


@dataclass(slots=True, eq=False)
class Publication:
    """A message that is being published, as a function of `broker.before_publish` sees it.

    Change `headers`, or raise an error to refuse the message. Assigning to the other fields changes nothing.
    """

    topic: str
    payload: Any = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    """Those of the call over those of the broker; with tracing, the trace context is among them."""
    key: str | None = None
    delay: Duration | None = None
    at: datetime | None = None
    message_id: str | None = None
    """As given to `publish`; None: rsmq makes one."""
    wait_replicas: int = 0


BeforePublish = Callable[[Publication], None]


class Preparation:
    """The headers of a message: those of the broker, those of the call, and what the functions make of them."""

    def __init__(self, headers: Mapping[str, str], functions: Sequence[BeforePublish]) -> None:
        self._headers = dict(headers)
        self._functions = tuple(functions)

    def __call__(
        self,
        topic: str,
        payload: Any,
        headers: Mapping[str, str] | None,
        key: str | None,
        delay: Duration | None = None,
        at: datetime | None = None,
        message_id: str | None = None,
        wait_replicas: int = 0,
    ) -> Mapping[str, str]:
        """Raises what a function raises: then the message is refused."""
        merged = {**self._headers, **headers} if headers else dict(self._headers)
        if self._functions:
            publication = Publication(topic, payload, merged, key, delay, at, message_id, wait_replicas)
            for function in self._functions:
                if (result := function(publication)) is not None:
                    refuse_result(function, result)
            return publication.headers
        return merged

    def __repr__(self) -> str:
        return f"<Preparation headers={sorted(self._headers)} functions={len(self._functions)}>"


def preparation(headers: Mapping[str, str], functions: Sequence[BeforePublish]) -> Preparation | None:
    """None if there is nothing to do: then publishing costs nothing more."""
    return Preparation(headers, functions) if headers or functions else None


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of the headers of a broker, or ConfigError."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or not all(type(part) is str for pair in headers.items() for part in pair):
        raise ConfigError(f"headers={headers!r}: pass a mapping whose names and values are str")
    return dict(headers)


def check_function(function: Any) -> None:
    """Raise ConfigError for what cannot be called for each message."""
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise ConfigError(f"before_publish takes a function of the publication, not {name}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"before_publish takes plain functions, and {name} is `async def`: it runs between the calls of `publish`, "
            f"whose order is the order of the messages. Write `def`, and do what must be awaited before you publish"
        )


def refuse_result(function: BeforePublish, result: object) -> None:
    """Raise ConfigError: a function that returns headers, or a coroutine, would have no effect."""
    if inspect.iscoroutine(result):
        result.close()
    raise ConfigError(
        f"{getattr(function, '__name__', function)} returned {type(result).__name__}: a function of before_publish "
        f"changes publication.headers and returns None"
    )
