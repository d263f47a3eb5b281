"""Settings: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from rsmq.errors import ConfigError
from rsmq.model.settings import NAMES, SERVICE_LINK, Overrides, Settings, heartbeat_interval, lease_margin


def test_defaults_fit_together() -> None:
    """The defaults keep their own rules: three renewals a lease, the margin inside it."""
    settings = Settings()
    assert settings.url is None
    assert heartbeat_interval(settings) * 3 <= settings.lease_ttl
    assert lease_margin(settings) < settings.lease_ttl - heartbeat_interval(settings)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("LEASE_TTL", "PT8S", timedelta(seconds=8)),
        ("LEASE_TTL", "8s", timedelta(seconds=8)),
        ("RETENTION_AGE", "P2DT1H", timedelta(days=2, hours=1)),
        ("PRESENCE_GRACE", "PT0S", timedelta(0)),
        ("PAYLOAD_LIMIT", "512KiB", 512 << 10),
        ("PARTITIONS", "16", 16),
        ("URL", "redis://localhost:6379/0", "redis://localhost:6379/0"),
    ],
)
def test_environment_variables_are_parsed(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    """Durations and sizes take units, and the name is RSMQ_ and the field in capitals."""
    monkeypatch.setenv(f"RSMQ_{name}", text)
    assert getattr(Settings(), name.lower()) == value


@pytest.mark.parametrize("text", ["", "  ", '""', "''", "\n"])
def test_setting_that_is_set_and_empty_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """An empty secret must not lead to the embedded server of the project."""
    monkeypatch.setenv("RSMQ_URL", text)
    with pytest.raises(ConfigError, match="RSMQ_URL is set, but empty: give it a value, or unset it"):
        Settings()


def test_setting_that_is_set_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In capitals by a manifest, and in small letters by a file: which of them counts would be chance."""
    monkeypatch.setenv("RSMQ_URL", "redis://queue:6379/0")
    monkeypatch.setenv("rsmq_url", "redis://queue:6379/1")
    with pytest.raises(ConfigError, match="RSMQ_URL is set twice, in capitals and in small letters"):
        Settings()
    monkeypatch.setenv("rsmq_url", "redis://queue:6379/0")
    assert Settings().url == "redis://queue:6379/0"


@pytest.mark.parametrize("text", ["{}", "'{}'", '"{}"', "{}\n", '  "{}"\r\n'])
def test_quotes_and_line_ends_around_a_value_are_not_part_of_it(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """`docker --env-file` keeps quotes, and a secret that was made from a file its line end."""
    monkeypatch.setenv("RSMQ_URL", text.format("redis://app:pw@queue:6379/1"))
    monkeypatch.setenv("RSMQ_LEASE_TTL", text.format("9s"))
    monkeypatch.setenv("RSMQ_PREFIX", text.format("shop"))
    settings = Settings()
    assert settings.url == "redis://app:pw@queue:6379/1"
    assert (settings.lease_ttl, settings.prefix) == (timedelta(seconds=9), "shop")


def service_links(service: str) -> list[str]:
    """The variables that Kubernetes sets in each container for a Service, and Docker for a linked container."""
    name = service.upper().replace("-", "_")
    port = f"{name}_PORT_9101_TCP"
    kubernetes = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_METRICS", "PORT"]
    tcp = [port, f"{port}_PROTO", f"{port}_PORT", f"{port}_ADDR"]
    return [*(f"{name}_{each}" for each in kubernetes), *tcp, f"{name}_NAME", f"{name}_ENV_VALKEY_VERSION"]


@pytest.mark.parametrize("service", ["rsmq", "rsmq-exporter", "rsmq-metrics", "rsmq-prefix", "rsmq-mqtt-gateway"])
def test_variables_of_services_are_not_taken_for_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, service: str
) -> None:
    """A pod beside a Service whose name begins with `rsmq` starts, and logs nothing about it."""
    for name in service_links(service):
        monkeypatch.setenv(name, "tcp://10.0.0.7:9101")
    assert Settings().prefix == "rsmq"
    assert not caplog.records


def test_no_setting_has_the_form_of_a_service_link() -> None:
    """Otherwise a Service could set it."""
    assert not [name for name in NAMES if SERVICE_LINK.fullmatch(f"RSMQ_{name.upper()}")]


