"""A real master with two replicas and three sentinels, and a line to it that loses its peers but not its clients."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.to_thread
import redis

from rsmq.testing.proxy import Proxy
from tests.servers import Server, wait_until

NAME: Final = "rsmq-master"
DOWN_AFTER_MS: Final = 1000
PEERS: Final = (b"REPLCONF", b"sentinel-")
"""What replicas and sentinels say about themselves on each of their connections."""
CONNECTION: ContextVar[object] = ContextVar("CONNECTION")
"""Both directions of a connection are pumped in the context of its `_serve`."""


class Watcher(Server):
    """One sentinel. It writes down what it knows into its configuration. `options` are more lines of that."""

    def __init__(
        self, port: int, *options: str, quorum: int = 2, password: str = "", down_after_ms: int = DOWN_AFTER_MS
    ) -> None:
        super().__init__(tcp=True, password=password)
        lines = (
            *options, *([f"requirepass {password}"] if password else []),
            f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}",
            f"sentinel monitor {NAME} 127.0.0.1 {port} {quorum}",
            f"sentinel down-after-milliseconds {NAME} {down_after_ms}",
            f"sentinel failover-timeout {NAME} 4000", f"sentinel parallel-syncs {NAME} 2",
        )  # fmt: skip
        (self.directory / "sentinel.conf").write_text("\n".join(lines) + "\n")

    def command(self) -> list[str]:
        """As a sentinel."""
        return [super().command()[0], str(self.directory / "sentinel.conf"), "--sentinel"]

    def master_port(self) -> int:
        """Where this sentinel sends clients."""
        with self.client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
            return int(port)

    def knows(self) -> tuple[int, int]:
        """How many replicas and other sentinels it has met."""
        with self.client() as client:
            state = client.sentinel_master(NAME)
            return int(state["num-slaves"]), int(state["num-other-sentinels"])


class Sentinels:
    """One master (`master`, if it runs already and is known under another port), two replicas, three sentinels.

    `_server`, `_watcher` and `_known` are there to be replaced.
    """

    def __init__(self, master: Server | None = None, *, known_as: int = 0) -> None:
        self._given, self._known_as = master, known_as
        self.members: list[Server] = []
        self.sentinels: list[Watcher] = []
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """What `RSMQ_URL` would say."""
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels) + f"/{NAME}"

    @property
    def first(self) -> Server:
        """The one that began as the master."""
        return self.members[0]

    def master_port(self) -> int:
        """Where the sentinels send clients now; 0 while they disagree."""
        ports = {watcher.master_port() for watcher in self.sentinels}
        return ports.pop() if len(ports) == 1 else 0

    def __enter__(self) -> Self:
        try:
            self.members += [self._given or self._stack.enter_context(self._server())]
            self.members += [self._stack.enter_context(self._server()) for _ in range(2)]
            known = self._known()
            for replica in self.members[1:]:
                with replica.client() as client:
                    client.execute_command("REPLICAOF", "127.0.0.1", known)
            wait_until(lambda: self._replicas(self.first) == 2, "the replicas are in sync")
            self.sentinels += [self._stack.enter_context(self._watcher(known)) for _ in range(3)]
            wait_until(lambda: all(each.knows() == (2, 2) for each in self.sentinels), "the sentinels know all")
        except BaseException:
            self._stack.close()
            raise
        return self

    def _server(self) -> Server:
        return Server("--repl-diskless-sync-delay", "0", tcp=True, aof=True)

    def _watcher(self, known: int) -> Watcher:
        return Watcher(known)

    def _known(self) -> int:
        """The port of the master that all sentinels report."""
        return self._known_as or self.first.port

    def is_whole(self) -> bool:
        """Whether the sentinels agree about the master, and both others are in sync with it."""
        with suppress(redis.RedisError, StopIteration):
            master = next(member for member in self.members if member.port == self.master_port())
            return self._replicas(master) == 2
        return False

    def _replicas(self, master: Server) -> int:
        """How many replicas the present master has in sync; 0 while it does not answer."""
        with suppress(redis.RedisError), master.client() as client:
            state = client.info("replication")
            return sum(state.get(f"slave{n}", {}).get("state") == "online" for n in range(state["connected_slaves"]))
        return 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


async def switched(sentinels: Sentinels, before: int) -> int:
    """Wait until all sentinels send clients elsewhere; returns where."""
    port = before
    with anyio.fail_after(30):
        while port in (0, before):
            port = await anyio.to_thread.run_sync(sentinels.master_port)
            await anyio.sleep(0.05)
    return port


async def replace_master(sentinels: Sentinels, how: str) -> None:
    """The master is lost (`how`: kill or pause), and another one takes its place. It comes back as a replica: else no
    publish would be confirmed by one after the next time."""
    before = await switched(sentinels, 0)
    victim = next(member for member in sentinels.members if member.port == before)
    getattr(victim, how)()
    try:
        await switched(sentinels, before)
    finally:
        await anyio.to_thread.run_sync(victim.start if how == "kill" else victim.resume)


class Border(Proxy):
    """Passes everything until `part`: then replicas and sentinels hear nothing any more, clients go on as before."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self._whole = asyncio.Event()
        self._whole.set()
        self._pairs, self._peers = set[object](), set[object]()

    @property
    def clients(self) -> int:
        """How many connections pass through it that are neither a replica's nor a sentinel's."""
        return len(self._pairs - self._peers)

    def part(self) -> None:
        """The master and its peers do not see each other any more."""
        self._whole.clear()

    def heal(self) -> None:
        """They do again."""
        self._whole.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = object()
        CONNECTION.set(connection)
        self._pairs.add(connection)
        try:
            await super()._serve(reader, writer)
        finally:
            self._pairs.discard(connection)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = CONNECTION.get()
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if any(mark in data for mark in PEERS):
                    self._peers.add(connection)
                await self._until_whole(connection)
                writer.write(data)
                await writer.drain()
        await self._until_whole(connection)
        writer.transport.abort()

    async def _until_whole(self, connection: object) -> None:
        if connection in self._peers:
            await self._whole.wait()
