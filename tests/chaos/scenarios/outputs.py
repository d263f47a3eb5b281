"""Outputs of handlers: each message that is settled has one, and no other message has any."""

from __future__ import annotations

import json
from collections import Counter

from tests.chaos.catalogue import ONE, scenario
from tests.chaos.checker import Name, Verdict
from tests.chaos.scenario_run import IS_LONG, ScenarioRun
from tests.chaos.testbed import Testbed, paused
from tests.chaos.worker import OUTPUT_TOPIC


@scenario("A34", injection="every handler publishes an output and works on; the busiest of three workers is killed "
          "(SIGKILL), twice (long runs: five times); another one sleeps for two leases",
          bound="each message has one output, in order per key; `broker`, the control: with broker.publish in the "
          "handler some have several",
          variants=({"way": "message"}, {"way": "broker"}), servers=ONE, is_cheap=True)  # fmt: skip
async def outputs_while_workers_die(testbed: Testbed, way: str) -> Verdict:
    """Outputs leave with the settlement of their message."""
    run = await testbed.start(await testbed.shared_server(), lease=2, output=way)
    await kill_and_pause_workers(run)
    verdict = await run.verdict()
    wrong = await wrong_outputs(run)
    if way == "message":
        assert not wrong, wrong[:20]
    else:
        assert any("outputs" in each for each in wrong), "a check that cannot fail is none"
    return verdict


@scenario("A36", injection="every handler moves money in a PostgreSQL and works on; the busiest of three workers is "
          "killed (SIGKILL), twice (long runs: five times); another one sleeps for two leases",
          bound="each message is booked once, with one receipt; `plain`, the control: with transactions of their own "
          "and broker.publish some are booked several times",
          variants=({"way": "effects"}, {"way": "plain"}), servers=ONE)  # fmt: skip
async def bank_while_workers_die(testbed: Testbed, way: str) -> Verdict:
    """What a handler writes with effects, and sends by the outbox, counts once."""
    database = await testbed.database()
    run = await testbed.start(await testbed.shared_server(), lease=2, bank=database, is_plain=way == "plain")
    await kill_and_pause_workers(run)
    verdict = await run.verdict()
    if way == "plain":
        assert any("times" in each for each in run.wrong_bookings), "a check that cannot fail is none"
    return verdict


async def kill_and_pause_workers(run: ScenarioRun) -> None:
    """Under load."""
    async with run.load(seconds=0.02):
        for turn in range(5 if IS_LONG else 2):
            await run.handles(100)
            await run.burst(200, seconds=0.01)
            victim = run.busiest()
            victim.kill()
            run.excuse("killed", victim)
            await run.processes.start_workers(1)
            if turn % 2:
                sleeper = run.busiest()
                run.excuse("paused", sleeper)
                await paused(sleeper, 4)
        await run.handles(200)


async def wrong_outputs(run: ScenarioRun) -> list[str]:
    """Messages with too many or too few outputs, and outputs out of order."""
    found, counts = list[str](), Counter[Name]()
    topic = await run.broker.topics.existing(OUTPUT_TOPIC)
    for partition in topic.numbers:
        newest = dict[str, int]()
        stream = run.broker.keys.stream(OUTPUT_TOPIC, partition)
        for _, flat in await run.broker.client.execute_command("XRANGE", stream, "-", "+"):
            order = json.loads(dict(zip(flat[::2], flat[1::2], strict=True))[b"data"])
            name = (str(order["key"]), int(order["n"]))
            counts[name] += 1
            if name[1] < newest.get(name[0], -1):
                found.append(f"the output of {name} comes after that of a later message")
            newest[name[0]] = max(name[1], newest.get(name[0], -1))
    history = run.history
    for name in history.stored | history.unknown | counts.keys():
        least = int(name in history.stored and name not in history.poison)
        if not least <= counts[name] <= int(name not in history.poison):
            found.append(f"{name} has {counts[name]} outputs")
    return found
