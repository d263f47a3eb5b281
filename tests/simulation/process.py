"""One simulated process: an event loop, its threads, and what can happen to it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

import redis.exceptions

from tests.simulation.loop import EndlessError, SimulatedLoop, SimulatedTransport
from tests.simulation.network import Network, SimulatedConnection
from tests.simulation.threads import Socket, Thread, deadline_after
from tests.simulation.world import World


class Process:
    """A member, a publisher. `freeze` and `thaw` are SIGSTOP and SIGCONT, `kill` is SIGKILL."""

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world, self.network, self.name = world, network, name
        self.loop = SimulatedLoop(world, self._connect)
        self.ready, self.runnable = self.loop.calls, deque[Thread]()
        self.timer = 0.0
        """When it has to run next, if nothing is ready before."""
        self.is_frozen = self.was_frozen = self.is_dead = False
        self.thawed_at = -1.0
        self.main: asyncio.Task[Any] | None = None
        self._endless: EndlessError | None = None
        self._connections = 0
        world.processes.append(self)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run its main task."""
        self.main = self.loop.create_task(coroutine)

    @property
    def is_over(self) -> bool:
        """Whether its main task has ended."""
        return self.main is not None and self.main.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended its main task, or that its loop ran without end."""
        if self._endless is not None:
            return self._endless
        if self.main is None or not self.main.done() or self.main.cancelled():
            return None
        return self.main.exception()

    @property
    def runs(self) -> bool:
        """Whether its code runs."""
        return not (self.is_frozen or self.is_dead)

    def run_ready(self) -> None:
        """Run all that can run now, until everything waits, and note when its loop has a timer."""
        loop, world = self.loop, self.world
        self.timer = float("inf")
        while self.runs:
            if not self.runnable and not self.ready and (timer := loop.next_timer) > world.now:
                self.timer = timer
                return
            world.current = self
            try:
                loop.run_ready()
            except EndlessError as error:
                self._endless = error
                self.kill()
            if self.runnable:
                self.runnable.popleft().proceed()
            world.current = None

    def freeze(self) -> None:
        """It does nothing until it is thawed; its connections stay open."""
        self.world.note(f"{self.name} frozen")
        self.is_frozen = self.was_frozen = True

    def thaw(self) -> None:
        """It goes on, if it was not killed meanwhile."""
        self.world.note(f"{self.name} thawed")
        self.is_frozen, self.timer, self.thawed_at = False, 0.0, self.world.now

    def kill(self) -> None:
        """It ends at once; its connections close."""
        self.world.note(f"{self.name} killed")
        self.is_dead = True
        self.network.close_all(self.name)

    def _label(self) -> str:
        self._connections += 1
        return f"{self.name}#{self._connections}"

    async def _connect(self, protocol: Any) -> SimulatedTransport:
        opened = self.loop.create_future()
        label = self._label()

        def open_it() -> None:
            if opened.done():
                return
            connection = self.network.open(self.name, label)
            opened.set_result(connection) if connection else opened.set_exception(ConnectionRefusedError("refused"))

        self.world.at(self.network.opens_at(self.name, label), open_it)
        connection = await opened
        transport = SimulatedTransport(self.loop, protocol, connection)
        connection.arrived = transport.arrived
        protocol.connection_made(transport)
        return transport

    def connect_thread(self, thread: Thread, timeout: float | None) -> Socket:
        """A blocking connection for a thread."""
        label, found = self._label(), Socket(timeout)
        answers = list[SimulatedConnection | None]()
        has_given_up = False

        def open_it() -> None:
            if not has_given_up:
                answers.append(self.network.open(self.name, label))
                thread.wake()

        self.world.at(self.network.opens_at(self.name, label), open_it)
        deadline = deadline_after(timeout)
        while not answers and self.world.now < deadline:
            thread.wait_until(deadline)
        if not answers:
            has_given_up = True
            # redis-py's, as over TCP: for a Unix socket, which never hangs, it would fail on the missing port
            raise redis.exceptions.TimeoutError("Timeout connecting to server")
        found.connection = answers[0]
        if not found.connection:
            raise ConnectionRefusedError("refused")
        found.connection.arrived = found.arrived
        return found
