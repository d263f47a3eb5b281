"""How long the wills of a killed gateway take: `python -m tests.gateway.wills_after_kills --kills 10`.

Each time a gateway with clients that have wills without a delay is killed (SIGKILL), and another one publishes them.
The time is that from the kill to the arrival of each will at a subscriber of a third gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from tests.gateway.process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.servers import Server


async def measure(kills: int, clients: int) -> list[tuple[float, float]]:
    """Seconds to the first and to the last will of each kill."""
    found = list[tuple[float, float]]()
    with (
        Server(aof=True) as server, GatewayProcess(server.url, "w") as watching, GatewayProcess(server.url, "w"),
    ):  # fmt: skip
        watcher = await RawClient(watching.port, 5).connect("watcher", keep_alive=0)
        await watcher.subscribe(("wills/#", 1))
        for turn in range(kills):
            with GatewayProcess(server.url, "w") as dying:
                ids = [f"c{turn}-{number}" for number in range(clients)]
                made = [
                    await RawClient(dying.port).connect(each, will=(f"wills/{each}", b"", 1, False)) for each in ids
                ]
                since = time.monotonic()
                dying.kill()
                names, times = set[str](), list[float]()
                for _ in range(clients):
                    names.add((await watcher.message()).topic)
                    times.append(time.monotonic() - since)
            assert names == {f"wills/{each}" for each in ids}
            assert await watcher.is_silent()
            found.append((times[0], times[-1]))
            for each in made:
                each.abort()
        watcher.abort()
    return found


def main() -> None:
    """Print a line for each kill, and the median and the longest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    found = asyncio.run(measure(options.kills, options.clients))
    for first, last in found:
        print(f"first will after {first:.2f} s, last of {options.clients} after {last:.2f} s")
    last = [each for _, each in found]
    print(f"{options.kills} kills: last will after {statistics.median(last):.2f} s (median), {max(last):.2f} s at most")


if __name__ == "__main__":
    main()
