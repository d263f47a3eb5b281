"""Between the processes and the real server: when a command reaches it, when its reply arrives, and what gets lost."""

from __future__ import annotations

import mmap
import os
import re
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import hiredis

from rsmq.gateway.fleet.scripts import ACK_CLIENTS, BEGIN_MQTT_SESSION
from rsmq.redis import scripts
from tests.simulation.invariants import Fences
from tests.simulation.world import EPOCH, World

SCRIPTS: Final = {
    name: script.name
    for script in (*vars(scripts).values(), ACK_CLIENTS, BEGIN_MQTT_SESSION)
    if isinstance(script, scripts.Script)
    for name in (script.sha, script.source)
}
READ: Final = 16 * 1024
"""The server reads at least so many bytes of a long command before it turns to the next connection."""

QUIET: Final = {b"CLIENT", b"HELLO", b"INFO", b"CONFIG", b"ACL"}
"""Commands whose replies differ between two runs (sizes, ports, memory); the trace has their names only."""

RUN_ID: Final = re.compile(rb"\brun_id:[0-9a-f]{40}")
"""In a reply to INFO. It is the same server after a failover, and has another id for the processes."""

RENEWING: Final = {scripts.RENEW_LEASE.name, scripts.TOUCH_MESSAGES.name}


def parsed(data: bytes) -> list[Any]:
    """Commands or replies out of the wire format; a part of one at the end is left out."""
    reader = hiredis.Reader()
    reader.feed(data)
    found = []
    while (each := reader.gets()) is not False:
        found.append(each)
    return found


def name_of(command: Sequence[bytes]) -> str:
    """The name of a command, or of the script that it calls."""
    if command[0] in (b"EVALSHA", b"EVAL"):
        return SCRIPTS.get(command[1].decode(), "a script")
    return command[0].decode(errors="replace")


@dataclass(frozen=True)
class Trap:
    """Waits for a command of a process, and lets the first ones (`skips`) pass."""

    command: str
    spring: Callable[[SimulatedConnection], None]
    skips: int = 0


class SimulatedConnection:
    """One connection: what a process sees of it, and the real socket to the server."""

    def __init__(self, network: Network, owner: str, label: str, sock: socket.socket) -> None:
        self.owner, self.label, self.sock = owner, label, sock
        self.arrived: Callable[[bytes], None] = lambda _: None
        self.is_open = True
        self.is_cut = False
        self.is_quiet = False
        self.is_reader = False
        self.is_listener = False
        """Whether it has a subscription, as the presence of a member."""
        self.chunks = 0
        self.replies = 0
        self.last_out = self.last_in = 0.0
        self.held_until = 0.0
        """Commands wait on the way until then."""
        self.breaks_after = 0
        """The number of the write after which it breaks, before the replies arrive."""
        self._network = network

    def send(self, data: bytes) -> None:
        """Bytes leave the process."""
        if self.is_open:
            self._network.send(self, data)

    def close(self) -> None:
        """The process closes it."""
        if self.is_open:
            self.is_open = False
            self._network.closed(self)


