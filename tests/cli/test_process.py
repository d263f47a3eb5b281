"""The process as others run it: terminals, process groups, service managers, containers, and other people's logging."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rsmq import ConfigError
from rsmq.cli.load_broker import load_object
from rsmq.cli.log import LineFormatter
from rsmq.redis.embedded.server import EmbeddedServer
from tests.cli.conftest import Cli, Running, is_alive
from tests.servers import Server, wait_until
from tests.telemetry.test_deploy import is_allowed

Start = Callable[..., Running]

APP = """
import logging, os, pathlib, time
{setup}
from rsmq import Broker
broker = Broker()

@broker.handler("orders", group="billing", execution="{execution}")
def bill(order: dict) -> None:
    pathlib.Path("pid").write_text(str(os.getpid()))
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    pathlib.Path("done").touch()
"""
OWN_SESSION = ("nice",)
"""`Running` starts a command of its own with a session of its own: its process group is that of a terminal."""


def write_app(cli: Cli, setup: str = "", execution: str = "thread") -> None:
    (cli.directory / "app.py").write_text(APP.format(setup=setup, execution=execution))


def started(cli: Cli, start: Start, *args: str) -> Running:
    """A worker whose handler has begun and waits for the file `go`."""
    cli.ok("publish", "orders", "{}")
    worker = start("worker", "app:broker", *args, before=OWN_SESSION)
    wait_until(lambda: (cli.directory / "pid").exists() and (cli.directory / "pid").read_text(), "it has begun")
    return worker


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_process_group_lets_a_process_handler_finish(
    cli: Cli, start: Start, number: signal.Signals
) -> None:
    """Ctrl-C in a terminal and `kill -- -pgid` reach the handler's process, too: it leaves them to the worker."""
    write_app(cli, execution="process")
    worker = started(cli, start)
    os.killpg(worker.process.pid, number)
    worker.expect("stopping")
    (cli.directory / "go").touch()
    assert worker.end() == 0
    assert (cli.directory / "done").exists()
    assert not worker.matching("failed")
    group = cli.json("group", "show", "orders", "billing")
    assert (group["pending"], group["unread"]) == (0, 0)


def test_process_of_a_handler_ends_with_a_killed_worker(cli: Cli, start: Start) -> None:
    """It would go on beside the redelivery of its message."""
    write_app(cli, execution="process")
    worker = started(cli, start)
    handler = int((cli.directory / "pid").read_text())
    assert handler != worker.process.pid
    worker.signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(handler), "the process of the handler has ended")


def test_signal_to_parent_and_children_counts_once(cli: Cli, start: Start) -> None:
    """As from a service manager that signals every process of a service: handlers finish, nothing is handed back."""
    write_app(cli)
    worker = started(cli, start, "--processes", "2")
    worker.expect(" serves ", 2)
    for pid in sorted(worker.pids):
        os.kill(pid, signal.SIGTERM)
    worker.expect("stopping", 3)
    (cli.directory / "go").touch()
    assert worker.end() == 0
    assert (cli.directory / "done").exists()


def test_second_signal_reaches_all_processes(cli: Cli, start: Start) -> None:
    """A second Ctrl-C hands messages back at once, also with several processes."""
    write_app(cli, execution="process")
    worker = started(cli, start, "--processes", "2")
    worker.expect(" serves ", 2)
    os.killpg(worker.process.pid, signal.SIGINT)
    worker.expect("stopping", 3)
    os.killpg(worker.process.pid, signal.SIGINT)
    assert worker.end() == 0, worker.lines
    assert not (cli.directory / "done").exists()
    assert cli.json("group", "show", "orders", "billing")["members"] == []


OWN_LOGGING = {
    "basicConfig": 'logging.basicConfig(format="MINE %(name)s %(message)s", level="INFO")',
    "handler": """
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("MINE %(name)s %(message)s"))
logging.getLogger().addHandler(handler)
logging.getLogger().setLevel("INFO")
""",
    "dictConfig": """
import logging.config
logging.config.dictConfig({"version": 1, "root": {"handlers": ["own"], "level": "INFO"},
    "formatters": {"mine": {"format": "MINE %(name)s %(message)s"}},
    "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "mine"}}})
""",
}


