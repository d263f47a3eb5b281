"""The preflight: checks at start whether the server could lose messages. `facts` asks the server, `rules` judges the
replies and refuses the start or warns, `vulnerabilities` lists known ones by version."""

from rsmq.redis.preflight.facts import ServerFacts, gather
from rsmq.redis.preflight.rules import Finding, judge, require

__all__ = ["Finding", "ServerFacts", "gather", "judge", "require"]
