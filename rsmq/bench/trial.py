"""The trials: each thing that is measured, what it is compared with, and how to run it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from rsmq.bench import bare, work
from rsmq.bench.load import Load
from rsmq.bench.meter import BY_HAND, BY_SCRIPT, Cost, Meter
from rsmq.connect import Client

Run = Callable[[Load, Meter], Awaitable[Cost]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement. `base` names the trial it is compared with; those that fill the topic come first."""

    name: str
    meaning: str
    base: str | None
    run: Run

    async def measure(self, load: Load, client: Client) -> Cost:
        """Run it, with the server's figures from a client of its own."""
        return await self.run(load, Meter(client, BY_HAND if self.base is None else BY_SCRIPT))


TRIALS: Final = (
    Trial("pipeline", "publish: redis-py pipeline of 100", None, bare.publish),
    Trial("many", "publish: publish_many", "pipeline", work.publish_many),
    Trial("concurrent", "publish: many at once, one await each", "pipeline", work.publish_concurrently),
    Trial("bare", "consume: bare redis-py loop", None, bare.consume),
    Trial("single", "consume: async handler, dict", "bare", partial(work.consume, kind=work.single)),
    Trial("typed", "consume: async handler, pydantic model", "bare", partial(work.consume, kind=work.typed)),
    Trial("batch", "consume: batch handler", "bare", partial(work.consume, kind=work.batches)),
    Trial("bare-suspending", "consume: bare loop, handlers suspend", None, partial(bare.consume, suspends=True)),
    Trial(
        "suspending", "consume: handlers suspend", "bare-suspending", partial(work.consume, kind=work.suspending)
    ),
)  # fmt: skip
BY_NAME: Final = {trial.name: trial for trial in TRIALS}
