"""The seam to redis-py: addresses, clients with pinned replies, and its errors translated into ours, once.

Everything above this layer sees raw replies (bytes, ints, lists, in RESP2 shape) and rsmq's own errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

import anyio
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MaxConnectionsError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential, wait_random

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, GroupMissing, ScriptError
from rsmq.settings import Settings

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")
TLS_OPTIONS = (
    "db",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)

TRANSIENT = {
    "LOADING": "the server is loading its data",
    "READONLY": "this server has become a replica",
    "MASTERDOWN": "the replica has lost its master",
    "CLUSTERDOWN": "the cluster is down",
    "TRYAGAIN": "a slot is moving",
    "NOREPLICAS": "too few replicas are in sync",
    "UNBLOCKED": "the server ended the blocking read",
    "BUSY": "the server runs a long script",
    "MISCONF": "the server cannot write to its disk: free space, or see its log",
    "OOM": "the server is out of memory: raise maxmemory or trim topics (`rsmq topic list`)",
}
MOVED_ON = ("READONLY", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED")
"""Answers of a server that is no longer the right one: every connection to it is given up."""


def translate(error: BaseException, url: str = "") -> BrokerError | ConfigError:
    """A redis-py, socket or timeout error as one of ours."""
    while isinstance(error.__cause__, RedisError):
        error = error.__cause__  # whatever the server says during the handshake is wrapped in a ConnectionError
    text = str(error)
    where = f" at {redact(url)}" if url else ""
    # redis-py strips the code of an error that it has a class for, so the class name stands in for it
    code = text.split(" ", 1)[0].rstrip(":")
    named = {"BusyLoadingError": "LOADING", "ReadOnlyError": "READONLY", "MasterDownError": "MASTERDOWN",
             "ClusterDownError": "CLUSTERDOWN", "TryAgainError": "TRYAGAIN", "OutOfMemoryError": "OOM"}  # fmt: skip
    code = named.get(type(error).__name__, code)
    if isinstance(error, AuthenticationError | AuthorizationError) or code in ("WRONGPASS", "NOAUTH"):
        return ConfigError(f"the server{where} refused the credentials ({text}): check user and password in RSMQ_URL")
    if isinstance(error, NoPermissionError) or code == "NOPERM":
        return ConfigError(f"the server's ACL does not allow this ({text}): see the list of commands in docs/keys.md")
    if code in TRANSIENT:
        return BrokerUnavailable(f"{TRANSIENT[code]} ({text})")
    if code == "NOGROUP" or "NOGROUP" in text[:80]:
        return GroupMissing(text)
    if isinstance(error, ResponseError):
        return ScriptError(text) if "script" in text else BrokerError(text)
    if isinstance(error, MaxConnectionsError):
        return BrokerError(text)
    # what follows "No master found" is the repr of every connection
    reason = text.partition(" : <")[0].rstrip(".") or type(error).__name__
    return BrokerUnavailable(f"no answer from the server{where}: {reason}. Is it running? Check RSMQ_URL")


@contextmanager
def translated(url: str = "") -> Iterator[None]:
    """Raise our errors instead of redis-py's inside the block. NOSCRIPT passes: `Script` answers it."""
    try:
        yield
    except NoScriptError:
        raise
    except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise translate(error, url) from error


class Client(redis.asyncio.Redis):
    """redis-py's client with raw replies, a bounded wait, no hidden retries and our errors.

    No retries: redis-py's own would repeat an XADD whose reply was lost, and so store it twice.
    """

    url: str = ""
    timeout: float = 5.0

    def prepare(self, url: str, timeout: float) -> Client:
        """Pin the reply shapes: no response callback rewrites what the server said."""
        self.url, self.timeout = url, timeout
        self.response_callbacks.clear()
        return self

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        if isinstance(self.connection_pool, AsyncSentinelPool):
            for sentinel in self.connection_pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with translated(self.url):
            try:
                with anyio.fail_after(self.timeout):
                    return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            except (RedisError, OSError) as error:
                if type(error).__name__ in ("ReadOnlyError", "MasterDownError") or str(error).startswith(MOVED_ON):
                    await self.connection_pool.disconnect(inuse_connections=False)
                raise