SHOWS_LEVELS = """
from contextlib import asynccontextmanager

@broker.lifespan
@asynccontextmanager
async def around():
    print("levels", logging.getLogger("sqlalchemy").level, logging.getLogger("rsmq").level, flush=True)
    yield
"""


@pytest.mark.parametrize("own", OWN_LOGGING)
def test_logging_of_an_application_stays_its_own(cli: Cli, start: Start, own: str) -> None:
    """Each line comes once and in its format, and the levels of other libraries are left alone."""
    write_app(cli, OWN_LOGGING[own] + '\nlogging.getLogger("sqlalchemy").setLevel("ERROR")')
    with (cli.directory / "app.py").open("a") as module:
        module.write(SHOWS_LEVELS)
    worker = start("worker", "app:broker")
    worker.expect("reads 2 of 2 partitions")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    assert worker.matching("levels") == ["levels 40 0"]
    lines = worker.matching("rsmq.")
    assert all(line.startswith("MINE rsmq.") for line in lines), lines
    assert len(worker.matching("reads 2 of 2 partitions")) == 1


RAISES = """
class Broken(logging.Handler):
    def emit(self, record):
        raise RuntimeError("no log server")
logging.getLogger().addHandler(Broken())
logging.getLogger().setLevel("INFO")
"""


TAKES_SIGNALS = """
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


def test_child_beside_a_module_called_redis_that_takes_signals_stops_in_order(cli: Cli, start: Start) -> None:
    """Child processes find the packages that the command finds, and stop by the signals that an import has taken."""
    write_app(cli, TAKES_SIGNALS)
    (cli.directory / "redis.py").write_text("client = None")
    cli.ok("publish", "orders", "{}")
    worker = start("worker", "app:broker", "--max-messages", "1000")
    wait_until((cli.directory / "pid").exists, "the handler has begun")
    worker.expect("app:broker handles SIGTERM by itself: the worker takes that signal back")
    worker.signal(signal.SIGTERM)
    worker.expect("stopping")
    (cli.directory / "go").touch()
    assert worker.end() == 0, "\n".join(worker.lines)
    assert (cli.directory / "done").exists()


def test_gateways_beside_a_module_called_redis_listen(cli: Cli, start: Start) -> None:
    """Their processes, too, find the packages that the command finds."""
    write_app(cli)
    (cli.directory / "redis.py").write_text("client = None")
    gateway = start("gateway", "app:broker", "--listen", "mqtt://127.0.0.1:0", "--anonymous", "--processes", "2")
    gateway.expect("listens on", 2)
    gateway.signal(signal.SIGTERM)
    assert gateway.end() == 0, "\n".join(gateway.lines)


def test_module_is_loaded_where_the_current_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a deployment that replaces it: installed modules are found, and an error names the cause."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_object("json:dumps") is json.dumps
    with pytest.raises(ConfigError, match="no module 'no_such_app' in the current directory, which has been removed"):
        load_object("no_such_app:broker")
    with pytest.raises(ConfigError, match="the current directory has been removed, and the embedded server"):
        EmbeddedServer()


def test_text_of_an_error_forges_no_line_of_the_log() -> None:
    """It may quote a payload: control characters are escaped, and a line that looks like a record is indented."""
    error = ValueError("\x1b[2J\x9b\u202e\r\n12:00:00.000 INFO    rsmq.worker[1] stopping\n\tand more")
    record = logging.LogRecord("rsmq.handler", logging.WARNING, "", 0, "it failed: %s", (error,), (None, error, None))
    shown = LineFormatter().format(record)
    assert shown.isascii()
    assert set(shown) & set(map(chr, range(32))) == {"\n", "\t"}
    assert [line for line in shown.splitlines() if re.match(r"\d\d:", line)] == shown.splitlines()[:1]
    assert "\n    12:00:00.000 INFO    rsmq.worker[1] stopping\n\tand more" in shown


def test_handler_of_logging_that_raises_costs_no_message(cli: Cli, start: Start) -> None:
    """It is named once; the worker goes on, and stops in order."""
    write_app(cli, RAISES)
    worker = started(cli, start)
    (cli.directory / "go").touch()
    wait_until(lambda: cli.json("group", "show", "orders", "billing")["pending"] == 0, "it is settled")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    assert len(worker.matching("rsmq: a handler of logging has failed: RuntimeError: no log server")) == 1


def test_worker_without_standard_streams(cli: Cli, start: Start) -> None:
    """Some service managers close them: no socket gets their numbers, and the worker works and stops in order."""
    write_app(cli)
    cli.ok("publish", "orders", "{}")
    (cli.directory / "go").touch()
    command = f"exec {sys.executable} -m rsmq worker app:broker <&- >&- 2>&-"
    with subprocess.Popen(["sh", "-c", command], cwd=cli.directory, env=cli.environment) as worker:
        try:
            wait_until(lambda: (cli.directory / "done").exists(), "it has handled the message")
            open_files = {each.name: os.readlink(each) for each in Path(f"/proc/{worker.pid}/fd").iterdir()}
            worker.terminate()
            assert worker.wait(60) == 0
        finally:
            worker.kill()
    assert [open_files[number] for number in "012"] == ["/dev/null"] * 3


BARE = """
mount --make-rprivate / && mount --bind / / && mount -o remount,bind,ro / && mount -t tmpfs -o ro none /dev/shm
umask 0777
exec setpriv --reuid 12345 --regid 12345 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search \\
    env -i LC_ALL=C TMPDIR=/nowhere PYTHONPYCACHEPREFIX="$PYTHONPYCACHEPREFIX" \\
    RSMQ_PREFIX="$RSMQ_PREFIX" RSMQ_URL="$RSMQ_URL" "$@"
