"""All settings with defaults, units and reasons. In the environment: `RSMQ_` + the name in capitals.

The values are validated by pydantic's core, with a schema that is written here: pydantic itself, which would make the
schema from annotations, takes a third of the time in which `Broker()` is imported and made.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict, Unpack

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from rsmq.errors import ConfigError
from rsmq.model.duration import Duration, as_duration
from rsmq.model.size import as_size
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
    read_ahead: int
    payload_limit: int | str
    decoded_limit: int | str
    key_patience: Duration
    dedup_window: Duration
    delay_resolution: Duration
    retention_age: Duration
    retention_length: int
    retention_interval: Duration
    max_length: int
    on_full: Literal["reject", "trim"]
    dlq_length: int
    inbox_ttl: Duration
    inbox_limit: int
    inbox_poll: Duration
    log_names: Literal["whole", "short"]
    app_version: str | None
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
READ_ELSEWHERE: Final = ("RSMQ_KEYS", "RSMQ_KEYS_FILE", "RSMQ_BODIES")
"""Keys of `rsmq.codecs`: secrets are not kept in settings. And the store of large payloads, for commands."""
_ignored: set[str] = set()
"""Names that were logged: an application may make many brokers."""
LONGEST = timedelta(days=36_500)


def refuse_nonsense(span: timedelta) -> timedelta:
    """Raise ValueError for a negative duration, and for one that is too large for the server's arithmetic."""
    if not timedelta(0) <= span <= LONGEST:
        raise ValueError("a duration is between 0 and 100 years")
    return span


def span(*, ge: timedelta | None = None, gt: timedelta | None = None) -> CoreSchema:
    """The schema of a duration."""
    value = core_schema.timedelta_schema(ge=ge, gt=gt)
    checked = core_schema.no_info_after_validator_function(refuse_nonsense, value)
    return core_schema.no_info_before_validator_function(as_duration, checked)


def size(*, le: int | None = None) -> CoreSchema:
    """The schema of a number of bytes."""
    return core_schema.no_info_before_validator_function(as_size, core_schema.int_schema(ge=0, le=le))


def number(ge: int, le: int | None = None) -> CoreSchema:
    """The schema of a number of things."""
    return core_schema.int_schema(ge=ge, le=le)


def setting(default: Any, schema: CoreSchema, description: str, *, is_secret: bool = False) -> Any:
    """A field of `Settings`. A default of None allows None. A secret is not in the `repr`."""
    if default is None:
        schema = core_schema.nullable_schema(schema)
    return field(default=default, repr=not is_secret, metadata={"schema": schema, "description": description})


