"""MQTT gateways, their server and their network fail while clients publish and subscribe through them."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import anyio

from tests.chaos.catalogue import scenario
from tests.chaos.checker import History, Verdict, check
from tests.chaos.gateway_run import LEASE, GatewayRun
from tests.chaos.ledger import Event
from tests.chaos.release import NEW, Release
from tests.chaos.scenario_run import IS_LONG
from tests.chaos.testbed import Testbed
from tests.gateway import packets as p
from tests.gateway.raw_client import RawClient
from tests.servers import Server

NODES = 3
KEPT = "QoS 1 lost nothing and kept the order; QoS 2 came exactly once, into the topic and to the client"
KEPT_MINUTE = b"\x11\0\0\0\x3c"
"""The property Session Expiry Interval of a minute."""


async def run_on(
    testbed: Testbed, server: Server, *, count: int, url: str = "", nodes: int = NODES, release: Release = NEW
) -> GatewayRun:
    """A run with gateways, one worker with a handler, and clients that publish so many messages each."""
    run = await testbed.begin(GatewayRun, server.url, workers=1, gateway_url=url)
    await run.start_gateways(nodes, release)
    await run.publish_all(count)
    return run


def size(testbed: Testbed, short: int) -> int:
    """How many messages each client publishes: with `--seconds` many more than in a short run."""
    return short * (10 if IS_LONG or testbed.seconds else 1)


async def connected(port: int, client_id: str, **options: Any) -> RawClient:
    """A client of version 5 whose session is kept. On a busy machine the gateway may lose its lease meanwhile."""
    while True:
        one = await RawClient(port, 5).connect(client_id, clean=False, raw_props=KEPT_MINUTE, keep_alive=0, **options)
        assert one.connack is not None
        if one.connack.reason == 0:
            return one
        one.abort()


@scenario("G1", injection="SIGKILL of one of three gateways under load, again and again: that of a publisher, "
          "of a subscriber, or the one that routes the most partitions; another one starts each time",
          bound=KEPT, variants=tuple({"of": each} for each in ("publisher", "subscriber", "router")),
          is_cheap=True)  # fmt: skip
async def gateways_are_killed(testbed: Testbed, of: str) -> Verdict:
    """Clients go on at the next gateway, with what they have not acknowledged."""
    server = await testbed.shared_server()
    count = size(testbed, 60)
    run = await run_on(testbed, server, count=count)
    kills = 8 if count > 60 else 2
    for number in range(kills):
        await run.reaches(4 * count * (number + 1) // (kills + 2))
        if of == "router":
            victim = await run.routing()
        else:
            victim = run.holding("q1-0" if of == "publisher" else f"reader-{1 + number % 2}")
        await run.kill(victim)
        await run.recovers()
        await run.start_gateways(1)
    return await run.judge()


@scenario("G2", injection="SIGKILL and restart of the server under gateways, again and again", bound=KEPT,
          is_cheap=True)  # fmt: skip
async def server_is_killed_under_gateways(testbed: Testbed) -> Verdict:
    """What was acknowledged is in its file; what was not is sent again."""
    server = await testbed.server()
    count = size(testbed, 60)
    run = await run_on(testbed, server, count=count, nodes=2)
    kills = 6 if count > 60 else 2
    for number in range(kills):
        await run.reaches(4 * count * (number + 1) // (kills + 2))
        server.kill()
        await anyio.to_thread.run_sync(server.start)
        await run.recovers()
    return await run.judge()


@scenario("G3", injection="every connection between gateways and server is reset, ten times; then a black hole "
          "for a third of a lease, twice, and for three leases", bound=KEPT)  # fmt: skip
async def gateways_are_cut_off(testbed: Testbed) -> Verdict:
    """A gateway that is cut off for longer than its lease starts anew."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    count = size(testbed, 100)
    run = await run_on(testbed, server, count=count, url=proxy.url, nodes=2)
    for _ in range(10):
        proxy.reset()
        await run.recovers()
    for seconds in (LEASE / 3, LEASE / 3, 3 * LEASE):
        proxy.cut()
        await anyio.sleep(seconds)  # the outage is the fault under test
        proxy.mend()
        await run.recovers()
    return await run.judge()


@scenario("G4", injection="one of three gateways is paused (SIGSTOP) for three leases, then another one; the first "
          "comes back and serves again", bound=KEPT)  # fmt: skip
