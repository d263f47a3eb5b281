"""`rsmq worker` as a process: signals, deaths, restarts, and errors in the user's module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Running, is_alive
from tests.servers import wait_until

Start = Callable[..., Running]


def hold(cli: Cli, number: int = 1, key: str = "a") -> None:
    """Publish a message whose handler runs until there is a file `go`."""
    cli.ok("publish", "orders", f'{{"n": {number}, "hold": true}}', "--key", key)


def go(cli: Cli) -> None:
    """Let the handlers that are held finish."""
    (cli.directory / "go").touch()


def test_sigterm_lets_running_handlers_finish(cli: Cli, start: Start, app: Path) -> None:
    """After SIGTERM a running handler finishes, its message is settled, and the exit code is 0."""
    worker = start("worker", "app:broker")
    hold(cli)
    worker.expect("started 1")
    worker.signal(signal.SIGTERM)
    worker.expect("stopping")
    go(cli)
    assert worker.end() == 0
    assert worker.matching("finished 1")
    group = cli.json("group", "show", "orders", "billing")
    assert (group["pending"], group["unread"], group["members"]) == (0, 0, [])


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sighup_lets_running_handlers_finish(cli: Cli, start: Start, app: Path, processes: str) -> None:
    """The end of the terminal is as SIGTERM: the running handler finishes, and the exit code is 0."""
    worker = start("worker", "app:broker", "--processes", processes)
    hold(cli)
    worker.expect("started 1")
    worker.signal(signal.SIGHUP)
    worker.expect("stopping")
    go(cli)
    assert worker.end() == 0, "\n".join(worker.lines)
    assert worker.matching("finished 1")


def test_sighup_is_ignored_under_nohup(cli: Cli, start: Start, app: Path) -> None:
    """A worker that was started with SIGHUP ignored goes on."""
    worker = start("worker", "app:broker", before=("nohup",))
    worker.expect("reads 2 of 2 partitions")
    worker.signal(signal.SIGHUP)
    hold(cli)
    go(cli)
    worker.expect("finished 1")
    assert not worker.matching("stopping")


def test_failure_and_rebalance_are_one_line_each(cli: Cli, start: Start, app: Path) -> None:
    """A failure names the group, the attempt of how many, and the wait; a rebalance is a line for all partitions."""
    app.write_text(app.read_text().replace("    print", "    raise OSError('no line')\n    print", 1))
    worker = start("worker", "app:broker", "--log-level", "info")
    cli("publish", "orders", '{"n": 1}')
    worker.expect("orders/billing: failed (attempt 1 of 5), retry in ")
    assert "OSError: no line" in worker.matching("attempt 1 of 5")[0]
    assert len(worker.matching("orders/billing: reads 2 of 2 partitions: 0-1 (took 0-1)")) == 1
    assert not worker.matching("epoch")
    second = start("worker", "app:broker")
    second.expect("orders/billing: reads 1 of 2 partitions")
    worker.expect("orders/billing: reads 1 of 2 partitions")
    assert len(worker.matching("gave up")) == 1


def test_second_sigterm_stops_now(cli: Cli, start: Start, app: Path) -> None:
    """A second SIGTERM cancels the running handler and hands its message back: it is redelivered."""
    worker = start("worker", "app:broker")
    hold(cli)
    worker.expect("started 1")
    worker.signal(signal.SIGTERM)
    worker.expect("stopping")
    worker.signal(signal.SIGINT)
    assert worker.end() == 0
    assert not worker.matching("finished")
    go(cli)
    start("worker", "app:broker").expect("finished 1")


def test_sigterm_with_zero_grace_stops_now(cli: Cli, start: Start, app: Path) -> None:
    """With a grace of 0 one SIGTERM cancels the running handler."""
    worker = start("worker", "app:broker", "--grace", "PT0S")
    hold(cli)
    worker.expect("started 1")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    assert not worker.matching("finished")


def test_sigusr1_stops_fetching(cli: Cli, start: Start, app: Path) -> None:
    """After SIGUSR1 running handlers finish, and later messages are not fetched."""
    worker = start("worker", "app:broker")
    hold(cli)
    worker.expect("started 1")
    worker.signal(signal.SIGUSR1)
    worker.expect("quiet")
    cli.ok("publish", "orders", '{"n": 2}', "--key", "b")
    go(cli)
    assert worker.end() == 0
    assert worker.matching("finished 1")
    assert not worker.matching("started 2")


def test_third_signal_exits_although_the_loop_is_blocked(cli: Cli, start: Start, app: Path) -> None:
    """A handler that blocks the event loop cannot keep an operator from ending the process."""
    app.write_text(app.read_text().replace("await asyncio.sleep(0.01)", "time.sleep(0.01)"))
    worker = start("worker", "app:broker")
    hold(cli)
    worker.expect("started 1")
    sent = []

    def has_left() -> bool:  # two that come close together may count as one
        worker.signal(signal.SIGTERM)
        sent.append(worker.process.poll())
        return sent[-1] is not None

    wait_until(has_left, "it has left")
    assert (worker.end(), sent[:2]) == (128 + signal.SIGTERM, [None, None])


def test_stuck_thread_does_not_keep_the_process(cli: Cli, start: Start, app: Path) -> None:
    """A plain function cannot be cancelled: after the grace the process leaves without its thread."""
    source = app.read_text().replace("async def", "def").replace("await asyncio.sleep(0.01)", "time.sleep(0.01)")
    app.write_text(source)
    worker = start("worker", "app:broker", "--grace", "PT0S")
    hold(cli)
    worker.expect("started 1")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    assert not worker.matching("finished")


def test_dead_child_is_restarted(cli: Cli, start: Start, app: Path) -> None:
    """A child that was killed is started again, its death is logged, and its message is handled."""
    parent = start("worker", "app:broker", "--processes", "2")
    parent.expect(" serves ", 2)
    hold(cli)
    victim = int(parent.expect("started 1")[0].split()[2])
    os.kill(victim, signal.SIGKILL)
    parent.expect("was killed by SIGKILL")
    parent.expect(" has pid ", 3)
    go(cli)
    parent.expect("finished 1")
    parent.signal(signal.SIGTERM)
    assert parent.end() == 0
    assert not any(is_alive(pid) for pid in parent.pids)


TWO = """
import os
from rsmq import Broker

