"""Who may do what: a visitor has one role everywhere, and others for single topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from starlette.requests import Request


class Role(IntEnum):
    """The role of a visitor; each one may do what the ones before may."""

    NONE = 0  # the topic does not exist for this visitor
    LOOK = 1  # see everything, payloads too
    ACT = 2  # publish, replay, run now, move, pause, resume, end a hold, a connection or a process
    ADMIN = 3  # cancel, purge, reset, remove: what cannot be undone


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person or program that uses the dashboard. `topics` are the topics in which the role is another one.

    `name` is what the audit stream calls the visitor. Devices belong to no topic: there `role` counts.
    """

    name: str
    role: Role = Role.LOOK
    topics: Mapping[str, Role] = field(default_factory=dict)

    def role_in(self, topic: str | None) -> Role:
        """The role in a topic, or outside of all topics."""
        return self.role if topic is None else self.topics.get(topic, self.role)

    def may(self, role: Role, topic: str | None) -> bool:
        """Whether the visitor has at least this role there."""
        return self.role_in(topic) >= role

    def sees(self, topic: str | None) -> bool:
        """Whether it exists for the visitor."""
        return self.may(Role.LOOK, topic)


Authorize = Callable[[Request], "Visitor | Awaitable[Visitor | None] | None"]
"""Says who sends a request. None: a visitor who may see nothing."""


def same_for_all(role: Role) -> Authorize:
    """All visitors have one role. Their address is the only name that is known."""

    def authorize(request: Request) -> Visitor:
        return Visitor(request.client.host if request.client is not None else "unknown", role)

    return authorize
