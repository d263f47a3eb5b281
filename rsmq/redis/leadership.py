"""Leadership: which member does a piece of work for all workers. A dead leader is replaced after about a second."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from rsmq.errors import BrokerError
from rsmq.model.clock import monotonic
from rsmq.redis.scripts import LEAD_WORK, OK
from rsmq.redis.server_context import ServerContext

TTL: Final = 1.0
"""Seconds without a renewal after which another member takes over. Short, because a change costs nothing: what the
leader writes carries its epoch."""
RENEW: Final = TTL / 3


class Leadership:
    """One member's bid for a piece of work. It is no lock: writes must carry `epoch`, which grows with each change."""

    def __init__(self, context: ServerContext, work: str) -> None:
        self._client = context.client
        self._member = context.member
        self._key = context.keys.leader(work)
        self._renewed = 0.0
        self.epoch = 0
        """That of the last grant; 0: this member does not lead."""

    async def bid(self) -> float:
        """Become or stay the leader. Returns 0 if this member leads, else the seconds until the next bid."""
        now = monotonic()
        if self.epoch and now - self._renewed < RENEW:
            return 0.0
        word, value = await LEAD_WORK(self._client, (self._key,), (self._member, round(TTL * 1000), self.epoch))
        if word != OK:
            self.epoch = 0
            return max(float(value) / 1000, 0.01)
        self.epoch, self._renewed = value, now
        return 0.0

    async def release(self) -> None:
        """Let another member lead at once."""
        if self.epoch:
            epoch, self.epoch = self.epoch, 0
            with suppress(BrokerError):
                await LEAD_WORK(self._client, (self._key,), (self._member, 0, epoch))

    def __repr__(self) -> str:
        return f"<Leadership {self._key} epoch={self.epoch}>"
