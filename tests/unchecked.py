"""Settings that a user may not choose: a lease that ends at once, or a heartbeat that never comes."""

from __future__ import annotations

from copy import copy
from typing import Any

from rsmq.model.settings import Settings


def unchecked(settings: Settings, **values: Any) -> Settings:
    """A copy with other values, without the checks of `dataclasses.replace`."""
    made = copy(settings)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
