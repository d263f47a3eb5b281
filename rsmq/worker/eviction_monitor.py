"""Checks while a worker runs that the server does not evict keys.

The preflight checks once, at the start. An operator or a managed service may change the eviction policy at any time,
and then messages disappear without any error.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio
import anyio.abc

from rsmq.errors import BrokerError, ConfigError
from rsmq.model.words import count
from rsmq.redis.client.client import Client
from rsmq.redis.preflight.facts import parse_info
from rsmq.redis.wire.url import redact

log = logging.getLogger("rsmq.eviction")

INTERVAL: Final = 5.0
"""Seconds between two checks."""


class EvictionMonitor:
    """Checks every server that holds keys. Each change of the policy and each rise of evicted keys is logged once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._policies: dict[str, str] = {}
        self._evicted: dict[str, int] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Other roles report a server that does not answer or refuses INFO."""
        task_status.started()
        while True:
            await anyio.sleep(INTERVAL)
            try:
                await self.check()
            except (BrokerError, ConfigError) as error:
                log.debug("the eviction policy cannot be checked: %s", error)

    async def check(self) -> None:
        """Ask every node and log what has changed since the last check."""
        for node in self._client.nodes:
            name = redact(node.url) if self._client.is_cluster else "the server"
            info = parse_info(await node.execute_command("INFO"))
            self._check_policy(name, info.get("maxmemory_policy", "noeviction"))
            evicted = int(info.get("evicted_keys", 0))
            before = self._evicted.get(name, evicted)
            if evicted > before:
                log.critical("%s has evicted %s: messages may be among them", name, count(evicted - before, "key"))
            self._evicted[name] = evicted

    def _check_policy(self, name: str, policy: str) -> None:
        if policy != self._policies.get(name, "noeviction"):
            if policy == "noeviction":
                log.warning("%s: maxmemory-policy is noeviction again", name)
            else:
                log.critical(
                    "%s: maxmemory-policy has become %s: a full server will delete messages. "
                    "CONFIG SET maxmemory-policy noeviction, and write it into its configuration", name, policy,
                )  # fmt: skip
        self._policies[name] = policy

    def __repr__(self) -> str:
        return f"<EvictionMonitor every {INTERVAL:g} s>"
