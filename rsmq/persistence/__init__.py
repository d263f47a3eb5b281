"""Device inboxes: letters stored per device, until it acknowledges them.

`inbox_writer` stores letters, batched per source and device; `feed` makes them from the messages of a topic. `session`
is one connection of a device, which reads and acknowledges; the `doorbell` wakes it over sharded pub/sub. `letter` is
the stored format; `devices` lists and purges inboxes for operators.
"""

from rsmq.persistence.devices import Device, Devices
from rsmq.persistence.feed import Feed
from rsmq.persistence.letter import Letter
from rsmq.persistence.session import Inboxes, Session

__all__ = ["Device", "Devices", "Feed", "Inboxes", "Letter", "Session"]
