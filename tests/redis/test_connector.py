"""The seam to redis-py: addresses, errors in our words, retries, a server that is away, Sentinel failover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from rsmq.errors import BrokerError, BrokerUnavailable, ConfigError, GroupMissing, NotPermitted, RsmqError, ScriptError
from rsmq.model.clock import monotonic
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector, check_url, redact, split_sentinel, translate, translated
from rsmq.redis.client.raw_connection import RawConnection
from rsmq.redis.wire.url import node_url, sentinel_options, server_name, split_cluster, tls_options
from rsmq.testing.server import free_port
from tests.patience import until
from tests.servers import Server, wait_until

SHORT = timedelta(milliseconds=300)


@asynccontextmanager
async def peer(answer: bytes | None) -> AsyncIterator[tuple[str, list[int]]]:
    """A listener that answers every write with the same bytes, or hangs up at once (None); counts its visitors."""
    visits: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        while answer is not None and await reader.read(4096):
            writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}", visits


async def ping(url: str, **values: object) -> None:
    """Connect as `Connector.connected` does."""
    async with Connector(url, Settings(**values)).connected():
        pass


async def test_callers_find_together_that_a_cluster_does_not_answer() -> None:
    """Not one after the other, each for a time-out of its own."""
    waited = list[float]()
    async with peer(b"") as (url, _):
        settings = Settings(url=url.replace("redis:", "redis+cluster:"), command_timeout=timedelta(milliseconds=300))
        client = Connector(settings.url or "", settings).client()

        async def ask(number: int) -> None:
            began = monotonic()
            with pytest.raises(BrokerUnavailable):
                await client.execute_command("GET", number)
            waited.append(monotonic() - began)

        await ask(0)
        async with anyio.create_task_group() as callers:
            for number in range(30):
                callers.start_soon(ask, number)
        await client.aclose()
    assert max(waited) < 6 * waited[0], "30 would take 30 times as long, one after the other"


@pytest.mark.parametrize("path", ["", "/3"])
async def test_a_full_server_is_named_however_late_this_process_is(path: str) -> None:
    """It answers with its limit and closes: also where it has closed before the first command is written."""

    async def keep_busy() -> None:
        while True:
            await asyncio.sleep(0)
            time.sleep(0.002)  # noqa: ASYNC251 - the server has answered and closed when the loop goes on

    server = Server("--maxclients", "4", tcp=True).start()
    with ExitStack() as held:
        held.callback(server.close)
        for _ in range(4):
            held.enter_context(server.client()).ping()
        settings = Settings(url=server.url.removesuffix("/0") + path)
        connector = Connector(settings.url or "", settings)
        client = connector.client()
        async with anyio.create_task_group() as beside:
            beside.start_soon(keep_busy)
            for _ in range(5):
                with pytest.raises(BrokerUnavailable, match="limit `maxclients` of the server is reached"):
                    await RawConnection(client).open()
                with pytest.raises(BrokerUnavailable, match="limit `maxclients` of the server is reached"):
                    await client.execute_command("PING")
            beside.cancel_scope.cancel()
        await client.aclose()
        for _ in range(5):
            with pytest.raises(BrokerUnavailable, match="limit `maxclients`"), translated():
                connector.blocking_client().execute_command("PING")


async def test_unreachable_server_is_said_plainly() -> None:
    """The address, the reason and what to look at; the cause is kept, redis-py's error is not what is raised."""
    url = f"redis://:geheim@127.0.0.1:{free_port()}/0"
    with pytest.raises(BrokerUnavailable, match=r"no answer .*127\.0\.0\.1.*Is it running\? Check RSMQ_URL") as caught:
        await ping(url, unavailable_timeout=SHORT)
    assert "geheim" not in str(caught.value)


