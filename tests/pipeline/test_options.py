"""Options: what is allowed is understood, everything else is refused with one line that helps. No Spark is started."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from rsmq.errors import ConfigError
from rsmq.pipeline.format import options as option
from rsmq.pipeline.format.option_reader import Bounds
from rsmq.pipeline.format.options import Access, TopicSelection, read_options, with_password, write_options

URL = {"url": "redis://localhost:6379/0"}
READ = {**URL, "subscribe": "orders"}
WRITE = {**URL, "topic": "orders"}


def test_read_options_have_defaults() -> None:
    """The defaults of Spark's Kafka source: everything, loss is an error, no headers."""
    options = read_options(READ)
    assert options.selection == TopicSelection(topics=("orders",))
    assert (options.start, options.end) == (None, None)
    assert (options.max_offsets, options.min_partitions, options.fetch_size) == (0, 0, 5000)
    assert options.fail_on_data_loss
    assert not options.include_headers
    assert options.access == Access("redis://localhost:6379/0", "rsmq")


def test_read_options_are_parsed() -> None:
    """Names in any case, as Spark hands them over."""
    options = read_options(
        {
            **URL, "PREFIX": "p", "passwordenv": "REDIS_PASSWORD", "subscribepattern": "or.*",
            "startingOFFSETS": '{"orders": {"0": "5-1", "1": -2}}', "endingTimestamp": "1970-01-01T00:00:01+00:00",
            "maxOffsetsPerTrigger": "10", "minPartitions": "4", "failOnDataLoss": "FALSE", "includeHeaders": "true",
            "fetchSize": "77",
        }
    )  # fmt: skip
    assert options.access == Access("redis://localhost:6379/0", "p", "REDIS_PASSWORD")
    assert options.selection == TopicSelection(pattern="or.*")
    assert options.start == Bounds("earliest", (("orders", 0, "5-1"), ("orders", 1, "earliest")))
    assert options.end is not None
    assert options.end.of("orders", 3) == "999-18446744073709551615"
    assert (options.max_offsets, options.min_partitions, options.fetch_size) == (10, 4, 77)
    assert not options.fail_on_data_loss
    assert options.include_headers


@pytest.mark.parametrize("text", ["1000", "1970-01-01T00:00:01Z", "1970-01-01T09:00:01+09:00"])
def test_a_time_may_be_iso_or_milliseconds(text: str) -> None:
    """Both ways to say one moment mean the same: after the last entry before it."""
    options = read_options({**READ, "startingTimestamp": text})
    assert options.start == Bounds("999-18446744073709551615", has_times=True)


def test_subscribe_takes_several_topics() -> None:
    """Separated by commas; a name that occurs twice is read once."""
    assert read_options({**URL, "subscribe": "a, b,a"}).selection == TopicSelection(topics=("a", "b"))


