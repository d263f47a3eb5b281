"""A member that cannot do its work owns nothing: it joins when it can, and gives its partitions back when it cannot."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from rsmq.broker.broker import Broker
from rsmq.consumer.owning import participation
from rsmq.model.settings import Settings
from rsmq.telemetry.health import HealthLimits, WorkerProbe, troubles
from rsmq.testing.proxy import Proxy
from tests.patience import until
from tests.servers import Server

LEASE = timedelta(seconds=1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of its own: its limits are changed."""
    started = Server(tcp=True).start()
    yield started
    started.close()


def make(server: Server | Proxy, name: str, done: Counter[str], user: str = "", lease: timedelta = LEASE) -> Broker:
    """A broker with one handler that counts under a name."""
    url = server.url.replace("//", f"//{user}:secret@") if user else server.url
    settings = Settings(url=url, prefix="few", partitions=4, lease_ttl=lease, preflight="warn", presence_grace=LEASE)
    broker = Broker(settings=settings)

    @broker.handler("t", group="g")
    async def handle(number: int) -> None:
        done[name] += 1

    return broker


@asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker that may never begin to serve."""
    async with broker:
        task = asyncio.create_task(broker.run())
        try:
            yield task
        finally:
            broker.stop(timedelta(0))
            await task


def reasons(broker: Broker) -> str:
    """What /readyz says."""
    return "\n".join(troubles(WorkerProbe(broker).read(), HealthLimits.of(broker.settings), "ready"))


def held(broker: Broker) -> int:
    """How many partitions it has."""
    return sum(len(each.lanes) for each in broker.worker.consumers) if broker.worker else 0


async def test_member_whose_user_may_not_read_joins_when_it_may(server: Server, no_task_left: None) -> None:
    """Another member keeps all partitions meanwhile, readiness names the command, and the right is all it takes."""
    done = Counter[str]()
    with server.client() as admin:
        admin.execute_command("FLUSHALL")
        admin.execute_command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-xreadgroup")
        healthy, blind = make(server, "healthy", done), make(server, "blind", done, "blind")
        async with running(healthy), running(blind):
            await until(lambda: held(healthy) == 4, "the healthy one has all partitions")
            await until(lambda: "xreadgroup" in reasons(blind), "the other one says why it is not ready")
            for number in range(40):
                await healthy.publish("t", number, key=str(number))
            await until(lambda: done["healthy"] == 40, "all are handled")
            assert held(healthy) == 4
            assert held(blind) == 0
            admin.execute_command("ACL", "SETUSER", "blind", "+xreadgroup")
            await until(lambda: held(blind) == 2, "it has its share")
            await until(lambda: not reasons(blind), "it is ready")


async def test_member_whose_connections_take_longer_than_a_lease_to_open_joins(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt has more time than the one before it: with equal times it would begin anew for ever."""
    monkeypatch.setattr(participation, "LEAST_PATIENCE", 0.0)
    done = Counter[str]()
    with server.client() as admin:
        admin.execute_command("FLUSHALL")
    async with Proxy(server.port) as proxy:
        far = make(proxy, "far", done, lease=timedelta(seconds=1.5))
        proxy.delay = lambda: 0.12
        async with running(far):
            await until(lambda: held(far) == 4, "it has all partitions", 60)
    assert "does not join" in caplog.text


async def test_member_that_may_not_read_any_more_gives_its_partitions_back(server: Server, no_task_left: None) -> None:
    """After a lease the other member has them, and it takes its share again when it may read."""
    done = Counter[str]()
    with server.client() as admin:
        admin.execute_command("FLUSHALL")
        admin.execute_command("ACL", "SETUSER", "half", "on", ">secret", "~*", "&*", "+@all")
        healthy, half = make(server, "healthy", done), make(server, "half", done, "half")
        async with running(healthy), running(half):
            await until(lambda: held(healthy) == held(half) == 2, "each has its share")
            admin.execute_command("ACL", "SETUSER", "half", "-xreadgroup")
            await until(lambda: held(healthy) == 4, "the healthy one has all partitions")
            assert "takes no part in its group" in reasons(half)
            assert half.worker is not None
            assert half.worker.is_serving
            for number in range(40):
                await healthy.publish("t", number, key=str(number))
            await until(lambda: sum(done.values()) == 40, "all are handled")
            admin.execute_command("ACL", "SETUSER", "half", "+xreadgroup")
            await until(lambda: held(half) == 2, "it has its share again")
            await until(lambda: not reasons(half), "it is ready again")


async def test_two_workers_that_share_too_few_connections_do_not_wait_for_each_other(no_task_left: None) -> None:
    """With connections for one of them, one works: each closes what it has if that is not all it needs. The message
    comes over a connection that is there before: a new one is refused while the other worker tries."""
    done = Counter[str]()
    server = Server("--maxclients", "10", tcp=True).start()
    admin = server.client()
    admin.ping()
    try:
        brokers = [make(server, name, done) for name in ("one", "other")]
        async with running(brokers[0]), running(brokers[1]):
            await until(lambda: max(map(held, brokers)) == 4, "one of them has all partitions")
            _, other = sorted(brokers, key=held, reverse=True)
            admin.xadd("few:{t.0}", {"data": "1"})
            await until(lambda: sum(done.values()) == 1, "it is handled")
            await until(lambda: "maxclients" in reasons(other), "the other one names the limit")
    finally:
        admin.close()
        server.close()


async def test_member_without_descriptors_names_the_limit(server: Server, no_task_left: None) -> None:
    """`ulimit -n` is reached before it could open its reading connection: it joins when there are some."""
    done = Counter[str]()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    broker = make(server, "only", done)
    with server.client() as admin:
        admin.execute_command("FLUSHALL")
        admin.execute_command("ACL", "SETUSER", "late", "on", ">secret", "~*", "&*", "+@all", "-xreadgroup")
        broker = make(server, "only", done, "late")
        async with running(broker):
            await until(lambda: "xreadgroup" in reasons(broker), "it has started")
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # every new one is refused
                await until(lambda: "ulimit -n" in reasons(broker), "it names the limit")
                assert held(broker) == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            admin.execute_command("ACL", "SETUSER", "late", "+xreadgroup")
            await until(lambda: held(broker) == 4, "it has joined")


async def test_leader_of_a_schedule_that_may_not_publish_lets_another_worker_lead(
    server: Server, no_task_left: None
) -> None:
    """It is asked first, and holds the schedule; after a lease the other one publishes the ticks."""
    done = Counter[str]()
    with server.client() as admin:
        admin.execute_command("FLUSHALL")
        admin.execute_command("ACL", "SETUSER", "mute", "on", ">secret", "~*", "&*", "+@all", "-xadd")
        long = 3 * LEASE  # it asks again before that has ended
        mute, other = make(server, "mute", done, "mute", long), make(server, "other", done, lease=long)
        for broker in (mute, other):
            broker.every(timedelta(seconds=1), "ticks", name="tick")(lambda: 1)
        async with running(mute):
            leads = "mute leads the schedule"
            await until(lambda: mute.worker is not None and bool(mute.worker._scheduler._led), leads)
            async with running(other):
                ticks = f"few:{{ticks.{await partition_of_ticks(other)}}}"
                await until(lambda: admin.xlen(ticks) > 1, "the other one publishes")


async def partition_of_ticks(broker: Broker) -> int:
    """Where the schedule publishes."""
    topic = await broker.topics.ensure("ticks", 4)
    return topic.normal.partition_for("tick")
