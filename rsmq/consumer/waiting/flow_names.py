"""Which flow a message belongs to: its tenant, and the names of its limits, as the functions of the handler say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from rsmq.consumer.waiting.named_flows import FlowName
from rsmq.handler.failure import describe
from rsmq.handler.tenants import Tenants
from rsmq.model.interrupt import is_from_signal
from rsmq.model.log_names import name_in_log
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message

log = logging.getLogger("rsmq.tenant")

MOST_REMEMBERED: Final = 10_000


class FlowNames:
    """Asks the functions. One that fails costs its message no more than its own flow: all of those are one flow."""

    def __init__(self, tenants: Tenants | None, names_of: Sequence[Callable[[Message], str | None]]) -> None:
        self._tenants = tenants
        self._names_of = names_of
        self._throttled = ThrottledLog(log)
        self.weight: Callable[[str | None], float] = lru_cache(MOST_REMEMBERED)(self._weight_of)
        """How many messages a turn of a tenant is. It is asked for each message, and a user's function once."""

    def of(self, message: Message) -> FlowName:
        """The flow of a message."""
        names = [name for each in self._names_of if (name := each(message)) is not None]
        tenant = None if self._tenants is None else self._tenant(self._tenants, message)
        return tenant, " and ".join(names) if names else None

    def _tenant(self, tenants: Tenants, message: Message) -> str | None:
        try:
            return tenants.name(message)
        except BaseException as error:
            if is_from_signal(error):
                raise
            self._throttled.warn("the function `tenant` has failed", f"{describe(error)} with {message}")
            return ""

    def _weight_of(self, tenant: str | None) -> float:
        try:
            return 1.0 if self._tenants is None else self._tenants.weight(tenant)
        except BaseException as error:
            if is_from_signal(error):
                raise
            about = f"{describe(error)} for {name_in_log(tenant or '')}"
            self._throttled.warn("the function `weights` has failed", about)
            return 1.0

    def __repr__(self) -> str:
        return f"<FlowNames {self._tenants!r}>"