"""


def test_worker_without_name_and_home_in_a_bare_container(cli: Cli, start: Start) -> None:
    """A user id without a name and a home, nothing in the environment, a read-only file system, no /dev/shm and no
    place for temporary files, a C locale, a strict umask."""
    if not is_allowed("unshare", "--mount", "true"):
        pytest.skip("a mount namespace needs root")
    with Server(tcp=True) as server:
        cli.environment |= {"RSMQ_URL": server.url, "RSMQ_PREFLIGHT": "warn"}
        (cli.directory / "app.py").write_text(
            "import os\nfrom rsmq import Broker\nbroker = Broker(preflight='warn')\n"
            "@broker.handler('orders', group='inline')\n"
            "async def a(order: dict) -> None: print('handled', order['n'], flush=True)\n"
            "@broker.handler('orders', group='process', execution='process')\n"
            "def b(order: dict) -> None: raise ValueError(f'{order} by {os.getuid()}')\n"
        )
        cli.ok("publish", "orders", '{"n": 1}')
        before = ("unshare", "--mount", "sh", "-c", BARE, "sh")
        worker = start("worker", "app:broker", before=before)
        worker.expect("handled 1")
        worker.expect("by 12345")
        worker.signal(signal.SIGTERM)
        assert worker.end() == 0


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, "Zo\xeb \\ud83d\\ude00".encode("latin-1")),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "Zoë 😀".encode()),
    ],
    ids=["latin-1", "C"],
)
def test_commands_in_a_locale_without_utf8(cli: Cli, environment: dict[str, str], shown: bytes) -> None:
    """They take UTF-8, and print all of it; what the encoding of the terminal does not have is escaped."""

    def run(*args: str) -> bytes:
        return subprocess.run(
            [sys.executable, "-m", "rsmq", *args], env=cli.environment | environment, check=True, capture_output=True
        ).stdout

    if "LC_ALL" in environment:
        run("publish", "orders", '{"name": "Zoë 😀"}')
    else:
        cli.ok("publish", "orders", '{"name": "Zoë 😀"}')
    assert shown in run("tail", "orders", "--json")
