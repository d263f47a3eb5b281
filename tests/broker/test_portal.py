"""`publish_sync`: for code without an event loop, from any thread."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import ThreadingMixIn
from types import ModuleType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import httpx
import pytest

from rsmq import Broker, ConfigError, Settings, SyncBroker, TooLarge
from tests.servers import Server, wait_until

ROOT = Path(__file__).parents[2]


class ThreadedServer(ThreadingMixIn, WSGIServer):
    """A thread for each request."""


class Silent(WSGIRequestHandler):
    """Does not log requests."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def broker(settings: Settings) -> Broker:
    """A broker that is never entered: `publish_sync` opens its own event loop."""
    return Broker(settings)


def stored(server: Server, settings: Settings, topic: str) -> int:
    """The entries of all partitions."""
    with server.client() as client:
        return sum(client.xlen(f"{settings.prefix}:{{{topic}.{n}}}") for n in range(settings.partitions))


PUBLISH: list[Callable[[Settings], object]] = [
    lambda settings: Broker(settings).publish_sync("orders", 1),
    lambda settings: SyncBroker(settings).publish("orders", 1),
]


@pytest.mark.parametrize("view", PUBLISH, ids=["Broker", "SyncBroker"])
def test_brokers_that_are_dropped_are_closed_with_one_warning(
    settings: Settings, caplog: pytest.LogCaptureFixture, view: Callable[[Settings], object]
) -> None:
    """A web view that makes a broker in each request leaves no thread, descriptor or connection behind."""

    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        view(settings)
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before[0], "the threads have ended")
    assert len(os.listdir("/proc/self/fd")) <= before[1]
    (said,) = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert said.startswith(f"a broker made at {__file__}:{view.__code__.co_firstlineno} was dropped while")


def test_broker_that_is_dropped_in_its_own_thread_is_closed(settings: Settings) -> None:
    """The garbage collector may run in the thread of the connection, which cannot wait for itself."""
    before = set(threading.enumerate())
    broker = Broker(settings)
    broker.publish_sync("orders", 1)
    held = [broker]
    broker._portal.run_soon(held.clear)
    del broker
    wait_until(lambda: not held, "the last reference is gone")
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before, "the thread has ended")


def test_publish_sync_from_many_threads_uses_one_connection(server: Server, settings: Settings, broker: Broker) -> None:
    """Each call returns the id of its own message; one background thread serves them all."""
    before = threading.active_count()
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda n: broker.publish_sync("orders", {"n": n}, key="k"), range(100)))
    assert len(set(ids)) == 100
    assert stored(server, settings, "orders") == 100
    assert threading.active_count() <= before + 2
    broker._portal.close()
    assert threading.active_count() <= before


def test_publish_sync_passes_options_and_errors(server: Server, settings: Settings, broker: Broker) -> None:
    """It takes the options of `publish` and raises its errors; the connection survives them."""
    with pytest.raises(ConfigError, match=r"publish: unknown option 'kye'\. Did you mean key\?"):
        broker.publish_sync("orders", {}, kye="a")  # type: ignore[call-arg]
    with pytest.raises(TooLarge):
        broker.publish_sync("orders", b"x" * (settings.payload_limit + 1))
    first = broker.publish_sync("orders", {"n": 1}, message_id="once")
    assert broker.publish_sync("orders", {"n": 1}, message_id="once") == first == "once"
    assert stored(server, settings, "orders") == 1
    broker._portal.close()


def test_publish_sync_to_an_unreachable_server_raises_and_leaves_no_thread() -> None:
    """The error is rsmq's own, and the call can be repeated."""
    broker = Broker(Settings(url="redis://127.0.0.1:1", unavailable_timeout="PT0.2S"))
    before = threading.active_count()
    for _ in range(2):
        with pytest.raises(Exception, match="no answer from the server"):
            broker.publish_sync("orders", {})
    assert threading.active_count() == before


def test_portal_closed_twice_opens_again(settings: Settings, broker: Broker) -> None:
    """A second close does nothing; the next publish connects again."""
    for n in range(2):
        broker.publish_sync("orders", {"n": n})
        broker._portal.close()
        broker._portal.close()