broker = Broker(partitions=1)

@broker.handler("orders", group="billing")
async def bill(n: int) -> None:
    print("billed", n, os.getpid(), flush=True)

@broker.handler("orders", group="audit")
async def audit(n: int) -> None:
    print("audited", n, flush=True)
"""


def test_only_and_max_messages(cli: Cli, start: Start) -> None:
    """One of two groups is served, by processes that end in order after three messages each; none is lost."""
    (cli.directory / "two.py").write_text(TWO)
    parent = start("worker", "two:broker", "--only", "*/billing", "--concurrency", "2", "--max-messages", "3")
    parent.expect(" serves ")
    for n in range(7):
        cli.ok("publish", "orders", str(n), "--key", "a")
        parent.expect(f"billed {n} ")
    parent.expect("is started again", 2)
    assert not parent.matching("audited")
    assert len({line.split()[2] for line in parent.matching("billed")}) >= 2  # it looks at the count now and then
    parent.signal(signal.SIGTERM)
    assert parent.end() == 0
    wrong = cli("worker", "two:broker", "--only", "billing")
    assert wrong.returncode == 2
    assert "only='billing' chooses no handler" in wrong.stderr


PATIENT = {"RSMQ_LEASE_TTL": "PT1H", "RSMQ_PRESENCE_GRACE": "PT1H", "RSMQ_BLOCK": "PT1S"}
"""Without the word of the parent process, no member would replace a dead one within an hour."""


def killed(parent: Running, *pids: int) -> None:
    """SIGKILL, and the parent has seen it."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    parent.expect("was killed by SIGKILL", len(pids))


def test_partitions_of_a_killed_child_move_to_its_siblings_at_once(cli: Cli, start: Start, app: Path) -> None:
    """The parent tells them which process has died: neither its lease nor the grace of its presence has to end."""
    cli.environment |= PATIENT
    parent = start("worker", "app:broker", "--processes", "3")
    parent.expect(" serves ", 3)
    hold(cli)
    victim = int(parent.expect("started 1")[0].split()[2])
    killed(parent, victim)
    go(cli)
    parent.expect("finished 1")
    assert {int(line.split()[2]) for line in parent.matching("started 1")} - {victim}


def test_children_that_are_killed_together_are_replaced_by_their_successors(cli: Cli, start: Start, app: Path) -> None:
    """No sibling is left to hear of it: the processes that start in their place learn it when they serve."""
    cli.environment |= PATIENT
    parent = start("worker", "app:broker", "--processes", "2")
    parent.expect(" serves ", 2)
    hold(cli)
    parent.expect("started 1")
    killed(parent, *(parent.pids - {parent.process.pid}))
    go(cli)
    parent.expect("finished 1")


