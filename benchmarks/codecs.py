"""`python -m benchmarks.codecs [--write]`: what compression, encryption and a store of bodies cost a message, beside a
plain one.

One process, without a server: from the object to the stored bytes, and from the entry to the object. The ways take
turns, and the least of all rounds counts: other work on the machine can only add. Of bodies it is the CPU of all
threads, and the time between two calls that follow one another; files are forced to the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from benchmarks.peers.results import machine
from benchmarks.section import Found, Section
from benchmarks.table import table
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd
from rsmq.handler.payload import decoder_for
from rsmq.handler.reader import PayloadReader
from rsmq.model.body import BodyFolder
from rsmq.model.encoding import Encoding
from rsmq.model.message import BYTES, Message, MessageOrigin, encode_payload, entry_fields, new_message_id

MESSAGES: Final = 2000
BODIES: Final = 50
BODY_BYTES: Final = 200_000
DEPLOYMENT: Final = "0" * 32
ORIGIN: Final = MessageOrigin("orders", 0, "billing")
KEYRING: Final = Keyring({"k1": secrets.token_bytes(32)})
WAYS: Final[dict[str, Encoding | None]] = {
    "plain": None,
    "Zstd": Encoding([Zstd(above=0)]),
    "Encrypt": Encoding([Encrypt(KEYRING)]),
    "Zstd and Encrypt": Encoding([Zstd(above=0), Encrypt(KEYRING)]),
}


def payloads() -> list[dict[str, Any]]:
    """Notifications of about 900 bytes."""
    return [
        {
            "id": number, "to": f"+82 10 {number:04d} {number * 7919 % 10_000:04d}", "channel": "push",
            "title": f"Your order {number} is on its way", "lines": [
                {"sku": f"{number * 31 % 9973:05d}-{line}", "count": line + 1, "price": f"{number * line % 997}.50",
                 "name": "A thing with a name of some length", "is_gift": False} for line in range(6)
            ], "link": f"https://shop.example.com/orders/{number}?utm_source=push", "at": "2026-11-26T04:00:00Z",
        } for number in range(MESSAGES)
    ]  # fmt: skip


def published(encoding: Encoding | None, objects: list[dict[str, Any]]) -> list[list[bytes]]:
    """The entries as they are stored."""
    made = []
    for each in objects:
        data, kind = encode_payload(each)
        identity, extra = new_message_id(), tuple[str, ...]()
        if encoding is not None:
            data, extra = encoding.extend(data, identity, "c-1", kind)
        made.append(entry_fields(data, identity, "c-1", kind, None, extra))
    return [[part.encode() if isinstance(part, str) else bytes(part) for part in fields] for fields in made]


def handled(encoding: Encoding | None, entries: list[list[bytes]]) -> None:
    """What a runner does between the entry and the call of the handler."""
    reader = PayloadReader(decoder_for(dict)) if encoding is None else PayloadReader(decoder_for(dict), encoding)
    for fields in entries:
        message = Message(ORIGIN, b"1-0", fields)
        message.payload = reader.plain(message.data) if message.is_plain else reader.read(message)


def cost(work: Callable[[], object]) -> float:
    """Microseconds of CPU for a message."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / MESSAGES * 1e6


def stores(folder: str) -> dict[str, Offload | None]:
    """Where bodies may lie."""
    return {
        "in its entry": None,
        "Offload(memory of fsspec)": Offload("memory://bodies", above="128KiB"),
        "Offload(folder)": Offload(folder, above="128KiB"),
    }


async def put_bodies(offload: Offload | None, body: bytes) -> list[list[bytes]]:
    """The entries as they are stored, one after the other, each after its body."""
    encoding, made = Encoding((), bodies=offload), list[list[bytes]]()
    for _ in range(BODIES):
        identity = new_message_id()
        folder = None if offload is None else BodyFolder("orders", DEPLOYMENT, offload.above, offload.largest)
        data, extra = encoding.extend(body, identity, "c-1", BYTES, folder=folder)
        for each in () if folder is None or offload is None else folder.take_all():
            await offload.put(each.name, each.data)
        fields = entry_fields(data, identity, "c-1", BYTES, None, extra)
        made.append([part.encode() if isinstance(part, str) else bytes(part) for part in fields])
    return made


