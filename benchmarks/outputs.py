"""What a settlement with an output costs the server: `python -m benchmarks.outputs` prints its CPU for each message.

Beside it: the settlement alone, a plain XADD with an XACK for the whole batch (neither fenced nor in one step), and a
publish with a dedup key before the settlement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import redis

from rsmq.model.keys import Keys
from rsmq.redis.scripts import PUBLISH_ONCE, SETTLE_MESSAGES, SETTLE_OUTPUTS
from rsmq.testing.server import ThrowawayServer

MESSAGES: Final = 40_000
BATCH: Final = 100
ROUNDS: Final = 5
GROUP: Final = "billing"
KEYS: Final = Keys()
STREAM, LEASE, OUT = KEYS.stream("orders", 0), KEYS.lease("orders", 0, GROUP), KEYS.stream("invoices", 0)
RETRY: Final = KEYS.retry("orders", 0, GROUP)
FIELDS: Final = ("data", b"x" * 100, "id", "019a6c1e-0000-7000-8000-000000000000", "key", "customer-1")

Settle = Callable[[Any, list[bytes]], None]


def with_outputs(pipe: Any, ids: list[bytes]) -> None:
    """One fenced script: the acknowledgements and the outputs."""
    args = [part for entry_id in ids for part in (entry_id, 1, 4, "", len(FIELDS), *FIELDS)]
    head = ("me", "7", GROUP, 0, 1, 0, 0)
    pipe.execute_command(*SETTLE_OUTPUTS.command((STREAM, LEASE, RETRY, OUT), (*head, *args)))


def alone(pipe: Any, ids: list[bytes]) -> None:
    """The settlement without outputs."""
    pipe.execute_command(*SETTLE_MESSAGES.command((STREAM, LEASE, RETRY), ("me", GROUP, "7", len(ids), 0, *ids)))


def plain(pipe: Any, ids: list[bytes]) -> None:
    """What a loop written by hand does."""
    for _ in ids:
        pipe.execute_command("XADD", OUT, "*", *FIELDS)
    pipe.execute_command("XACK", STREAM, GROUP, *ids)


def by_dedup(pipe: Any, ids: list[bytes]) -> None:
    """An id made from that of the message, and the settlement afterwards."""
    for entry_id in ids:
        names = (OUT, KEYS.dedup("invoices", 0, entry_id.decode()))
        pipe.execute_command(*PUBLISH_ONCE.command(names, (0, "reject", 60_000, "", entry_id, *FIELDS)))
    alone(pipe, ids)


def cpu(client: Any) -> float:
    """Seconds of CPU that the server has used."""
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def measured(client: Any, settle: Settle) -> float:
    """Microseconds of the server's CPU for each message."""
    client.flushall()
    for script in (SETTLE_OUTPUTS, SETTLE_MESSAGES, PUBLISH_ONCE):
        client.script_load(script.source)
    client.execute_command("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
    client.execute_command("HSET", LEASE, "owner", "me", "epoch", "7")
    ids = list[bytes]()
    for _ in range(0, MESSAGES, BATCH):
        with client.pipeline(transaction=False) as pipe:
            for _ in range(BATCH):
                pipe.execute_command("XADD", STREAM, "*", *FIELDS)
            pipe.execute_command("XREADGROUP", "GROUP", GROUP, "me", "STREAMS", STREAM, ">")
            ids += pipe.execute()[:-1]
    before = cpu(client)
    for at in range(0, MESSAGES, BATCH):
        with client.pipeline(transaction=False) as pipe:
            settle(pipe, ids[at : at + BATCH])
            pipe.execute()
    return (cpu(client) - before) / MESSAGES * 1e6


def main() -> None:
    """Print the median of the rounds, and the lowest and highest."""
    server = ThrowawayServer().start()
    try:
        with redis.Redis.from_url(server.url) as client:
            for settle in (with_outputs, alone, plain, by_dedup):
                found = sorted(measured(client, settle) for _ in range(ROUNDS))
                title = (settle.__doc__ or "").splitlines()[0].rstrip(".")
                print(f"{statistics.median(found):5.2f} us ({found[0]:.2f} ... {found[-1]:.2f})  {title}")
    finally:
        server.close()


if __name__ == "__main__":
    main()
