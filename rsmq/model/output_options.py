"""What a handler may say of an output that it publishes with its message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict

from rsmq.errors import ConfigError
from rsmq.model.duration import Duration
from rsmq.model.expiry import OnExpiry


class OutputOptions(TypedDict, total=False):
    """What `message.publish` takes besides topic and payload: that of `broker.publish`, but not `wait_replicas`."""

    key: str | None
    headers: Mapping[str, str] | None
    delay: Duration | None
    at: datetime | None
    message_id: str | None
    expires: Duration | datetime | None
    on_expiry: OnExpiry | None


def refuse_thread(is_async: bool) -> None:
    """Raise ConfigError unless this code runs in an event loop, or for `is_async` False unless it does not."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if is_async:
            raise ConfigError(
                "message.publish is for async handlers: a plain function writes message.publish_sync(...)"
            ) from None
    else:
        if not is_async:
            raise ConfigError("message.publish_sync is for plain functions: here write `await message.publish(...)`")
