"""`rsmq sql init` and `rsmq outbox status`, on SQLite."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine, insert
from typer.testing import CliRunner

from rsmq.cli import make_app
from rsmq.errors import ConfigError
from rsmq.sql import Outbox
from rsmq.sql.outbox import outbox_row
from rsmq.sql.tables import OUTBOX

runner = CliRunner()


def test_init_creates_what_is_missing_and_status_counts_what_waits(tmp_path: Path) -> None:
    """Twice is as once; a refused row is exit code 1."""
    url = f"sqlite:///{tmp_path / 'test.db'}"
    first = runner.invoke(make_app(), ["sql", "init", url])
    assert (first.exit_code, "created rsmq_outbox" in first.output) == (0, True)
    assert runner.invoke(make_app(), ["sql", "init", url]).output == "all tables exist\n"
    assert json.loads(runner.invoke(make_app(), ["sql", "init", url, "--json"]).output) == {"created": []}
    engine = create_engine(url)
    outbox = Outbox(engine)
    with engine.begin() as connection:
        outbox.publish(connection, "orders", 1)
    found = runner.invoke(make_app(), ["outbox", "status", url, "--json"])
    assert (found.exit_code, json.loads(found.output)[0]["backlog"]) == (0, 1)
    with engine.begin() as connection:
        connection.execute(insert(OUTBOX), {**outbox_row(outbox, "orders", 2), "error": "why not"})
    engine.dispose()
    found = runner.invoke(make_app(), ["outbox", "status", url])
    assert (found.exit_code, "why not" in found.output) == (1, True)


def test_doctor_finds_an_outbox_that_does_not_drain(tmp_path: Path, server_url: str) -> None:
    """Rows that wait for long and rows that are refused; a row that has just come is no finding."""
    url, engine = f"sqlite:///{tmp_path / 'test.db'}", create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    assert runner.invoke(make_app(), ["sql", "init", url]).exit_code == 0
    outbox = Outbox(engine)

    def findings() -> list[str]:
        args = ["doctor", "--url", server_url, "--over", "0s", "--outbox", url, "--json"]
        found = json.loads(runner.invoke(make_app(), args).stdout)["findings"]
        return [each["text"] for each in found if each["topic"] == "outbox"]

    with engine.begin() as connection:
        outbox.publish(connection, "orders", 1)
    assert findings() == []
    with engine.begin() as connection:
        old = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=2)
        connection.execute(insert(OUTBOX), {**outbox_row(outbox, "orders", 2), "created_at": old})
        connection.execute(insert(OUTBOX), {**outbox_row(outbox, "orders", 3), "error": "why not"})
    engine.dispose()
    late, refused = findings()
    assert "2 rows of the outbox wait, the oldest for 2 h" in late
    assert "1 row of the outbox cannot be published (why not)" in refused


def test_init_prints_the_statements_of_each_database() -> None:
    """For review, or for a migration by hand; nothing is connected."""
    for url, word in (
        ("postgresql+psycopg://localhost/x", "BIGSERIAL"), ("mysql+pymysql://localhost/x", "AUTO_INCREMENT"),
        ("sqlite://", "AUTOINCREMENT"),
    ):  # fmt: skip
        printed = runner.invoke(make_app(), ["sql", "init", url, "--print"])
        assert printed.exit_code == 0, printed.output
        assert word in printed.output
        assert printed.output.count("CREATE TABLE") == 5


@pytest.mark.parametrize("url", ["", "nosuch://localhost/x", "postgresql://localhost:port/x"])
@pytest.mark.parametrize("options", [(), ("--print",)])
def test_url_that_cannot_be_read_says_how_to_write_one(url: str, options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="write one as postgresql"):
        runner.invoke(make_app(), ["sql", "init", url, *options], catch_exceptions=False)