async def test_another_service_is_said_plainly() -> None:
    """A web server at the port of the URL."""
    async with peer(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (url, _):
        with pytest.raises(
            BrokerUnavailable, match="Another service answers there, not Redis or Valkey: check host and port"
        ):
            await ping(url, unavailable_timeout=SHORT)


async def test_sentinel_url_of_a_plain_server_is_said_plainly() -> None:
    """The URL names a server where it should name Sentinels."""
    with Server(tcp=True) as server:
        url = f"redis+sentinel://127.0.0.1:{server.port}/orders"
        with pytest.raises(BrokerUnavailable, match="not a Sentinel: use redis://"):
            await ping(url, unavailable_timeout=SHORT)


async def test_unreachable_socket_file() -> None:
    """A unix socket that does not exist is the same error."""
    with pytest.raises(BrokerUnavailable, match="No such file"):
        await ping("unix:///nowhere/s", unavailable_timeout=SHORT)


async def test_unavailable_server_is_tried_again() -> None:
    """Start-up tries again, with back-off, until `unavailable_timeout`."""
    async with peer(None) as (url, visits):
        with pytest.raises(BrokerUnavailable):
            await ping(url, unavailable_timeout=timedelta(seconds=1))
        assert 2 <= len(visits) <= 40


async def test_server_that_comes_up_is_found() -> None:
    """Who starts before its server waits for it."""
    server = Server(tcp=True)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(ping, server.url)
            await anyio.to_thread.run_sync(server.start)
    finally:
        server.close()


async def test_wrong_password_is_a_config_error() -> None:
    """It is a ConfigError, at once, and shows no password."""
    with Server(password="right") as server:
        for url in (server.url.replace("right", "wrong"), server.url.replace(":right@", "")):
            with pytest.raises(ConfigError, match=r"refused the credentials.*check user and password") as caught:
                await ping(url)
            assert "wrong" not in str(caught.value)
        await ping(server.url)


async def test_something_else_listens_there() -> None:
    """A peer that does not speak the protocol is an error of ours."""
    async with peer(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (url, _):
        with pytest.raises(RsmqError):
            await ping(url, unavailable_timeout=SHORT)


async def test_silent_peer_is_unavailable_after_the_timeout() -> None:
    """A peer that accepts and says nothing is unavailable after `command_timeout`, not a hang."""
    async with peer(b"") as (url, _):
        with pytest.raises(BrokerUnavailable):
            await ping(url, unavailable_timeout=SHORT, command_timeout=timedelta(milliseconds=100))


async def test_paused_server_and_its_return() -> None:
    """A command to a stopped server ends with BrokerUnavailable; afterwards the same client works again."""
    with Server() as server:
        settings = Settings(command_timeout=timedelta(seconds=2))
        async with Connector(server.url, settings).connected() as client:
            server.pause()
            try:
                with pytest.raises(BrokerUnavailable):
                    await client.execute_command("PING")
            finally:
                server.resume()
            assert await client.execute_command("PING") == b"PONG"


async def test_restarted_server_and_its_return() -> None:
    """A client outlives its server: one command may fail, the next ones work."""
    with Server(aof=True) as server:
        async with Connector(server.url, Settings()).connected() as client:
            await client.execute_command("SET", "k", "v")
            await anyio.to_thread.run_sync(server.restart)
            try:
                found = await client.execute_command("GET", "k")
            except BrokerUnavailable:
                found = await client.execute_command("GET", "k")
            assert found == b"v"


async def test_time_out_does_not_mix_up_replies() -> None:
    """The late reply of a timed-out command is never taken for that of the next one."""
    with Server() as server:
        settings = Settings(command_timeout=timedelta(seconds=1))
        async with Connector(server.url, settings).connected() as client:
            with pytest.raises(BrokerUnavailable):
                await client.execute_command("DEBUG", "SLEEP", "2")
            with server.client() as plain:
                await anyio.to_thread.run_sync(plain.ping)  # the server is awake again
            assert await client.execute_command("ECHO", "mine") == b"mine"


async def test_replies_are_raw(client: Client, prefix: str) -> None:
    """No response callback changes a shape: a hash is a flat list of bytes, SET answers OK, a score is bytes."""
    assert await client.execute_command("SET", f"{prefix}:s", "v") == b"OK"
    await client.execute_command("HSET", f"{prefix}:h", "a", "1")
    assert await client.execute_command("HGETALL", f"{prefix}:h") == [b"a", b"1"]
    await client.execute_command("ZADD", f"{prefix}:z", 1.5, "m")
    assert await client.execute_command("ZSCORE", f"{prefix}:z", "m") == b"1.5"


def test_blocking_client_is_raw_too(connector: Connector, prefix: str) -> None:
    """The client for threads has the same shapes."""
    with connector.blocking_client() as client:
        client.execute_command("HSET", f"{prefix}:h", "a", "1")
        assert client.execute_command("HGETALL", f"{prefix}:h") == [b"a", b"1"]


def test_blocking_client_gives_up_in_time() -> None:
    """A renewal that waits longer than a third of the lease would be worth nothing."""
    settings = Settings(lease_ttl=timedelta(seconds=3), block=timedelta(seconds=1))
    client = Connector("redis://localhost", settings).blocking_client()
    assert client.connection_pool.connection_kwargs["socket_timeout"] == pytest.approx(1.0)


async def test_cancelled_command_leaves_the_client_usable(client: Client, prefix: str) -> None:
    """Cancelling a wait neither is swallowed nor spoils the pool."""
    for _ in range(20):
        with anyio.move_on_after(0.001) as scope:
            await client.execute_command("BLPOP", f"{prefix}:never", 5)
        assert scope.cancelled_caught
    assert await client.execute_command("ECHO", "mine") == b"mine"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (BusyLoadingError("Redis is loading the dataset in memory"), BrokerUnavailable, "loading its data"),
        (ReadOnlyError("You can't write against a read only replica."), BrokerUnavailable, "become a replica"),
        (ClusterDownError("CLUSTERDOWN Hash slot not served"), BrokerUnavailable, "cluster is down"),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), BrokerUnavailable, "out of memory"),
        (ResponseError("MISCONF Errors writing to the AOF file"), BrokerUnavailable, "free space"),
        (ResponseError("BUSY Redis is busy running a script"), BrokerUnavailable, "long script"),
        (ResponseError("UNBLOCKED the stream key no longer exists"), BrokerUnavailable, "ended the blocking read"),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), BrokerUnavailable, "too few replicas"),
        (ResponseError("NOGROUP No such key 's' or consumer group 'g'"), GroupMissing, "NOGROUP"),
        (ResponseError("ERR user_script:3: boom script: 1f2e"), ScriptError, "boom"),
        (ResponseError("WRONGTYPE Operation against a key"), BrokerError, "`rsmq doctor` names it"),
        (ResponseError("DB index is out of range"), ConfigError, "check the number at the end of RSMQ_URL"),
        (AuthenticationError("invalid username-password pair"), ConfigError, "credentials"),
        (ResponseError("WRONGPASS invalid username-password pair"), ConfigError, "credentials"),
        (NoPermissionError("this user has no permissions to run 'xadd'"), NotPermitted, "ACL"),
        (redis.ConnectionError("Connection closed by server."), BrokerUnavailable, "no answer"),
        (ConnectionResetError(104, "Connection reset by peer"), BrokerUnavailable, "no answer"),
        (TimeoutError(), BrokerUnavailable, "TimeoutError"),
    ],
)
def test_every_error_has_one_of_ours(error: Exception, kind: type[RsmqError], says: str) -> None:
    """The table of what the server and the network say, and what we make of it."""
    found = translate(error, "redis://:geheim@localhost")
    assert type(found) is kind
    assert says in str(found)
    assert "geheim" not in str(found)


