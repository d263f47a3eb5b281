"""The lease of a gateway: renewed, and lost when it was away for too long; and the ends of those that died."""

from __future__ import annotations

import logging

import anyio

from rsmq.errors import BrokerError
from rsmq.gateway.connections.context import Context
from rsmq.gateway.fleet.suspects import BEAT, Renewal, Suspects
from rsmq.gateway.protocol.packet import ReasonCode
from rsmq.model.clock import monotonic, to_ms

log = logging.getLogger("rsmq.gateway")


class GatewayLease:
    """Renews the lease of this gateway, and ends the connections of gateways that stay dead."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._length = context.rules.options.lease
        self._under_way = set[str]()
        self._confirmed = monotonic()
        self._trouble = ""

    async def begin(self) -> None:
        """Take it, and learn the server's time."""
        await self._renew(new=True)

    async def keep(self) -> None:
        """Renew it, and end what dead gateways have left, until cancelled."""
        lease = self._length.total_seconds()
        suspects = Suspects(lease, monotonic())
        sessions = self._context.fleet.sessions
        while True:
            await anyio.sleep(min(BEAT, lease / 4))
            try:
                beat = await self._renew(of_all=not suspects.is_settled(monotonic()))
                if beat is None:
                    await self._start_anew()
                    continue
                for each in suspects.beaten(beat, monotonic()):
                    if each not in self._under_way:
                        self._under_way.add(each)
                        self._context.spawn(self._bury(each))
                for each in suspects.unseen(monotonic()):
                    if sessions.server and await sessions.last_server(each) == sessions.server:
                        suspects.vouch(each)
            except BrokerError as error:
                suspects.interrupted(monotonic())
                if not self._trouble:
                    log.warning("the lease waits for the server: %s", error)
                self._trouble = str(error)

    @property
    def trouble(self) -> str:
        """Why it has run out; empty while it has not. From any thread."""
        age = monotonic() - self._confirmed
        if age < self._length.total_seconds():
            return ""
        return f"the lease of this gateway was not renewed for {age:.1f} s: {self._trouble or 'no answer yet'}"

    async def _renew(self, *, new: bool = False, of_all: bool = False) -> Renewal | None:
        found = await self._context.fleet.sessions.beat(to_ms(self._length), new=new, of_all=of_all)
        self._confirmed = monotonic()
        self._trouble = ""
        return found

    async def _bury(self, gateway: str) -> None:
        """End the connections of a dead gateway. That may take longer than a lease, which is renewed meanwhile."""
        try:
            await self._context.fleet.sessions.bury(gateway)
        except BrokerError as error:
            log.info("the end of gateway %s waits for the server: %s", gateway, error)
        finally:
            self._under_way.discard(gateway)

    async def _start_anew(self) -> None:
        """The others have ended the connections of this gateway: so does it, and goes on under a new name."""
        log.warning("this gateway was away for longer than its lease: its clients have to connect again")
        self._context.clients.close(ReasonCode.SERVER_BUSY)
        self._context.fleet.sessions.rename()
        await self._renew(new=True)

    def __repr__(self) -> str:
        return f"<GatewayLease of {self._context.fleet.sessions.gateway}>"
