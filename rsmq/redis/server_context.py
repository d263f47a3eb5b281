"""The surroundings of a service in the worker that runs it: the connected client and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.topics import Topics


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The server, as one member of it sees it."""

    client: Client
    keys: Keys
    settings: Settings
    topics: Topics
    member: str
