"""What the workers run that `benchmarks.waiting` kills: a module of its own, so that they import nothing else."""

from __future__ import annotations

from typing import Any

from rsmq import Broker

broker = Broker()


@broker.handler("waiting", group="bench")
async def handle(_payload: dict[str, Any]) -> None:
    """Does nothing."""
