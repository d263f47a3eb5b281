"""Device inboxes: letters are stored for a device whether it is there or not, and leave through its session only."""

from rsmq.persistence.device import Device, Devices
from rsmq.persistence.feed import Feed
from rsmq.persistence.letter import Letter
from rsmq.persistence.office import PostOffice
from rsmq.persistence.session import Session

__all__ = ["Device", "Devices", "Feed", "Letter", "PostOffice", "Session"]
