"""On a standing cluster: a master and two workers, commands with `--master` and with `spark-submit`. Minutes long."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rsmq.model.keys import Keys
from tests.pipeline.conftest import Store
from tests.pipeline.spark_cluster import SparkCluster
from tests.servers import Server, wait_until

COUNT = int(os.environ.get("COUNT", "100000"))
RATE_SECONDS = 20
"""How long a replay is made to take at least, so that its middle can be met."""
PASSWORD = "pass word"

pytestmark = [
    pytest.mark.long_chaos("minutes"),
    pytest.mark.spark_cluster,
    pytest.mark.timeout(1200),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    """A master and two workers, whose environment holds the server's password."""
    with SparkCluster(tmp_path, 2, QUEUE_PASSWORD=PASSWORD) as running:
        yield running


@pytest.fixture
def guarded(keys: Keys) -> Iterator[tuple[Server, Store]]:
    """A server of its own, over TCP, with a password."""
    with Server(tcp=True, password=PASSWORD) as server, server.client() as client:
        yield server, Store(client, keys)


def test_commands_on_a_cluster_publish_each_message_once(
    cluster: SparkCluster, guarded: tuple[Server, Store], keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Archived by `--master`, replayed by `spark-submit`, one worker killed in the middle: each message once."""
    server, store = guarded
    for start in range(0, COUNT, 1000):
        store.fill("orders", min(1000, COUNT - start), start=start)
    variables = {"RSMQ_PREFIX": keys.prefix}
    reach = ("--url", f"redis://127.0.0.1:{server.port}/0", "--password-env", "QUEUE_PASSWORD", "--json")
    archive, took = str(tmp_path / "archive"), list[str]()

    def run(title: str, *command: str) -> dict[str, object]:
        begun = time.perf_counter()
        result: dict[str, object] = json.loads(cluster.run(*command, **variables))
        took.append(f"{title} {time.perf_counter() - begun:.0f} s")
        return result

    rsmq = (sys.executable, "-m", "rsmq", "pipeline")
    done = run("archive", *rsmq, "archive", "orders", "--to", archive, "--master", cluster.url, *reach)
    assert done["messages"] == COUNT
    assert cluster.executors() == [1, 1], "both workers have taken part"
    job = tmp_path / "rsmq_job.py"
    job.write_text("from rsmq.cli import main\nmain()\n")
    submit = (str(cluster.home / "bin" / "spark-submit"), "--master", cluster.url, str(job), "pipeline")
    words = ("replay", "orders", "--from", archive, "--to")
    assert run("replay", *submit, *words, "again", *reach)["messages"] == COUNT
    assert cluster.executors() == [2, 2]
    slowly = (*words, "once-more", "--rate", str(COUNT / RATE_SECONDS), *reach)
    with ThreadPoolExecutor(1) as pool:
        replaying = pool.submit(run, "replay while a worker is killed", *submit, *slowly)
        wait_until(lambda: store.count("once-more", 8) or replaying.done(), "the last replay has begun", 300)
        cluster.kill_worker(0)
        so_far = store.count("once-more", 8)
        assert replaying.result()["messages"] == COUNT
    assert so_far < COUNT, "the worker was killed too late"
    for copy in ("again", "once-more"):
        assert sorted(store.ids(copy, 8)) == sorted(store.ids("orders"))
    with capsys.disabled():
        print(f"\n{COUNT} messages: {', '.join(took)}")
