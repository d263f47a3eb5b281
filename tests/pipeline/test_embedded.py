"""The source without a URL: the embedded server of the project, as for the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from rsmq import Broker, Settings
from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.pipeline.source import RsmqSource
from rsmq.redis.embedded.server import embedded
from tests.servers import wait_until


def rows(source: RsmqSource) -> list[dict[str, Any]]:
    """All rows of a batch read."""
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a project without a server."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RSMQ_UNAVAILABLE_TIMEOUT", "PT0.2S")
    (tmp_path / "project" / "notebooks").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "project" / "notebooks")
    return tmp_path / "project"


async def publish(url: str) -> None:
    """Three messages."""
    async with Broker(Settings(url=url, preflight="warn")) as broker:
        await broker.publish_many("orders", [{"n": n} for n in range(3)])


def test_source_without_url_reads_from_the_embedded_server_of_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found from any directory of the project; the tasks may have another one."""
    with embedded() as url:
        anyio.run(publish, url)
        source = RsmqSource({"subscribe": "orders"})
        reader = source.reader(source.schema())
        parts = reader.partitions()
        monkeypatch.chdir("/")
        assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 3


def test_source_says_what_to_run_if_no_server_runs(project: Path) -> None:
    """One line, with the project; nothing is started."""
    with pytest.raises(ConfigError) as caught:
        rows(RsmqSource({"subscribe": "orders"}))
    assert str(caught.value).startswith(f"the embedded server of {project} does not run: start it with `rsmq server`")
    assert len(str(caught.value).splitlines()) == 1


def test_source_says_what_to_run_if_the_server_has_ended(project: Path) -> None:
    """In the middle of a query, too."""
    with embedded() as url:
        anyio.run(publish, url)
        source = RsmqSource({"subscribe": "orders"})
        reader = source.reader(source.schema())
        parts = reader.partitions()
    wait_until(lambda: not Path(url.removeprefix("unix://")).exists(), "the server has ended")
    with pytest.raises(BrokerUnavailable, match=r"^the embedded server has ended: start it with `rsmq server`"):
        [list(reader.read(part)) for part in parts]