class Connector:
    """Makes connections to the one server (or Sentinel-managed master) that the settings name."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = check_url(url)
        self.settings = settings
        self._connect_seconds = settings.connect_timeout.total_seconds()
        self._command_seconds = settings.command_timeout.total_seconds()

    def client(self) -> Client:
        """An asyncio client with a pool. Time-outs are anyio's: redis-py's swallow cancellations on Python 3.11."""
        options: dict[str, Any] = {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": None,
            "socket_connect_timeout": self._connect_seconds,
            "retry": AsyncRetry(NoBackoff(), 0),
        }
        if self.url.startswith("redis+sentinel:"):
            hosts, master, more = split_sentinel(self.url)
            sentinel = AsyncSentinel(hosts, sentinel_kwargs={"socket_timeout": self._connect_seconds}, **more)
            client = sentinel.master_for(master, redis_class=Client, **{**more, **options})
        else:
            client = Client.from_url(self.url, **options)
        assert isinstance(client, Client)
        return client.prepare(self.url, self._command_seconds)

    def blocking_client(self) -> redis.Redis:
        """A client for a thread: raw replies, no hidden retries. Its errors are redis-py's: wrap in `translated`."""
        timeout = min(self._command_seconds, self.settings.lease_ttl.total_seconds() / 3)
        options: dict[str, Any] = {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        if self.url.startswith("redis+sentinel:"):
            hosts, master, more = split_sentinel(self.url)
            sentinel = Sentinel(hosts, sentinel_kwargs={"socket_timeout": timeout}, **more)
            client: redis.Redis = sentinel.master_for(master, **{**more, **options})
        else:
            client = redis.Redis.from_url(self.url, **options)
        client.response_callbacks.clear()
        return client

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """A client that has been seen to work; waits for an unavailable server up to `unavailable_timeout`."""
        client = self.client()
        try:
            async for attempt in retrying(self.settings):
                with attempt:
                    await client.execute_command("PING")
            yield client
        finally:
            await client.aclose()


def retrying(settings: Settings) -> AsyncRetrying:
    """The one retry rule for idempotent commands: only while the server is unavailable, with back-off and jitter."""
    return AsyncRetrying(
        retry=retry_if_exception_type(BrokerUnavailable),
        wait=wait_exponential(multiplier=0.05, max=1.0) + wait_random(0, 0.05),
        stop=stop_after_delay(settings.unavailable_timeout.total_seconds()),
        reraise=True,
    )


def split_url(url: str) -> SplitResult:
    """`urlsplit`, also for a list of hosts, in which it takes brackets for a mistake."""
    scheme, _, rest = url.partition("://")
    if scheme != "redis+sentinel":
        return urlsplit(url)
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    return SplitResult(scheme, netloc, f"/{path}", query, "")


def check_url(url: str) -> str:
    """Return the URL, or raise ConfigError that says which form it should have."""
    try:
        parts = split_url(url)
        if parts.scheme == "redis+sentinel":
            split_sentinel(url)
        elif parts.scheme == "unix" and not parts.path:
            raise ValueError(url)
        elif parts.scheme in ("redis", "rediss"):
            _ = parts.port, int(parts.path.strip("/") or 0)
    except ValueError:
        parts = split_url("")
    if parts.scheme == "redis+cluster":
        raise ConfigError(
            "redis+cluster:// is not supported by this version: use one server, or redis+sentinel:// for failover"
        )
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"RSMQ_URL {redact(url)!r} is not understood: use redis://host:6379/0, rediss://, unix:///path/to.sock "
            f"or redis+sentinel://host1,host2/master-name"
        )
    allowed = TLS_OPTIONS if parts.scheme == "rediss" else ("db",)
    for option in parse_qs(parts.query, keep_blank_values=True):
        # redis-py would let it override what we pin: the protocol, the time-outs, the shape of replies
        if option not in allowed:
            raise ConfigError(f"RSMQ_URL may not have the option {option!r}, only {', '.join(allowed)}")
    return url


def split_sentinel(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """`redis+sentinel://user:pw@h1:26379,h2/master/0` as hosts, master name and client options."""
    parts = split_url(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    master, _, db = parts.path.strip("/").partition("/")
    if not master:
        raise ConfigError("redis+sentinel:// needs the master's name: redis+sentinel://host1,host2/master-name")
    options: dict[str, Any] = {"db": int(db or parse_qs(parts.query).get("db", ["0"])[0])}
    if credentials:
        username, _, password = credentials.partition(":")
        options |= {"username": unquote(username) or None, "password": unquote(password)}
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    return [(node.hostname or "localhost", node.port or 26379) for node in nodes], master, options


def redact(url: str) -> str:
    """A URL without its password, for logs and errors."""
    try:
        parts = split_url(url)
    except ValueError:
        return "(no URL)"
    if "@" not in parts.netloc:
        return url
    user = parts.netloc.rpartition("@")[0].partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{parts.netloc.rpartition('@')[2]}"))
