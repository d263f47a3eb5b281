"""Passwords and payloads stay where they belong: in no log line, no repr, no error, and on no open line."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import wait_none

from rsmq import Breaker, Broker, Concurrency, Message, Rate, RetryPolicy, Settings
from rsmq.errors import ConfigError, RsmqError, SessionLost
from rsmq.inspector import Inspector
from rsmq.model import log_names
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Connector, check_url, redact
from rsmq.redis.topics import lookup_topic
from rsmq.telemetry.worker_metrics import WorkerMetrics
from tests.contract.witness import ask, dies, settled
from tests.patience import until
from tests.servers import Server

SECRET = "geh/eim#1?"
BODY = "body-of-a-patient"
PHONE = "+821012345678"


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:{}@h:1/0", "redis://:{}@h", "rediss://u:{}@h", "unix://u:{}@/run/s.sock", "redis+sentinel://u:{}@h1,h2/m",
        "redis+cluster://u:{}@h1,h2", "redis:/u:{}@h", "redis//u:{}@h", "u:{}@h:6379", "http://u:{}@h", "redis://u:{}@h:port",
        "redis://h?password={}",
        "redis+sentinel://u:x@h/m?sentinel_password={}", "redis+sentinel://h/m?sentinel_password={}",
        "redis://u:{}@h?db=x", "redis://u:{}@[::1", "redis://u:{}@",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "password",
    [
        "geheim",
        SECRET,
        "a@geheim",
        "geheim@b",
        "geheim:x",
        "geheim/b",
        "1/geheim",
        "geheim#b",
        "1#geheim",
        "geheim?b",
        "1?geheim=2",
        "1?db=geheim",
        "[geheim",
        "geheim]",
        "%geh",
    ],
)
def test_no_form_of_an_address_shows_its_password(url: str, password: str) -> None:
    """Not when it is right, nor when it is mistyped, nor when the password is not encoded."""
    url = url.format(password)
    assert "geh" not in redact(url)
    said = ""
    try:
        Connector(check_url(url), Settings(allow_insecure=True))
    except ConfigError as error:
        said = f"{error} {error!r} {error.__cause__!r}"
    assert "geh" not in said


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel", "redis+cluster", "rediss+cluster"])
@pytest.mark.parametrize("password", ["12/34", "12#34", "12?34", "a/b", "a#b", "a?b=c", "a?db=3", "?", "#", "/"])
def test_password_that_is_not_encoded_is_refused(scheme: str, password: str) -> None:
    """Never taken for a port, a database or an option: the error says what to do."""
    with pytest.raises(ConfigError, match="percent-encode the user and the password"):
        check_url(f"{scheme}://user:{password}@host:6379/0")


def test_password_in_the_place_of_the_user_is_not_shown() -> None:
    """`redis://secret@host` is a common mistake."""
    assert redact("redis://geheim@host:6379/0") == "redis://***@host:6379/0"


@given(st.text(st.characters(codec="ascii", exclude_characters="@&"), min_size=6, max_size=20))
def test_no_password_is_shown(password: str) -> None:
    """With any characters in it."""
    assert redact(f"redis://user:{password}\x00@host") == "redis://user:***@host"


async def test_a_refused_password_is_in_no_error(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The server said no: the error names the place, and neither it nor the log holds the password."""
    with Server(tcp=True, password="right") as guarded:
        url = f"redis://:{'gehe1m'}@127.0.0.1:{guarded.port}/0"
        with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError, match="refused the credentials") as caught:
            async with Broker(Settings(url=url)):
                pass
    assert "gehe1m" not in "".join(traceback.format_exception(caught.value))
    assert "gehe1m" not in caplog.text


async def test_nothing_that_is_shown_has_the_password(caplog: pytest.LogCaptureFixture) -> None:
    """The repr of each object that holds the address, what the inspector tells, and everything that is logged."""
    with Server(tcp=True, password="gehe1m", aof=True) as guarded, caplog.at_level(logging.DEBUG):
        settings = Settings(url=guarded.url)
        connector = Connector(guarded.url, settings)
        broker = Broker(settings)

        @broker.handler("t", group="g")
        async def handle(order: dict[str, Any]) -> None:
            return

        async with broker.running():
            await broker.publish("t", {"n": 1})
            await settled(broker, "t")
            state = await Inspector(broker.client, Keys("rsmq"), settings).server()
            shown = [settings, connector, broker, broker.client, broker.worker, connector.blocking_client(), state]
    assert "gehe1m" not in "\n".join(f"{each!r} {each}" for each in shown)
    assert "gehe1m" not in caplog.text


@pytest.mark.parametrize(
    "url",
    ["redis://u:p@db.example.org", "redis://:p@10.0.0.1:6379/1", "redis+sentinel://u:p@127.0.0.1,10.0.0.2/main",
     "redis+sentinel://10.0.0.2/main?sentinel_password=:p@",
     "redis+cluster://u:p@localhost:7000,db.example.org:7000", "redis://u:p@[2001:db8::1]:6379"],
)  # fmt: skip
def test_a_password_is_not_sent_in_the_clear(url: str) -> None:
    """To another machine it needs TLS, or a setting that says that the network is trusted."""
    with pytest.raises(ConfigError, match=r"unencrypted: use rediss://.*RSMQ_ALLOW_INSECURE=true") as caught:
        Connector(url, Settings())
    assert ":p@" not in str(caught.value)
    Connector(url, Settings(allow_insecure=True))


