"""Make clients, for the event loop or for a thread, to the server in the settings; and the rule for retries."""

from __future__ import annotations

import logging
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay

from rsmq.errors import BrokerUnavailable
from rsmq.model.backoff import Backoff
from rsmq.model.settings import Settings
from rsmq.redis.client.client import ACCEPTED, BlockingClient, Client, Packer, translate, translated
from rsmq.redis.client.cluster import BlockingCluster, ClusterClient
from rsmq.redis.client.refusals import Refusals
from rsmq.redis.client.sentinel import SentinelClients
from rsmq.redis.wire.url import (
    check_url,
    is_cluster,
    is_sentinel,
    redact,
    refuse_plain_password,
    split_sentinel,
    split_url,
)

__all__ = [
    "BlockingClient", "Client", "Connector", "check_url", "redact", "retrying", "split_sentinel", "split_url",
    "translate", "translated",
]  # fmt: skip

log = logging.getLogger("rsmq.connect")

NO_NAME: Final = None
"""redis-py writes its name and version as the first two commands. A server that refuses a connection for its limit of
clients has closed it by then, and what is raised is "Connection lost" in place of what the server said."""


class Connector:
    """Makes connections to the server, Sentinel-managed master or cluster that the settings name."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = check_url(url)
        if not settings.allow_insecure:
            refuse_plain_password(self.url)
        self.settings = settings
        self.is_cluster = is_cluster(self.url)
        self.refusals = Refusals()
        self._connect_seconds = settings.connect_timeout.total_seconds()
        self._command_seconds = settings.command_timeout.total_seconds()
        # the system's OpenSSL may allow older versions
        self._tls = {"ssl_min_version": ssl.TLSVersion.TLSv1_2} if self.url.startswith("rediss") else {}
        self._sentinel_clients = (
            SentinelClients(self.url, self._connect_seconds, self._tls) if is_sentinel(self.url) else None
        )

    def client(self) -> Client:
        """An asyncio client with a pool. Time-outs are anyio's, because redis-py's swallow cancellations on 3.11."""
        options: dict[str, Any] = {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": None,
            "socket_read_size": 1 << 20,  # a full read in few pieces: a twelfth of the reader's time
            "socket_connect_timeout": self._connect_seconds,
            "driver_info": NO_NAME,
            "retry": AsyncRetry(NoBackoff(), 0),
            **self._tls,
        }
        if self.is_cluster:
            return ClusterClient(self.url, self._command_seconds, options, self.refusals)
        client = (
            Client.from_url(self.url, **options)
            if self._sentinel_clients is None
            else self._sentinel_clients.client(options)
        )
        assert isinstance(client, Client)
        return client.prepare(self.url, self._command_seconds, self.refusals)

    def blocking_client(self) -> BlockingClient:
        """A client for a thread: raw replies, no hidden retries. Its errors are redis-py's: wrap in `translated`."""
        timeout = min(self._command_seconds, self.settings.lease_ttl.total_seconds() / 3)
        options: dict[str, Any] = {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "command_packer": Packer(),
            "driver_info": NO_NAME,
            **self._tls,
        }
        if self.is_cluster:
            return BlockingCluster(self.url, options)
        if self._sentinel_clients is not None:
            return self._sentinel_clients.blocking_client(options, timeout).prepare()
        client = BlockingClient.from_url(self.url, **options)
        assert isinstance(client, BlockingClient)
        return client.prepare()

    async def watch(self) -> None:
        """Leave a Sentinel-managed master when it is replaced, until cancelled. Without Sentinel it returns at once."""
        if self._sentinel_clients is not None:
            await self._sentinel_clients.watch()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """A client whose server has answered; waits for an unavailable server up to `unavailable_timeout`."""
        client = self.client()
        try:
            async for attempt in retrying(self.settings).copy(before_sleep=log_wait):
                with attempt:
                    await client.execute_command("PING")
            ACCEPTED.add(self.url)
            yield client
        finally:
            await client.aclose()


def log_wait(state: RetryCallState) -> None:
    """Log the first failed attempt: otherwise a start that waits for the server looks like a running worker."""
    if state.attempt_number == 1 and state.outcome is not None:
        log.info("waiting for the server: %s", state.outcome.exception())


def retry_rule(settings: Settings) -> dict[str, Any]:
    """The one retry rule for idempotent commands: only while the server is unavailable, with back-off and jitter."""
    return {
        "retry": retry_if_exception_type(BrokerUnavailable),
        "wait": lambda state: Backoff(0.05, 1.0, state.attempt_number - 1).next() + random.uniform(0, 0.05),
        "stop": stop_after_delay(settings.unavailable_timeout.total_seconds()),
        "reraise": True,
    }


def retrying(settings: Settings) -> AsyncRetrying:
    """`retry_rule` for the event loop."""
    return AsyncRetrying(**retry_rule(settings))