def test_argument_goes_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program says wins over what its environment says."""
    monkeypatch.setenv("RSMQ_PARTITIONS", "16")
    assert Settings(partitions=4).partitions == 4


def test_misspelt_variable_is_refused_with_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo must not be a silent default."""
    monkeypatch.setenv("RSMQ_LEASE_TLL", "PT8S")
    with pytest.raises(ConfigError, match=r"unknown setting RSMQ_LEASE_TLL\. Did you mean RSMQ_LEASE_TTL\?"):
        Settings()


@pytest.mark.parametrize("name", ["RSMQ_REDIS_URL", "RSMQ_SERVER", "RSMQ_ADDRESS"])
def test_variable_with_an_address_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its author means the server: without an error the embedded one would be used."""
    monkeypatch.setenv(name, "redis://queue:6379/0")
    with pytest.raises(ConfigError, match=rf"unknown setting {name}\. Did you mean RSMQ_URL\?"):
        Settings()


def test_part_of_a_name_is_refused_with_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of a setting's name is a mistyped setting."""
    monkeypatch.setenv("RSMQ_LEASE", "9s")
    with pytest.raises(ConfigError, match=r"unknown setting RSMQ_LEASE\. Did you mean RSMQ_LEASE_TTL\?"):
        Settings()


def test_variable_of_another_program_is_logged_once_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deployment may have variables of its own that begin with RSMQ_."""
    monkeypatch.setattr("rsmq.model.settings._ignored", set())
    monkeypatch.setenv("RSMQ_IMAGE_TAG", "1.2")
    Settings()
    Settings()
    assert [record.getMessage() for record in caplog.records] == [
        "RSMQ_IMAGE_TAG is no setting of rsmq and is ignored. All settings: docs/settings.md"
    ]


def test_misspelt_argument_is_refused_with_a_guess() -> None:
    """The same for keyword arguments."""
    with pytest.raises(ConfigError, match=r"unknown setting 'leese_ttl'\. Did you mean lease_ttl\?"):
        Settings(leese_ttl=timedelta(seconds=6))


@pytest.mark.parametrize("text", ["6", "6S", "six", "nan", "-", "PT", "s", "1m1h", "00:00:06"])
def test_bad_duration_is_shown_the_form(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What is no duration is answered with one that is."""
    monkeypatch.setenv("RSMQ_LEASE_TTL", text)
    with pytest.raises(ConfigError, match=rf"RSMQ_LEASE_TTL: a duration is text with a unit, such as 5s, 2h.*'{text}'"):
        Settings()


@pytest.mark.parametrize("value", [6, 6.0, True])
def test_bare_number_is_no_time(value: object) -> None:
    """In Python, too, a number without a unit is refused."""
    with pytest.raises(ConfigError, match="RSMQ_LEASE_TTL: a duration is a timedelta"):
        Settings(lease_ttl=value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("RETENTION_AGE", "-P1D", "between 0 and 100 years"),
        ("LEASE_TTL", "P999999999D", "between 0 and 100 years"),
        ("CONNECT_TIMEOUT", "PT0S", "greater than 0 seconds"),
        ("HEARTBEAT", "PT0S", "greater than"),
        ("LEASE_TTL", "PT0.5S", "greater than or equal to 1 second"),
        ("PAYLOAD_LIMIT", "2MiB", "less than or equal to 1048576"),
        ("PARTITIONS", "0", "greater than or equal to 1"),
        ("PARTITIONS", "eight", "valid integer"),
        ("PREFIX", "a{b", "pattern"),
        ("ON_FULL", "drop", "'reject' or 'trim'"),
    ],
)
def test_values_out_of_range(monkeypatch: pytest.MonkeyPatch, name: str, text: str, says: str) -> None:
    """The variable, the rule and what was given are all in one line."""
    monkeypatch.setenv(f"RSMQ_{name}", text)
    with pytest.raises(ConfigError, match=rf"^RSMQ_{name}: .*{says}.*given: [^\n]*$"):
        Settings()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"heartbeat": timedelta(seconds=3)}, "heartbeat .* at most a third of lease_ttl"),
        ({"block": timedelta(seconds=6)}, "block .* shorter than lease_ttl"),
        ({"presence_grace": timedelta(milliseconds=100)}, "presence_grace .* at least twice presence_interval"),
    ],
)
def test_contradicting_settings_are_refused(values: dict[str, timedelta], says: str) -> None:
    """Settings that contradict each other are refused together."""
    with pytest.raises(ConfigError, match=says):
        Settings(**values)


