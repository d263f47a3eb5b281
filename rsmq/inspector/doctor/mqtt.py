"""The doctor's rules for MQTT gateways and their clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from rsmq.errors import ConfigError
from rsmq.model.clock import from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.words import count, duration
from rsmq.persistence.mqtt_clients import MqttClient, MqttClients, MqttGateway
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import server_now_ms

MOST_CLIENTS: Final = 2000
"""Clients whose inboxes are looked at: a server may have a million."""
NEARLY_FULL: Final = 0.8
SOON: Final = timedelta(days=14)
LOCAL: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class MqttFacts:
    """The gateways, and some clients that have subscriptions, as of `now` by the server's clock."""

    now: datetime
    gateways: Sequence[MqttGateway] = ()
    clients: Sequence[MqttClient] = ()


async def mqtt_facts(client: Client, keys: Keys) -> MqttFacts | None:
    """None if MQTT is not used on this server, or if this user may not read it."""
    clients = MqttClients(client, keys)
    try:
        gateways, names = await clients.gateways(), await clients.some_with_subscriptions(MOST_CLIENTS)
    except ConfigError:
        return None
    if not (gateways or names):
        return None
    now_ms = await server_now_ms(client.nodes[0])
    found = await clients.find_all(names) if names else []
    return MqttFacts(from_epoch_ms(now_ms), gateways, [each for each in found if each is not None])


def check_mqtt(facts: MqttFacts, inbox_limit: int, groups: frozenset[str]) -> Iterator[str]:
    """`groups`: the topics that have a group of handlers."""
    yield from check_gateways(facts)
    yield from check_listeners(facts)
    yield from check_held(facts)
    yield from check_routes(facts, groups)
    full = [each for each in facts.clients if each.waiting >= NEARLY_FULL * inbox_limit]
    if full:
        worst = max(full, key=lambda each: each.waiting)
        why = "reads more slowly than it gets messages" if worst.gateway else "is not connected"
        then = "Its publishers wait for it next" if worst.gateway else "The oldest letters are dropped next"
        lost = f", and {count(worst.dropped, 'letter was', 'letters were')} dropped before" if worst.dropped else ""
        many = count(len(full), "inbox of an MQTT client is", "inboxes of MQTT clients are")
        yield (
            f"{many} nearly full, that of {worst.client_id!r} with {worst.waiting} of {inbox_limit} letters: it {why}. "
            f"{then}{lost}. `rsmq client show {worst.client_id}`; RSMQ_INBOX_LIMIT"
        )


def check_gateways(facts: MqttFacts) -> Iterator[str]:
    """Gateways run, and each renews its lease."""
    if facts.clients and not facts.gateways:
        yield (
            f"{count(len(facts.clients), 'MQTT client has', 'MQTT clients have')} subscriptions or more, and no "
            f"gateway runs: start `rsmq gateway`"
        )
    for each in facts.gateways:
        if each.is_late:
            ago = duration(facts.now - each.until)
            yield (
                f"gateway {each.name} has not renewed its lease for {ago}, and no other gateway has ended its "
                f"{count(each.clients, 'connection')}: start `rsmq gateway`, at least two of them"
            )


def check_listeners(facts: MqttFacts) -> Iterator[str]:
    """No public listener is open to all, and no certificate ends soon."""
    for each in facts.gateways:
        public = [text for text in each.listen if urlsplit(text).hostname not in LOCAL]
        if each.is_anonymous and public:
            yield (
                f"gateway {each.name} lets clients without credentials connect from other machines ({public[0]}): "
                f"give it --password-file instead of --anonymous"
            )
        if each.certificate_until is not None and each.certificate_until - facts.now < SOON:
            left = each.certificate_until - facts.now
            ends = f"ends in {duration(left)}" if left > timedelta(0) else "has ended: clients refuse it"
            yield f"the certificate of gateway {each.name} {ends}. Replace the file, and send SIGHUP"


def check_held(facts: MqttFacts) -> Iterator[str]:
    """Each gateway can decode the letters of its clients."""
    for each in facts.gateways:
        for needs, clients in sorted(each.held.items()):
            yield (
                f"letters of {count(clients, 'client')} of gateway {each.name} need the {needs}, which it does not "
                f"have, and what is behind them waits: give its broker the codecs and keys of the publishers "
                f"(codecs=[...], RSMQ_KEYS) and restart it"
            )


def check_routes(facts: MqttFacts, groups: frozenset[str]) -> Iterator[str]:
    """All gateways have the same routes, and something reads what a route without subscribers stores."""
    live = [each for each in facts.gateways if each.listen]
    if len({each.routes for each in live}) > 1:
        yield (
            f"the routes of gateways {live[0].name} and "
            f"{next(each.name for each in live if each.routes != live[0].routes)} differ: where a message is stored "
            f"depends on which of them gets it. Give all gateways the same routes"
        )
    for pattern, topic, has_subscribers in sorted({route for each in live for route in each.routes}):
        if not has_subscribers and topic not in groups:
            yield (
                f"messages of {pattern} are stored in topic {topic}, which no handler reads and no MQTT client gets: "
                f"start its worker, or remove the route"
            )