def test_child_process_ends_with_its_parent(cli: Cli, start: Start, app: Path) -> None:
    """When the parent is killed the children stop gracefully: running handlers finish first."""
    parent = start("worker", "app:broker", "--processes", "2")
    parent.expect(" serves ", 2)
    hold(cli)
    parent.expect("started 1")
    parent.signal(signal.SIGKILL)
    parent.expect("the parent process has ended", 2)
    go(cli)
    wait_until(lambda: not any(map(is_alive, parent.pids)), "no child is left")
    parent.expect("finished 1")


def test_parent_forwards_signals_to_its_children(cli: Cli, start: Start, app: Path) -> None:
    """SIGTERM to the parent stops all children within the grace, a second one now."""
    parent = start("worker", "app:broker", "--processes", "2")
    parent.expect(" serves ", 2)
    hold(cli)
    parent.expect("started 1")
    parent.signal(signal.SIGTERM)
    parent.expect("rsmq.worker", 2)
    parent.expect("stopping", 3)
    parent.signal(signal.SIGTERM)
    assert parent.end() == 0
    assert not parent.matching("finished")
    assert not any(is_alive(pid) for pid in parent.pids)


LATE = """
import signal
from rsmq import Broker
from rsmq.cli.serve import ServedProcess
from rsmq.worker.supervisor import Stage, signals

service = ServedProcess(None)
service.enter(Stage.QUIET)
with signals(service.obey):
    service.serve(Broker())
    signal.raise_signal(signal.SIGTERM)
    print(service.stage.name)
"""


