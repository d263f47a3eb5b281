"""Running a schedule now, beside its ticks."""

from __future__ import annotations

from datetime import datetime

from rsmq.errors import ConfigError
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import as_dict, ask_all
from rsmq.redis.topics import Topic


async def run_schedule(client: Client, keys: Keys, topic: Topic, name: str) -> datetime:
    """Ask for one run, and return its time. Raises ConfigError for an unknown schedule.

    The schedule's leader publishes it: the payload comes from the function in its code. It looks three times in a
    lease. A run that was asked for before and is not published yet is that run.
    """
    schedule_keys = [keys.every(topic.name, number) for number in topic.numbers]
    replies = [
        as_dict(each) for each in await ask_all(client, [("HGETALL", schedule_key) for schedule_key in schedule_keys])
    ]
    known = {
        field.partition("|")[2]: schedule_key
        for schedule_key, reply in zip(schedule_keys, replies, strict=True)
        for field in reply
    }
    if name not in known:
        raise ConfigError(f"topic {topic.name!r} has no schedule {name!r}")
    schedule_key = known[name]
    ((seconds, micros),) = await ask_all(client, [("TIME",)])
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    await client.execute_command("HSETNX", schedule_key, f"run|{name}", now_ms)
    return from_epoch_ms(int(await client.execute_command("HGET", schedule_key, f"run|{name}") or now_ms))