def test_noscript_error_reaches_the_script_that_answers_it() -> None:
    """Script answers it with the source."""
    with pytest.raises(NoScriptError), translated():
        raise NoScriptError("No matching script.")


@pytest.mark.parametrize(
    "scheme",
    ["redis://h", "rediss://h:6380/1", "unix:///run/s.sock?db=2", "redis://u:p@h?db=3",
     "redis+cluster://u:p@h1:7000,h2", "rediss+cluster://h?ssl_cert_reqs=none",
     "redis+sentinel://u:p@h1,h2/m?sentinel_username=u&sentinel_password=q&db=2", "rediss+sentinel://h/m?ssl_ca_certs=x"],
)  # fmt: skip
def test_valid_urls_are_accepted(scheme: str) -> None:
    """The forms of RSMQ_URL. The scheme may have capital letters, which the clients for threads do not know."""
    assert check_url(scheme) == scheme
    name, separator, rest = scheme.partition("://")
    assert check_url(f"{name.upper()}{separator}{rest}") == scheme


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h:0/0", "has port 0"),
        ("redis+cluster://h:7000,h2:0", "has port 0"),
        ("redis+sentinel://u:p@h:0/m", "has port 0"),
        ("REDIS://u:@h", "no password before the @"),
        ("redis://h/2?db=3", "names a database twice"),
        ("redis+sentinel://h/m/2?db=3", "names a database twice"),
    ],
)
def test_url_that_would_lead_elsewhere_is_refused(url: str, says: str) -> None:
    """A part of it would be left out in silence."""
    with pytest.raises(ConfigError, match=says):
        check_url(url)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:6379", "http://h", "redis://h:port", "redis://h:99999", "redis://[::1", "redis://h/zero", "unix://",
     "redis+sentinel://h:x/m", "redis+sentinel://h/m/x"],
)  # fmt: skip
def test_invalid_urls_are_refused_with_the_valid_forms(url: str) -> None:
    """The error lists the valid forms."""
    with pytest.raises(ConfigError, match=r"not understood: use redis://.*unix://.*redis\+sentinel://"):
        Connector(url, Settings())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+cluster://h/1", "only database 0"),
        ("redis+cluster://h?db=1", "may not have the option 'db', only none"),
        ("rediss+cluster://h?db=1", "may not have the option 'db', only ssl_ca_certs"),
        ("redis+sentinel://h1,h2", "needs the master's name"),
        ("rediss+sentinel://h1,h2", "needs the master's name"),
        ("redis+sentinel://h/m?ssl_ca_certs=x", "may not have the option 'ssl_ca_certs'"),
        ("redis://h?sentinel_password=x", "may not have the option 'sentinel_password'"),
        ("redis://h?decode_responses=true", "may not have the option 'decode_responses'"),
        ("redis://h?socket_timeout=1", "may not have the option 'socket_timeout'"),
        ("redis://h?ssl_ca_certs=x", "may not have the option 'ssl_ca_certs'"),
    ],
)
def test_urls_that_cannot_work(url: str, says: str) -> None:
    """Each has its own answer."""
    with pytest.raises(ConfigError, match=says):
        Connector(url, Settings())


