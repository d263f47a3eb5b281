"""The ways to reach a server: each is a context manager that gives every test its URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
import redis
from anyio.from_thread import start_blocking_portal

from tests.cluster.cluster import Cluster
from tests.matrix.certificates import Certificates
from tests.matrix.network import Fault, FaultyProxy
from tests.sentinel.sentinels import Sentinels, Watcher
from tests.servers import Server

WAY: Final = "CONTRACT_WAY"
"""Environment variable with the way for a run of tests/contract; unset: the shared server of all other tests."""
PAGE: Final = Path(__file__).parents[2] / "docs" / "keys.md"

UrlOf = Callable[[str], str]
"""From the key prefix of a test to its URL."""


def rule_of_the_page(prefix: str) -> list[str]:
    """The rights that docs/keys.md grants a worker, for one prefix: everything after the password."""
    (rule,) = re.findall(r"^ACL SETUSER rsmq on >\S+ (.*?)(?=^```)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(rule).replace("rsmq:", f"{prefix}:").split()


@contextmanager
def tcp() -> Iterator[UrlOf]:
    """Over TCP."""
    with Server(tcp=True) as server:
        yield lambda _: server.url


@contextmanager
def unix_socket() -> Iterator[UrlOf]:
    """Over a unix socket."""
    with Server() as server:
        yield lambda _: server.url


@contextmanager
def least_rights() -> Iterator[UrlOf]:
    """Each test has its own user with only the rights of docs/keys.md for its prefix; the default user is disabled."""
    with Server(tcp=True) as server, redis.Redis(port=server.port, username="admin", password="admin") as admin:
        with server.client() as default:
            default.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
        admin.execute_command("ACL", "SETUSER", "default", "off")

        def url_of(prefix: str) -> str:
            admin.execute_command("ACL", "SETUSER", prefix, "on", ">secret", *rule_of_the_page(prefix))
            return f"redis://{prefix}:secret@127.0.0.1:{server.port}/0"

        yield url_of


@contextmanager
def tls() -> Iterator[UrlOf]:
    """Over TLS with client certificates; a proxy terminates TLS in front of a server that is built without it."""
    with TemporaryDirectory() as directory:
        certificates = Certificates.make(Path(directory))
        with server_with_tls(certificates) as port:
            yield lambda _: f"rediss://127.0.0.1:{port}/0?{certificates.query}"


@contextmanager
def server_with_tls(certificates: Certificates) -> Iterator[int]:
    """The port of such a server or proxy."""
    port = Server(tcp=True).port
    options = (
        "--tls-port", str(port), "--tls-cert-file", str(certificates.server),
        "--tls-key-file", str(certificates.server_key), "--tls-ca-cert-file", str(certificates.authority),
    )  # fmt: skip
    try:
        with Server(*options):
            yield port
            return
    except AssertionError as error:
        if "tls" not in str(error).lower():
            raise
    with Server(tcp=True) as server, in_thread(FaultyProxy(server.port, tls=certificates.context())) as proxy:
        yield proxy.port


@contextmanager
def in_thread(proxy: FaultyProxy) -> Iterator[FaultyProxy]:
    """Run the proxy in its own thread: a test that blocks its event loop must not block the proxy."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(proxy):
        yield proxy


def through_proxy(fault: Fault) -> Callable[[], AbstractContextManager[UrlOf]]:
    """Through a proxy with a network fault."""

    @contextmanager
    def way() -> Iterator[UrlOf]:
        with Server(tcp=True) as server, in_thread(FaultyProxy(server.port, fault)) as proxy:
            yield lambda _: proxy.url

    return way


@contextmanager
def cluster() -> Iterator[UrlOf]:
    """Three masters with a replica each."""
    with Cluster() as running:
        yield lambda _: running.url


class PatientSentinels(Sentinels):
    """A failover only after 15 s: on a busy machine a master may be slow, and a failover loses unreplicated writes."""

    def _watcher(self, known: int) -> Watcher:
        return Watcher(known, down_after_ms=15_000)


@contextmanager
def sentinel() -> Iterator[UrlOf]:
    """A master, two replicas, three sentinels."""
    with PatientSentinels() as running:
        yield lambda _: running.url


WAYS: Final[dict[str, Callable[[], AbstractContextManager[UrlOf]]]] = {
    "tcp": tcp,
    "unix socket": unix_socket,
    "TLS, client certificate": tls,
    "least rights (ACL)": least_rights,
    "Redis Cluster": cluster,
    "Sentinel": sentinel,
    "proxy: delays": through_proxy("delays"),
    "proxy: cuts": through_proxy("cuts"),
    "proxy: lost replies": through_proxy("lost-replies"),
    "proxy: black holes": through_proxy("black-holes"),
}

BREAKING: Final = ("proxy: cuts", "proxy: lost replies", "proxy: black holes")
"""Ways over which each connection breaks about once a second."""
steady_connections = pytest.mark.skipif(
    os.environ.get(WAY) in BREAKING,
    reason="counts starts, or ends that a lost answer hides, or makes calls that an operator makes again",
)
"""For a test that does not hold where connections break all the time."""
one_server = pytest.mark.skipif(
    os.environ.get(WAY) == "Redis Cluster",
    reason="asks one server, or for what is done there in one step: on a cluster it is done in several",
)
"""For a test of what a cluster does in another way. What it does with outputs and full topics is in tests/cluster."""


@contextmanager
def chosen() -> Iterator[UrlOf | None]:
    """The way that the environment variable names, or None."""
    name = os.environ.get(WAY)
    if name is None:
        yield None
        return
    with WAYS[name]() as url_of:
        yield url_of
