"""The options of a handler: each is checked when it is registered, and refused with what to write instead."""

from __future__ import annotations

import inspect
import math
import re
from datetime import datetime, timedelta
from typing import Any, Final, Literal, get_args

from rsmq.clock import epoch_ms
from rsmq.errors import ConfigError
from rsmq.rate import Rate
from rsmq.retry import RetryPolicy

Ordering = Literal["key", "partition", "none"]
Distribution = Literal["hash", "shared"]
Execution = Literal["inline", "thread", "process"]

STREAM_ID: Final = re.compile(r"\d{1,20}(-\d{1,20})?")
MOST_PARTITIONS: Final = 1024


class Options:
    """Checks what was given for one handler, called `title` in errors. Every method raises ConfigError."""

    def __init__(self, title: str, *, is_batch: bool) -> None:
        self._title, self._is_batch = title, is_batch

    def _wrong(self, text: str) -> ConfigError:
        return ConfigError(f"handler {self._title}: {text}")

    def _one_of(self, option: str, value: Any, choices: Any) -> Any:
        if value not in get_args(choices):
            known = " or ".join(repr(choice) for choice in get_args(choices))
            raise self._wrong(f"{option}={value!r} is unknown: use {known}")
        return value

    def count(self, option: str, value: Any, most: int | None = None) -> int:
        """A whole number from 1 on."""
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or value < 1 or (most is not None and value > most):
            limit = "of 1 or more" if most is None else f"from 1 to {most}"
            raise self._wrong(f"{option}={value!r} is not a whole number {limit}")
        return int(value)

    def count_or_none(self, option: str, value: Any, most: int | None = None) -> int | None:
        """The same, or nothing."""
        return None if value is None else self.count(option, value, most)

    def distribution(self, value: Any) -> Distribution:
        """One of two."""
        chosen: Distribution = self._one_of("distribution", value, Distribution)
        return chosen

    def ordering(self, value: Any, distribution: Any) -> Ordering:
        """By key where there is an order at all."""
        if value is None:
            return "key" if distribution == "hash" else "none"
        if value in ("key", "partition") and distribution == "shared":
            raise self._wrong(
                f"distribution='shared' has no order, so ordering={value!r} cannot hold: leave one of them out"
            )
        chosen: Ordering = self._one_of("ordering", value, Ordering)
        return chosen

    def retry(self, value: Any) -> RetryPolicy:
        """A policy; the usual one if none is given."""
        if value is not None and not isinstance(value, RetryPolicy):
            raise self._wrong(f"retry={value!r} is no policy: write retry=RetryPolicy(max_attempts=5)")
        return RetryPolicy() if value is None else value

    def timeout(self, value: Any) -> timedelta | None:
        """A time; a number is seconds."""
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            value = timedelta(seconds=min(value, 10**9))
        if value is None or (isinstance(value, timedelta) and value > timedelta(0)):
            return value
        raise self._wrong(f"timeout={value!r} is no time above 0: write timeout=timedelta(seconds=30)")

    def linger(self, value: Any) -> timedelta:
        """How long an incomplete batch waits."""
        if value is None:
            return timedelta(0)
        if not self._is_batch:
            raise self._wrong("linger needs batch, such as batch=500: single messages never wait")
        if isinstance(value, timedelta) and value >= timedelta(0):
            return value
        raise self._wrong(f"linger={value!r} is not a time: write linger=timedelta(milliseconds=50)")

    def start(self, value: Any) -> str | datetime:
        """A place in the topic."""
        if isinstance(value, datetime):
            epoch_ms(value)
            return value
        if isinstance(value, str) and (value in ("earliest", "latest") or STREAM_ID.fullmatch(value)):
            return value
        raise self._wrong(
            f"start={value!r} is no place in a topic: use 'earliest', 'latest', a stream id such as "
            f"'1700000000000-0' or an aware datetime"
        )

    def rate(self, value: Any) -> Rate | None:
        """How many messages may start in a time."""
        if value is None:
            return None
        if not isinstance(value, Rate):
            raise self._wrong(f"rate={value!r} is no rate: write rate=Rate(100, per=timedelta(seconds=1))")
        if self._is_batch:
            raise self._wrong("rate counts single messages: leave batch out, or use concurrency")
        return value

    def group_concurrency(self, value: Any, distribution: Any) -> int | None:
        """The limit over the whole group: it goes by who owns what."""
        if value is not None and distribution == "shared":
            raise self._wrong(
                "under distribution='shared' a limit over the group cannot hold: leave group_concurrency out, or let "
                "partitions have owners with distribution='hash'"
            )
        return self.count_or_none("group_concurrency", value)

    def execution(self, value: Any, function: Any, *, is_async: bool, has_dependencies: bool) -> Execution:
        """In the loop for an `async def`, else in a thread or a process."""
        if value is None:
            return "inline" if is_async else "thread"
        chosen: Execution = self._one_of("execution", value, Execution)
        if is_async != (chosen == "inline"):
            kind, other = ("an async def", "a plain def") if is_async else ("a plain def", "async def")
            raise self._wrong(f"{kind} cannot run with execution={value!r}: write {other}, or leave it out")
        if chosen == "process" and has_dependencies:
            raise self._wrong("dependencies cannot go to another process: open them in the function")
        if chosen == "process" and not (inspect.isfunction(function) and "<" not in function.__qualname__):
            raise self._wrong(
                "execution='process' needs a function that another process can import by name: define it with def at "
                "module level"
            )
        return chosen
