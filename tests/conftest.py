"""Fixtures of all tests: one real server per session, a key prefix per test, and a check for tasks left running."""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import uuid
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from tests.contract.witness import Witness
from tests.cpu import CpuRecorder
from tests.servers import Server
from tests.untested import untested

# unbuffered, a process writes a print in pieces, and a line of its log can come between two of them
os.environ.pop("PYTHONUNBUFFERED", None)

# for these tests alone: without bytecode every start of a process compiles all that it imports
sys.dont_write_bytecode = False

ROOT = Path(__file__).parents[1]

# how long an example takes says more about the machine than about the code
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

LONGEST_FIRST = (
    "tests/contract/test_simulation.py", "tests/pipeline/", "tests/chaos/test_workers.py",
    "tests/sql/test_committed_ends.py", "tests/pipeline/test_cluster.py", "tests/cluster/",
    "tests/contract/test_cancelled_handlers.py", "tests/cli/test_nouns.py", "tests/dashboard/test_pages.py",
    "tests/redis/lua/test_hostile_records.py", "tests/chaos/", "tests/cli/",
    "tests/telemetry/", "tests/robustness/", "tests/contract/", "tests/examples/", "tests/repository/",
    "tests/security/",
)  # fmt: skip
"""With `-n` the files that take longest begin first, so that no process is left alone with one of them at the end."""

TOGETHER = {"tests/pipeline/": "spark", "tests/pipeline/test_cluster.py": "spark cluster", "tests/cluster/": "cluster"}
"""Where one expensive fixture serves many files: these stay in one process when the tests run in several."""


SLOW = (
    "tests/pipeline/", "tests/cluster/", "tests/sentinel/", "tests/chaos/", "tests/matrix/", "tests/dashboard/",
    "tests/examples/", "tests/cli/", "tests/robustness/", "tests/fuzz/", "tests/interleavings/", "tests/telemetry/",
    "tests/security/", "tests/benchmarks/", "tests/django/", "tests/sql/", "tests/contract/test_simulation.py",
    "tests/contract/test_liveness.py", "tests/contract/test_poison.py", "tests/repository/test_site.py",
    "tests/repository/test_typed_through.py", "tests/repository/test_typing.py", "tests/testing/test_chaos.py",
)  # fmt: skip
"""What `make test-fast` leaves out: suites with Spark, clusters, browsers or many processes, and long searches."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast`, which `make test-fast` gives, and `--shard` of the workflow."""
    parser.addoption("--fast", action="store_true", help="leave out what takes long: SLOW in tests/conftest.py")
    parser.addoption("--shard", metavar="N/M", help="of M parts of the tests, by file, run the one with the number N")


def shard_of(scope: str, shards: int) -> int:
    """The part that a file or a group belongs to, from 1: by its name, so that each machine says the same."""
    return zlib.crc32(scope.encode()) % shards + 1


def scope_of(nodeid: str) -> str:
    """What stays in one process: a file, or all that shares a Spark or a cluster."""
    return TOGETHER.get(longest(TOGETHER, nodeid)) or nodeid.partition("::")[0]


