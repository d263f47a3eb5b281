"""The connection of one task. While the server is away it repeats commands, for a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self, TypeVar

from tenacity import Retrying

from rsmq.errors import BrokerUnavailable
from rsmq.model.keys import Keys
from rsmq.model.page_limit import PageLimit
from rsmq.pipeline.format.options import Access, embedded
from rsmq.redis.client.client import BlockingClient, translated
from rsmq.redis.client.connector import Connector, retry_rule
from rsmq.redis.scripts import Script, Value
from rsmq.redis.wire.url import database_of

T = TypeVar("T")


class TaskConnection:
    """One connection, opened by its first command. For one thread; close it with `with`."""

    def __init__(self, access: Access) -> None:
        self.settings = access.settings()
        assert self.settings.url is not None
        self.url = self.settings.url
        self.keys = Keys(access.prefix, database_of(self.url))
        self._retrying = Retrying(**retry_rule(self.settings))
        self._page_limit = PageLimit()

    @cached_property
    def client(self) -> BlockingClient:
        """The client. It raises the errors of redis-py: `attempt` translates them."""
        return Connector(self.url, self.settings).blocking_client()

    def ask(self, *command: Value) -> Any:
        """The raw reply to a command. It must be safe to repeat: it is retried while the server is away."""
        return self.attempt(lambda: self.client.execute_command(*command))

    def page(self, command: str, stream: str, start: str, end: str, count: int) -> Any:
        """At most `count` entries of a range; fewer, where a server or proxy closes connections with large answers.
        None only where there is nothing."""

        def read() -> Any:
            with self._page_limit.asking(), translated(self.url):
                return self.client.execute_command(command, stream, start, end, "COUNT", self._page_limit.of(count))

        return self.attempt(read)

    def run(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """Run a script that is safe to repeat."""
        return self.attempt(lambda: script.run(self.client, keys, args))

    def read(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Value]) -> Any:
        """Run a script that only reads; a user with read rights may do that."""
        return self.attempt(lambda: script.run(self.client, keys, args, read_only=True))

    def attempt(self, act: Callable[[], T]) -> T:
        """Call `act`, again while the server is away."""
        try:
            return self._retrying(translated(self.url)(act))
        except BrokerUnavailable:
            if not embedded().is_ended(self.url):
                raise
        raise BrokerUnavailable("the embedded server has ended: start it with `rsmq server` in its project")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "client" in self.__dict__:
            self.client.close()

    def __repr__(self) -> str:
        return f"<TaskConnection {'open' if 'client' in self.__dict__ else 'not open'}>"
