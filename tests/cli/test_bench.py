"""`rsmq bench` as a process: what it reports, what it recommends, and that it leaves nothing behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rsmq.cli.bench.command import advise, bench
from rsmq.cli.bench.meter import Cost
from rsmq.cli.bench.run import BY_NAME
from tests.cli.conftest import Cli, Running
from tests.servers import Server, wait_until

ROOT: Final = Path(__file__).parents[2]
TAKES: Final = re.compile(r"[Mm]easures? .*server.* in ((?:half )?a minute)")
SMALL = ("--messages", "200")
IMPATIENT = {"RSMQ_UNAVAILABLE_TIMEOUT": "PT0.1S"}


def left_behind(server: Server) -> list[bytes]:
    """Keys of a measurement."""
    with server.client() as client:
        return list(client.keys("bench-*"))


def test_json_has_every_measurement_and_the_advice(cli: Cli, server: Server) -> None:
    """All trials with a cost, ratios to their base, both latencies, four recommendations; and no key is left."""
    report = cli.json("bench", *SMALL, "--payload", "300", "--partitions", "3")
    assert list(report["costs"]) == list(BY_NAME)
    assert all(cost["client_us"] > 0 and cost["rate"] > 0 for cost in report["costs"].values())
    assert {name for name, cost in report["costs"].items() if cost["ratio"] is None} == {
        "pipeline", "keys", "bare", "bare-key", "bare-data", "bare-suspending",
    }  # fmt: skip
    assert 0 < report["latency_ms"]["rsmq"]["p50"] <= report["latency_ms"]["rsmq"]["p99"]
    assert [each["name"] for each in report["advice"]] == ["processes", "partitions", "concurrency", "batch"]
    assert left_behind(server) == []


def test_tables_say_what_was_measured_and_why_something_is_recommended(cli: Cli) -> None:
    """One row a trial, and a reason beside each recommendation."""
    text = cli.ok("bench", *SMALL)
    for trial in BY_NAME.values():
        assert trial.meaning in text
    assert "messages/s, a process handles up to" in text


def test_nothing_of_others_is_touched(cli: Cli, server: Server, prefix: str) -> None:
    """A topic with messages and its group are the same afterwards."""
    cli.ok("publish", "orders", '{"n": 1}')
    with server.client() as client:
        before = {key: client.dump(key) for key in client.keys(f"{prefix}:*")}
        cli.ok("bench", *SMALL)
        assert {key: client.dump(key) for key in client.keys(f"{prefix}:*")} == before


def test_ctrl_c_leaves_nothing_behind(cli: Cli, start: Callable[..., Running], server: Server) -> None:
    """Interrupted in the middle it removes its keys before it ends, without a traceback."""
    running = start("bench", "--messages", "1000000")
    wait_until(lambda: left_behind(server), "its first keys")
    running.signal(signal.SIGINT)
    assert running.end() != 0
    assert running.matching("Traceback") == []
    assert left_behind(server) == []


def test_a_cluster_or_sentinel_is_refused_in_one_line(cli: Cli) -> None:
    """The bare client is measured on one server, so it asks for one."""
    done = cli("bench", "--url", "redis+sentinel://127.0.0.1:1/main", **IMPATIENT)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


def test_no_server_is_one_line(cli: Cli) -> None:
    """Exit code 1, and what to check."""
    done = cli("bench", "--url", "redis://127.0.0.1:1/0", **IMPATIENT)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "RSMQ_URL" in done.stderr


def costs(**client_us: float) -> dict[str, Cost]:
    """Costs with these client figures; the server carries 100 000 messages a second."""
    names = {"many": 4.0, "single": 5.0, "batch": 4.0, "suspending": 10.0} | client_us
    return {name: Cost(value, 5.0, 0.01, 1.0) for name, value in names.items()}


def advice(cores: int, **client_us: float) -> dict[str, str]:
    """What is recommended for such costs."""
    return {each.name: each.value for each in advise(costs(**client_us), cores)}


def test_processes_are_as_many_as_the_server_can_feed_and_the_machine_can_run() -> None:
    """A slow process needs company, up to the cores; a fast one does not."""
    assert advice(16, single=5.0)["processes"] == "1"
    assert advice(16, single=35.0)["processes"] == "4"
    assert advice(2, single=35.0)["processes"] == "2"


def test_partitions_follow_the_processes() -> None:
    """Four a process, never fewer than eight."""
    assert advice(16, single=5.0)["partitions"] == "8"
    assert advice(16, single=35.0)["partitions"] == "16"


def test_concurrency_fills_the_wait_of_a_handler() -> None:
    """At 100 000 handlers a second a wait of 10 ms takes 1 000 at once; slower ones need fewer."""
    assert advice(4, suspending=10.0)["concurrency"] == "1024"
    assert advice(4, suspending=100.0)["concurrency"] == "128"


def test_batches_are_recommended_where_they_are_cheaper() -> None:
    """Only for a clear difference."""
    assert advice(4, batch=2.0)["batch"] == "500"
    assert advice(4, batch=4.9)["batch"] == "none"


def test_the_help_and_the_pages_say_the_same_time() -> None:
    """The help said a minute, the pages half of one, which is what it takes."""
    said = [str(bench.__doc__), *((ROOT / page).read_text() for page in ("README.md", "docs/deployment.md"))]
    assert [TAKES.findall(each) for each in said] == [["half a minute"]] * 3


def test_no_advice_says_that_partitions_stay_as_they_are() -> None:
    """A topic can grow."""
    (said,) = [each.reason for each in advise(costs(), 2) if each.name == "partitions"]
    assert ("can grow" in said, "never" in said) == (True, False)