@pytest.mark.parametrize(
    "url",
    ["redis://u:p@localhost", "redis://:p@127.0.0.1:6379", "redis://:p@[::1]", "unix://u:p@/run/s.sock", "rediss://u:p@db",
     "redis://db.example.org", "redis://user@db", "rediss+cluster://u:p@db", "redis+sentinel://u:p@localhost/m",
     "rediss+sentinel://u:p@db/m?sentinel_password=q"],
)  # fmt: skip
def test_what_nobody_can_listen_to_is_allowed(url: str) -> None:
    """This machine, TLS, or no password at all."""
    Connector(url, Settings())


async def test_a_payload_is_never_logged(server_url: str, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """Handled, failing, malformed, redelivered: no line of rsmq shows what was in a message, nor does a dead letter's
    error. What a handler's own exception says is the handler's."""
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=2, wait=wait_none()))
    async def handle(order: dict[str, str]) -> None:
        if order["fail"] == "yes":
            raise ValueError("no")

    with caplog.at_level(logging.DEBUG):
        async with broker.running():
            await broker.publish("t", {"fail": "no", "x": BODY})
            await broker.publish("t", {"fail": "yes", "x": BODY})
            await broker.publish("t", f'{{"{BODY}')
            await broker.publish("t", [BODY])
            letters = await dies(broker, "t", "g", 3)
            await settled(broker, "t")
            place = await lookup_topic(broker.topics, "t")
            errors = [letter.error async for letter in broker.dead_letters.iterate(place, "g")]
    assert len(letters) == 3
    assert BODY not in caplog.text
    assert BODY not in "".join(errors)


@pytest.mark.parametrize("how", ["short", "whole"])
async def test_names_are_shortened_in_logs_by_a_setting(
    server_url: str, prefix: str, how: Literal["short", "whole"], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A phone number that is a key, a tenant, the name of a rate, of a permit, and of what a breaker holds. Without the
    setting the same log has it."""
    monkeypatch.setattr(log_names, "_is_short", False)
    broker = Broker(Settings(url=server_url, prefix=prefix, preflight="warn", log_names=how, partitions=1))
    by: Callable[[Message], str] = lambda message: message.key or ""  # noqa: E731

    def weight(tenant: str | None) -> float:
        raise LookupError("no weight")

    @broker.handler(
        "t", group="g", tenant=by, weights=weight, rate=Rate(1000, by=by), group_concurrency=Concurrency(5, by=by),
        breaker=Breaker(failures=1, hold="1h"), retry=RetryPolicy(max_attempts=9, wait=wait_none()),
    )  # fmt: skip
    async def handle(order: dict[str, str]) -> None:
        if order["fail"] == "yes":
            raise ValueError("no")

    def lines(text: str) -> list[str]:
        return [each.getMessage() for each in caplog.records if text in each.getMessage()]

    with caplog.at_level(logging.DEBUG):
        async with broker.running():
            for key in (broker.keys.rate("t", "g", PHONE), broker.keys.permits("t", "g", PHONE)):
                await ask(broker, "SET", key, "spoiled", "PX", 60_000)
            await broker.publish("t", {"fail": "no"}, key=PHONE)
            await until(lambda: len(lines("begin")) >= 2, "the spoiled records are replaced")
            await broker.publish("t", {"fail": "yes"}, key=PHONE)
            await until(lambda: lines("is held for 1 h by a breaker"), "the breaker holds it")
            shown = [value for each in WorkerMetrics(broker).read() for value in map(str, each.labels)]
            assert "g" in shown
            assert PHONE not in shown
            await broker.hold("t", PHONE, "1s")
            await broker.end_hold("t", PHONE)
    assert all(lines(text) for text in ("no weight", "rate of", "permits of", "failed (attempt 1")), caplog.text
    assert (PHONE in caplog.text) == (how == "whole")


def test_shortened_names_are_alike_and_tell_little() -> None:
    """Two characters, at most a third, and four digits."""
    assert log_names.name_in_log(PHONE) == repr(PHONE)
    try:
        log_names.shorten_names()
        assert re.fullmatch(r"'\+8…[0-9a-f]{4}'", log_names.name_in_log(PHONE))
        assert log_names.name_in_log(PHONE) == log_names.name_in_log(PHONE)
        assert re.fullmatch(r"'a…[0-9a-f]{4}'", log_names.name_in_log("ada"))
        assert re.fullmatch(r"'…[0-9a-f]{4}'", log_names.name_in_log("ab"))
        lost = log_names.text_in_log(str(SessionLost(PHONE)), PHONE)
        assert PHONE not in lost
        assert "'+8…" in lost
        assert "\n" not in log_names.name_in_log("\n" * 9 + "\ud800")
    finally:
        log_names._is_short = False


def test_options_of_spark_name_a_secret() -> None:
    """They travel to every executor: a password is named by variable or file, and refused in the address."""
    option = pytest.importorskip("rsmq.pipeline.format.options")
    with pytest.raises(RsmqError, match=r"passwordEnv|passwordFile") as caught:
        option.read_options({"url": "redis://u:gehe1m@localhost/0", "subscribe": "t"})
    assert "gehe1m" not in str(caught.value)
    assert pickle  # what Spark does with them


def test_settings_hide_the_address() -> None:
    """A dump of the settings in a log shows no address."""
    make: Callable[..., Settings] = Settings
    assert "gehe1m" not in repr(make(url="redis://:gehe1m@localhost"))
