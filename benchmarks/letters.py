"""Server CPU of one letter for an MQTT client, call by call: `python -m benchmarks.letters [--rounds N]`.

Each client is connected and has read everything; a call waits for its reply, so that none shares a write or a read with
another one. It is what little traffic costs. The best of the rounds: other load on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import redis

from benchmarks.server import ServerMeter, server
from benchmarks.table import figure, table
from rsmq.gateway.fleet.scripts import ACK_CLIENTS, BEGIN_MQTT_SESSION
from rsmq.model.keys import Keys
from rsmq.model.packing import pack_array, pack_values
from rsmq.persistence.letter import pack_letter, pack_letters, seal_mqtt
from rsmq.redis.scripts import ADD_LETTERS, OPEN_SESSION, PAGE_LETTERS, Script

CLIENTS: Final = 192
TURNS: Final = 10
LIFE: Final = 604_800_000
SOURCE: Final = "source:&mqtt.3/mqtt"
LETTER: Final = seal_mqtt(1, b"p2p/17", b"", bytes(200))
KEYS: Final = Keys()


class Fleet:
    """The clients of a gateway on one server."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._seq = 0
        self.names = [f"r{n}" for n in range(CLIENTS)]
        self._epochs = dict[str, str]()
        for n, name in enumerate(self.names):
            args: tuple[Any, ...] = ("g", 0, LIFE, "source:!g", f"{n + 1:016d}", 600_000, 1)
            epoch = self.run(OPEN_SESSION, KEYS.device(name), args)[1].decode()
            inbox, session, *_ = KEYS.device(name)
            keys = (session, KEYS.received(name), inbox, KEYS.will(name))
            self.run(BEGIN_MQTT_SESSION, keys, (epoch, 0, 3600, 0, ""))
            self._epochs[name] = epoch

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """One call, and its reply."""
        return script.run(self._client, keys, args)

    def store(self, *, rings_with_letter: bool) -> None:
        """A letter for each client, in a call of its own."""
        self._seq += 1
        now = b"%d" % (time.time_ns() // 1_000_000)
        letter = pack_letter(now.zfill(20) + b"%020d" % self._seq, now, b"", LETTER)
        call = (f"bench.{self._seq}",) if rings_with_letter else ()
        args = (LIFE, 10_000, 600_000, pack_letters([(SOURCE, [letter])]), 1, *call)
        for name in self.names:
            self.run(ADD_LETTERS, KEYS.device(name)[:3], args)

    def read(self) -> None:
        """A page for each client."""
        for name in self.names:
            args = (self._epochs[name], self._seq - 1, 20, 65_536, LIFE, "")
            self.run(PAGE_LETTERS, KEYS.device(name)[:3], args)

    def acknowledge(self, at_once: int, *, rang_with_letter: bool) -> None:
        """The acks of so many clients in one call."""
        named = f"{self._seq}:bench.{self._seq}" if rang_with_letter else ""
        for names in (self.names[at : at + at_once] for at in range(0, CLIENTS, at_once)):
            values = [part for name in names for part in (self._epochs[name], named, str(self._seq))]
            keys = [key for name in names for key in KEYS.device(name)[:3]]
            replies = self.run(ACK_CLIENTS, keys, (pack_array(len(values), [pack_values(values)]),))
            assert all(each == [b"OK", 1] for each in replies), replies


def measured(meter: ServerMeter, fleet: Fleet, *, rings_with_letter: bool, at_once: int) -> Iterator[float]:
    """Microseconds a letter of each step."""
    steps = [lambda: fleet.store(rings_with_letter=rings_with_letter)]
    if not rings_with_letter:
        steps.append(fleet.read)
    steps.append(lambda: fleet.acknowledge(at_once, rang_with_letter=rings_with_letter))
    spent = [0.0] * len(steps)
    for _ in range(TURNS):
        for at, step in enumerate(steps):
            meter.start()
            step()
            spent[at] += meter.cpu_us
    found = [each / TURNS / CLIENTS for each in spent]
    yield from found if not rings_with_letter else (found[0], 0.0, found[1])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.letters", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways = {
        "read by a page": (False, 1), "along with its ring": (True, 1),
        "along with its ring, 8 acks a call": (True, 8), "along with its ring, 64 acks a call": (True, 64),
    }  # fmt: skip
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    with server() as url, redis.Redis.from_url(url, protocol=2) as client:
        fleet, meter = Fleet(client), ServerMeter(url)
        for _ in range(options.rounds):
            for way, (rings, at_once) in ways.items():
                found[way].append(list(measured(meter, fleet, rings_with_letter=rings, at_once=at_once)))
    rows = []
    for way, rounds in found.items():
        least = min(rounds, key=sum)
        rows.append((way, *(figure(each) if each else "–" for each in least), figure(sum(least))))
    print("\n".join(table(("server CPU µs a letter", "store", "page", "ack", "sum"), rows)))


if __name__ == "__main__":
    main()
