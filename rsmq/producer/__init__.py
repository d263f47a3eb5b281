"""Publishing. `producer` encodes a message and chooses its partition, `batch` gathers the messages of a partition,
`send_queue` holds the batches, `sender` writes those of one node, `in_doubt` finds out what a lost reply meant."""

from rsmq.producer.producer import Producer, PublishOptions

__all__ = ["Producer", "PublishOptions"]