@pytest.mark.anyio
async def test_publish_without_connecting_is_refused(broker: Broker) -> None:
    """The error shows `async with broker`."""
    with pytest.raises(ConfigError, match="async with broker"):
        await broker.publish("orders", {})


FORK = """
import os, sys
from rsmq import Broker, Settings

broker = Broker(Settings(url=sys.argv[1], prefix=sys.argv[2], preflight="warn"))
broker.publish_sync("orders", {"by": "parent"})
child = os.fork()
broker.publish_sync("orders", {"by": "child" if child == 0 else "parent again"})
if child == 0:
    broker.publish_sync("orders", {"by": "child again"})
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
broker.publish_sync("orders", {"by": "parent at last"})
"""


def test_publish_sync_works_after_a_fork(server: Server, settings: Settings) -> None:
    """A server that loads the application before it forks: parent and child publish, each over its own connection."""
    assert settings.url is not None
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, settings.url, settings.prefix]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert stored(server, settings, "orders") == 5


def flask_shop(broker: Broker) -> Any:
    """An application that publishes an order for each request."""
    flask = pytest.importorskip("flask")
    app = flask.Flask("shop")

    @app.post("/orders")
    def order() -> dict[str, str]:
        return {"id": broker.publish_sync("orders", flask.request.get_json(), key="k")}

    return app


def django_shop(broker: Broker) -> Any:
    """The same application in Django, whose settings can be configured only once per process."""
    pytest.importorskip("django")
    from django.conf import settings
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpRequest, JsonResponse
    from django.urls import path

    def order(request: HttpRequest) -> JsonResponse:
        return JsonResponse({"id": broker.publish_sync("orders", json.loads(request.body), key="k")})

    urls = ModuleType("urls")
    urls.urlpatterns = [path("orders", order)]  # type: ignore[attr-defined]
    if not settings.configured:
        settings.configure(ROOT_URLCONF=urls, ALLOWED_HOSTS=["*"], SECRET_KEY="of a test")
    return WSGIHandler()


@pytest.mark.parametrize("shop", [flask_shop, django_shop])
def test_publish_sync_works_in_a_wsgi_application(
    server: Server, settings: Settings, broker: Broker, shop: Callable[[Broker], Callable[..., Any]]
) -> None:
    """Flask and Django, with a thread per request."""
    listening = make_server("127.0.0.1", 0, shop(broker), server_class=ThreadedServer, handler_class=Silent)
    serving = threading.Thread(target=listening.serve_forever)
    serving.start()
    try:
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{listening.server_port}") as client,
            ThreadPoolExecutor(8) as pool,
        ):
            answers = list(pool.map(lambda n: client.post("/orders", json={"n": n}).json(), range(40)))
    finally:
        listening.shutdown()
        serving.join()
        listening.server_close()
        broker._portal.close()
    assert len({answer["id"] for answer in answers}) == 40
    assert stored(server, settings, "orders") == 40


AT_EXIT = """
import atexit{first}
from rsmq import Broker, SyncBroker
from rsmq.errors import BrokerError

sync, broker = SyncBroker(), Broker()
sync.publish("orders", 0)
broker.publish_sync("orders", 0)
{last}
"""
FLUSH = """
@atexit.register
def flush():
    for publish in (lambda: sync.publish("orders", 1), lambda: broker.publish_sync("orders", 1)):
        try:
            print("stored", publish())
        except Exception as error:
            print(type(error).__name__)
"""


@pytest.mark.parametrize("is_early", [False, True])
def test_atexit_function_may_publish(server_url: str, prefix: str, is_early: bool) -> None:
    """Brokers are closed after the functions that an application registers. One that was registered before rsmq was
    imported gets an error: the process must not wait for a thread that does not start any more."""
    source = AT_EXIT.format(first=FLUSH if is_early else "", last="" if is_early else FLUSH)
    environment = {**os.environ, "RSMQ_URL": server_url, "RSMQ_PREFIX": prefix, "RSMQ_PREFLIGHT": "warn"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == ["BrokerError" if is_early else "stored"] * 2
