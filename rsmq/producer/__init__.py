"""Publishing: encode, choose the partition, and let a line carry it."""

from rsmq.producer.producer import Producer

__all__ = ["Producer"]
