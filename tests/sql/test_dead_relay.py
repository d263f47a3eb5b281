"""A relay that is killed: another worker relays on as soon as its lease has ended, by the server's clock."""

from __future__ import annotations

from pathlib import Path

from tests.servers import Server
from tests.sql.databases import Postgres
from tests.sql.relays import Relays

LEASE_MS = 1000


def test_killed_relay_is_replaced_when_its_lease_ends(
    postgres: Postgres, server: Server, prefix: str, tmp_path: Path
) -> None:
    """SIGKILL while it relays. Its lease has a second at most, no two relay at once, and each row comes once."""
    relays = Relays(server.url, prefix, postgres.url("asyncpg", postgres.new_database()), tmp_path / "log")
    with relays.running():
        found = relays.replace(rows=300)
        assert [number for _, number in relays.rows()] == list(range(301))
    before, after = found.before, found.after
    print(f"replaced after {found.took_ms} ms")
    assert after.pid != before.pid
    assert before.until_ms - before.now_ms <= LEASE_MS
    assert before.until_ms <= after.epoch <= found.stored_ms
