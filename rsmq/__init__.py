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
    SessionTaken,
    TooLarge,
    TopicFull,
)
from rsmq.message import Message
from rsmq.persistence import Letter, Session
from rsmq.rate import Rate
from rsmq.retry import Reject, Retry, RetryPolicy
from rsmq.router import Router
from rsmq.settings import Settings

__all__ = [
    "Broker",
    "BrokerError",
    "BrokerUnavailable",
    "ConfigError",
    "HandlerTimeout",
    "Letter",
    "Malformed",
    "Message",
    "PublishUnknown",
    "Rate",
    "Reject",
    "Retry",
    "RetryPolicy",
    "Router",
    "RsmqError",
    "Session",
    "SessionTaken",
    "Settings",
    "TooLarge",
    "TopicFull",
]
