"""Whether a client may connect now: how many there are, how fast they come, and who they are."""

from __future__ import annotations

import asyncio

from rsmq.gateway.connections.client_link import ClientLink
from rsmq.gateway.connections.clients import RECHECK
from rsmq.gateway.connections.context import Context
from rsmq.gateway.connections.peer import Peer
from rsmq.gateway.protocol.packet import Connect, ReasonCode, RefusedPacket


async def admit(context: Context, client: ClientLink, request: Connect, peer: Peer) -> None:
    """Let a client in, or raise RefusedPacket. Returns early if it has gone: then nothing is known of it.

    The cheap limits come before its password. Its user is counted in the step that checks their number.
    """
    options, clients, sessions = context.rules.options, context.clients, context.fleet.sessions
    clients.require_room()
    clients.require_not_banned(context.fleet.clock.now_ms(), client.client_id, None, peer.address)
    seconds = clients.arrivals.wait(clients.wheel.now)
    if seconds:
        context.counts["connects delayed"] += 1
        await asyncio.sleep(seconds)
        if client.is_closed:
            return
    user, until = await context.rules.gatekeeper.admit(client.client_id, request.username, request.password, peer.user)
    is_full = options.most_sessions and sessions.known >= options.most_sessions
    if is_full and not await sessions.has(client.client_id):
        raise RefusedPacket(ReasonCode.QUOTA_EXCEEDED, "there are the most sessions", "most_sessions")
    if client.is_closed:
        return
    if user is not None:
        clients.require_not_banned(context.fleet.clock.now_ms(), None, user, "")
        clients.add_user(client, user)
    if until is not None:
        ends = clients.wheel.now + until - context.fleet.clock.now_ms() / 1000

        def look(now: float) -> float | None:
            if client.is_closed:
                return None
            if now < ends:
                return min(ends, now + RECHECK)
            client.close(ReasonCode.NOT_AUTHORIZED, "its token has ended")
            return None

        clients.wheel.add_after(0, look)
