"""What `rsmq doctor` says about the queues: `gather` reads the facts, `judge` applies the rules to them."""

from rsmq.inspector.doctor.facts import QueueFacts, gather
from rsmq.inspector.doctor.rules import judge

__all__ = ["QueueFacts", "gather", "judge"]
