"""What a user holds: `broker` passes each call on to the room that does it.

`connection` is what `async with broker:` opens and its users share; `portal` runs it in a thread for `publish_sync`.
"""

from rsmq.broker.broker import Broker

__all__ = ["Broker"]
