"""rsmq: a message queue for teams that already run Redis.

Names are loaded at first use: a process that needs one part, such as a Spark executor that reads a topic, does not
load the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsmq.broker import Broker, TypedTopic
    from rsmq.broker.sync_broker import SyncBroker
    from rsmq.control import Cancelled, Running, Settled, Unknown
    from rsmq.errors import (
        BatchEnded,
        BatchExists,
        BrokerError,
        BrokerUnavailable,
        ConfigError,
        HandlerTimeout,
        Malformed,
        NotJson,
        PublishUnknown,
        RequestFailed,
        RequestTimeout,
        ResultFailed,
        ResultTimeout,
        RsmqError,
        SessionLost,
        SessionTaken,
        TooLarge,
        TopicFull,
    )
    from rsmq.handler.breaker import Breaker
    from rsmq.handler.concurrency import Concurrency
    from rsmq.handler.dead_hook import Burial
    from rsmq.handler.fallback import Fallback
    from rsmq.handler.quiet_hours import QuietHours
    from rsmq.handler.rate_limit import Rate
    from rsmq.handler.retry import Hold, Reject, Retry, RetryPolicy
    from rsmq.handler.router import Router
    from rsmq.model.message import Message
    from rsmq.model.message_ref import MessageRef
    from rsmq.model.settings import Settings
    from rsmq.persistence import Letter, Session
    from rsmq.producer import Publication
    from rsmq.worker.collector import tune_garbage_collector
else:
    from importlib import import_module
    from os.path import exists

    if exists(f"{__path__[0]}/rsmq.py"):  # PyRSMQ's
        import_module("rsmq.errors")  # says so

    _HOMES = {
        "rsmq.broker": ("Broker", "TypedTopic"),
        "rsmq.broker.sync_broker": ("SyncBroker",),
        "rsmq.control": ("Cancelled", "Running", "Settled", "Unknown"),
        "rsmq.errors": (
            "BatchEnded", "BatchExists", "BrokerError", "BrokerUnavailable", "ConfigError", "HandlerTimeout",
            "Malformed", "NotJson", "PublishUnknown", "RequestFailed", "RequestTimeout", "ResultFailed",
            "ResultTimeout", "RsmqError", "SessionLost",
            "SessionTaken", "TooLarge", "TopicFull",
        ),
        "rsmq.model.message": ("Message",),
        "rsmq.model.message_ref": ("MessageRef",),
        "rsmq.persistence": ("Letter", "Session"),
        "rsmq.producer": ("Publication",),
        "rsmq.handler.breaker": ("Breaker",),
        "rsmq.handler.concurrency": ("Concurrency",),
        "rsmq.handler.dead_hook": ("Burial",),
        "rsmq.handler.fallback": ("Fallback",),
        "rsmq.handler.quiet_hours": ("QuietHours",),
        "rsmq.handler.rate_limit": ("Rate",),
        "rsmq.handler.retry": ("Hold", "Reject", "Retry", "RetryPolicy"),
        "rsmq.handler.router": ("Router",),
        "rsmq.model.settings": ("Settings",),
        "rsmq.worker.collector": ("tune_garbage_collector",),
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
    "BatchEnded",
    "BatchExists",
    "Breaker",
    "Broker",
    "BrokerError",
    "BrokerUnavailable",
    "Burial",
    "Cancelled",
    "Concurrency",
    "ConfigError",
    "Fallback",
    "HandlerTimeout",
    "Hold",
    "Letter",
    "Malformed",
    "Message",
    "MessageRef",
    "NotJson",
    "Publication",
    "PublishUnknown",
    "QuietHours",
    "Rate",
    "Reject",
    "RequestFailed",
    "RequestTimeout",
    "ResultFailed",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "Router",
    "RsmqError",
    "Running",
    "Session",
    "SessionLost",
    "SessionTaken",
    "Settings",
    "Settled",
    "SyncBroker",
    "TooLarge",
    "TopicFull",
    "TypedTopic",
    "Unknown",
    "tune_garbage_collector",
]
