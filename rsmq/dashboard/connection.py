"""The pages of MQTT connections: the gateways, their clients, and one client with its subscriptions.

All of it is read from the server: the gateways themselves are not asked, and their code is not imported.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from rsmq.dashboard.client_rates import ClientRate
from rsmq.dashboard.html import Html, Row, about, link, table, tag, text_field
from rsmq.dashboard.page import Page, Visit
from rsmq.dashboard.queries import MOST_DEVICES, MOST_SCANNED, PREVIEW, PageNotFound, as_text
from rsmq.dashboard.roles import Role
from rsmq.inspector.text import timestamp
from rsmq.model.clock import monotonic
from rsmq.model.words import count, duration, number, size
from rsmq.persistence.mqtt_clients import MqttClient, MqttConnection, MqttGateway
from rsmq.persistence.retained_messages import some_retained

NEVER = 0xFFFFFFFF


async def connections(visit: Visit) -> Page:
    """The gateways, and some of their clients, or the one that was asked for: there may be a million."""
    visit.check_devices()
    name = visit.given("client")
    gateways = await visit.queries.mqtt.gateways()
    if name:
        one = await visit.queries.mqtt.find(name)
        found, is_more = ([] if one is None else [one]), False
    else:
        found, is_more = await visit.queries.mqtt_clients()
    total = sum(each.clients for each in gateways)
    shown = f"{count(total, 'client is', 'clients are')} connected"
    columns = ("client", "gateway", "connected since", "session", "#queued", "#dropped", "#subscriptions", "last heard")
    return Page(
        "Connections",
        [
            table(("gateway", "#clients", "lease until"), [gateway_row(each) for each in gateways],
                  "no MQTT gateway runs"),
            tag("p", link("retained messages", visit.url("retained"))),
            tag("h2", "Clients"),
            tag("form", text_field("client", "client id", name), tag("button", "show"), class_="bar"),
            tag("p", shown + (f", the first {MOST_DEVICES} are shown" if is_more else "")),
            table(columns, [client_row(visit, each) for each in found], "no client matches"),
        ],
    )  # fmt: skip


def gateway_row(each: MqttGateway) -> Row:
    """A row of the gateways."""
    lease = "run out: it does not answer" if each.is_late else timestamp(each.until)
    return Row(each.name, (each.name, number(each.clients), lease))


def client_row(visit: Visit, each: MqttClient) -> Row:
    """A row of the clients."""
    return Row(each.client_id, (
        link(each.client_id, visit.url("connection", each.client_id)), each.gateway or "not connected",
        timestamp(each.connected_at) if each.gateway else "", session_text(each), number(each.waiting),
        number(each.dropped), number(len(each.subscriptions)), timestamp(each.seen_at) or "never"),
    )  # fmt: skip


async def retained(visit: Visit) -> Page:
    """Some retained messages, or those with a text in their topic names."""
    visit.check_devices()
    wanted, queries = visit.given("q"), visit.queries
    found, is_more = await some_retained(
        queries.client, queries.keys, wanted, MOST_DEVICES, MOST_SCANNED, queries.encoding
    )
    rows = [
        Row(each.topic, (
            each.topic, each.qos, timestamp(each.published), timestamp(each.expires) or "never",
            tag("code", (f"({each.sealed})" if each.sealed else as_text(each.data))[:PREVIEW])))
        for each in found
    ]  # fmt: skip
    more = f", there may be more: the first of {number(MOST_SCANNED)} are shown" if is_more else ""
    columns = ("topic", "#QoS", "published", "expires", "payload")
    return Page(
        "Retained messages",
        [
            visit.search(), tag("p", f"{count(len(found), 'retained message')}{more}"),
            table(columns, rows, "no retained message matches"),
        ],
        crumbs=[("Connections", visit.url("connections"))],
    )  # fmt: skip


async def connection(visit: Visit, name: str) -> Page:
    """One client: its connection, its session and its subscriptions."""
    visit.check_devices()
    found = await visit.queries.mqtt.find(name)
    if found is None:
        raise PageNotFound(f"MQTT client {name!r} is not connected and has no session")
    link_to = await visit.queries.mqtt.connection(found)
    values = {
        "connected": f"{timestamp(found.connected_at)} by {found.gateway}" if found.gateway else "no",
        **(about_connection(link_to) if link_to else {}),
        "last heard": timestamp(found.seen_at) or "never", "session": session_text(found),
        "queued": count(found.waiting, "letter"), "dropped": count(found.dropped, "letter"),
        "will": "published if the connection breaks" if found.has_will else "none",
    }  # fmt: skip
    rows = [Row(each.filter, (each.filter, str(each.qos), each.options)) for each in found.subscriptions]
    kick = None
    if found.gateway:
        kick = visit.action("kick-client", "end the connection", Role.ACT, None, {"client": name}, danger=True)
    return Page(
        f"Client {name}",
        [
            kick, about(values), tag("h2", "Rates"), rates(visit, found) if found.gateway else NOT_CONNECTED,
            tag("h2", "Subscriptions"),
            table(("topic filter", "#QoS", "options"), rows, "it has no subscriptions"),
            tag("p", link("its inbox", visit.url("device", name))),
        ],
        is_live=bool(found.gateway),
        crumbs=[("Connections", visit.url("connections"))],
    )  # fmt: skip


def rates(visit: Visit, client: MqttClient) -> Html:
    """What passes in a second, over the last ten: its gateway tells it while a page of the client is open."""
    watched, now = visit.room.rates.watch(client.client_id), monotonic()
    if watched is None:
        return visit.live.part("rates", tag("p", "too many pages of clients are open", class_="nothing"))
    rows = [rate_row("from the client", watched.rate(now, "in")), rate_row("to the client", watched.rate(now, "out"))]
    trouble = tag("p", watched.trouble, class_="trouble") if watched.trouble else None
    return visit.live.part("rates", trouble, table(("", "#packets/s", "#messages/s", "#bytes/s"), rows, ""))


def rate_row(name: str, found: ClientRate | None) -> Row:
    """A row of the rates; unknown in the first seconds."""
    if found is None:
        return Row(name, (name, "…", "…", "…"))
    return Row(name, (name, f"{found.packets:.1f}", f"{found.messages:.1f}", size(round(found.bytes))))


NOT_CONNECTED: Final = tag("p", "it is not connected", class_="nothing")


def about_connection(found: MqttConnection) -> dict[str, str]:
    """How a client is connected."""
    return {
        "address": found.address or "unknown", "user": found.user or "none",
        "protocol": found.protocol or "unknown",
        "keep-alive": duration(timedelta(seconds=found.keep_alive)) if found.keep_alive else "none",
    }  # fmt: skip


def session_text(each: MqttClient) -> str:
    """How long the session outlives its connection."""
    if not each.expiry:
        return "ends with the connection"
    return "is kept" if each.expiry == NEVER else f"is kept for {duration(timedelta(seconds=each.expiry))}"
