"""Testing."""

from rsmq.testing.harness import Harness
from rsmq.testing.outcome import Outcome
from rsmq.testing.server import ThrowawayServer

__all__ = ["Harness", "Outcome", "ThrowawayServer"]