class Network:
    """All connections to one server. One write of one connection is executed at a time.

    `control` is a connection of its own: when it has its second answer, the server has done everything that was sent
    before, and has written all replies and pushed messages; each READ bytes of a long command take one answer more.
    """

    def __init__(self, world: World, address: str, clock: Path) -> None:
        self._world, self._address = world, address
        file = os.open(clock, os.O_RDWR)
        self._clock = mmap.mmap(file, 8)
        os.close(file)
        self.offset = 0.0
        """Seconds by which the server's clock is wrong."""
        self.set_clock()
        self._open: dict[int, SimulatedConnection] = {}
        self._poll = select.poll()
        self._control = self._socket()
        self.commands = 0
        self.fences = Fences(self.ask)
        self.after_command: Callable[[], None] = lambda: None
        self.heartbeats = set[str]()
        """The labels of connections that renew leases or touch messages."""
        self.on_slow_heartbeat: Callable[[str, float], None] = lambda _, __: None
        self.replaced = 0
        """How often another server process has taken over, for the processes."""
        self.noise = 0.0
        """The share of commands and replies that take long."""
        self._refused, self._hangs = dict[str, float](), dict[str, float]()
        self._traps: dict[str, list[Trap]] = {}

    def _socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(self._address)
        return sock

    def close(self) -> None:
        """Close every socket: for a caller that lives on."""
        for sock in (self._control, *(each.sock for each in self._open.values())):
            sock.close()
        self._clock.close()

    def set_clock(self) -> None:
        """Let the server have the present moment."""
        self._clock[:8] = struct.pack("q", int((EPOCH + self._world.now + self.offset) * 1_000_000))

    def latency(self, label: str, what: str) -> float:
        """Seconds on the way."""
        name = f"slow: {label} {what}"
        chosen = self._world.choices.unit(name)
        if chosen < self.noise and self._world.choices.allows(name):
            span = 0.01 + 0.79 * chosen / self.noise
            if label in self.heartbeats:
                self.on_slow_heartbeat(label, span)
            return span
        return 0.0001 + 0.0005 * chosen

    def open(self, owner: str, label: str) -> SimulatedConnection | None:
        """A new connection, or None while it is refused."""
        if self._world.now < max(self._refused.get(owner, 0.0), self._refused.get("", 0.0)):
            return None
        sock = self._socket()
        connection = SimulatedConnection(self, owner, label, sock)
        self._open[sock.fileno()] = connection
        self._poll.register(sock, select.POLLIN)
        self._sync()  # the server gives out its client ids in this order
        self._world.note(f"{label} open")
        return connection

    def refuse(self, owner: str, until: float) -> None:
        """Open no connection for a process until then; for none at all if it is empty."""
        self._world.note(f"{owner or 'every process'} cannot connect until {until:.3f}")
        self._refused[owner] = max(until, self._refused.get(owner, 0.0))

    def hang(self, owner: str, until: float) -> None:
        """Attempts of a process to connect get no answer until then."""
        self._world.note(f"connections of {owner} hang until {until:.3f}")
        self._hangs[owner] = max(until, self._hangs.get(owner, 0.0))

    def opens_at(self, owner: str, label: str) -> float:
        """When an attempt to connect that begins now gets its answer."""
        return max(self._world.now + self.latency(label, "connect"), self._hangs.get(owner, 0.0))

    def closed(self, connection: SimulatedConnection) -> None:
        """The process has closed it: what is still on its way reaches the server first."""
        moment = max(connection.last_out, self._world.now + self.latency(connection.label, "close"))
        self._world.at(moment, lambda: self._drop(connection))

    @property
    def is_a_command_late(self) -> bool:
        """Whether a fault holds what a connection has sent."""
        return any(each.held_until > self._world.now for each in self._open.values())

    def connections_of(self, owner: str) -> list[SimulatedConnection]:
        """The open connections of a process."""
        return [connection for connection in self._open.values() if connection.owner == owner]

    def connections(self) -> list[SimulatedConnection]:
        """All open connections."""
        return list(self._open.values())

    def break_connection(self, connection: SimulatedConnection) -> None:
        """The connection breaks: what is on its way is lost in both directions."""
        if connection.is_open:
            self._world.note(f"{connection.label} breaks")
            connection.is_open = False
            self._drop(connection)
            connection.arrived(b"")

    def close_all(self, owner: str) -> None:
        """The process has ended."""
        for connection in self.connections_of(owner):
            connection.close()

    def _drop(self, connection: SimulatedConnection) -> None:
        number = connection.sock.fileno()
        if number >= 0:
            if not connection.is_cut:
                self._poll.unregister(connection.sock)
            del self._open[number]
            connection.sock.close()
            self._world.note(f"{connection.label} closed")
            self._sync()
            self._collect()

    # -- commands ---------------------------------------------------------------------------------------------------

    def send(self, connection: SimulatedConnection, data: bytes) -> None:
        """Bytes are on their way to the server; those of one connection keep their order."""
        connection.chunks += 1
        if traps := self._traps.get(connection.owner):
            names = {name_of(command) for command in parsed(data)}
            if "adopt_pending" in names:  # the take-over of shared distribution
                names.add("claim_pending")
            for trap in [trap for trap in traps if trap.command in names]:
                traps.remove(trap)
                if trap.skips:
                    traps.append(replace(trap, skips=trap.skips - 1))
                    continue
                trap.spring(connection)
                if not connection.is_open:
                    return
        moment = self._world.now + self.latency(connection.label, f"command {connection.chunks}")
        connection.last_out = max(moment, connection.last_out, connection.held_until)
        self._world.at(connection.last_out, lambda chunk=connection.chunks: self._execute(connection, chunk, data))  # type: ignore[misc]

    def trap(self, owner: str, command: str, spring: Callable[[SimulatedConnection], None], *, skips: int = 0) -> None:
        """Call `spring` when a process next sends a command or script, before it is on its way."""
        self._traps.setdefault(owner, []).append(Trap(command, spring, skips))

    def _execute(self, connection: SimulatedConnection, chunk: int, data: bytes) -> None:
        if connection.sock.fileno() < 0:
            return
        commands = parsed(data)
        self.set_clock()
        self.commands += len(commands)
        names = [self._note(connection, command) for command in commands]
        self.fences.before(commands, names)
        try:
            connection.sock.sendall(data)
        except OSError:
            return
        blocks = 0
        for command in commands:
            if b"BLOCK" in command[:10]:
                blocks = int(command[command.index(b"BLOCK") + 1])
        for _ in range(2 + len(data) // READ):  # the server answers `control` between two parts of a long command
            self._sync()
        self.fences.after(parsed(self._collect().get(connection.label, b"")))
        if blocks:
            self._world.after(blocks / 1000 + 0.002, self._time_out)
        if chunk == connection.breaks_after:
            self.break_connection(connection)
        self.after_command()

    def _time_out(self) -> None:
        """A blocking command may be over."""
        self.set_clock()
        self._sync()
        self._sync()
        self._collect()

    def _note(self, connection: SimulatedConnection, command: list[Any]) -> str:
        """Write it into the trace; returns the name of the command or script."""
        words = [word.decode(errors="replace") for word in command[:40]]
        connection.is_quiet = command[0] in QUIET
        connection.is_reader = connection.is_reader or command[0] == b"XREADGROUP"
        connection.is_listener = connection.is_listener or command[0] == b"SUBSCRIBE"
        if words[0] in ("EVALSHA", "EVAL"):
            words[:2] = [name_of(command)]
        if words[0] in RENEWING:
            self.heartbeats.add(connection.label)
        self._world.note(f"{connection.label} > {' '.join(words)[:300]}")
        return words[0]

    def _sync(self) -> None:
        self._control.sendall(b"PING\r\n")
        data = b""
        while not data.endswith(b"+PONG\r\n"):
            data += self._control.recv(100)

    def _collect(self) -> dict[str, bytes]:
        """Everything that the server has written goes on its way back. Returns it by connection."""
        found = dict[str, bytes]()
        ready = [self._open[number] for number, _ in self._poll.poll(0) if number in self._open]
        for connection in sorted(ready, key=lambda each: each.label):
            data = self._received(connection)
            if data is None:
                continue
            found[connection.label] = data
            connection.replies += 1
            moment = self._world.now + self.latency(connection.label, f"reply {connection.replies}")
            connection.last_in = max(moment, connection.last_in)
            self._world.at(connection.last_in, lambda connection=connection, data=data: self._arrive(connection, data))  # type: ignore[misc]
            if not data:
                connection.is_cut = True
                self._poll.unregister(connection.sock)
        return found

    def _received(self, connection: SimulatedConnection) -> bytes | None:
        connection.sock.setblocking(False)
        data = b""
        try:
            while piece := connection.sock.recv(1 << 20):
                data += piece
        except BlockingIOError:
            return RUN_ID.sub(b"run_id:%040d" % self.replaced, data) or None
        except OSError:
            return data or b""
        finally:
            connection.sock.settimeout(10)
        return data

    def _arrive(self, connection: SimulatedConnection, data: bytes) -> None:
        if connection.is_open:
            size = "" if connection.is_quiet else f" {len(data)}"
            self._world.note(f"{connection.label} <{size}" if data else f"{connection.label} < closed by the server")
            if not data:
                connection.is_open = False
            connection.arrived(data)
            if not data:
                self._forget(connection)

    def _forget(self, connection: SimulatedConnection) -> None:
        self._open.pop(connection.sock.fileno(), None)
        connection.sock.close()

    # -- for the faults and the verdict ---------------------------------------------------------------------------

    def ask(self, *command: str | bytes | int) -> Any:
        """The reply to a command of the simulation itself."""
        self.set_clock()
        self._control.sendall(hiredis.pack_command(command))
        reader = hiredis.Reader()
        while (reply := reader.gets()) is False:
            reader.feed(self._control.recv(1 << 16))
        return reply

    def inflict(self, *command: str | bytes | int) -> None:
        """A command of another client: what it lets the server tell the members goes on its way."""
        self._world.note(f"another client > {' '.join(map(str, command))[:100]}")
        self.ask(*command)
        self._sync()
        self._collect()
