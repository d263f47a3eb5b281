"""Run as a process: publishes numbered messages, feeds inboxes, or is a device, until it is done or killed."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from rsmq import Broker, Settings

TOPIC = "alerts"
AT_ONCE = 50


async def produce(broker: Broker, device: str, name: str, count: int, progress: Path) -> None:
    """Publish numbers from where the progress file says, each with an id of its own: after a kill, none twice."""
    done = int(progress.read_text() or 0) if progress.exists() else 0
    async with broker:
        while done < count:
            numbers = range(done, min(count, done + AT_ONCE))
            await asyncio.gather(
                *(
                    broker.publish(TOPIC, {"to": device, "by": name, "n": n}, key=name, message_id=f"{name}-{n}")
                    for n in numbers
                )
            )
            done = numbers.stop
            beside = progress.with_suffix(".new")
            beside.write_text(str(done))
            beside.replace(progress)


async def feed(broker: Broker) -> None:
    """Bring messages into inboxes."""
    broker.deliver(TOPIC, to=lambda message: message["to"], batch=100)
    await broker.run()


async def listen(broker: Broker, device: str, ledger: Path) -> None:
    """Be a device: note each letter before acknowledging it, and each time that all acks are confirmed."""
    with ledger.open("w", buffering=1) as notes:
        async with broker, broker.connect(device, window=random.choice([5, 50])) as session:
            async for letter in session:
                payload = letter.payload
                notes.write(f"{letter.seq} {int(letter.is_redelivered)} {payload['by']} {payload['n']}\n")
                await session.ack(letter)
                if letter.seq % 20 == 0:
                    await session.flush()
                    notes.write("confirmed\n")


def main() -> None:
    """`url prefix feed`, `url prefix produce DEVICE NAME COUNT PROGRESS-FILE`, or `url prefix listen DEVICE LEDGER`."""
    url, prefix, role, *rest = sys.argv[1:]
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", inbox_limit=30_000))
    if role == "feed":
        asyncio.run(feed(broker))
    elif role == "listen":
        device, ledger = rest
        asyncio.run(listen(broker, device, Path(ledger)))
    else:
        device, name, count, progress = rest
        asyncio.run(produce(broker, device, name, int(count), Path(progress)))


if __name__ == "__main__":
    main()
