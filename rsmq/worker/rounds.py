"""The rounds of a role that looks after something now and then: an outage is logged once, and waited out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from rsmq.errors import BrokerError, ConfigError


async def each_round(
    work: Callable[[], Awaitable[object]], pause: Callable[[], float], log: logging.Logger, trouble: str
) -> None:
    """A pause in seconds and some work, until cancelled. Errors end here: the next round tries it again. `trouble`:
    what the log says of the first one of an outage, such as `retention waits`."""
    was_out = False
    while True:
        await anyio.sleep(pause())
        try:
            await work()
            was_out = False
        except (BrokerError, ConfigError) as error:
            log.log(logging.DEBUG if was_out else logging.WARNING, "%s: %s", trouble, error)
            was_out = True
