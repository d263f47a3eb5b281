"""`rsmq top`, as a script and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from rsmq.cli.top_screen import draw
from rsmq.inspector.trend import Board, GroupTrend, TopicTrend
from tests.cli.conftest import Cli, Running
from tests.inspector.states import MEMBER, PART
from tests.servers import wait_until

Start = Callable[..., Running]
FAST = ("--every", "PT0.1S")


def test_top_once_prints_rates(cli: Cli, app: Path, start: Start) -> None:
    """One object with rates, or tables, with topic, group and member."""
    worker = start("worker", "app:broker")
    worker.expect("reads 2 of 2 partitions")
    cli.ok("publish", "orders", '{"n": 1}')
    worker.expect("finished 1")
    board = cli.json("top", "--once", *FAST)
    assert [(topic["name"], topic["partitions"], topic["rate_in"]) for topic in board["topics"]] == [("orders", 2, 0.0)]
    (group,) = board["groups"]
    assert (group["name"], group["lag"], group["owned"], group["rate_out"]) == ("billing", 0, 2, 0.0)
    assert group["members"][0]["handler"] == "bill"
    text = cli.ok("top", "orders", "--once", *FAST)
    assert "orders/billing" in text
    assert "running" in text
    assert group["members"][0]["id"] in text


def test_top_without_topics_says_so(cli: Cli) -> None:
    """Without topics it says so; a topic that does not exist is a negative answer."""
    assert "there are no topics" in cli.ok("top", "--once", *FAST)
    assert cli("top", "nothing", "--once", *FAST).returncode == 1
    assert cli("top", "--once", "--every", "PT0S").returncode == 2


def test_top_json_prints_lines_until_interrupted(cli: Cli, start: Start) -> None:
    """--json without --once is an object a line; Ctrl-C is no failure."""
    cli.ok("publish", "orders", "1")
    running = start("top", "--json", *FAST)
    lines = running.expect('"topics"', 2)
    running.signal(signal.SIGINT)
    assert running.end() == 0
    assert all(json.loads(line)["topics"][0]["name"] == "orders" for line in lines)


def test_top_on_a_terminal_draws_again_and_again(cli: Cli) -> None:
    """It takes over the screen, draws again and again, and gives the screen back at Ctrl-C."""
    cli.ok("publish", "orders", "1")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rsmq", "top", *FAST], cwd=cli.directory, stdin=follower, stdout=follower,
        stderr=follower, env=cli.environment | {"TERM": "xterm", "LINES": "40"}, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown = bytearray()

    def sees(mark: bytes, count: int) -> bool:
        shown.extend(os.read(leader, 65536))
        return shown.count(mark) >= count

    wait_until(lambda: sees(b"rsmq top", 3), "three screens")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: sees(b"\x1b[?1049l", 1), "the screen is given back")
    assert process.wait(60) == 0
    os.close(leader)
    assert b"\x1b[?1049h" in shown
    assert b"orders" in shown


def drawn(board: Board) -> str:
    """As a wide terminal without colours would show it."""
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(draw(board, "title", with_partitions=True))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_screen_marks_what_is_wrong() -> None:
    """Growth, new dead letters, an unserved group, a dead member and a late loop are shown.

    Names cannot control the terminal.
    """
    share = replace(PART, owner="", is_lag_exact=False, oldest=timedelta(minutes=3))
    late = replace(
        MEMBER, id="w\x1b[31m", concurrency=8, heard_ago=None, loop_lag=timedelta(seconds=2), in_flight=3
    )  # fmt: skip
    group = GroupTrend(
        "orders", "billing", "hash", False, 12.5, None, 100.0, None, timedelta(minutes=3), 3, 0, 2, 1, 0, (share,),
        (late,),
    )  # fmt: skip
    text = drawn(Board(timedelta(seconds=1), (TopicTrend("orders", 1, 5000, 0, 112.0, 1),), (group,)))
    for part in ("unserved", "↑ +100/s", "+1", "3 min", "none", "dead", "2 s", "3/8", "5 000", "112", r"w\x1b[31m"):
        assert part in text, part
    assert "\x1b" not in text
