"""The OPTIONS of a task backend: those below, and every setting of rsmq by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from django.utils.module_loading import import_string

from rsmq.errors import ConfigError
from rsmq.handler.retry import RetryPolicy
from rsmq.model.duration import checked_duration
from rsmq.model.encoding import Codec, Encoding
from rsmq.model.keys import check_name
from rsmq.model.settings import NAMES, Settings, did_you_mean

CONCURRENCY = 8
BANDS = ("high", "normal", "low")
"""Of the topic of each queue, so that a backlog of one does not hold back those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """`topic`: what the names of the topics begin with. `concurrency`: tasks that run at once in a worker process.

    `result_ttl`: how long the server keeps the result of a task. `retry`: by default a task that raises an error has
    failed; only a task whose process has died runs again. `on_commit`: inside a transaction of `database`, enqueue when
    it commits. `outbox`: do so by a row of that transaction, so that no task is lost after the commit. `codecs`:
    compress and encrypt tasks, with their arguments, and their results. A worker fetches twice as many tasks of each
    band as it runs, so that a free slot can choose, and the others stay for other workers.
    """

    settings: Settings
    topic: str = "tasks"
    concurrency: int = CONCURRENCY
    result_ttl: timedelta = timedelta(days=1)
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(retry_on=()))
    on_commit: bool = True
    database: str = "default"
    outbox: bool = False
    codecs: Sequence[Codec] = ()

    @property
    def encoding(self) -> Encoding:
        """What the codecs do."""
        return Encoding(self.codecs, int(self.settings.decoded_limit))


OWN = tuple(each.name for each in fields(BackendOptions) if each.name != "settings")


def read_options(given: Mapping[str, Any], queues: Iterable[str]) -> BackendOptions:
    """The options of a backend. Raises ConfigError for a wrong one, and for a queue that cannot be a topic."""
    own = {name: value for name, value in given.items() if name in OWN}
    rest = {name: value for name, value in given.items() if name not in OWN}
    known = [*OWN, *NAMES]
    for name in rest:
        if name not in NAMES:
            raise ConfigError(f"unknown option {name!r} in OPTIONS.{did_you_mean(name, known)}")
    if "result_ttl" in own:
        own["result_ttl"] = checked_duration("result_ttl", own["result_ttl"])
        if own["result_ttl"] <= timedelta(0):
            raise ConfigError("result_ttl must be longer than 0: write how long results are kept, such as '1d'")
    concurrency = own.get("concurrency", 1)
    if type(concurrency) is not int or concurrency < 1:
        raise ConfigError(f"concurrency={concurrency!r} is not a whole number of 1 or more")
    if not isinstance(own.get("retry", RetryPolicy()), RetryPolicy):
        raise ConfigError(f"retry={own['retry']!r} is not a policy: write RetryPolicy(max_attempts=5)")
    window = 2 * own.get("concurrency", CONCURRENCY)
    if "codecs" in own:
        own["codecs"] = codecs_given(own["codecs"])
    options = BackendOptions(settings=Settings(**{"prefetch": window, **rest}), **own)
    options.encoding.names  # noqa: B018  # an impossible list of codecs is refused here
    if not queues:
        raise ConfigError("QUEUES is empty: name the queues that the workers serve")
    for queue in queues:
        check_name("topic", topic_of(options, queue))
    return options


def codecs_given(value: Any) -> Sequence[Codec]:
    """A list of codecs, or what a path such as "shop.queue.codecs" leads to. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = import_string(value)
        except ImportError as error:
            raise ConfigError(f"codecs={value!r} cannot be imported ({error}): write the path of a list") from None
    if not isinstance(value, list | tuple):
        raise ConfigError(f"codecs={value!r} is no list: write [Encrypt(Keyring.from_env())], or the path of a list")
    return tuple(value)


def topic_of(options: BackendOptions, queue: str) -> str:
    """The topic of the tasks of a queue."""
    return f"{options.topic}.{queue}"


def band_of(priority: int) -> str:
    """The band of a task in its topic."""
    return "high" if priority > 0 else "low" if priority < 0 else "normal"