def test_assign_takes_partitions() -> None:
    """Single partitions of topics."""
    selection = read_options({**URL, "assign": '{"b": [2, 0, 2], "a": [1]}'}).selection
    assert selection == TopicSelection(partitions=(("a", (1,)), ("b", (0, 2))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"subscirbe": "a"}, "unknown option 'subscirbe'. Did you mean subscribe?"),
        ({"xyzzy": "1"}, "unknown option 'xyzzy'. Use one of url, prefix"),
        ({"topic": "a"}, "the option 'topic' does not belong to a read"),
        ({"path": "/x"}, "rsmq has no path"),
        ({"password": "x"}, "Use passwordEnv or passwordFile"),
        ({"url": "redis://u:secret@h/0"}, "contains a password"),
        ({"url": "http://h"}, "is not understood: use redis://"),
        ({"url": "redis://h?protocol=3"}, "may not have the option 'protocol'"),
        ({"prefix": "a b"}, "RSMQ_PREFIX"),
        ({"passwordEnv": "A", "passwordFile": "b"}, "not both"),
        ({"passwordEnv": "RSMQ_PASSWORD"}, "choose another, such as REDIS_PASSWORD"),
        ({"subscribePattern": "a"}, r"exactly one of .* \(subscribe and subscribePattern given\)"),
        ({"subscribe": ""}, "the option 'subscribe' is empty"),
        ({"subscribe": "a b"}, "topic name 'a b' is not allowed"),
        ({"startingOffsets": "newest"}, "startingOffsets='newest' is not valid: use a JSON object, such as"),
        ({"startingOffsets": '{"orders": 5}'}, "needs an object of partition numbers"),
        ({"startingOffsets": '{"orders": {"x": "1-0"}}'}, "needs an object of partition numbers"),
        ({"startingOffsets": '{"orders": {"0": "x"}}'}, "orders.0 needs earliest, latest or a stream id"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "startingOffsets or startingTimestamp, not both"),
        ({"endingOffsets": "earliest"}, "endingOffsets=earliest reads nothing"),
        ({"startingTimestamp": "yesterday"}, "is not a valid time: use 2026"),
        ({"startingTimestamp": "2026-05-01T12:00:00"}, "has no time zone"),
        ({"maxOffsetsPerTrigger": "0"}, "use a whole number from 1"),
        ({"minPartitions": "many"}, "use a whole number from 1"),
        ({"fetchSize": "-1"}, "use a whole number from 1"),
        ({"failOnDataLoss": "maybe"}, "use true or false"),
        ({"includeHeaders": "1"}, "use true or false"),
    ],
)  # fmt: skip
def test_a_wrong_read_option_is_refused_in_one_line(change: dict[str, str], words: str) -> None:
    """One line that says what is wrong and what would be right."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_options({**READ, **change})
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_read_needs_a_topic() -> None:
    """Nothing chosen is not everything."""
    with pytest.raises(ConfigError, match="give exactly one of subscribe"):
        read_options(URL)


@pytest.mark.parametrize("text", ["[1]", "{}", '{"a": []}', '{"a": [-1]}', '{"a": [true]}', '{"a b": [1]}', "x"])
def test_a_wrong_assign_is_refused(text: str) -> None:
    """Only an object of lists of partition numbers."""
    with pytest.raises(ConfigError, match=r"assign|not allowed"):
        read_options({**URL, "assign": text})


def test_a_wrong_pattern_is_refused() -> None:
    """What is not a regular expression is refused before anything is read."""
    with pytest.raises(ConfigError, match="is not a regular expression"):
        read_options({**URL, "subscribePattern": "("})


def test_write_options_are_parsed() -> None:
    """A write by mark, and one by message id."""
    options = write_options({**WRITE, "idempotence": "MARKER", "jobId": "nightly", "checkpointLocation": "/x"})
    assert (options.topic, options.target, options.idempotence, options.job_id) == (
        "orders",
        "topic",
        "marker",
        "nightly",
    )
    options = write_options({**URL, "idempotence": "dedupe", "dedupeWindow": "PT10M"})
    assert (options.topic, options.dedupe_window) == (None, timedelta(minutes=10))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"idempotence": "markr"}, "idempotence='markr' is not valid. Did you mean marker?"),
        ({"target": "x"}, "target='x' is not valid. Use one of topic, inbox"),
        ({"idempotence": "marker"}, 'needs "jobId"'),
        ({"jobId": "x"}, '"jobId" belongs to idempotence=marker'),
        ({"idempotence": "marker", "jobId": "a|b"}, "job name 'a|b' is not allowed"),
        ({"target": "inbox", "idempotence": "dedupe"}, "goes with idempotence=none or marker, not dedupe"),
        ({"expires": "PT1H"}, "belongs to target=inbox"),
        ({"topic": "a:b"}, "topic name 'a:b' is not allowed"),
        ({"subscribe": "a"}, "the option 'subscribe' does not belong to a write"),
        ({"idempotence": "dedupe", "dedupeWindow": "10"}, "is not a valid duration: use 5s"),
        ({"idempotence": "dedupe", "dedupeWindow": "-PT1S"}, "is not a valid duration: use 5s"),
        ({"dedupeWindow": "PT1S"}, "belongs to idempotence=dedupe"),
        ({"ratePerTask": "0"}, "use messages a second, such as 100 or 0.5"),
        ({"ratePerTask": "5", "target": "inbox"}, "belongs to target=topic"),
    ],
)
def test_a_wrong_write_option_is_refused_in_one_line(change: dict[str, str], words: str) -> None:
    """One line that says what is wrong and what would be right."""
    with pytest.raises(ConfigError, match=words.replace("|", r"\|")) as caught:
        write_options({**WRITE, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://h:1/0", "redis://:p%40w@h:1/0"),
        ("rediss://me@h:1/0?ssl_cert_reqs=none", "rediss://me:p%40w@h:1/0?ssl_cert_reqs=none"),
        ("redis+sentinel://a:1,b:2/master", "redis+sentinel://:p%40w@a:1,b:2/master"),
        ("redis+cluster://me@a:1,b:2", "redis+cluster://me:p%40w@a:1,b:2"),
        ("unix:///run/x.sock", "unix://:p%40w@/run/x.sock"),
    ],
)
def test_a_password_is_put_into_the_url(url: str, whole: str) -> None:
    """With every scheme the user and the rest of the URL stay the same."""
    assert with_password(url, "p@w") == whole


def test_a_password_comes_from_a_variable_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a variable or a file of the machine that connects; each missing one is named."""
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"passwordFile=.*No such file"):
        Access("redis://h/0", "p", password_file=str(file)).settings()
    file.write_text("from file\n")
    assert Access("redis://h/0", "p", password_file=str(file)).settings().url == "redis://:from%20file@h/0"
    with pytest.raises(ConfigError, match="this variable is not set on this machine"):
        Access("redis://h/0", "p", password_env="SECRET").settings()
    monkeypatch.setenv("SECRET", "from env")
    assert Access("redis://h/0", "p", password_env="SECRET").settings().url == "redis://:from%20env@h/0"


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option each machine uses its own RSMQ_URL, which may hold a password: it is not sent around."""
    access = read_options({"subscribe": "orders"}).access
    assert access.url is None
    with pytest.raises(ConfigError, match=r"does not run: start it with `rsmq server`"):
        access.settings()
    monkeypatch.setenv("RSMQ_URL", "redis://:secret@h/0")
    assert access.settings().url == "redis://:secret@h/0"
    assert "secret" not in repr(access)


def test_the_page_names_every_option() -> None:
    """The tables of the page and the options of the code are the same, for reads and for writes."""
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    reads, writes = (
        {name for row in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
        for table in re.findall(r"^\| option \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    )
    assert (reads, writes) == (set(option.READ), set(option.WRITE))


def test_empty_password_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret that is empty on this machine would be no password; the line end of its file is not part of it."""
    monkeypatch.setenv("SECRET", "")
    with pytest.raises(ConfigError, match="passwordEnv=SECRET: the password is empty"):
        Access("redis://h/0", "p", password_env="SECRET").settings()
    monkeypatch.setenv("SECRET", "of a file\n")
    assert Access("redis://h/0", "p", password_env="SECRET").settings().url == "redis://:of%20a%20file@h/0"
    (file := tmp_path / "secret").write_text("\n")
    with pytest.raises(ConfigError, match="the password is empty"):
        Access("redis://h/0", "p", password_file=str(file)).settings()


def test_quotes_and_line_ends_are_not_part_of_an_option() -> None:
    """An option that comes from the environment of an application."""
    options = read_options({"url": "'redis://h/0'\n", "prefix": '"p"', "subscribe": " orders\n"})
    assert (options.access.url, options.access.prefix, options.selection.topics) == ("redis://h/0", "p", ("orders",))


def test_a_write_names_a_band_of_its_topic() -> None:
    """Not letters, and not what is restored where it was."""
    assert write_options({**WRITE, "band": "bulk"}).band == "bulk"
    assert write_options(WRITE).band is None
    for wrong in ({"band": "Bulk!"}, {"band": "bulk", "idempotence": "id"}, {"band": "bulk", "target": "inbox"}):
        with pytest.raises(ConfigError, match="band"):
            write_options({**URL, "topic": "orders", **wrong} if "target" not in wrong else {**URL, **wrong})
