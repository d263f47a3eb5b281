"""`rsmq device` against a real server, and its session as a process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from tests.cli.conftest import Cli, Running
from tests.servers import wait_until


def test_device_inbox_is_sent_shown_and_purged(cli: Cli) -> None:
    """A letter is shown with its topic and packet id, and deleted by a purge that was confirmed."""
    cli.ok("device", "send", "phone", '{"n": 1}', "--topic", "alerts", "--header", "a=b", "--expires", "PT1H")
    assert cli.ok("device", "send", "phone", "5", "--text") == "stored for phone\n"
    shown = cli.json("device", "show", "phone")
    assert (shown["backlog"], shown["seq"], shown["last_packet_id"], shown["gateway"]) == (2, 2, 2, None)
    first, second = shown["letters"]
    assert (first["data"], first["topic"], first["headers"]) == ({"n": 1}, "alerts", {"a": "b"})
    assert (second["data"], second["type"]) == ("5", "text/plain")
    text = cli.ok("device", "show", "phone", "-n", "1")
    assert "backlog: 2" in text
    assert 'packet 1 alerts {"n":1}' in text
    refused = cli("device", "purge", "phone")
    assert refused.returncode == 2
    assert "use --yes" in refused.stderr
    assert cli.ok("device", "purge", "phone", "--yes") == "deleted 2 letters of phone\n"
    assert cli.json("device", "show", "phone")["letters"] == []


def test_device_list_shows_backlog(cli: Cli) -> None:
    """Devices are listed, with --waiting only those with letters; the output says if there are more."""
    assert cli.ok("device", "list").startswith(f"there are no devices at {cli.environment['RSMQ_URL']}")
    for number in range(3):
        cli.ok("device", "send", f"phone-{number}", "x")
    cli.ok("device", "purge", "phone-0", "--yes")
    assert {each["client_id"] for each in cli.json("device", "list")} == {"phone-0", "phone-1", "phone-2"}
    assert {each["client_id"] for each in cli.json("device", "list", "--waiting")} == {"phone-1", "phone-2"}
    assert "there are more" in cli("device", "list", "-n", "2", "--json").stderr


def test_unknown_device_is_exit_code_1(cli: Cli) -> None:
    """An unknown device is exit code 1; an invalid id or expiry is exit code 2."""
    for verb in (("show",), ("purge", "--yes")):
        answer = cli("device", verb[0], "unknown", *verb[1:])
        assert (answer.returncode, answer.stdout) == (1, "")
        assert "device 'unknown' is unknown" in answer.stderr
    for wrong in (("show", ""), ("send", "x" * 257, "1"), ("send", "phone", "1", "--expires", "10")):
        answer = cli("device", *wrong)
        assert answer.returncode == 2, wrong
        assert "Traceback" not in answer.stderr


def test_device_tail_is_a_session(cli: Cli, start: Callable[..., Running]) -> None:
    """Letters are printed and acknowledged as they come; Ctrl-C ends the session in order."""
    cli.ok("device", "send", "phone", "one", "--text")
    session = start("device", "tail", "--client", "phone")
    assert "1 packet 1 one" in session.expect("one")[0]
    cli.ok("device", "send", "phone", "two", "--text")
    session.expect("two")
    session.signal(signal.SIGINT)
    assert session.end() == 0
    state = cli.json("device", "show", "phone")
    assert (state["backlog"], state["gateway"]) == (0, None)


def test_unacknowledged_letters_are_delivered_again(cli: Cli) -> None:
    """A letter that was not acknowledged is printed again, as redelivered."""
    cli.ok("device", "send", "phone", "one", "--text")
    first = json.loads(cli.ok("device", "tail", "--client", "phone", "--no-ack", "-n", "1", "--json"))
    again = json.loads(cli.ok("device", "tail", "--client", "phone", "-n", "1", "--json"))
    assert (first["seq"], first["redelivered"]) == (1, False)
    assert (again["seq"], again["redelivered"]) == (1, True)
    assert cli.json("device", "show", "phone")["backlog"] == 0


def test_clean_tail_starts_with_an_empty_inbox(cli: Cli, start: Callable[..., Running]) -> None:
    """Letters stored before a clean start are deleted without being printed; the window must be at least 1."""
    cli.ok("device", "send", "phone", "one", "--text")
    session = start("device", "tail", "--client", "phone", "--clean", "-n", "1")
    wait_until(lambda: cli.json("device", "show", "phone")["gateway"] is not None, "it is connected")
    cli.ok("device", "send", "phone", "two", "--text")
    assert session.end() == 0
    assert [line.rpartition(" ")[2] for line in session.lines] == ["two"]
    assert cli.json("device", "show", "phone")["backlog"] == 0
    for window in ("0", "32768"):  # a session has at most half of the packet ids out
        refused = cli("device", "tail", "--client", "phone", "--window", window)
        assert (refused.returncode, "'--window'" in refused.stderr) == (2, True)


def test_tail_whose_session_is_taken_over_says_so(cli: Cli, start: Callable[..., Running]) -> None:
    """One line, exit code 1."""
    cli.ok("device", "send", "phone", "one", "--text")
    session = start("device", "tail", "--client", "phone", "--no-ack")
    session.expect("one")
    cli.ok("device", "tail", "--client", "phone", "-n", "1")
    assert session.end() == 1
    assert "has connected elsewhere" in session.lines[-1]
    assert not session.matching("Traceback")
