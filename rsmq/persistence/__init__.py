"""Device inboxes: letters stored per device, until it acknowledges them.

`inbox_writer` stores letters, batched per source and device; `feed` makes them from the messages of a topic. `session`
is one connection of a device, which reads and acknowledges; the `doorbell` wakes it over sharded pub/sub. `letter` is
the stored format; `devices` lists and purges inboxes for operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.persistence.devices import Device, Devices
    from rsmq.persistence.feed import Feed
    from rsmq.persistence.letter import Letter
    from rsmq.persistence.session import Inboxes, Session
else:
    from rsmq.model.lazy import loading

    __getattr__, __dir__ = loading(
        __name__, {"devices": "Device Devices", "feed": "Feed", "letter": "Letter", "session": "Inboxes Session"}
    )

__all__ = ["Device", "Devices", "Feed", "Inboxes", "Letter", "Session"]