def longest(starts: Iterable[str], nodeid: str) -> str:
    """The longest of these texts that the id starts with, or an empty one."""
    return max((start for start in starts if nodeid.startswith(start)), key=len, default="")


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is marked with `long_chaos` is a test of chaos, and left to `make chaos`."""
    for mark in item.iter_markers("long_chaos"):
        item.add_marker("chaos")
        if os.environ.get("CHAOS") != "long":
            item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: CHAOS=long, or make chaos"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--fast` and `--shard` do not ask for; with `-n`, sort by LONGEST_FIRST."""
    kept = [item for item in items if not (config.getoption("--fast") and longest(SLOW, item.nodeid))]
    if shard := config.getoption("--shard"):
        number, _, shards = shard.partition("/")
        kept = [item for item in kept if shard_of(scope_of(item.nodeid), int(shards)) == int(number)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if hasattr(config, "workerinput"):
        ranks = {start: rank for rank, start in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(longest(ranks, item.nodeid), len(ranks)))


def pytest_configure(config: pytest.Config) -> None:
    """Compile what the tests start as processes. Python would do it at each start where it may not write bytecode. A
    run with a report has the CPU of each test in it."""
    if config.getoption("xmlpath", None):
        config.pluginmanager.register(CpuRecorder())
    if not config.getoption("numprocesses"):  # this process collects tests, of which nothing is garbage
        gc.disable()
    if not hasattr(config, "workerinput"):
        for folder in ("rsmq", "tests", "benchmarks"):
            compileall.compile_dir(ROOT / folder, quiet=2)


def pytest_sessionstart(session: pytest.Session) -> None:
    """With `-n`, each process imports another part of all tests first: pytest compiles each file once, not four
    times at the same time."""
    if hasattr(session.config, "workerinput") and session.config.args == ["tests"]:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        number, count = (int(os.environ[f"PYTEST_XDIST_WORKER{end}"].removeprefix("gw")) for end in ("", "_COUNT"))
        first = len(files) * number // count
        for path in (*files[first:], *files[:first]):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # what is wrong is said when it is collected
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Leave what was collected out of garbage collections: a full one takes half a second, in any test, and here, too,
    where it would find nothing worth that."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say behind the summary what this machine cannot test, and what to install."""
    yield
    reports = terminalreporter.stats.get("skipped", ())
    reasons = [each.longrepr for each in reports if isinstance(each.longrepr, tuple)]
    if sentence := untested((os.path.relpath(path, ROOT), reason) for path, _, reason in reasons):
        terminalreporter.write_line(sentence)


@pytest.fixture(autouse=True)
def logs_stay(pytestconfig: pytest.Config) -> Iterator[None]:
    """A command sets the log level of its process, and PySpark's loggers give their format to every handler. Called by
    a test, they would change what later tests see."""
    plugin = pytestconfig.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler) if plugin is not None else ():
        handler.setFormatter(plugin.formatter)
    logging.setLoggerClass(logging.Logger)
    log, root = logging.getLogger("rsmq"), logging.root
    before = log.level, root.manager.disable
    yield
    log.setLevel(before[0])
    logging.disable(before[1])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `-n`, a process takes a file at a time, or all that shares a Spark or a cluster.

    Not by marks with `--dist loadgroup`: pytest 9.2 and xdist 3.8 ignore them together, and say nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # that is by the number of tests
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def _plain_environment() -> Iterator[None]:
    """Remove the developer's RSMQ_* variables, which would change the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.upper().startswith("RSMQ_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_terminal() -> None:
    """A background job ignores SIGINT, and one of nohup SIGHUP, and so would the processes that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # these tests go on; a process that they start has the default


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Leave no garbage to the next module: Python 3.11 cannot parse code while a finalizer warns. What is still there
    is kept for the session, such as imports and parsed files: later collections need not look at it."""
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """redis-py runs on asyncio only, and so does rsmq."""
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that all tests of a session share. A test that kills or configures a server starts its own one."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def server_url(server: Server) -> str:
    """Its address."""
    return server.url


@pytest.fixture
def witness() -> Witness:
    """Records what the handlers of a test have seen."""
    return Witness()


@pytest.fixture
def prefix() -> str:
    """A key prefix that only this test uses, so that no test needs FLUSH."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def settings(server_url: str, prefix: str) -> Settings:
    """Defaults on the shared server."""
    return Settings(url=server_url, prefix=prefix)


@pytest.fixture
def keys(prefix: str) -> Keys:
    """The key catalogue of this test."""
    return Keys(prefix)


@pytest.fixture
def connector(settings: Settings) -> Connector:
    """Makes clients for the shared server."""
    assert settings.url is not None
    return Connector(settings.url, settings)


def is_of_the_runner(task: asyncio.Task[Any]) -> bool:
    """Whether anyio's test runner made it, to run this very fixture."""
    return "TestRunner" in getattr(task.get_coro(), "__qualname__", "")


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fails a test that leaves a task running: every role ends with its scope."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if not task.done() and not is_of_the_runner(task)]
    assert not left, f"tasks left running: {left}"


@pytest.fixture
async def client(connector: Connector, no_task_left: None) -> AsyncIterator[Client]:
    """A connected client, closed afterwards."""
    async with connector.connected() as connected:
        yield connected
