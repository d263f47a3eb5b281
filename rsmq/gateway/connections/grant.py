"""The wishes of a CONNECT, and what is granted: client id, session expiry, keep-alive. No I/O."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from rsmq.gateway.options import GatewayOptions
from rsmq.gateway.protocol.encode import connack
from rsmq.gateway.protocol.machine import ClientLimits
from rsmq.gateway.protocol.packet import V5, V31, Connect, Properties, ReasonCode, RefusedPacket
from rsmq.gateway.protocol.properties import Property
from rsmq.gateway.protocol.topic_filter import is_within
from rsmq.model.keys import LONGEST_DEVICE


class Grant(NamedTuple):
    """The terms of a connection. `expiry` and `keep_alive` in seconds; `answer` are the properties of the CONNACK."""

    client_id: str
    expiry: int
    keep_alive: int
    answer: Properties


def capped(expiry: int, options: GatewayOptions) -> int:
    """A session expiry, at most what the options allow: 0xFFFFFFFF asks for a session without an end."""
    return min(expiry, int(options.session_expiry.total_seconds()))


def grant(request: Connect, options: GatewayOptions, limits: ClientLimits) -> Grant:
    """The terms for a client. Raises RefusedPacket for a client id that is not possible."""
    client_id = request.client_id or assigned_id(request)
    if len(client_id.encode()) > LONGEST_DEVICE:
        raise RefusedPacket(ReasonCode.CLIENT_ID_NOT_VALID, f"the client id has more than {LONGEST_DEVICE} bytes")
    if request.will and not is_within(request.will.topic, options.most_levels, options.most_topic_bytes):
        raise RefusedPacket(ReasonCode.TOPIC_NAME_INVALID, "the topic name of the will is too long")
    if request.level != V5:
        expiry = 0 if request.clean_start else int(options.session_expiry.total_seconds())
        return Grant(client_id, expiry, request.keep_alive, {})
    if Property.AUTH_METHOD in request.properties:
        raise RefusedPacket(ReasonCode.BAD_AUTHENTICATION_METHOD, "enhanced authentication is not supported")
    answer: Properties = {
        Property.RECEIVE_MAXIMUM: limits.receive_maximum,
        Property.MAXIMUM_PACKET_SIZE: limits.packet_size,
        Property.TOPIC_ALIAS_MAXIMUM: limits.topic_aliases,
    }
    if not request.client_id:
        answer[Property.ASSIGNED_CLIENT_ID] = client_id
    asked = request.properties.get(Property.SESSION_EXPIRY, 0)
    expiry = capped(asked, options)
    if expiry != asked:
        answer[Property.SESSION_EXPIRY] = expiry
    keep_alive, most = request.keep_alive, min(int(options.keep_alive.total_seconds()), 65_535)
    if not 0 < keep_alive <= most:
        keep_alive = answer[Property.SERVER_KEEP_ALIVE] = most
    largest = request.properties.get(Property.MAXIMUM_PACKET_SIZE)
    if largest is not None and len(connack(ReasonCode.SUCCESS, V5, properties=answer)) > largest:
        raise RefusedPacket(ReasonCode.PACKET_TOO_LARGE, f"not even a CONNACK has only {largest} bytes")
    return Grant(client_id, expiry, keep_alive, answer)


def assigned_id(request: Connect) -> str:
    """A client id for a client that has none. Raises RefusedPacket where the version does not allow that."""
    if request.level == V31 or (request.level != V5 and not request.clean_start):
        raise RefusedPacket(ReasonCode.CLIENT_ID_NOT_VALID, "the client id is empty")
    return f"auto-{secrets.token_hex(10)}"