def test_redact_removes_only_the_password() -> None:
    """Passwords are removed, the rest stays."""
    assert redact("redis://u:p%40ss@h:1/0") == "redis://u:***@h:1/0"
    assert redact("unix:///s") == "unix:///s"


def test_sentinel_url_is_split_into_hosts_and_options() -> None:
    """Hosts with and without port, credentials decoded, master and database."""
    hosts, master, options = split_sentinel("redis+sentinel://u:p%40ss@h1:1234,h2,[::1]:5/main/3")
    assert hosts == [("h1", 1234), ("h2", 26379), ("::1", 5)]
    assert master == "main"
    assert options == {"db": 3, "username": "u", "password": "p@ss"}
    asks = "rediss+sentinel://u:p@h/main?sentinel_username=w&sentinel_password=q%40&ssl_ca_certs=x&ssl_check_hostname=false"
    assert sentinel_options(asks) == {"username": "w", "password": "q@"}
    assert tls_options(asks) == {"ssl_ca_certs": "x", "ssl_check_hostname": False}


def test_cluster_url_is_split_into_seeds() -> None:
    """The seeds, and what one node's address is made of: credentials, TLS and its options stay."""
    url = "rediss+cluster://u:p%40ss@h1:7000,h2,[::1]:5?ssl_ca_certs=x"
    assert split_cluster(url) == [("h1", 7000), ("h2", 6379), ("::1", 5)]
    assert node_url(url, ("::1", 5)) == "rediss://u:p%40ss@[::1]:5/0?ssl_ca_certs=x"
    assert node_url("redis+cluster://h1,h2", ("h3", 1)) == "redis://h3:1/0"
    assert redact(url) == "rediss+cluster://u:***@h1:7000,h2,[::1]:5?ssl_ca_certs=x"