async def gateways_are_paused(testbed: Testbed) -> Verdict:
    """Its clients find out when their connections time out, and go elsewhere: what it wakes up with is refused."""
    server = await testbed.shared_server()
    run = await run_on(testbed, server, count=size(testbed, 100))
    for turn in range(2):
        await run.reaches(40 * (turn + 1))
        victim = run.gateways[turn]
        run.ports.remove(victim.port)
        victim.signal(signal.SIGSTOP)
        await anyio.sleep(3 * LEASE)  # the pause is the fault under test
        victim.signal(signal.SIGCONT)
        await run.recovers()
        run.ports.append(victim.port)
    return await run.judge()


@scenario("G5", injection="at random under load: SIGKILL of a gateway, of the server, of both, resets, pauses",
          bound=KEPT)  # fmt: skip
async def gateways_and_server_fail_at_random(testbed: Testbed) -> Verdict:
    """Faults one after the other, at any moment."""
    server = await testbed.server(tcp=True)
    proxy = await testbed.proxy(server)
    count = size(testbed, 200)
    run = await run_on(testbed, server, count=count, url=proxy.url)
    for number in range(24 if count > 200 else 6):
        await anyio.sleep(run.random.random())  # at any moment
        fault = run.random.choice(["gateway", "gateway", "server", "both", "reset", "pause", "cut"])
        if fault in ("gateway", "both"):
            await run.kill(run.random.choice(run.gateways))
        if fault in ("server", "both"):
            server.kill()
            await anyio.to_thread.run_sync(server.start)
        if fault == "reset":
            proxy.reset()
        elif fault == "cut":
            proxy.cut()
            await anyio.sleep(run.random.random() * 2 * LEASE)
            proxy.mend()
        elif fault == "pause":
            victim = run.random.choice(run.gateways)
            victim.signal(signal.SIGSTOP)
            await anyio.sleep(run.random.random() * LEASE)
            victim.signal(signal.SIGCONT)
        await run.recovers()
        await run.start_gateways(NODES - len(run.gateways))
        del number
    return await run.judge()


@scenario("G6", injection="SIGKILL of a gateway with 200 clients that have wills, and of one of the two others while "
          "they publish them; one client in ten comes back at once",
          bound="each will is published once, but none of a client that came back before its delay; the time is that "
          "of the last will", is_cheap=True)  # fmt: skip
async def wills_of_killed_gateways(testbed: Testbed) -> Verdict:
    """Two survivors compete for the wills of the first; one of them dies meanwhile."""
    server = await testbed.shared_server()
    clients = 1000 if testbed.seconds or IS_LONG else 200
    run = await testbed.begin(GatewayRun, server.url, workers=0)
    dying, second, last = await run.start_gateways(3)
    watcher = await RawClient(last.port, 5).connect("watcher", keep_alive=0)
    await watcher.subscribe(("wills/#", 2))
    made = await asyncio.gather(*(
        connected(
            dying.port, f"c{n}", will=(f"wills/{n}", b"%d" % n, n % 3, False),
            will_props=b"\x18" + (2 * (n % 10 == 0)).to_bytes(4, "big"),
        )
        for n in range(clients)
    ))  # fmt: skip
    await run.kill(dying)
    killed = run.now()
    back = await asyncio.gather(*(connected(last.port, f"c{n}") for n in range(0, clients, 10)))
    stored = {("will", n) for n in range(clients) if n % 10 and n % 3}
    perhaps = {("will", n) for n in range(clients) if n % 10 and n % 3 == 0}  # QoS 0: at most once
    events, released = list[Event](), 0
    fatal = run.random.randrange(1, clients // 2)
    while not stored <= {(each.key, each.n) for each in events} or released < sum(each.n % 3 == 2 for each in events):
        got = await watcher.take()
        if got.kind == 3:
            events.append(Event("commit", 0, run.now(), "will", int(got.payload)))
            run.recovered = run.now() - killed
            if got.qos:
                watcher.send(p.ack(3 + got.qos, got.packet_id))
            if len(events) == fatal:
                await run.kill(second)
        elif got.kind == 6:
            released += 1
            watcher.send(p.ack(7, got.packet_id))
    assert await watcher.is_silent()
    for each in (*made, *back, watcher):
        each.abort()
    return check(History(stored=stored, unknown=perhaps, events=events, is_ordered=False))
