"""A topic as an argument: its name, or a typed topic of a broker."""

from __future__ import annotations

from typing import Any, Protocol

from rsmq.model.keys import check_name


class NamedTopic(Protocol):
    """A `TypedTopic`, as far as lower layers need it."""

    @property
    def name(self) -> str: ...
    @property
    def payload(self) -> Any: ...

    def checked(self, payload: Any) -> Any:
        """The payload. Raises ConfigError for one of another type."""
        ...


def name_of_topic(topic: str | NamedTopic) -> str:
    """The checked name. Raises ConfigError."""
    return check_name("topic", topic if isinstance(topic, str) else topic.name)


def checked_payload(topic: str | NamedTopic, payload: Any) -> Any:
    """The payload. Raises ConfigError for one of another type than that of a typed topic."""
    return payload if isinstance(topic, str) else topic.checked(payload)
