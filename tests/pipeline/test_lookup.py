"""One message of an archive is found by either id, among committed data only, and without a JVM."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rsmq.cli import make_app
from rsmq.cli.message import in_archive
from rsmq.control import MessageStatus
from rsmq.errors import ConfigError
from rsmq.model.message import new_message_id
from rsmq.pipeline import find_archived

NOW = datetime.now(UTC)
MS = int(NOW.timestamp() * 1000)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Shelf:
    """An archive that is written as the jobs do it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commit("_rsmq/batches/q-1.json", {"archive": "a", "query": "q", "number": 1, "offsets": {}})

    def commit(self, record: str, content: dict[str, object]) -> None:
        (self.root / record).parent.mkdir(parents=True, exist_ok=True)
        (self.root / record).write_text(json.dumps(content))

    def put(self, batch: str, message_id: str | None, data: bytes, day: datetime = NOW, seq: int = 0) -> str:
        """A file with one message, in a batch of the day; returns its stream id with the partition."""
        folder = self.root / f"topic=orders/date={day.date().isoformat()}/batch={batch}"
        folder.mkdir(parents=True, exist_ok=True)
        ms = int(day.timestamp() * 1000)
        row = {
            "key": [b"ada"], "value": [data], "partition": pa.array([3], pa.int32()), "offset": [f"{ms}-{seq}"],
            "id_ms": [ms], "id_seq": [seq], "headers": pa.array([[{"key": "h", "value": b"x"}]], HEADERS),
            "id": pa.array([message_id], pa.string()), "type": [None],
        }  # fmt: skip
        pq.write_table(pa.table(row), folder / f"{message_id}.parquet")
        return f"3/{ms}-{seq}"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_either_id_finds_a_message_of_the_archive(shelf: Shelf) -> None:
    """A delayed one is in a later day; one without a message id has only its stream id; other days are not opened."""
    mine, late = new_message_id(), new_message_id()
    at = shelf.put("q-0", mine, b"1")
    shelf.put("q-0", None, b"2", seq=7)
    shelf.put("q-1", late, b"3", NOW + timedelta(days=9))
    (shelf.root / "topic=orders/date=2020-01-01/batch=q-0").mkdir(parents=True)
    (shelf.root / "topic=orders/date=2020-01-01/batch=q-0/broken.parquet").write_text("no parquet")
    found = find_archived(str(shelf.root), mine)
    assert found
    assert (found.id, found.data, found.key, found.headers) == (mine, b"1", "ada", {"h": "x"})
    assert find_archived(str(shelf.root), at, topic="orders") == found
    assert [getattr(find_archived(str(shelf.root), each), "data", None) for each in (late, f"3/{MS}-7")] == [b"3", b"2"]
    assert find_archived(str(shelf.root), f"2/{MS}-7") is None
    assert find_archived(str(shelf.root), mine, topic="bills") is None
    with pytest.raises(ConfigError, match="there is no archive at"):
        find_archived(str(shelf.root / "nothing"), mine)


def test_only_committed_data_are_read(shelf: Shelf) -> None:
    """A batch without its record is left over from a crash; a compaction counts when its data are in place."""
    lost, old = new_message_id(), new_message_id()
    shelf.put("q-2", lost, b"lost")
    shelf.put("q-1", old, b"before")
    record = f"_rsmq/days/orders/{NOW.date().isoformat()}/1.json"
    shelf.commit(record, {"attempt": "x", "replaces": ["q-1"], "rows": 1})
    assert find_archived(str(shelf.root), lost) is None
    found = find_archived(str(shelf.root), old)
    assert found
    assert found.data == b"before"
    shelf.put("compact-1", old, b"after")
    found = find_archived(str(shelf.root), old)
    assert found
    assert (found.data, found.part.rpartition("=")[2]) == (b"after", "compact-1")


def test_status_of_an_archived_message(shelf: Shelf) -> None:
    """`rsmq trace --archive` says where it is there."""
    mine = new_message_id()
    shelf.put("q-0", mine, b"1")
    status = in_archive(MessageStatus(mine, None, "removed"), str(shelf.root))
    assert (status.state, status.topic, status.partition, status.key) == ("archived", "orders", 3, "ada")
    assert f"in the archive as {status.stream_id} of orders.3, in {shelf.root}/topic=orders/date=" in status.text
    missing = MessageStatus(new_message_id(), None, "removed")
    assert in_archive(missing, str(shelf.root)) == missing


def test_commands_look_in_the_archive(shelf: Shelf, server_url: str) -> None:
    """The server has never heard of the message."""
    mine = new_message_id()
    at = shelf.put("q-0", mine, b'{"n": 1}')
    given = (mine, "--archive", str(shelf.root), "--url", server_url, "--json")
    traced, shown = (
        json.loads(CliRunner().invoke(make_app(), command).stdout)
        for command in (["trace", *given], ["message", "show", *given])
    )
    assert (traced["state"], f"{traced['partition']}/{traced['stream_id']}") == ("archived", at)
    assert (shown["id"], shown["data"], shown["headers"]) == (mine, {"n": 1}, {"h": "x"})
