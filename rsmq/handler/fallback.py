"""The fallback of a handler: the topic to which a message goes after its last attempt, in place of a dead letter."""

from __future__ import annotations

from asyncio import timeout
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction, signature
from typing import Any, Final

import anyio.to_thread

from rsmq.errors import ConfigError
from rsmq.handler.apart import apart
from rsmq.handler.retry import Bury
from rsmq.handler.returned import completed
from rsmq.handler.surroundings import call_surrounded
from rsmq.model.keys import check_name
from rsmq.model.message import Message
from rsmq.model.named_topic import NamedTopic, checked_payload, name_of_topic
from rsmq.model.reason import Reason

REASONS: Final = frozenset({Reason.FAILED, Reason.TIMEOUT, Reason.REJECTED, Reason.CRASHED})
"""Why a message goes to the fallback. What has expired, or cannot be read, becomes a dead letter as without one."""
LONGEST: Final = 30.0
"""Seconds that `payload` may take: meanwhile the message is not settled."""
ID: Final = "fallback.id"
PATH: Final = "fallback.path"


@dataclass(frozen=True, slots=True)
class Fallback:
    """Where a message goes that has failed for good: `@broker.handler("push", group="sender", fallback=...)`.

    `topic`: its name, or a typed topic. `payload`: a function of the message, perhaps async, that returns the payload
    for that topic; without one the bytes go there as they are. If it raises, or takes longer than 30 s, the message
    becomes a dead letter. `group`: the group that is to handle it there, which `rsmq doctor` looks for (any group).
    """

    topic: str | NamedTopic
    payload: Callable[[Message], Any] | None = None
    group: str | None = None

    @property
    def target(self) -> str:
        """The name of the topic."""
        return name_of_topic(self.topic)

    async def made(self, message: Message) -> Any:
        """What `payload` makes of a message, whose payload is decoded. Raises what is wrong."""
        assert self.payload is not None
        async with timeout(LONGEST):
            return checked_payload(self.topic, await apart(_call, self.payload, message))


async def _call(function: Callable[[Message], Any], message: Message) -> Any:
    if iscoroutinefunction(function):
        return await completed(await function(message))
    return await completed(await anyio.to_thread.run_sync(call_surrounded, function, message, abandon_on_cancel=True))


def checked_fallback(value: object, declared: Any, *, is_declared: bool, replies: bool) -> Fallback | None:
    """The fallback of a handler, whose topic has payloads of the type `declared` if it `is_declared`.

    Raises ConfigError."""
    if value is None:
        return None
    fallback = value if isinstance(value, Fallback) else Fallback(value)  # type: ignore[arg-type]
    topic = fallback.topic
    if not isinstance(topic, str) and not hasattr(topic, "checked"):
        raise ConfigError(f"fallback={value!r} is no topic: write fallback='sms', or Fallback('sms', payload=to_sms)")
    if replies:
        raise ConfigError("replies=True answers the caller, also with an error: leave fallback out")
    if fallback.group is not None:
        check_name("group", fallback.group)
    name_of_topic(topic)
    if fallback.payload is not None:
        _check_function(fallback.payload)
    elif is_declared and not isinstance(topic, str) and topic.payload != declared:
        raise ConfigError(
            f"the payloads of the fallback topic {topic.name!r} are of another type: write "
            f"fallback=Fallback({topic.name}, payload=...), a function of the message that returns one of them"
        )
    return fallback


def _check_function(function: Any) -> None:
    wrong = ConfigError(
        f"payload={function!r} of a fallback cannot be called with a message: write `def to_sms(message)`, which "
        f"returns the payload"
    )
    if not callable(function):
        raise wrong
    try:
        signature(function).bind(None)
    except TypeError:
        raise wrong from None
    except ValueError:  # a function without a signature, such as some builtins
        return


def circle_of(ways: Iterable[tuple[str, str]], start: str) -> list[str]:
    """Topics from `start` over fallbacks back to it, if there is such a circle. `ways`: topic and fallback topic."""
    following = dict[str, list[str]]()
    for topic, target in ways:
        following.setdefault(topic, []).append(target)
    waiting, seen = [[start]], set[str]()
    while waiting:
        path = waiting.pop()
        for target in following.get(path[-1], ()):
            if target == start:
                return [*path, target]
            if target not in seen:
                seen.add(target)
                waiting.append([*path, target])
    return []


def path_of(message: Message) -> list[str]:
    """The topics in which a message and those that it came from have failed, with its own."""
    return [*message.headers.get(PATH, "").split(), message.topic]


def fallback_headers(message: Message, decision: Bury, attempts: int) -> Mapping[str, str]:
    """The headers of what goes to the fallback topic: those of the message, and why it goes there."""
    headers = message.headers
    return {
        **headers,
        ID: headers.get(ID, message.id),
        "fallback.from": message.topic,
        "fallback.reason": str(decision.reason),
        "fallback.error": decision.error,
        "fallback.attempts": str(attempts),
        PATH: " ".join(path_of(message)),
    }
