"""Tenants of a handler: whose message is whose, and how much of the handler each gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rsmq.errors import ConfigError
from rsmq.model.message import Message

TenantOf = Callable[[Message], str | None]
Weights = Mapping[str, float] | Callable[[str], float]

LARGEST: Final = 1000


@dataclass(frozen=True, slots=True)
class Tenants:
    """A function of the message, before its payload is decoded, and the weights of the names that it returns."""

    of: TenantOf
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if not callable(self.of):
            raise ConfigError(
                f"tenant={self.of!r} is no function of the message: write "
                f"tenant=lambda message: message.headers['tenant']"
            )
        if self.weights is None or callable(self.weights):
            return
        if not isinstance(self.weights, Mapping):
            raise ConfigError(f"weights={self.weights!r} is no dict: write weights={{'gold': 3}}, or give a function")
        for name, weight in self.weights.items():
            if not isinstance(name, str):
                raise ConfigError(f"weights: {name!r} is no name of a tenant: write it as text")
            _checked(name, weight)

    def name(self, message: Message) -> str | None:
        """The tenant of a message. None: those without one share a flow."""
        name = self.of(message)
        return None if name is None else str(name)

    def weight(self, name: str | None) -> float:
        """How many messages its turn is: 1 by default. Raises ConfigError for what the function may not return."""
        if self.weights is None or name is None:
            return 1.0
        if callable(self.weights):
            return _checked(name, self.weights(name))
        return float(self.weights.get(name, 1))


def _checked(name: str, weight: object) -> float:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 1 <= weight <= LARGEST:  # type: ignore[operator]
        raise ConfigError(
            f"the weight {weight!r} of the tenant {name!r} is not from 1 to {LARGEST}: give the smallest one 1, the "
            f"default, and the others so many times as much"
        )
    return float(weight)  # type: ignore[arg-type]
