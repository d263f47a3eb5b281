"""Lets worker processes end from outside."""

from __future__ import annotations

from rsmq.errors import RsmqError
from rsmq.model.keys import Keys
from rsmq.model.member import request_to
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import announce, listeners


async def end_process(client: Client, keys: Keys, member: str, group: tuple[str, str], word: str) -> str:
    """Ask a process to end: QUIET or STOP. `group`: the topic and the name of any group that it serves.

    It ends with all its groups, and answers nothing: it leaves them when it ends. A paused process is asked when it
    goes on. Returns what was done, as text. Raises RsmqError if it does not listen.
    """
    if not (await listeners(client, [keys.presence(member)]))[0]:
        raise RsmqError(f"{member} does not listen: it may have ended")
    await announce(client, keys, *group, request_to(member, word))
    return f"{member} is asked to {word}"
