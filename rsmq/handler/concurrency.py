"""How many calls of a handler may run at once, over all members of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rsmq.errors import ConfigError
from rsmq.model.message import Message

MOST: int = 100_000


@dataclass(frozen=True, slots=True)
class Concurrency:
    """At most `limit` calls run at once in all members of a group together.

    With `by`, such as `by=lambda message: message.headers["tenant"]`, that holds for each value that the function
    returns by itself. None: the message is not limited. The function gets the message before its payload is decoded:
    headers, key and data.

    Exact: each call needs a permit, and the server lends permits to the members that have something to call. A permit
    ends with its call, or with the lease of its member. A member that cannot renew its permits starts nothing more and
    cancels what runs; only a thread that ignores its cancellation runs on. After a server has lost its data there may
    be more calls, until each member has asked again.
    """

    limit: int
    by: Callable[[Message], str | None] | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.limit, int) and not isinstance(self.limit, bool)
        if not is_number or not 1 <= self.limit <= MOST:
            raise ConfigError(f"a concurrency of {self.limit!r} is not possible: use 1 to {MOST}")
        if self.by is not None and not callable(self.by):
            raise ConfigError(
                f"a concurrency by {self.by!r} is unknown: use a function of the message, such as "
                f"by=lambda message: message.headers['tenant'], or leave it out for one limit over all"
            )
