"""The object that a user holds: `broker` passes each call on to the room that does it.

`connection` is what `async with broker:` opens and its users share; `portal` runs it in a thread for `publish_sync` and
`sync_broker`, whose methods `blocking` makes out of those of the broker. `typed_topic` is a topic with the type of its
payloads, and `requests` waits for answers of handlers. `asyncapi` documents it.
"""

from rsmq.broker.broker import Broker
from rsmq.broker.typed_topic import TypedTopic

__all__ = ["Broker", "TypedTopic"]