def test_signal_after_the_broker_has_stopped_is_ignored(cli: Cli) -> None:
    """It raises nothing: the event loop may be closing, and an exception would end the worker with an error."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], env=cli.environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "STOPPING\n", "")


def test_error_in_a_child_stops_all_and_is_printed_once(cli: Cli, start: Start, app: Path) -> None:
    """A configuration error ends the parent with exit code 2 and one message, not a loop of restarts."""
    result = cli("worker", "app:brokr", "--processes", "4")
    assert result.returncode == 2
    assert result.stderr.count("did you mean app:broker?") == 1
    assert "Traceback" not in result.stderr


def test_exit_of_user_code_does_not_end_the_service(cli: Cli, start: Start, app: Path) -> None:
    """A handler that exits fails its message. One that ends the process, with any exit code, is started again."""
    app.write_text(
        app.read_text().replace(
            '    while order.get("hold")',
            """    if order["n"] == 1:
        raise SystemExit(2)
    if order["n"] in (2, 3) and not Path(str(order["n"])).exists():
        Path(str(order["n"])).touch()
        os._exit(2 if order["n"] == 2 else 0)
    if order["n"] == 4 and not Path("4").exists():
        Path("4").touch()
        async def exits(): raise SystemExit(2)
        await asyncio.create_task(exits())
    while order.get("hold")""",
        )
    )
    parent = start("worker", "app:broker", "--processes", "2")
    parent.expect(" serves ", 2)
    cli("publish", "orders", '{"n": 1}')
    parent.expect("retry in")
    for n in (2, 3, 4):
        cli("publish", "orders", f'{{"n": {n}}}')
        parent.expect(f"finished {n}")
    parent.expect("restarting in", 3)
    parent.signal(signal.SIGTERM)
    assert parent.end() == 0


def test_exit_in_a_task_of_a_handler_is_a_failure_of_the_worker(cli: Cli, start: Start, app: Path) -> None:
    """It ends the event loop. The log says so, and the exit code is that of a failure for any code of the exit.

    The message is given back, and the next worker handles it.
    """
    source = app.read_text()
    app.write_text(
        source.replace(
            '    while order.get("hold")',
            """    async def exits():
        raise SystemExit(0)
    await asyncio.create_task(exits())
    while order.get("hold")""",
        )
    )
    worker = start("worker", "app:broker")
    cli.ok("publish", "orders", '{"n": 1}')
    worker.expect("code outside of a handler's call ended this worker: SystemExit: 0")
    assert worker.end() == 1
    app.write_text(source)
    start("worker", "app:broker").expect("finished 1")


def test_reload_replaces_the_child_processes(cli: Cli, start: Start, app: Path) -> None:
    """With --reload changed code runs at once, also after a version that could not be imported."""
    parent = start("worker", "app:broker", "--reload")
    parent.expect(" serves ")
    source = app.read_text()
    app.write_text("broker = (")
    parent.expect("waits for a change")
    app.write_text(source.replace('"finished"', '"done with"'))
    cli.ok("publish", "orders", '{"n": 7}')
    parent.expect("done with 7")
    parent.signal(signal.SIGINT)
    assert parent.end() == 0


def test_worker_json_option_logs_json(cli: Cli, start: Start, app: Path) -> None:
    """With --json every logged line is a JSON object."""
    worker = start("worker", "app:broker", "--json")
    assert worker.expect('"logger":"rsmq.worker"')[0].startswith("{")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0


MISTAKES = {
    "app": "does not name a broker: write MODULE:BROKER",
    "app.py:broker": "names a file: write app:broker",
    "ap:broker": "did you mean app?",
    "app:brokr": "did you mean app:broker?",
    "app:number": "app:number is a int, not a Broker: did you mean app:broker?",
    "deep:broker": "deep.py:2: import no_such_thing: ModuleNotFoundError: No module named 'no_such_thing'",
    "syntax:broker": "syntax.py:1: SyntaxError",
    "handler:broker": 'handler.py:3: @broker.handler("orders", group="a:b"): group name \'a:b\' is not allowed',
    "empty:broker": "empty:broker has no handler",
    "own:broker": "own.py:2: raise Own('no'): Own: no",
    "lazy:broker": "lazy:broker cannot be read: lazy.py:2: return 1 // 0: ZeroDivisionError",
}


@pytest.mark.parametrize(("target", "text"), MISTAKES.items(), ids=MISTAKES)
def test_wrong_target_is_explained(cli: Cli, app: Path, target: str, text: str) -> None:
    """An error in the module is one line with its position and what to write, and exit code 2."""
    app.write_text(app.read_text() + "\nnumber = 1\n")
    (cli.directory / "deep.py").write_text("\nimport no_such_thing\n")
    (cli.directory / "syntax.py").write_text("broker = (\n")
    (cli.directory / "empty.py").write_text("from rsmq import Broker\nbroker = Broker()\n")
    (cli.directory / "lazy.py").write_text("def __getattr__(name):\n    return 1 // 0\n")
    (cli.directory / "own.py").write_text("class Own(BaseException): ...\nraise Own('no')\n")
    (cli.directory / "handler.py").write_text(
        'from rsmq import Broker\nbroker = Broker()\n@broker.handler("orders", group="a:b")\nasync def f(x: str): ...\n'
    )
    result = cli("worker", target)
    assert result.returncode == 2, result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_worker_without_server_is_one_line(cli: Cli, app: Path) -> None:
    """A worker without its server retries, says so, and ends with exit code 1."""
    away = "redis://:secret@127.0.0.1:1/0"
    result = cli("worker", "app:broker", RSMQ_URL=away, RSMQ_UNAVAILABLE_TIMEOUT="PT0.2S")
    assert result.returncode == 1
    assert "no answer from the server at redis://:***@127.0.0.1:1/0" in result.stderr
    assert "Traceback" not in result.stderr
    assert "secret" not in result.stderr


def test_sigterm_while_the_server_is_unreachable_ends_the_worker(cli: Cli, start: Start, app: Path) -> None:
    """A worker that waits for its server ends at the first SIGTERM."""
    cli.environment["RSMQ_URL"] = "redis://127.0.0.1:1/0"
    worker = start("worker", "app:broker")
    worker.expect("waiting for the server")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0


MANY = """
from rsmq import Broker

broker = Broker(partitions=4)

async def handle(n: int) -> None: ...

for number in range(10):
    broker.handler(f"topic{number}", group="g")(handle)
"""


def test_a_kill_among_many_handlers_is_a_few_lines(cli: Cli, start: Start) -> None:
    """One of four processes with ten handlers is killed and replaced: a line for each process and change, not each
    handler. The details are there with `--log-level debug`."""
    (cli.directory / "many.py").write_text(MANY)
    parent = start("worker", "many:broker", "--processes", "4")
    parent.expect("handlers have 4 members", 4)
    before = len(parent.lines)
    os.kill(max(parent.pids - {parent.process.pid}), signal.SIGKILL)
    parent.expect("handlers have 4 members", 8)  # of the three that go on, and of the new one
    after = [line for line in parent.lines[before:] if "rsmq.preflight" not in line]
    assert len(after) <= 12, after
    assert any("took " in line and " of 10 handlers" in line for line in parent.lines)
