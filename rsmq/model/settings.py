"""All settings with defaults, units and reasons. In the environment: `RSMQ_` + the name in capitals."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, Self, TypedDict, Unpack

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rsmq.errors import ConfigError
from rsmq.model.duration import Duration, as_duration
from rsmq.model.words import duration


class Overrides(TypedDict, total=False):
    """All settings as optional arguments. Durations may be text (`6s`, `PT6S`), sizes may have a unit (`256KiB`)."""

    url: str | None
    allow_insecure: bool
    prefix: str
    partitions: int
    connect_timeout: Duration
    command_timeout: Duration
    unavailable_timeout: Duration
    block: Duration | None
    lease_ttl: Duration
    heartbeat: Duration | None
    presence_grace: Duration
    presence_interval: Duration
    stop_grace: Duration
    prefetch: int
    prefetch_bytes: int | str
    payload_limit: int | str
    dedup_window: Duration
    delay_resolution: Duration
    recovery_batch: int
    retention_age: Duration
    retention_length: int
    retention_interval: Duration
    max_length: int
    on_full: Literal["reject", "trim"]
    dlq_length: int
    inbox_ttl: Duration
    inbox_limit: int
    inbox_poll: Duration
    metrics: str | None
    stall_limit: Duration
    preflight: Literal["refuse", "warn"]


log = logging.getLogger("rsmq.settings")

PREFIX = "RSMQ_"
SERVICE_LINK: Final = re.compile(
    r"RSMQ_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|NAME|ENV_\w+)"
)
"""What Kubernetes and Docker set in each container beside a service called `rsmq` or `rsmq-...`: no setting of ours."""
ADDRESS: Final = re.compile(r"(rediss?|unix|valkeys?)(\+\w+)?://", re.IGNORECASE)
_ignored: set[str] = set()
"""Names that were logged: an application may make many brokers."""
LONGEST = timedelta(days=36_500)


def refuse_nonsense(span: timedelta) -> timedelta:
    """Raise ValueError for a negative duration, and for one that is too large for the server's arithmetic."""
    if not timedelta(0) <= span <= LONGEST:
        raise ValueError("a duration is between 0 and 100 years")
    return span


Span = Annotated[timedelta, BeforeValidator(as_duration), AfterValidator(refuse_nonsense)]


class Settings(BaseSettings):
    """Durations are text with a unit (`6s`, `PT6S`) or a `timedelta`; sizes take units, too (`256KiB`)."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    url: str | None = Field(None, repr=False, description="The server. Unset: the embedded server of this project.")
    allow_insecure: bool = Field(
        False,
        description="Allow to send the password of RSMQ_URL unencrypted to another machine (in a trusted network).",
    )
    prefix: str = Field("rsmq", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Prefix of every key.")
    partitions: int = Field(8, ge=1, le=1024, description="Partitions of a topic that is created on first use.")

    connect_timeout: Span = Field(
        timedelta(seconds=5), gt=timedelta(0), description="Time limit for opening a connection."
    )
    command_timeout: Span = Field(
        timedelta(seconds=5), gt=timedelta(0), description="Time limit for a command that does not block."
    )
    unavailable_timeout: Span = Field(
        timedelta(seconds=30), description="How long publish and start-up retry while the server is unavailable."
    )
    block: Span | None = Field(
        None,
        gt=timedelta(0),
        description="Longest blocking read, so a half-open connection lasts no longer. "
        "Default: a third of the lease, at most 2 s. With shared distribution never more than a third of the lease.",
    )

    lease_ttl: Span = Field(
        timedelta(seconds=6),
        ge=timedelta(seconds=1),
        description="A member that is paused or cut off is replaced after this time.",
    )
    heartbeat: Span | None = Field(
        None, gt=timedelta(0), description="Interval between two lease renewals. Default: a quarter of the lease."
    )
    presence_grace: Span = Field(
        timedelta(seconds=1),
        description="A member whose presence connection is closed for this long is replaced. 0s turns this off.",
    )
    presence_interval: Span = Field(
        timedelta(milliseconds=250),
        gt=timedelta(0),
        description="How often members check each other's presence connections.",
    )
    stop_grace: Span = Field(
        timedelta(seconds=25),
        description="Time that running handlers have after SIGTERM (Kubernetes kills after 30 s).",
    )

    prefetch: int = Field(2000, ge=1, le=10_000, description="Maximum number of messages of one handler in memory.")
    prefetch_bytes: ByteSize = Field(
        ByteSize(32 << 20), description="Target for the payload bytes of one handler in memory."
    )
    payload_limit: ByteSize = Field(
        ByteSize(256 << 10), le=1 << 20, description="Larger payloads are refused: 1 MiB stalls a server for 4-12 ms."
    )
    dedup_window: Span = Field(
        timedelta(minutes=10),
        gt=timedelta(0),
        description="How long a message_id given by the publisher is remembered.",
    )
    delay_resolution: Span = Field(
        timedelta(milliseconds=100),
        gt=timedelta(0),
        description="Polling interval for delayed messages and retries: they may be late by this much.",
    )
    recovery_batch: int = Field(200, ge=1, le=1000, description="Pending messages claimed with one call.")

    retention_age: Span = Field(timedelta(days=1), description="Settled messages are kept for replay this long ...")
    retention_length: int = Field(100_000, ge=0, description="... or until the partition has this many newer ones.")
    retention_interval: Span = Field(
        timedelta(seconds=10), gt=timedelta(0), description="How often streams are trimmed."
    )
    max_length: int = Field(
        0, ge=0, description="Maximum number of unsettled messages in a partition of a new topic. 0: no limit."
    )
    on_full: Literal["reject", "trim"] = Field(
        "reject", description="What happens when a message is published to a full topic."
    )
    dlq_length: int = Field(100_000, ge=1, description="Maximum number of dead letters kept per partition and group.")

    inbox_ttl: Span = Field(
        timedelta(days=7),
        ge=timedelta(seconds=1),
        description="A device without activity for this long is deleted; no letter is kept longer.",
    )
    inbox_limit: int = Field(
        10_000,
        ge=1,
        le=65_000,
        description="Maximum number of letters of a device; packet ids allow no more than 65 000.",
    )
    inbox_poll: Span = Field(
        timedelta(seconds=30),
        gt=timedelta(0),
        description="How often an idle session polls its inbox, in case a wake-up was lost.",
    )

    metrics: str | None = Field(
        None, description="Address on which a worker serves /metrics, /livez and /readyz, such as 127.0.0.1:9100."
    )
    stall_limit: Span = Field(
        timedelta(minutes=1),
        gt=timedelta(0),
        description="An event loop that is blocked for longer fails /livez, so that the worker is restarted.",
    )

    preflight: Literal["refuse", "warn"] = Field(
        "refuse", description="What to do when the server's configuration could lose messages."
    )

    def __init__(self, **values: Unpack[Overrides]) -> None:
        meant: dict[str, Any] = from_environment(os.environ)
        try:
            super().__init__(**{**meant, **values})
        except ValidationError as error:
            raise ConfigError(explain(error)) from None

    @property
    def heartbeat_interval(self) -> timedelta:
        """The interval between two lease renewals."""
        return self.lease_ttl / 4 if self.heartbeat is None else self.heartbeat

    @property
    def longest_read(self) -> timedelta:
        """The limit of a blocking read."""
        return min(self.lease_ttl / 3, timedelta(seconds=2)) if self.block is None else self.block

    @property
    def lease_margin(self) -> timedelta:
        """How long before the server's deadline a member gives up its lease."""
        return self.lease_ttl / 6

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.heartbeat_interval * 3 > self.lease_ttl:
            raise ValueError(
                f"heartbeat ({duration(self.heartbeat_interval)}) must be at most a third of lease_ttl "
                f"({duration(self.lease_ttl)}): one lost renewal must not cost the lease"
            )
        if self.longest_read >= self.lease_ttl:
            raise ValueError(
                f"block ({duration(self.longest_read)}) must be shorter than lease_ttl ({duration(self.lease_ttl)})"
            )
        if timedelta(0) < self.presence_grace < 2 * self.presence_interval:
            raise ValueError(
                f"presence_grace ({duration(self.presence_grace)}) must be 0 or at least twice presence_interval"
            )
        return self


