"""The course of the MQTT demo: gateways, a worker and clients; a gateway is killed; wait until all has arrived."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rsmq.cli.demo.flight import UNKNOWN_AIRCRAFT, Departure
from rsmq.cli.demo.mqtt_clients import Aircraft, DemoClient, Tower
from rsmq.cli.demo.mqtt_result import DepartureConfirmed, MqttResult, Received, handled, received
from rsmq.cli.demo.result import LEDGER_VARIABLE
from rsmq.cli.demo.run import finish
from rsmq.cli.demo.screen import COLOURS, TITLE, Check, Timeline, bars, print_checks
from rsmq.errors import BrokerUnavailable
from rsmq.model.clock import monotonic
from rsmq.model.words import count
from rsmq.testing.ledger import Ledger

POLL_SECONDS = 0.1
START_SECONDS, STALL_SECONDS = 60, 60
SERVICE = "rsmq.cli.demo.mqtt_service"
KILL_AT = 0.4
WIDEST = 45
"""Columns of the picture of a gateway's clients: it fits a terminal of 80."""


@dataclass
class MqttScreen(Timeline):
    """The state that is shown. `gateways`: the clients of each; None for one that was killed."""

    total: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    gateways: dict[str, int | None] = field(default_factory=dict)

    def line(self) -> str:
        """The state as one line."""
        return f"{super().line()}  {', '.join(f'{name} {number:,}' for name, number in self.counts.items())}"

    def draw(self) -> RenderableType:
        """The state as bars and a table."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("clients", justify="right")
        table.add_column("", width=WIDEST)
        for (name, number), colour in zip(self.gateways.items(), COLOURS, strict=False):
            table.add_row(
                Text(name, style="dim" if number is None else colour), "killed" if number is None else str(number),
                Text("■" * min(number or 0, WIDEST), style=colour),
            )  # fmt: skip
        rate = self.counts.get("handled", 0) / max(0.1, monotonic() - self.started)
        made = bars(self.counts, self.total, f"{rate:,.0f} departures a second handled")
        return Group(made, table, *(Text(event) for event in self.events[-6:]))


@dataclass(frozen=True, slots=True)
class MqttPlan:
    """A plan of a run: the aircraft's messages, seconds, whether a gateway is killed, and how many gateways run."""

    departures: Sequence[Departure]
    seconds: float
    is_deadly: bool
    gateways: int


def of_busiest(departures: Sequence[Departure], number: int) -> list[Departure]:
    """The departures of the aircraft that have most of them."""
    known = Counter(each.aircraft for each in departures if each.aircraft != UNKNOWN_AIRCRAFT)
    chosen = {aircraft for aircraft, _ in known.most_common(number)}
    return [each for each in departures if each.aircraft in chosen]


@dataclass(frozen=True, slots=True)
class GatewayUnderTest:
    """A gateway process and its two ports."""

    name: str
    process: subprocess.Popen[bytes]
    mqtt: int
    web: int


@contextmanager
def fleet(number: int, directory: Path, environment: Mapping[str, str]) -> Iterator[list[GatewayUnderTest]]:
    """Gateways that listen, and a worker. All are stopped gracefully at the end; `directory` has their logs."""
    inherited = {**os.environ, **environment, LEDGER_VARIABLE: str(directory / "ledger")}
    with ExitStack() as stack:

        def start(log: str, *words: str) -> subprocess.Popen[bytes]:
            with (directory / log).open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rsmq", *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    env=inherited,
                )  # fmt: skip
            stack.callback(finish, process)
            return process

        start("workers.log", "worker", f"{SERVICE}:broker")
        ports = free_ports(2 * number)
        yield [
            GatewayUnderTest(
                f"gateway {at + 1}",
                start(
                    f"gateway-{at + 1}.log", "gateway", f"{SERVICE}:gateway",
                    "--listen", f"mqtt://127.0.0.1:{ports[2 * at]}", "--listen", f"ws://127.0.0.1:{ports[2 * at + 1]}",
                ),
                ports[2 * at],
                ports[2 * at + 1],
            )
            for at in range(number)
        ]  # fmt: skip


