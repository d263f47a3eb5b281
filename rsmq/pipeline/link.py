"""The connection of one task: questions asked again while the server is away, for a bounded time; our errors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, Self, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential, wait_random

from rsmq.client import BlockingClient, translated
from rsmq.connect import Connector
from rsmq.errors import BrokerUnavailable
from rsmq.keys import Keys
from rsmq.pipeline.option import Access
from rsmq.script import Script, Value

T = TypeVar("T")

LONGEST_WAIT: Final = 1.0


class Link:
    """One connection, made at its first question. For one thread; close it with `with`."""

    def __init__(self, access: Access) -> None:
        self.settings = access.settings()
        assert self.settings.url is not None
        self.url = self.settings.url
        self.keys = Keys(access.prefix)
        self._retrying = Retrying(
            retry=retry_if_exception_type(BrokerUnavailable),
            wait=wait_exponential(multiplier=0.05, max=LONGEST_WAIT) + wait_random(0, 0.05),
            stop=stop_after_delay(self.settings.unavailable_timeout.total_seconds()),
            reraise=True,
        )

    @cached_property
    def client(self) -> BlockingClient:
        """The client. Its errors are redis-py's: `attempt` wraps them."""
        return Connector(self.url, self.settings).blocking_client()

    def ask(self, *command: Value) -> Any:
        """The raw reply to a command that may be repeated: retried while the server is away."""
        return self.attempt(lambda: self.client.execute_command(*command))

    def run(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """Run a script that may be repeated."""
        return self.attempt(lambda: script.run(self.client, keys, args))

    def read(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """Run a script that only reads, as a user who may do no more than that."""
        return self.attempt(lambda: script.read(self.client, keys, args))

    def attempt(self, act: Callable[[], T]) -> T:
        """Act, again while the server is away."""

        def translating() -> T:
            with translated(self.url):
                return act()

        return self._retrying(translating)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "client" in self.__dict__:
            self.client.close()

    def __repr__(self) -> str:
        return f"<Link {'open' if 'client' in self.__dict__ else 'not open'}>"
