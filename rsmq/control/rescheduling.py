"""Giving a delayed message another due time."""

from __future__ import annotations

from datetime import datetime

from rsmq.control.finder import Finder
from rsmq.control.status import moment
from rsmq.errors import ConfigError
from rsmq.model.clock import to_ms
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.connector import Client
from rsmq.redis.scripts import OK, RESCHEDULE_DELAYED
from rsmq.redis.topics import Topic


async def reschedule(
    client: Client, keys: Keys, settings: Settings, message_id: str, topic: Topic, key: str | None, due: str
) -> datetime:
    """Move it to `due` (see `due_time`), and return that time. Raises ConfigError if it is not delayed."""
    found = await Finder(client, keys).find(message_id, topic, key)
    if found is not None and found.packed:
        at = (topic.name, found.partition)
        names = (keys.delayed(*at), keys.dedup(*at, found.message.id))
        word, *rest = await RESCHEDULE_DELAYED(client, names, (found.packed, due, to_ms(settings.dedup_window)))
        if word == OK:
            return moment(rest[0])
    raise ConfigError(
        f"{message_id} is not delayed, so it cannot be rescheduled: `rsmq trace` says where it is. Cancel it with "
        f"broker.cancel, and publish it again"
    )
