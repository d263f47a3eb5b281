"""Jobs of an earlier release and of this one take turns: on one archive, one replay, one list of recipients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rsmq.model.settings import Settings
from tests.chaos.release import NEW, Release, earlier_release
from tests.chaos.scenario_run import IS_LONG
from tests.pipeline.test_kill import Command
from tests.pipeline.vault import Vault

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SPARK = pytest.param("spark", marks=pytest.mark.long_chaos("minutes"))


@pytest.fixture
def releases() -> list[Release]:
    """The earlier one and this one, twice in `make chaos`. Each is what its environment imports."""
    old = earlier_release()
    for release in (old, NEW):
        command = [sys.executable, "-c", "import rsmq; print(rsmq.__file__)"]
        found = subprocess.check_output(command, env={**os.environ, **release.environment}, text=True)
        assert Path(found.strip()).is_relative_to(release.site)
    return [old, NEW] * (2 if IS_LONG else 1)


def take_turns(settings: Settings, releases: list[Release], words: list[str], done: Callable[[], int]) -> None:
    """Each but the last is killed (SIGKILL) when it has done something; the last one goes on to the end."""
    for release in releases[:-1]:
        before = done()
        command = Command(settings, *words, release=release)
        command.kill_when(lambda before=before: done() > before, f"{release.name} has done something")  # type: ignore[misc]
    code, _ = Command(settings, *words, release=releases[-1]).wait()
    assert code == 0


@pytest.mark.parametrize("engine", ["arrow", SPARK])
def test_archive_and_replay_of_both_releases_have_each_message_once(
    light: Vault, settings: Settings, releases: list[Release], engine: str
) -> None:
    """Each is killed and the other one goes on, there and back; the older one compacts, and the newer one reads."""
    count, batch = (9000, 20) if engine == "arrow" else (12_000, 1000)
    light.add("orders", range(count))
    light.make("copy")
    common = ("--json", "--engine", engine)

    def archived() -> int:
        return sum(int(path.stem.rpartition("-")[2]) for path in light.path.glob("_rsmq/batches/*.json"))

    def stored() -> int:
        return sum(light.raw("XLEN", light.keys.stream("copy", number)) for number in (0, 1))

    archive = ["archive", "orders", "--to", str(light.path), "--batch", str(batch), *common]
    take_turns(settings, releases, archive, archived)
    replay = ["replay", "orders", "--from", str(light.path), "--to", "copy", "--rate", str(count / 6), *common]
    take_turns(settings, releases[::-1], replay, stored)
    code, _ = Command(settings, "compact", str(light.path), "--engine", engine, release=releases[0]).wait()
    assert (code, light.archived("orders")) == (0, list(range(count)))
    entries = [dict(zip(fields[::2], fields[1::2], strict=True)) for part in light.entries("copy") for fields in part]
    for key in range(4):
        found = [json.loads(entry[b"data"])["n"] for entry in entries if entry[b"key"] == b"k%d" % key]
        assert found == list(range(key, count, 4))


@pytest.mark.long_chaos("a minute")
def test_bulk_sending_of_both_releases_sends_each_row_once(
    light: Vault, settings: Settings, releases: list[Release], tmp_path: Path
) -> None:
    """A campaign that one release has begun is finished by the other one."""
    count = 60_000
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": "m{n}", "key": "k{n % 4}", "n": {n}}}\n' for n in range(count)))
    light.make("copy")

    def stored() -> int:
        return sum(light.raw("XLEN", light.keys.stream("copy", number)) for number in (0, 1))

    take_turns(settings, releases[-2:], ["send", str(rows), "--to", "copy", "--key", "key", "--id", "id"], stored)
    entries = [dict(zip(fields[::2], fields[1::2], strict=True)) for part in light.entries("copy") for fields in part]
    assert sorted(json.loads(entry[b"data"])["n"] for entry in entries) == list(range(count))
