"""Tests of your own handlers: on a real server, in the test process or under chaos. `pytest_rsmq` has the fixtures.

The map: `server` starts a real server for a test (ThrowawayServer) and deletes a test's keys. `harness` runs a broker's
handlers in the test, with a clock that can be moved (Harness), and reports each message's Outcome; `idle` waits until
its worker is idle and moves due times. `chaos` runs the handlers in worker processes and injects faults (Chaos):
`worker_process` is a process as the test sees it, `worker_main` what it executes, `proxy` the connection that can be
cut. Every process records its handler calls in the `ledger`, a file outside the server; `verdict` compares the ledger
with what was published. The demo, the examples and rsmq's own chaos suite use the same ledger and proxy.
"""

from rsmq.testing.chaos import Chaos
from rsmq.testing.fixtures import ChaosFixture, HarnessFixture
from rsmq.testing.harness import Harness, Outcome
from rsmq.testing.ledger import Event
from rsmq.testing.server import ThrowawayServer
from rsmq.testing.verdict import MoreThanOnce, Never, OutOfOrder, Stuck, Verdict

__all__ = [
    "Chaos",
    "ChaosFixture",
    "Event",
    "Harness",
    "HarnessFixture",
    "MoreThanOnce",
    "Never",
    "OutOfOrder",
    "Outcome",
    "Stuck",
    "ThrowawayServer",
    "Verdict",
]