def free_ports(number: int) -> list[int]:
    """Ports on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def is_open(port: int) -> bool:
    """Whether something listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class MqttDemoRun:
    """Runs one demo. `redraw` is called after each look at the clients and the ledger."""

    def __init__(
        self, plan: MqttPlan, gateways: list[GatewayUnderTest], directory: Path, redraw: Callable[[MqttScreen], None]
    ) -> None:
        self._plan = plan
        self._gateways = gateways
        self._redraw = redraw
        self._ledger = Ledger(directory / "ledger", DepartureConfirmed)
        names = list(dict.fromkeys(each.aircraft for each in plan.departures))
        self._aircraft = {
            name: Aircraft(name, rotated([each.mqtt for each in gateways], at), 1 + at % 2)
            for at, name in enumerate(names)
        }
        self._tower = Tower([each.web for each in gateways])
        self._killed: GatewayUnderTest | None = None
        self._killed_at = 0.0
        self._moved = 0
        self._reconnect_seconds: float | None = None
        self._is_published = False
        self.screen = MqttScreen(total=len(plan.departures))

    async def run(self) -> MqttResult:
        """Run the demo from start to end."""
        clients: list[DemoClient] = [self._tower, *self._aircraft.values()]
        await self._wait(self._all_listen, "the gateways do not listen")
        try:
            for each in clients:
                each.start()
            await self._wait(self._all_connected, "the clients are not connected")
            self.screen.started = monotonic()
            self.screen.event(f"{count(len(clients), 'client')} connected to {count(len(self._gateways), 'gateway')}")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._publish)
                await self._watch()
            return self._judge()
        finally:
            await anyio.to_thread.run_sync(stop_all, clients)

    async def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        with anyio.move_on_after(START_SECONDS):
            while not condition():
                await anyio.sleep(POLL_SECONDS)
            return
        raise BrokerUnavailable(f"{otherwise} after {START_SECONDS} s: see their logs in {self._ledger.path.parent}")

    def _all_listen(self) -> bool:
        return all(is_open(port) for each in self._gateways for port in (each.mqtt, each.web))

    def _all_connected(self) -> bool:
        return self._tower.is_subscribed and all(each.is_connected for each in self._aircraft.values())

    async def _publish(self) -> None:
        pace, started = self._plan.seconds / max(1, len(self._plan.departures)), monotonic()
        for number, each in enumerate(self._plan.departures):
            self._aircraft[each.aircraft].publish(each)
            if (early := started + number * pace - monotonic()) > 0:
                await anyio.sleep(early)
        self._is_published = True

    async def _watch(self) -> None:
        """Wait until everything has arrived, or nothing has happened for a minute: then messages are lost."""
        changed_at, before = monotonic(), dict[str, int]()
        while not self._poll():
            if self.screen.counts != before:
                changed_at, before = monotonic(), self.screen.counts
            elif self._is_published and monotonic() - changed_at > STALL_SECONDS:
                self.screen.event("nothing has arrived for a minute: giving up")
                return
            await anyio.sleep(POLL_SECONDS)

    def _poll(self) -> bool:
        """Look at the clients and the ledger. True when all has arrived, and all clients are connected."""
        self._ledger.read()
        aircraft = self._aircraft.values()
        for each in aircraft:
            each.flush()
        self.screen.counts = {
            "acknowledged": sum(each.acknowledged for each in aircraft),
            "handled": len(set(handled(self._ledger.events()))),
            "answered": sum(len(set(each.answers)) for each in aircraft),
            "tower": len(set(self._tower.seen)),
        }
        self.screen.gateways = {
            each.name: None if each is self._killed else len(self._clients_of(each)) for each in self._gateways
        }
        self._follow_the_kill()
        self._redraw(self.screen)
        has_all = self._is_published and all(number == self.screen.total for number in self.screen.counts.values())
        return has_all and (self._killed is None or self._reconnect_seconds is not None)

    def _clients_of(self, gateway: GatewayUnderTest) -> list[DemoClient]:
        clients: list[DemoClient] = [self._tower, *self._aircraft.values()]
        return [each for each in clients if each.is_connected and each.port in (gateway.mqtt, gateway.web)]

    def _follow_the_kill(self) -> None:
        if self._plan.is_deadly and self._killed is None:
            victim = next((each for each in self._gateways if self._tower in self._clients_of(each)), None)
            if victim is not None and self.screen.counts["acknowledged"] > KILL_AT * self.screen.total:
                self._moved = len(self._clients_of(victim))
                victim.process.kill()
                self._killed = victim
                self._killed_at = monotonic()
                self.screen.event(
                    f"SIGKILL to {victim.name}, with {count(self._moved, 'client')}, one of them the tower"
                )
        elif self._killed is not None and self._reconnect_seconds is None:
            left = [each for each in self._gateways if each is not self._killed]
            if sum(len(self._clients_of(each)) for each in left) == len(self._aircraft) + 1:
                self._reconnect_seconds = monotonic() - self._killed_at
                text = f"all {self._moved} are connected again, {self._reconnect_seconds:.2f} s after the kill"
                self.screen.event(text)

    def _judge(self) -> MqttResult:
        published = {name: each.published for name, each in self._aircraft.items()}
        once = {name for name, each in self._aircraft.items() if each.qos == 2}
        answers = [(name, turn) for name, each in self._aircraft.items() for turn in each.answers]
        receivers = (
            received("handler", published, handled(self._ledger.events()), once),
            received("aircraft", published, answers, ()),
            received("tower", published, self._tower.seen, once),
        )
        unacknowledged = sum(each.published - each.acknowledged for each in self._aircraft.values())
        return MqttResult(receivers, unacknowledged, self._killed is not None, self._reconnect_seconds)


def stop_all(clients: Sequence[DemoClient]) -> None:
    """Disconnect all clients."""
    for each in clients:
        each.stop()


def rotated(ports: list[int], by: int) -> list[int]:
    """Ports in their order, from another one on: so the clients spread over all gateways."""
    at = by % len(ports)
    return ports[at:] + ports[:at]


def show_mqtt_result(console: Console, result: MqttResult, directory: str) -> None:
    """Print what was promised and whether it held."""
    print_checks(console, TITLE, {each.receiver: checks(each) for each in result.receivers})
    if result.was_killed:
        seconds = result.reconnect_seconds
        after = "never" if seconds is None else f"after {seconds:.2f} s (their library waits for 1 s)"
        console.print(f"The killed gateway's clients were connected again: {after}.", highlight=False)
    if result.unacknowledged:
        console.print(f"{count(result.unacknowledged, 'departure')} never acknowledged.", highlight=False)
    console.print("All promises held." if result.is_good else f"A promise was BROKEN: the logs are in {directory}")


def checks(found: Received) -> list[Check]:
    """The rows of a receiver's verdict. Counts of violations are good when they are 0."""
    wrong = {
        "lost": found.lost,
        "never published": found.unexpected,
        "out of order per aircraft": found.out_of_order,
        "more than once with QoS 2": found.twice,
    }
    return [
        Check("expected", found.expected, True),
        Check("received", found.received, not found.lost),
        Check("repeated with QoS 1, as it may", found.again, True),
        *(Check(title, number, number == 0) for title, number in wrong.items()),
    ]
