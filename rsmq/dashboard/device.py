"""The pages of devices, and the audit stream."""

from __future__ import annotations

from rsmq.control.audit import SHOWN, AuditEntry
from rsmq.dashboard.html import Row, about, block, link, table, tag, text_field
from rsmq.dashboard.page import Page, Visit
from rsmq.dashboard.payload import readable
from rsmq.dashboard.queries import MOST_DEVICES, PageNotFound
from rsmq.dashboard.roles import Role
from rsmq.errors import Malformed
from rsmq.inspector.text import timestamp
from rsmq.model.words import count, number
from rsmq.persistence import Device, Letter


async def devices(visit: Visit) -> Page:
    """Some devices, or the one that was asked for: there may be millions."""
    visit.check_devices()
    name, only_waiting = visit.given("device"), bool(visit.given("waiting"))
    if name:
        one = await visit.queries.device(name)
        found, is_more = ([] if one is None else [one]), False
    else:
        found, is_more = await visit.queries.devices(only_waiting=only_waiting)
    rows = [row_of(visit, each) for each in found]
    columns = ("device", "#backlog", "connected", "seen", "#dropped", "#expired", "#late")
    tick = tag("input", type="checkbox", name="waiting", value="1", checked=only_waiting)
    return Page(
        "Devices",
        [
            tag("form", text_field("device", "device id", name), tag("label", tick, "only with letters", class_="tick"),
                tag("button", "show"), class_="bar"),
            tag("p", count(len(found), "device") + (f", there are more than {MOST_DEVICES}" if is_more else "")),
            table(columns, rows, "no device matches"),
        ],
    )  # fmt: skip


def row_of(visit: Visit, device: Device) -> Row:
    """A row of the table."""
    connected = f"{timestamp(device.connected_at)} by {device.gateway}" if device.gateway else "no"
    return Row(device.client_id, (
        link(device.client_id, visit.url("device", device.client_id)), number(device.backlog), connected,
        timestamp(device.seen_at) or "never", number(device.dropped), number(device.expired), number(device.late)),
    )  # fmt: skip


async def device(visit: Visit, name: str) -> Page:
    """One device with its oldest letters. This delivers nothing."""
    visit.check_devices()
    found = await visit.queries.device(name)
    if found is None:
        raise PageNotFound(f"there is no device {name!r}: it never got a letter, or its state has expired")
    letters = await visit.queries.letters(name)
    values = {
        "backlog": count(found.backlog, "letter"), "seen": timestamp(found.seen_at) or "never",
        "connected": f"{timestamp(found.connected_at)} by {found.gateway}" if found.gateway else "no",
        "dropped": number(found.dropped), "expired": number(found.expired),
    }  # fmt: skip
    shown = [(tag("p", about_letter(each), class_="dim"), block(text_of(each), "payload")) for each in letters]
    return Page(
        f"Device {name}",
        [
            visit.action("purge-device", "purge the inbox", Role.ADMIN, None, {"device": name}, danger=True),
            about(values), tag("h2", "Inbox"), shown or tag("p", "no letter waits", class_="nothing"),
        ],
        crumbs=[("Devices", visit.url("devices"))],
    )  # fmt: skip


def about_letter(letter: Letter) -> str:
    """A letter's number, time and topic; only the number if it cannot be read."""
    try:
        at = "received" if letter.is_received else timestamp(letter.timestamp)
        return f"{letter.seq} {at} {letter.topic}"
    except Malformed:
        return str(letter.seq)


def text_of(letter: Letter) -> str:
    """Its payload as text."""
    try:
        sealed = letter.sealed
        return f"({sealed})" if sealed else readable(letter.data)
    except Malformed as error:
        return f"(unreadable: {error})"


async def audit(visit: Visit) -> Page:
    """Who did what, newest first, in the topics that the visitor sees."""
    entries = [each for each in await visit.room.audit.newest() if visit.visitor.sees(each.topic or None)]
    rows = [Row(each.id, (
        timestamp(each.at), each.who, each.what, where(each), each.before, each.after, each.result or "not ended"))
        for each in entries[:SHOWN]
    ]  # fmt: skip
    columns = ("at", "who", "what", "where", "before", "after", "result")
    return Page("Audit", [table(columns, rows, "nothing was changed with the dashboard yet")])


def where(entry: AuditEntry) -> str:
    """Group and topic, or nothing."""
    return f"{entry.group} of {entry.topic}" if entry.group else entry.topic
