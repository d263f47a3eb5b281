"""Whether a client may connect now: how many there are, how fast they come, and who they are."""

from __future__ import annotations

import asyncio
from typing import Any

from rsmq.gateway.connections.context import RECHECK, Context
from rsmq.gateway.connections.peer import Peer
from rsmq.gateway.protocol.packet import Connect, ReasonCode, RefusedPacket


async def admit(context: Context, client: Any, request: Connect, peer: Peer) -> None:
    """Let a client in, or raise RefusedPacket. Returns early if it has gone: then nothing is known of it.

    The cheap limits come before its password. Its user is counted in the step that checks their number.
    """
    options, client_id = context.options, client.client_id
    if len(context.connections) >= options.most_connections:
        raise RefusedPacket(ReasonCode.QUOTA_EXCEEDED, "this gateway has its most connections", "most_connections")
    seconds = context.arrivals.wait(context.loop_time)
    if seconds:
        context.counts["connects delayed"] += 1
        await asyncio.sleep(seconds)
        if client.is_closed:
            return
    user, until = await context.gatekeeper.admit(client_id, request.username, request.password, peer.user)
    is_full = options.most_sessions and context.sessions.known >= options.most_sessions
    if is_full and not await context.sessions.has(client_id):
        raise RefusedPacket(ReasonCode.QUOTA_EXCEEDED, "there are the most sessions", "most_sessions")
    if client.is_closed:
        return
    older = context.connections.get(client_id)
    if (
        options.most_per_user and user is not None and context.users[user] >= options.most_per_user
        and (older is None or older.user != user)
    ):  # fmt: skip
        raise RefusedPacket(ReasonCode.QUOTA_EXCEEDED, f"user {user!r} has its most connections", "most_per_user")
    client.user = user
    if user is not None:
        context.users.add(user)
    if until is not None:
        ends = context.loop_time + until - context.now_ms() / 1000

        def look(now: float) -> float | None:
            if client.is_closed:
                return None
            return min(ends, now + RECHECK) if now < ends else client.end_with_token(now)

        context.wheel.add(context.loop_time, look)
