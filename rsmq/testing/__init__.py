"""What a test of your own handlers needs: a real server, handlers that run in the test, a clock to move, and chaos.

The fixtures are in `pytest_rsmq`, which pytest finds by itself; everything here works without pytest, too.
"""

from rsmq.testing.chaos import Chaos
from rsmq.testing.harness import Harness
from rsmq.testing.ledger import Event
from rsmq.testing.outcome import Outcome
from rsmq.testing.server import ThrowawayServer
from rsmq.testing.verdict import MoreThanOnce, Never, OutOfOrder, Stuck, Verdict

__all__ = [
    "Chaos",
    "Event",
    "Harness",
    "MoreThanOnce",
    "Never",
    "OutOfOrder",
    "Outcome",
    "Stuck",
    "ThrowawayServer",
    "Verdict",
]
