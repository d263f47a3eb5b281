"""With which key the newest message of a topic, or the newest letter of a device, is encrypted: programs that know no
broker store what they add likewise. It only reads."""

from __future__ import annotations

from rsmq.model.encoding import key_of
from rsmq.model.keys import Keys
from rsmq.model.record import whole
from rsmq.persistence.letter import enc_of
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import AT_ONCE, ask_all, key_of_newest, last_entries
from rsmq.redis.topics import Topic


async def key_of_topic(client: Client, keys: Keys, topic: Topic | None) -> str | None:
    """The id of the key; empty if the newest message is not encrypted, None if there is no message."""
    streams = [] if topic is None else [keys.stream(topic.name, number) for number in topic.numbers]
    for at in range(0, len(streams), AT_ONCE):
        replies = await ask_all(client, [("XINFO", "STREAM", stream) for stream in streams[at : at + AT_ONCE]])
        if entries := last_entries(replies):
            return key_of_newest(entries)
    return None


async def key_of_inbox(client: Client, keys: Keys, device: str) -> str | None:
    """The same of the newest letter of a device."""
    refs = await client.execute_command("ZRANGE", keys.inbox(device), -1, -1)
    seq = whole(refs[0]) if refs else None
    if seq is None:
        return None
    return key_of(enc_of(await client.execute_command("GET", keys.letter(device, seq)) or b""))
