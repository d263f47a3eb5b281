"""`rsmq erase`: asks first, and says what is gone and what it does not look at."""

from __future__ import annotations

from tests.cli.conftest import Cli


def test_a_key_is_erased_after_a_question(cli: Cli) -> None:
    """With the inbox of a device. Exit code 2 without an answer, 0 when nothing is left."""
    cli.ok("publish", "orders", '{"n": 1}', "--key", "u7")
    cli.ok("publish", "orders", '{"n": 2}', "--key", "u8")
    cli.ok("device", "send", "phone-7", "x", "--text")
    refused = cli("erase", "u7")
    assert refused.returncode == 2
    assert "use --yes" in refused.stderr
    done = cli("erase", "u7", "--device", "phone-7", "--yes")
    assert done.returncode == 0
    assert done.stdout.startswith(
        "erased 1 message, 0 delayed, 0 dead letters, 0 outputs, 0 unique names, 1 letter, 0 answers, 0 bodies; 0"
    )
    assert "not looked at: payloads of other keys" in done.stderr
    assert cli.json("erase", "u7", "--yes")["stored"] == 0
    assert [each["key"] for each in cli.json("message", "find", "orders")] == ["u8"]


def test_wrong_use_is_exit_code_2(cli: Cli) -> None:
    """Without a traceback."""
    answer = cli("erase", "", "--yes")
    assert answer.returncode == 2
    assert "is no ordering key" in answer.stderr