@dataclass(frozen=True, init=False)
class Settings:
    """Durations are text with a unit (`6s`, `PT6S`) or a `timedelta`; sizes take units, too (`256KiB`).

    Settings do not change. `dataclasses.replace(settings, partitions=4)` makes others.
    """

    url: str | None = setting(
        None, core_schema.str_schema(), "The server. Unset: the embedded server of this project.", is_secret=True
    )
    allow_insecure: bool = setting(
        False,
        core_schema.bool_schema(),
        "Allow to send the password of RSMQ_URL unencrypted to another machine (in a trusted network).",
    )
    prefix: str = setting("rsmq", core_schema.str_schema(pattern="^[A-Za-z0-9_.-]{1,64}$"), "Prefix of every key.")
    partitions: int = setting(8, number(1, 1024), "Partitions of a topic that is created on first use.")

    connect_timeout: timedelta = setting(
        timedelta(seconds=5), span(gt=timedelta(0)), "Time limit for opening a connection."
    )
    command_timeout: timedelta = setting(
        timedelta(seconds=5), span(gt=timedelta(0)), "Time limit for a command that does not block."
    )
    unavailable_timeout: timedelta = setting(
        timedelta(seconds=30), span(), "How long publish and start-up retry while the server is unavailable."
    )
    block: timedelta | None = setting(
        None,
        span(gt=timedelta(0)),
        "Longest blocking read, so a half-open connection lasts no longer. "
        "Default: a third of the lease, at most 2 s. With shared distribution never more than a third of the lease.",
    )

    lease_ttl: timedelta = setting(
        timedelta(seconds=6),
        span(ge=timedelta(seconds=1)),
        "A member that is paused or cut off is replaced after this time.",
    )
    heartbeat: timedelta | None = setting(
        None, span(gt=timedelta(0)), "Interval between two lease renewals. Default: a quarter of the lease."
    )
    presence_grace: timedelta = setting(
        timedelta(seconds=1),
        span(),
        "A member whose presence connection is closed for this long is replaced. 0s turns this off.",
    )
    presence_interval: timedelta = setting(
        timedelta(milliseconds=250),
        span(gt=timedelta(0)),
        "How often members check each other's presence connections: in large groups, less often costs the server less.",
    )
    stop_grace: timedelta = setting(
        timedelta(seconds=25), span(), "Time that running handlers have after SIGTERM (Kubernetes kills after 30 s)."
    )

    prefetch: int = setting(2000, number(1, 10_000), "Maximum number of messages of one handler in memory.")
    prefetch_bytes: int = setting(32 << 20, size(), "Target for the payload bytes of one handler in memory.")
    read_ahead: int = setting(
        100_000,
        number(0, 1_000_000),
        "Messages of a partition that wait behind their key, of which only the id is kept. 0 turns this off.",
    )
    payload_limit: int = setting(
        256 << 10, size(le=1 << 20), "Larger payloads are refused: 1 MiB stalls a server for 4-12 ms."
    )
    decoded_limit: int = setting(
        4 << 20, size(le=1 << 30), "A payload that is larger than this when it is decompressed is refused."
    )
    key_patience: timedelta = setting(
        timedelta(hours=1),
        span(),
        "A message is held this long while no key, or no coding, is there to decode it. Then it becomes a dead letter.",
    )
    dedup_window: timedelta = setting(
        timedelta(minutes=10), span(gt=timedelta(0)), "How long a message_id given by the publisher is remembered."
    )
    delay_resolution: timedelta = setting(
        timedelta(milliseconds=100),
        span(gt=timedelta(0)),
        "Polling interval for delayed messages and retries: they may be late by this much.",
    )

    retention_age: timedelta = setting(timedelta(days=1), span(), "Settled messages are kept for replay this long ...")
    retention_length: int = setting(100_000, number(0), "... or until the partition has this many newer ones.")
    retention_interval: timedelta = setting(
        timedelta(seconds=10), span(gt=timedelta(0)), "How often streams are trimmed."
    )
    max_length: int = setting(
        0, number(0), "Maximum number of unsettled messages in a partition of a new topic. 0: no limit."
    )
    on_full: Literal["reject", "trim"] = setting(
        "reject",
        core_schema.literal_schema(["reject", "trim"]),
        "A publish to a full topic: `reject` raises TopicFull, `trim` drops the oldest messages, handled or not.",
    )
    dlq_length: int = setting(100_000, number(1), "Maximum number of dead letters kept per partition and group.")

    inbox_ttl: timedelta = setting(
        timedelta(days=7),
        span(ge=timedelta(seconds=1)),
        "A device without activity for this long is deleted; no letter is kept longer.",
    )
    inbox_limit: int = setting(
        10_000, number(1, 65_000), "Maximum number of letters of a device; packet ids allow no more than 65 000."
    )
    inbox_poll: timedelta = setting(
        timedelta(seconds=30),
        span(gt=timedelta(0)),
        "How often an idle session polls its inbox, in case a wake-up was lost: "
        "with many idle devices, less often costs the server less.",
    )

    log_names: Literal["whole", "short"] = setting(
        "whole",
        core_schema.literal_schema(["whole", "short"]),
        "How the log shows keys, tenants, devices and names of limits: they may be personal data. "
        "`short`: two characters and four digits of a hash.",
    )
    app_version: str | None = setting(
        None,
        core_schema.str_schema(min_length=1, max_length=60),
        "The version of your service, such as a tag: shown with its processes, and in charts where these began.",
    )
    metrics: str | None = setting(
        None,
        core_schema.str_schema(),
        "Address on which a worker serves /metrics, /livez and /readyz, such as 127.0.0.1:9100.",
    )
    stall_limit: timedelta = setting(
        timedelta(minutes=1),
        span(gt=timedelta(0)),
        "An event loop that is blocked for longer fails /livez, so that the worker is restarted.",
    )

    preflight: Literal["refuse", "warn"] = setting(
        "refuse",
        core_schema.literal_schema(["refuse", "warn"]),
        "A server that would evict messages, or lacks rights or commands: `refuse` to start, or `warn`.",
    )

    def __init__(self, **values: Unpack[Overrides]) -> None:
        meant: dict[str, Any] = from_environment(os.environ)
        for name in ("url", "metrics"):
            if isinstance(text := values.get(name), str):
                values[name] = refuse_empty(name, text)
        try:
            checked = VALIDATOR.validate_python({**meant, **values})
        except ValidationError as error:
            raise ConfigError(explain(error)) from None
        for each in fields(self):
            object.__setattr__(self, each.name, checked.get(each.name, each.default))
        self._refuse_contradictions()

    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults: `Settings(**settings.changed())` are the same ones."""
        return {name: value for name, value in vars(self).items() if value != getattr(Settings, name)}

    def _refuse_contradictions(self) -> None:
        """Raise ConfigError for settings that do not fit together."""
        if heartbeat_interval(self) * 3 > self.lease_ttl:
            raise ConfigError(
                f"heartbeat ({duration(heartbeat_interval(self))}) must be at most a third of lease_ttl "
                f"({duration(self.lease_ttl)}): one lost renewal must not cost the lease"
            )
        if longest_read(self) >= self.lease_ttl:
            raise ConfigError(
                f"block ({duration(longest_read(self))}) must be shorter than lease_ttl ({duration(self.lease_ttl)})"
            )
        if timedelta(0) < self.presence_grace < 2 * self.presence_interval:
            raise ConfigError(
                f"presence_grace ({duration(self.presence_grace)}) must be 0 or at least twice presence_interval"
            )


def heartbeat_interval(settings: Settings) -> timedelta:
    """The time between two lease renewals: `heartbeat`, or a quarter of the lease."""
    return settings.lease_ttl / 4 if settings.heartbeat is None else settings.heartbeat


def longest_read(settings: Settings) -> timedelta:
    """How long a read may block: `block`, or a third of the lease, at most two seconds."""
    return min(settings.lease_ttl / 3, timedelta(seconds=2)) if settings.block is None else settings.block


def lease_margin(settings: Settings) -> timedelta:
    """How long before the server's deadline a member gives up its lease."""
    return settings.lease_ttl / 6


