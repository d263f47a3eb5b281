"""Chooses the handlers that a worker serves: one code base, several deployments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rsmq.errors import ConfigError
from rsmq.handler.handler import Handler
from rsmq.model.settings import did_you_mean


def selected(handlers: Sequence[Handler], only: Iterable[str]) -> list[Handler]:
    """The handlers whose `topic/group` is like one of the patterns; all of them without patterns.

    A pattern has the wildcards of a shell: `sms/*`, `*/billing`, `sms/twilio`. Without a slash it is a topic. Raises
    ConfigError for one that chooses nothing.
    """
    patterns = {text: text if "/" in text else f"{text}/*" for text in only}
    titles = {handler: f"{handler.topic}/{handler.group}" for handler in handlers}
    for text, pattern in patterns.items():
        if not any(fnmatchcase(title, pattern) for title in titles.values()):
            known = sorted(set(titles.values()))
            hint = did_you_mean(text, [*known, *sorted({handler.topic for handler in handlers})])
            raise ConfigError(f"only={text!r} chooses no handler.{hint} There are: {', '.join(known) or 'none at all'}")
    chosen = patterns.values()
    return [
        handler
        for handler, title in titles.items()
        if not chosen or any(fnmatchcase(title, pattern) for pattern in chosen)
    ]


@dataclass(frozen=True, slots=True)
class Serving:
    """What one worker serves, and how. Raises ConfigError for a number that is not possible."""

    only: tuple[str, ...] = ()
    concurrency: int | None = None
    max_messages: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("concurrency", self.concurrency), ("max_messages", self.max_messages)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} is not possible: use 1 or more")

    def chosen(self, handlers: Sequence[Handler]) -> list[Handler]:
        """The handlers to serve."""
        found = selected(handlers, self.only)
        if self.concurrency is None:
            return found
        return [replace(handler, concurrency=self.concurrency) for handler in found]
