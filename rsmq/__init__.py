"""rsmq: a message queue for teams that already run Redis."""

from rsmq.broker import Broker
from rsmq.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    HandlerTimeout,
    Malformed,
    PublishUnknown,
    RsmqError,
    TooLarge,
    TopicFull,
)
from rsmq.message import Message
from rsmq.retry import Reject, Retry, RetryPolicy
from rsmq.settings import Settings

__all__ = [
    "Broker",
    "BrokerError",
    "BrokerUnavailable",
    "ConfigError",
    "HandlerTimeout",
    "Malformed",
    "Message",
    "PublishUnknown",
    "Reject",
    "Retry",
    "RetryPolicy",
    "RsmqError",
    "Settings",
    "TooLarge",
    "TopicFull",
]