async def test_a_single_server_is_no_cluster() -> None:
    """The address of a server that is no cluster says which one to use."""
    with Server(tcp=True) as single, pytest.raises(ConfigError, match="use redis:// instead"):
        await ping(f"redis+cluster://127.0.0.1:{single.port}")


class SentinelServer(Server):
    """One Sentinel that watches one master and decides alone."""

    def __init__(self, master: Server) -> None:
        super().__init__(tcp=True)
        self._master = master

    def command(self) -> list[str]:
        """A Sentinel wants a file that it can write."""
        file = Path(self.directory / "sentinel.conf")
        file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n"
            f"sentinel monitor main 127.0.0.1 {self._master.port} 1\n"
            f"sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
        )
        return [super().command()[0], str(file), "--sentinel"]


async def test_client_of_a_killed_master_writes_to_its_successor() -> None:
    """When the master is killed, the same client writes to its successor, with BrokerUnavailable at most between."""
    with ExitStack() as stack:
        master = stack.enter_context(Server(tcp=True))
        replica = stack.enter_context(Server("--replicaof", "127.0.0.1", str(master.port), tcp=True))
        sentinel = stack.enter_context(SentinelServer(master))
        watcher, successor = stack.enter_context(sentinel.client()), stack.enter_context(replica.client())
        wait_until(lambda: successor.info("replication")["master_link_status"] == "up", "the replica is in sync")
        wait_until(lambda: watcher.execute_command("SENTINEL", "REPLICAS", "main"), "Sentinel knows the replica")
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        settings = Settings(command_timeout=timedelta(seconds=1))
        async with Connector(url, settings).connected() as client:
            await client.execute_command("SET", "before", "1")
            master.kill()
            await until(lambda: wrote(client, "after"), "the new master takes a write")
            assert successor.get("after") == b"1"


async def wrote(client: Client, key: str) -> bool:
    """Whether the write was accepted; any error but BrokerUnavailable fails the test."""
    try:
        await client.execute_command("SET", key, "1")
    except BrokerUnavailable:
        return False
    return True


async def test_credentials_that_were_good_are_waited_for() -> None:
    """A refusal after an accepted login is an outage: the password is being changed, and a worker survives that."""
    with Server() as server, server.client() as operator:
        async with Connector(server.url, Settings(url=server.url)).connected() as client:
            operator.config_set("requirepass", "secret")
            await client.connection_pool.disconnect()
            with pytest.raises(BrokerUnavailable, match="refused the credentials"):
                await client.execute_command("PING")
            operator.config_set("requirepass", "")
            await client.execute_command("PING")


@pytest.mark.parametrize(
    "url",
    ["redis://:6379/0", "redis:///0", "redis://h:/0", "redis://:@h", "rediss://app:@h", "redis://@h",
     "redis+sentinel://a,,b/main", "redis+cluster://a,:7000", "redis://:pw\n@h"],
)  # fmt: skip
def test_url_with_an_empty_part_is_refused(url: str) -> None:
    """`redis://:$PASSWORD@$HOST` without these variables would lead to this machine, without a password."""
    with pytest.raises(ConfigError, match=r"has (an empty host or port|no password before the @|a line end)"):
        check_url(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://app:geheim@h", "redis://h:6379, database 0"),
        ("rediss://:geheim@[::1]:7/3", "rediss://[::1]:7, database 3"),
        ("unix://app:geheim@/run/s.sock?db=2", "unix:///run/s.sock, database 2"),
        (
            "redis+sentinel://:geheim@a,b:9/main/4?sentinel_password=geheim",
            "redis+sentinel://a:26379,b:9/main, database 4",
        ),
        ("redis+cluster://:geheim@a,b:9", "redis+cluster://a:6379,b:9"),
    ],
)
def test_name_of_a_server_says_all_but_the_credentials(url: str, name: str) -> None:
    """The log names host, port and database, also where the URL leaves them to the defaults."""
    assert server_name(check_url(url)) == name
