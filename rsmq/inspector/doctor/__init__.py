"""The findings of `rsmq doctor` about the queues: `gather` reads the facts, `judge` applies the rules to them.

`check_outbox` is the rule for an outbox, which another server has. `foreign_keys` finds what made the server answer
WRONGTYPE.
"""

from rsmq.inspector.doctor.facts import QueueFacts, gather
from rsmq.inspector.doctor.foreign_keys import foreign_keys
from rsmq.inspector.doctor.rules import check_outbox, judge

__all__ = ["QueueFacts", "check_outbox", "foreign_keys", "gather", "judge"]
