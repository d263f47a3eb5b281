"""The vigil: whether the server still keeps what it is given, looked at while a worker runs.

The preflight has looked once. An operator, or a managed service, may change the eviction policy at any time, and then
messages go without any error.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio
import anyio.abc

from rsmq.address import redact
from rsmq.client import Client
from rsmq.errors import BrokerError, ConfigError
from rsmq.preflight.facts import parse_info

log = logging.getLogger("rsmq.vigil")

EVERY: Final = 5.0
"""Seconds between two looks."""


class Vigil:
    """Looks at every server that holds keys, and says once, as a disaster, that one deletes messages."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._policies: dict[str, str] = {}
        self._evicted: dict[str, int] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. A server that does not answer, or may not be asked, is left to others."""
        task_status.started()
        while True:
            await anyio.sleep(EVERY)
            try:
                await self.look()
            except (BrokerError, ConfigError) as error:
                log.debug("the server cannot be looked at: %s", error)

    async def look(self) -> None:
        """Once."""
        for node in self._client.nodes:
            name = redact(node.url) if self._client.is_cluster else "the server"
            reply = await node.execute_command("INFO")
            info = parse_info(reply)
            self._judge_policy(name, info.get("maxmemory_policy", "noeviction"))
            self._judge_evicted(name, int(info.get("evicted_keys", 0)))

    def _judge_policy(self, name: str, policy: str) -> None:
        if policy != self._policies.get(name, "noeviction"):
            if policy == "noeviction":
                log.warning("%s: maxmemory-policy is noeviction again", name)
            else:
                log.critical(
                    "%s: maxmemory-policy has become %s: messages are deleted when it is full. "
                    "CONFIG SET maxmemory-policy noeviction, and write it into its configuration", name, policy,
                )  # fmt: skip
        self._policies[name] = policy

    def _judge_evicted(self, name: str, evicted: int) -> None:
        before = self._evicted.setdefault(name, evicted)
        if evicted > before:
            log.critical("%s has evicted %d keys: messages may be among them", name, evicted - before)
        self._evicted[name] = evicted

    def __repr__(self) -> str:
        return f"<Vigil every {EVERY:g} s>"
