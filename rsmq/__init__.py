"""rsmq: a message queue for teams that already run Redis.

Names are loaded when they are first used: a process that needs one part, such as a Spark executor that reads a topic,
does not pay for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
else:
    from importlib import import_module

    _HOMES = {
        "rsmq.broker": ("Broker",),
        "rsmq.errors": (
            "BrokerError", "BrokerUnavailable", "ConfigError", "HandlerTimeout", "Malformed", "PublishUnknown",
            "RsmqError", "SessionTaken", "TooLarge", "TopicFull",
        ),
        "rsmq.message": ("Message",),
        "rsmq.persistence": ("Letter", "Session"),
        "rsmq.rate": ("Rate",),
        "rsmq.retry": ("Reject", "Retry", "RetryPolicy"),
        "rsmq.router": ("Router",),
        "rsmq.settings": ("Settings",),
    }  # fmt: skip
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name):  # hidden from type checkers, for which an unknown name stays a mistake
        if name not in _HOME_OF:
            raise AttributeError(f"module 'rsmq' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


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
