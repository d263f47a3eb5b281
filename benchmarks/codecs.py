"""`python -m benchmarks.codecs [--write]`: what compression and encryption cost a message, beside a plain one.

One process, without a server: from the object to the stored bytes, and from the entry to the object. The ways take
turns, and the least of all rounds counts: other work on the machine can only add.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from benchmarks.peers.results import machine
from benchmarks.section import Found, Section
from benchmarks.table import table
from rsmq.codecs import Encrypt, Keyring, Zstd
from rsmq.handler.payload import decoder_for
from rsmq.handler.reader import PayloadReader
from rsmq.model.encoding import Encoding
from rsmq.model.message import Message, MessageOrigin, encode_payload, entry_fields, new_message_id

MESSAGES: Final = 2000
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
    return {
        "day": now, "rounds": rounds, "load": os.getloadavg()[0], "machine": machine(), "size": size, "ways": ways,
    }  # fmt: skip


def text(found: Found) -> str:
    """The section of the page."""
    rows = [(each["name"], round(each["bytes"]), each["publish_us"], each["read_us"]) for each in found["ways"]]
    head = (f"JSON of {found['size']:.0f} bytes", "stored bytes", "object to entry, CPU µs", "entry to object, CPU µs")
    about = found["machine"]
    return "\n".join([
        *table(head, rows),
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
