"""`rsmq top`, as a script and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rsmq.cli.keyboard import keys_of
from rsmq.cli.top_screen import draw
from rsmq.cli.top_view import HELP, TopView, columns_of, heading, picture, press, room_of, settled
from rsmq.inspector.trend import Board, GroupTrend, TopicTrend
from rsmq.model.work import Work
from tests.cli.conftest import Cli, Running
from tests.inspector.states import MEMBER, PART
from tests.servers import Server, wait_until

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
    assert (group["name"], group["backlog"], group["owned"], group["rate_out"]) == ("billing", 0, 2, 0.0)
    assert group["members"][0]["handler"] == "bill"
    text = cli.ok("top", "orders", "--once", *FAST)
    assert "orders/billing" in text
    assert "running" in text
    assert group["members"][0]["id"] in text


def test_the_example_of_the_page_has_the_columns_and_keys_of_the_screen() -> None:
    """In a window of 100 columns. Its picture had those of an earlier version."""
    page = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text(encoding="utf-8")
    names = [name.split("/") for name in re.findall(r"^([a-z]+/[a-z]+) +running", page, re.MULTILINE)]
    groups = [replace(BOARD.groups[0], topic=topic, name=name) for topic, name in names]
    assert len(groups) == 4
    assert heading(columns_of(groups, 100)).plain in page.splitlines()
    assert HELP in page.splitlines()


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


class Window:
    """`rsmq top` in a pseudo-terminal of 80 x 24, and what it shows now."""

    def __init__(self, cli: Cli, terminal: str = "xterm") -> None:
        self._leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (24, 80))
        environment = {**cli.environment, "TERM": terminal} | {"COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rsmq", "top", *FAST], cwd=cli.directory, stdin=follower, stdout=follower,
            stderr=follower, env=environment, start_new_session=True,
        )  # fmt: skip
        self.before = termios.tcgetattr(follower)
        self.follower = follower
        self.sent = ""

    def screen(self) -> list[str]:
        """The lines of the newest picture: each begins at the top left corner."""
        if select.select([self._leader], [], [], 0.2)[0]:
            self.sent += os.read(self._leader, 65536).decode(errors="replace")
        pictures = re.split(r"\x1b\[H", self.sent)
        newest = pictures[-1] if pictures[-1].count("\n") >= 23 else pictures[-2] if len(pictures) > 1 else ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", newest).replace("\r", "").split("\n")

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._leader, keys.encode())

    def shows(self, text: str, *, is_there: bool = True) -> list[str]:
        """Wait until the screen shows a text, or does not, and return it."""
        wait_until(lambda: any(text in line for line in self.screen()) is is_there, f"{text!r} in {self.screen()}")
        return self.screen()

    def end(self) -> None:
        """The screen and the settings of the terminal are as before."""
        wait_until(lambda: bool(self.screen()) and "\x1b[?1049l" in self.sent, "the screen is given back")
        assert self.process.wait(60) == 0
        assert termios.tcgetattr(self.follower)[3] == self.before[3]
        self.close()

    def close(self) -> None:
        """The window is gone."""
        os.close(self._leader)
        os.close(self.follower)


def test_top_on_a_terminal_obeys_keys(cli: Cli, server: Server) -> None:
    """200 topics on 80 x 24: the worst first, idle ones folded; sort, filter, scroll, open and go back; q ends it."""
    prefix = cli.environment["RSMQ_PREFIX"]
    with server.client() as redis:
        pipe = redis.pipeline()
        for n in range(200):
            stream = f"{prefix}:{{topic-{n:03}.0}}"
            pipe.sadd(f"{prefix}:topics", f"topic-{n:03}")
            pipe.hset(f"{prefix}:topic:{{topic-{n:03}}}", mapping={"partitions": 1, "created_ms": 1})
            pipe.xgroup_create(stream, "work", "0", mkstream=True)
            for _ in range(max(0, n - 150)):
                pipe.xadd(stream, {"data": "1"})
        pipe.execute()
    window = Window(cli)
    lines = window.shows("topic-199/work")
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert lines[3].startswith("topic-199/work")
    assert lines[3].split()[1:4] == ["unserved", "0", "49"]
    assert any("151 idle groups are folded" in line for line in lines)
    window.press("\x1b[6~")
    window.shows("topic-175/work")
    window.press("/topic-00")
    window.shows("/topic-00")
    window.press("\r")
    assert sum("/work" in line for line in window.shows("topic-009/work")) == 10
    window.press("\x1b")
    window.shows("topic-199/work")
    window.press("\r")
    assert any("owner" in line for line in window.shows("members"))
    window.press("\x1b")
    window.shows("idle groups are folded")
    window.press("sssssi")
    assert window.shows("topic-000/work")[3].startswith("topic-000/work")
    window.press("q")
    window.end()


def test_top_on_a_dumb_terminal_prints_its_tables(cli: Cli) -> None:
    """As in a shell inside of an editor: nothing can be drawn there, and an empty screen says nothing."""
    cli.ok("publish", "orders", "1")
    window = Window(cli, "dumb")
    wait_until(lambda: bool(window.screen()) and window.sent.count("orders") > 1, "a table is printed")
    assert "\x1b[" not in window.sent
    window.process.send_signal(signal.SIGINT)
    assert window.process.wait(60) == 0
    window.close()


def test_top_on_a_terminal_gives_it_back_at_ctrl_c(cli: Cli) -> None:
    """As a key, before the event loop can be interrupted in the middle."""
    cli.ok("publish", "orders", "1")
    window = Window(cli)
    window.shows("1 topic")
    window.press("\x03")
    window.end()


BOARD = Board(timedelta(seconds=1), (), tuple(
    GroupTrend(f"t{n:02}", "g" * 200, "hash", False, float(n), 10**n, None, None, None, Work(), 10**n, 0, 0, 0, (), ())
    for n in range(10)
))  # fmt: skip
KEYS = ["up", "down", "page up", "page down", "home", "end", "enter", "esc", "s", "i", "/", "t", "0", "backspace", "é"]


@given(st.lists(st.sampled_from(KEYS)), st.integers(1, 300), st.integers(1, 100))
def test_picture_fits_into_any_window_after_any_keys(keys: list[str], width: int, height: int) -> None:
    """Never more lines than the window has, and none wider; the cursor is on a line."""
    view = TopView()
    for key in keys:
        view = settled(press(view, key, BOARD, room_of(height)), BOARD, room_of(height))
        lines = picture(BOARD, view, "title " * 50, width, height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
        assert view.cursor >= 0
    assert press(TopView(), "q", BOARD, 1).is_done


def test_names_are_cut_only_where_there_is_no_room() -> None:
    """A wide window shows whole names and all columns of the docs; a narrow one cuts names to keep the numbers."""
    wide, narrow = (picture(BOARD, TopView(), "title", width, 20) for width in (400, 80))
    assert wide[2].plain.split() == [
        "group", "state", "out/s", "unread", "ready", "running", "waiting", "oldest", "dead",
        "backlog", "trend", "in/s", "owned",
    ]  # fmt: skip
    assert f"t09/{'g' * 200} " in wide[3].plain
    assert (len(narrow[3].plain), narrow[3].plain.split()[0][-2:]) == (80, "g…")
    assert narrow[2].plain.split()[-1] == "dead"
    opened = picture(BOARD, TopView(opened=("t09", "g" * 200)), "title", 400, 40)
    assert any(
        line.plain.split() == ["part.", "owner", "unread", "oldest", "pending", "retry", "dead"] for line in opened
    )


def test_keys_of_a_terminal_are_read_one_by_one() -> None:
    """Also several at once, and sequences that are not known."""
    assert keys_of("a\x1b[A\x1b[6~\x1bOB\r\x1b") == ["a", "up", "page down", "down", "enter", "esc"]
    assert keys_of("\x1b[1;5Cq") == ["q"]


def drawn(board: Board) -> str:
    """As a wide terminal without colours would show it."""
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(draw(board, "title", with_partitions=True))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_screen_marks_what_is_wrong() -> None:
    """Growth, new dead letters, an unserved group, a dead member and a late loop are shown.

    Names cannot control the terminal.
    """
    share = replace(PART, owner="", is_unread_exact=False, oldest=timedelta(minutes=3))
    late = replace(
        MEMBER, id="w\x1b[31m", concurrency=8, heard_ago=None, loop_lag=timedelta(seconds=2), pending=5,
        work=Work(running=3)
    )  # fmt: skip
    group = GroupTrend(
        "orders", "billing", "hash", False, 12.5, None, 100.0, None, timedelta(minutes=3),
        Work(waiting_for_key=3), None, 2, 1, 0, (share,),
        (late,),
    )  # fmt: skip
    text = drawn(Board(timedelta(seconds=1), (TopicTrend("orders", 1, 5000, 0, 112.0, 1),), (group,)))
    for part in (
        "unserved",
        "↑ +100/s",
        "+1",
        "3 min",
        "none",
        "dead",
        "2 s",
        "3/8",
        "3 for a key",
        "5 000",
        "112",
        r"w\x1b[31m",
    ):
        assert part in text, part
    assert "\x1b" not in text


def test_a_group_on_the_screen_shows_what_waits_for_a_rate() -> None:
    """What a member holds back for a rate, on the page of the group; 0 is not shown."""
    for waiting_for_rate in (7, 0):
        work = Work(waiting_for_rate=waiting_for_rate)
        held = replace(MEMBER, work=work, waiting_for_rate_by=(("acme\x1b", 5), ("other", 2)))
        group = GroupTrend(
            "orders", "billing", "hash", False, 12.5, None, None, None, None, work, None, 0, 0, 0, (PART,), (held,)
        )  # fmt: skip
        board = Board(timedelta(seconds=1), (), (group,))
        page = "\n".join(map(str, picture(board, TopView(opened=("orders", "billing")), "title", 120, 24)))
        assert (
            (r"  7 wait for a rate (acme\x1b 5, other 2)  " in page) is ("for a rate" in page) is bool(waiting_for_rate)
        )
