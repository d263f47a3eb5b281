"""The ways to reach a server: each a stage that gives every test its URL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import redis
from anyio.from_thread import start_blocking_portal

from tests.cluster.cluster import Cluster
from tests.matrix.certificates import Certificates
from tests.matrix.weather import Line, Weather
from tests.sentinel.sentinels import Sentinels, Watcher
from tests.servers import Server

WAY: Final = "CONTRACT_WAY"
"""The variable that names the way for a run of tests/contract; unset: the shared server of every other test."""
PAGE: Final = Path(__file__).parents[2] / "docs" / "keys.md"

UrlOf = Callable[[str], str]
"""From the key prefix of a test to its URL."""


def rule_of_the_page(prefix: str) -> list[str]:
    """The rights that docs/keys.md grants a worker, for one prefix: everything after the password."""
    (line,) = re.findall(r"^ACL SETUSER rsmq on >\S+ (.*?)(?=^```)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(line).replace("rsmq:", f"{prefix}:").split()


@contextmanager
def tcp() -> Iterator[UrlOf]:
    """A port."""
    with Server(tcp=True) as server:
        yield lambda _: server.url


@contextmanager
def unix_socket() -> Iterator[UrlOf]:
    """A file."""
    with Server() as server:
        yield lambda _: server.url


@contextmanager
def least_rights() -> Iterator[UrlOf]:
    """Each test is a user who has what docs/keys.md says, for the prefix of this test, and nothing else; the default
    user is switched off."""
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
    """The server asks every client for a certificate. One built without TLS has a proxy in front that does."""
    with TemporaryDirectory() as directory:
        papers = Certificates.make(Path(directory))
        with server_with_tls(papers) as port:
            yield lambda _: f"rediss://127.0.0.1:{port}/0?{papers.query}"


@contextmanager
def server_with_tls(papers: Certificates) -> Iterator[int]:
    """Its port."""
    port = Server(tcp=True).port
    options = ("--tls-port", str(port), "--tls-cert-file", str(papers.server), "--tls-key-file", str(papers.server_key),
               "--tls-ca-cert-file", str(papers.authority))  # fmt: skip
    try:
        with Server(*options):
            yield port
            return
    except AssertionError as error:
        if "tls" not in str(error).lower():
            raise
    with Server(tcp=True) as server, outdoors(Line(server.port, tls=papers.context())) as line:
        yield line.port


@contextmanager
def outdoors(line: Line) -> Iterator[Line]:
    """Open in a thread of its own: a test that blocks its loop must not hold up the line."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(line):
        yield line


def under(weather: Weather) -> Callable[[], AbstractContextManager[UrlOf]]:
    """Through a proxy."""

    @contextmanager
    def way() -> Iterator[UrlOf]:
        with Server(tcp=True) as server, outdoors(Line(server.port, weather)) as line:
            yield lambda _: line.url

    return way


@contextmanager
def cluster() -> Iterator[UrlOf]:
    """Three masters with a replica each."""
    with Cluster() as running:
        yield lambda _: running.url


class Patient(Sentinels):
    """Nobody is killed here. On a busy machine a master may be late, and a failover loses what no replica has yet."""

    def _watcher(self, known: int) -> Watcher:
        return Watcher(known, down_after_ms=15_000)


@contextmanager
def sentinel() -> Iterator[UrlOf]:
    """A master, two replicas, three sentinels."""
    with Patient() as running:
        yield lambda _: running.url


WAYS: Final[dict[str, Callable[[], AbstractContextManager[UrlOf]]]] = {
    "tcp": tcp,
    "unix socket": unix_socket,
    "TLS, client certificate": tls,
    "least rights (ACL)": least_rights,
    "Redis Cluster": cluster,
    "Sentinel": sentinel,
    "proxy: delays": under("delays"),
    "proxy: cuts": under("cuts"),
    "proxy: lost replies": under("lost-replies"),
    "proxy: black holes": under("black-holes"),
}


@contextmanager
def chosen() -> Iterator[UrlOf | None]:
    """The way that the environment names; None if it names none."""
    name = os.environ.get(WAY)
    if name is None:
        yield None
        return
    with WAYS[name]() as url_of:
        yield url_of
