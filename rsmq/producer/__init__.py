"""Publishing. `producer` encodes a message and chooses its partition, `batch` gathers the messages of a partition,
`publication` completes its headers or refuses it, `send_queue` holds the batches, `sender` writes those of one node,
`in_doubt` finds out what a lost reply meant. `claims` has the messages with a unique name."""

from rsmq.producer.producer import Producer
from rsmq.producer.publication import BeforePublish, Publication

__all__ = ["BeforePublish", "Producer", "Publication"]
