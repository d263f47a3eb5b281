"""Run as a process: publishes numbered messages for a device, or feeds inboxes, until it is done or killed."""

from __future__ import annotations

import asyncio
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


def main() -> None:
    """`url prefix feed`, or `url prefix produce DEVICE NAME COUNT PROGRESS-FILE`."""
    url, prefix, role, *rest = sys.argv[1:]
    broker = Broker(Settings(url=url, prefix=prefix, preflight="warn", inbox_limit=30_000))
    if role == "feed":
        asyncio.run(feed(broker))
    else:
        device, name, count, progress = rest
        asyncio.run(produce(broker, device, name, int(count), Path(progress)))


if __name__ == "__main__":
    main()