def chosen_settings(given: Settings | str | None, overrides: Overrides) -> Settings:
    """The settings of `Broker(given, **overrides)`: a URL, settings, or neither."""
    if isinstance(given, str):
        if "url" in overrides:
            raise ConfigError("the URL is given twice: leave out url=...")
        overrides = {**overrides, "url": given}
    if given is None or isinstance(given, str):
        return Settings(**overrides)
    if not isinstance(given, Settings):
        raise ConfigError(f"{given!r} is not a server: write Broker('redis://localhost:6379'), or pass Settings(...)")
    if overrides:
        raise ConfigError(f"settings are given twice: put {', '.join(overrides)} into Settings(...)")
    return given


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that stand in the environment, by field.

    Space around a value and one pair of quotes are not part of it: `docker --env-file` keeps the quotes, and a secret
    made from a file the line end. Raises ConfigError for a setting that is set and empty, which is neither a value nor
    the default, and for a name that looks like a mistyped setting. Logs a name that is no setting once.
    """
    known = {PREFIX + name.upper(): name for name in Settings.model_fields}
    found = {}
    for name, text in environment.items():
        capitals = name.upper()
        if not capitals.startswith(PREFIX) or SERVICE_LINK.fullmatch(capitals):
            continue
        if (field := known.get(capitals)) is None:
            refuse_typo(name, text, list(known))
            continue
        value = text.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].strip()
        if not value:
            raise ConfigError(f"{name} is set, but empty: give it a value, or unset it to use the default")
        found[field] = value
    return found


def refuse_typo(name: str, text: str, known: list[str]) -> None:
    """Raise ConfigError for a name that looks like a mistyped setting: it must not be a silent default.

    Any other name belongs to another program, such as a deployment's `RSMQ_IMAGE_TAG`: it is logged, and ignored.
    """
    word = name.upper().removeprefix(PREFIX)
    close = difflib.get_close_matches(word, [each.removeprefix(PREFIX) for each in known], n=1, cutoff=0.7)
    if not close and ADDRESS.match(text.strip().strip("'\"")):  # RSMQ_REDIS_URL, RSMQ_SERVER
        close = ["URL"]
    if not close:
        parts = set(word.split("_"))
        close = [each for each in (item.removeprefix(PREFIX) for item in known) if parts < set(each.split("_"))][:1]
    if close:
        raise ConfigError(f"unknown setting {name}. Did you mean {PREFIX}{close[0]}?")
    if name not in _ignored:
        _ignored.add(name)
        log.warning("%s is no setting of rsmq and is ignored. All settings: docs/settings.md", name)


def did_you_mean(name: str, known: list[str]) -> str:
    """` Did you mean X?` for the closest known name, otherwise the list of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(known))}"


def explain(error: ValidationError) -> str:
    """A validation error as one line a setting, without pydantic's vocabulary."""
    lines = []
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {name!r}.{did_you_mean(name, list(Settings.model_fields))}")
        else:
            value = item["input"]
            given = f" (given: {str(value) if isinstance(value, timedelta) else repr(value)})" if name else ""
            text = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            lines.append(f"{PREFIX + name.upper() + ': ' if name else ''}{text}{given}")
    return "\n".join(lines)
