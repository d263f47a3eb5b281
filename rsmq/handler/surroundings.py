"""What stands around a message, and has to end with it: such as the database connections that a framework keeps.

A framework that looks after its connections at the end of each web request does not know of messages. An integration
registers here what it would do then. Without one, a call costs nothing more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from rsmq.handler.middleware import Call


class Surroundings(ABC):
    """What an integration does around the functions of a user."""

    @abstractmethod
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a plain function, in the thread or the process in which it runs."""

    @abstractmethod
    async def failed(self, error: Exception) -> None:
        """An async function has raised this, in the event loop. It is raised again."""


_registered: list[Surroundings] = []


def register(surroundings: Surroundings) -> None:
    """Keep these for all handlers, hooks and schedules of this process. A second one of its class changes nothing."""
    if all(type(each) is not type(surroundings) for each in _registered):
        _registered.append(surroundings)


def call_surrounded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain function inside all of them."""
    for surroundings in _registered:
        function = partial(surroundings.call, function)
    return function(*arguments)


def surrounded(call: Call) -> Call:
    """An async call inside all of them; without any, the call itself."""
    if not _registered:
        return call

    async def watched(work: Any) -> Any:
        try:
            return await call(work)
        except Exception as error:
            for surroundings in _registered:
                await surroundings.failed(error)
            raise

    return watched