async def get_bodies(offload: Offload | None, entries: list[list[bytes]]) -> None:
    """What a runner does between the entry and the call of the handler."""
    reader = PayloadReader(decoder_for(bytes), Encoding((), bodies=offload))
    for fields in entries:
        message = Message(ORIGIN, b"1-0", fields)
        if message.is_outside:
            await reader.fetch(message)
        message.payload = reader.read(message)


async def measure_bodies(rounds: int) -> list[Found]:
    """CPU and time for a message with a body, of each store: the least."""
    found, body = defaultdict[str, list[tuple[float, ...]]](list), secrets.token_bytes(BODY_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, offload in stores(folder).items():
                began, cpu = time.perf_counter(), time.process_time()
                entries = await put_bodies(offload, body)
                put, put_cpu = time.perf_counter(), time.process_time()
                await get_bodies(offload, entries)
                got, got_cpu = time.perf_counter(), time.process_time()
                found[name].append((put_cpu - cpu, put - began, got_cpu - put_cpu, got - put))
                for fields in entries if offload is not None else ():
                    await offload.delete(fields[fields.index(b"ref", 6) + 1].decode())
    names = ("put_us", "put_took_us", "get_us", "get_took_us")
    return [
        {"name": store, **{name: min(each[at] for each in rows) / BODIES * 1e6 for at, name in enumerate(names)}}
        for store, rows in found.items()
    ]


def measure(rounds: int) -> Found:
    """The least of each way."""
    objects, costs = payloads(), defaultdict[str, list[tuple[float, float]]](list)
    entries = {name: published(encoding, objects) for name, encoding in WAYS.items()}
    for _ in range(rounds):
        for name, encoding in WAYS.items():
            write = cost(lambda encoding=encoding: published(encoding, objects))
            costs[name].append((write, cost(lambda name=name, encoding=encoding: handled(encoding, entries[name]))))
    ways = [
        {"name": name, "bytes": sum(len(fields[1]) for fields in entries[name]) / MESSAGES,
         "publish_us": min(write for write, _ in found), "read_us": min(read for _, read in found)}
        for name, found in costs.items()
    ]  # fmt: skip
    size = sum(len(json.dumps(each, separators=(",", ":"))) for each in objects) / MESSAGES
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    bodies = asyncio.run(measure_bodies(rounds))
    return {
        "day": now, "rounds": rounds, "load": os.getloadavg()[0], "machine": machine(), "size": size, "ways": ways,
        "bodies": bodies,
    }  # fmt: skip


def text(found: Found) -> str:
    """The section of the page."""
    rows = [(each["name"], round(each["bytes"]), each["publish_us"], each["read_us"]) for each in found["ways"]]
    head = (f"JSON of {found['size']:.0f} bytes", "stored bytes", "object to entry, CPU µs", "entry to object, CPU µs")
    about = found["machine"]
    bodies = [
        (each["name"], each["put_us"], each["put_took_us"], each["get_us"], each["get_took_us"])
        for each in found["bodies"]
    ]
    columns = (f"{BODY_BYTES // 1000} kB of bytes", "put, CPU µs", "put, µs", "get, CPU µs", "get, µs")
    return "\n".join([
        *table(head, rows),
        "",
        *table(columns, bodies),
        "",
        f"`python -m benchmarks.codecs --write`, {found['day']}: {about['cpu']}, {about['cores']} cores, Python "
        f"{about['python']}; the least of {found['rounds']} rounds, load average {found['load']:.0f} ({SECTION.link}).",
    ])  # fmt: skip


SECTION: Final = Section("codecs", text)


def main() -> None:
    """Measure, print, and with `--write` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="keep figures and section")
    options = parser.parse_args()
    found = measure(options.rounds)
    print(text(found))
    if options.write:
        SECTION.keep(found)


if __name__ == "__main__":
    main()