def test_every_mistake_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three wrong variables are three lines, not three starts."""
    for name in ("PARTITIONS", "PREFETCH", "DLQ_LENGTH"):
        monkeypatch.setenv(f"RSMQ_{name}", "none")
    with pytest.raises(ConfigError) as caught:
        Settings()
    assert len(str(caught.value).splitlines()) == 3


def test_repr_keeps_the_password() -> None:
    """Settings end up in logs, the URL's password must not."""
    assert "geheim" not in repr(Settings(url="redis://u:geheim@localhost"))


def test_a_type_checker_knows_every_setting() -> None:
    """The names and types that `Settings(...)` and `Broker(...)` are typed with are those of the fields."""
    wider: dict[Any, Any] = {timedelta: timedelta | str, timedelta | None: timedelta | str | None}
    sizes = {"prefetch_bytes", "payload_limit", "decoded_limit"}
    typed, made = get_type_hints(Overrides), get_type_hints(Settings)
    assert list(typed) == list(made) == [each.name for each in fields(Settings)]
    for name, annotation in made.items():
        assert typed[name] == (int | str if name in sizes else wider.get(annotation, annotation)), name


def test_words_of_a_setting_are_those_of_its_type() -> None:
    """What a type checker allows is what the validation accepts."""
    for name, annotation in get_type_hints(Settings).items():
        if get_origin(annotation) is Literal:
            for word in get_args(annotation):
                assert getattr(replace(Settings(), **{name: word}), name) == word


def test_replace_makes_other_settings_and_checks_them() -> None:
    """The standard library's `replace` copies settings with changes, under the same rules."""
    settings = Settings(partitions=4, lease_ttl="8s")
    changed = replace(settings, partitions=2)
    assert (changed.partitions, changed.lease_ttl) == (2, timedelta(seconds=8))
    assert settings.partitions == 4
    assert replace(changed, partitions=4) == settings
    assert hash(replace(changed, partitions=4)) == hash(settings)
    assert Settings(**changed.changed()) == changed
    assert changed.changed() == {"partitions": 2, "lease_ttl": timedelta(seconds=8)}
    with pytest.raises(ConfigError, match="RSMQ_PARTITIONS: must be greater than or equal to 1"):
        replace(settings, partitions=0)
    with pytest.raises(FrozenInstanceError):
        settings.partitions = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "size"),
    [(1000, 1000), ("1000", 1000), ("512KiB", 524_288), ("1.5 MB", 1_500_000), ("2kb", 2000), ("1 GiB", 1 << 30),
     ("1k", 1000), ("1Ki", 1024), ("10 B", 10)],
)  # fmt: skip
def test_a_size_takes_units(value: int | str, size: int) -> None:
    """Powers of 1000 or of 1024, in any case."""
    assert Settings(prefetch_bytes=value).prefetch_bytes == size


@pytest.mark.parametrize("value", ["", "KiB", "1 XB", "-1", "1e3", "1,5MB", "i", "5ib", "٣", True, 1.5, None])
def test_what_is_no_size_is_shown_the_form(value: Any) -> None:
    """Nothing is guessed."""
    with pytest.raises(ConfigError, match="RSMQ_PREFETCH_BYTES: a size is a number of bytes"):
        Settings(prefetch_bytes=value)


@pytest.mark.parametrize("text", ["", " \n", '""'])
def test_empty_url_of_an_application_is_refused(text: str) -> None:
    """`Broker(os.environ["REDIS_URL"])` must not be the embedded server because a secret was empty."""
    with pytest.raises(ConfigError, match="url is empty"):
        Settings(url=text)


@pytest.mark.parametrize("text", ["redis://h:7/1\n", '"redis://h:7/1"', " 'redis://h:7/1'\r\n"])
def test_url_of_an_application_is_read_as_that_of_the_environment(text: str) -> None:
    """Quotes and the line end of a secret file are not part of it."""
    assert Settings(url=text).url == "redis://h:7/1"