NAMES: Final = [each.name for each in fields(Settings)]
VALIDATOR: Final = SchemaValidator(
    core_schema.typed_dict_schema(
        {each.name: core_schema.typed_dict_field(each.metadata["schema"], required=False) for each in fields(Settings)},
        extra_behavior="forbid",
    )
)


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
    known = {PREFIX + name.upper(): name for name in NAMES}
    found = dict[str, str]()
    for name, text in environment.items():
        capitals = name.upper()
        if not capitals.startswith(PREFIX) or SERVICE_LINK.fullmatch(capitals):
            continue
        if capitals in READ_ELSEWHERE:
            continue
        if (setting_name := known.get(capitals)) is None:
            refuse_typo(name, text, list(known))
            continue
        value = unquoted(text)
        if not value:
            raise ConfigError(f"{name} is set, but empty: give it a value, or unset it to use the default")
        if found.get(setting_name, value) != value:
            raise ConfigError(f"{capitals} is set twice, in capitals and in small letters: unset one of them")
        found[setting_name] = value
    return found


def unquoted(text: str) -> str:
    """A value without space around it and without one pair of quotes."""
    value = text.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1].strip()
    return value


def refuse_empty(name: str, text: str) -> str:
    """What an application has read itself, such as `Broker(os.environ["REDIS_URL"])`, as `from_environment` reads it.

    An empty URL would otherwise be the embedded server.
    """
    if not (value := unquoted(text)):
        raise ConfigError(f"{name} is empty: give it a value, or leave it out to use the default")
    return value


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
            lines.append(f"unknown setting {name!r}.{did_you_mean(name, NAMES)}")
        else:
            value = item["input"]
            given = f" (given: {str(value) if isinstance(value, timedelta) else repr(value)})" if name else ""
            text = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            lines.append(f"{PREFIX + name.upper() + ': ' if name else ''}{text}{given}")
    return "\n".join(lines)
