"""The key catalogue: it cannot collide, keeps a partition in one slot, and is what the page for people says."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rsmq.errors import ConfigError
from rsmq.inspector.state import member_state, process_state
from rsmq.model.keys import RESERVED_GROUPS, Keys, check_name, decode_device
from rsmq.model.settings import Settings
from rsmq.model.work import READ_AHEAD_USED, Work
from rsmq.redis.client.connector import Client, Connector
from rsmq.redis.preflight import gather, judge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
ACL = re.findall(r"^ACL SETUSER .*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)[0]
EXAMPLE = {
    "number": 0,
    "topic": "orders",
    "partition": 3,
    "group": "billing",
    "message_id": "<message id>",
    "member": "<member>",
    "name": "<name>",
    "work": "<work>",
    "device": "phone-7",
    "seq": "<seq>",
    "task": "<task id>",
    "request": "<request id>",
    "shard": "<shard>",
    "bucket": "<bucket>",
    "home": "<shard>.<id>",
    "gateway": "<gateway>",
    "token": "<token>",
}

PLACE = ("topic", "partition", "group")


def methods() -> list[str]:
    """The names of the catalogue: each spells one key."""
    found = inspect.getmembers(Keys, inspect.isfunction)
    return [name for name, call in found if name[0] != "_" and inspect.signature(call).return_annotation == "str"]


def spell(keys: Keys, method: str, **values: object) -> str:
    """The key of one method, its parameters taken from `values`."""
    call = getattr(keys, method)
    return str(call(**{name: values[name] for name in inspect.signature(call).parameters}))


def tag(key: str) -> str:
    """The cluster hash tag."""
    found = re.search(r"\{([^}]+)\}", key)
    assert found, f"{key} has no hash tag"
    return found[1]


@pytest.mark.parametrize("name", ["orders", "a", "_", "-x", "A.b-c_9", "x" * 128])
def test_names_that_are_allowed(name: str) -> None:
    """Names of the alphabet are returned as they are."""
    assert check_name("topic", name) == name


@pytest.mark.parametrize(
    "name", ["", ".", ".hidden", "a b", "a:b", "a{b}", "a\n", "grüß", "x" * 129, "a/b", "*", None, 7]
)
def test_names_that_are_refused(name: object) -> None:
    """Everything that could break a key, a pattern or a log line is refused with the rule."""
    with pytest.raises(ConfigError, match="use 1 to 128 of A-Z a-z 0-9"):
        check_name("topic", name)  # type: ignore[arg-type]


def test_reserved_group_names() -> None:
    """A group cannot take the name of a key of its partition; a topic can."""
    for name in RESERVED_GROUPS:
        assert check_name("topic", name) == name
        with pytest.raises(ConfigError, match="is reserved"):
            check_name("group", name)


@given(st.from_regex(r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z"), st.integers(0, 1023))
def test_a_partition_is_one_slot(topic: str, partition: int) -> None:
    """Stream, delayed, dedup, unique, marks, removed, archived, jobs, every, relayed, lease, retry, waits, calls,
    errors, cancels, cancelled, dlq, handed_on and out share a tag."""
    values = {**EXAMPLE, "topic": topic, "partition": partition}
    of_partition = [m for m in methods() if "partition" in inspect.signature(getattr(Keys, m)).parameters]
    assert {tag(spell(Keys(), method, **values)) for method in of_partition} == {f"{topic}.{partition}"}
    assert len(of_partition) == 23


def test_no_two_keys_collide() -> None:
    """Different things never have one key, with the names most apt to clash."""
    seen: dict[str, tuple[object, ...]] = {}
    names = ["t", "t.1", "1", "topic", "topics", "presence"]
    groups = ["g", "lease", "retry", "errors", "dlq", "out", "alive", "changes", "nodes", "set"]
    ids = ["g", "lease", "g:lease", "dedup", "g:alive:nodes:x"]
    for topic, partition, group, message_id, member in itertools.product(names, (1, 11), groups, ids, ("x", "y:z")):
        values = {"topic": topic, "partition": partition, "group": group, "message_id": message_id, "member": member,
                  "name": "string", "work": "work", "number": partition, "device": f"{topic}.{partition}",
                  "seq": partition, "shard": partition, "bucket": partition, "gateway": member,
                  "home": f"{partition}.{member[0]}",
                  "task": message_id, "request": message_id, "token": message_id}  # fmt: skip
        for method in methods():
            used = tuple(values[name] for name in inspect.signature(getattr(Keys, method)).parameters if name != "self")
            thing = (method, *used)
            assert seen.setdefault(spell(Keys(), method, **values), thing) == thing


def test_all_that_a_group_has_in_a_partition_is_known_to_who_deletes_it() -> None:
    """Beside results, which are found by a scan: their names have the id of a message."""
    of_group = [m for m in methods() if [*inspect.signature(getattr(Keys, m)).parameters][1:] == [*PLACE]]
    found = Keys().of_group(*(EXAMPLE[name] for name in PLACE))  # type: ignore[arg-type]
    assert sorted(found) == sorted(spell(Keys(), method, **EXAMPLE) for method in of_group)


@given(st.text(min_size=1, max_size=60))
def test_a_device_is_one_slot(device: str) -> None:
    """For any id, all keys of a device share one hash tag, and the id can be read back from it."""
    assume(is_encodable(device))
    of_device = [m for m in methods() if "device" in inspect.signature(getattr(Keys, m)).parameters]
    tags = {tag(spell(Keys(), method, **{**EXAMPLE, "device": device})) for method in of_device}
    assert {decode_device(each) for each in tags} == {device}
    assert len(of_device) == 7
    assert Keys().device(device) == tuple(
        spell(Keys(), method, device=device) for method in ("inbox", "session", "expiry", "wake")
    )


def is_encodable(device: str) -> bool:
    """Whether it is Unicode that can be sent, and short enough."""
    return not any("\ud800" <= char <= "\udfff" for char in device) and len(device.encode()) <= 256


@pytest.mark.parametrize("device", ["", "x" * 257, "\ud800", None, 7, b"phone"])
def test_devices_that_are_refused(device: object) -> None:
    """Only text of 1 to 256 bytes can be an id."""
    with pytest.raises(ConfigError, match=r"^device id .*(use|Unicode)"):
        Keys().session(device)  # type: ignore[arg-type]


@given(st.text(alphabet="{}%AB0", min_size=1, max_size=8), st.text(alphabet="{}%AB0", min_size=1, max_size=8))
def test_no_device_reaches_the_keys_of_another(one: str, other: str) -> None:
    """Two ids never have a key in common, however they are made of braces and percent signs."""
    assert (one == other) == (set(Keys().device(one)) == set(Keys().device(other)))


def test_every_key_has_the_prefix() -> None:
    """Two prefixes never meet."""
    assert Keys("a").topics == "a:topics"
    assert all(spell(Keys("a"), method, **EXAMPLE).startswith("a:") for method in methods())


@pytest.mark.parametrize("method", methods())
def test_the_page_names_every_key(method: str) -> None:
    """The catalogue for people holds each key as the code spells it."""
    assert f"| `{spell(Keys(), method, **EXAMPLE)}` |" in PAGE


def test_the_page_names_what_members_say_about_themselves() -> None:
    """Each field of the heartbeat and of the vitals that the inspector reads."""
    read = inspect.getsource(member_state) + inspect.getsource(process_state)
    named = set(re.findall(r'(?:about|vital)(?:\.get\(|\[)"([a-z_]+)"', read)) | {"unreadable", "outputs_wait_for"}
    named |= {READ_AHEAD_USED, *(field.name for field in dataclasses.fields(Work))}
    assert len(named) > 30
    assert {name for name in named if f"`{name}`" not in PAGE} == set()


def test_the_page_names_the_set_of_topics() -> None:
    """The one key without parameters is in it, too."""
    assert f"| `{Keys().topics}` |" in PAGE


def test_the_page_names_no_key_of_its_own() -> None:
    """Each key of the page exists in the code."""
    spelled = {spell(Keys(), method, **EXAMPLE) for method in methods()}
    spelled |= {
        Keys().topics,
        Keys().deployment,
        Keys().schedules,
        Keys().outboxes,
        Keys().gateways,
        Keys().bans,
        Keys().sweep,
        Keys().broadcast,
        Keys().history,
        Keys().audit,
    }
    assert set(re.findall(r"^\| `(rsmq:[^`]+)` \|", PAGE, re.MULTILINE)) == spelled


def test_channels_of_another_database_carry_its_number() -> None:
    """Keys belong to a database, channels to the server: only those that a script derives from a key have no number."""
    for method in methods():
        name, in_third = spell(Keys(), method, **EXAMPLE), spell(Keys(database=3), method, **EXAMPLE)
        is_channel = re.match(r"Channel|Sharded channel", getattr(Keys, method).__doc__) and method != "wake"
        assert in_third == (f"{name}@3" if is_channel else name)
    assert Keys(database=3).broadcast == f"{Keys().broadcast}@3"


def test_the_page_grants_every_command() -> None:
    """Every command in a script or in the code is in the ACL of the page."""
    granted = {command.split("|")[0] for command in re.findall(r"\+([a-z|]+)", ACL)}
    lua = "".join(path.read_text() for path in (ROOT / "rsmq" / "redis" / "lua").rglob("*.lua"))
    code = "".join(path.read_text() for path in (ROOT / "rsmq").rglob("*.py"))
    used = re.findall(r"(?:\bp?call|try)\('([A-Z]+)'", lua) + re.findall(
        r"(?:execute_command|pack\()\(\s*\"([A-Z]+)", code
    )
    assert "XADD" in used
    assert {command.lower() for command in used} - granted == set()


async def test_the_acl_of_the_page_is_enough(client: Client, settings: Settings, server_url: str, prefix: str) -> None:
    """A user made as the page says passes every question of the preflight, and reaches no other key."""
    rules = ACL.replace("rsmq:", f"{prefix}:").split()
    user, rules = f"u-{prefix}", rules[rules.index("resetkeys") :]
    await client.execute_command("ACL", "SETUSER", user, "on", ">secret", *rules)
    try:
        url = server_url.replace("://", f"://{user}:secret@")
        async with Connector(url, settings).connected() as restricted:
            findings = judge(await gather(restricted, Keys(prefix)))
            assert [str(finding) for finding in findings if finding.level == "refuse"] == []
            with pytest.raises(ConfigError, match=r"docs/keys\.md"):
                await restricted.execute_command("GET", "other")
    finally:
        await client.execute_command("ACL", "DELUSER", user)


def test_page_says_what_every_script_does_when_it_runs_twice() -> None:
    """An answer can get lost after the server has run the script, so each has to be safe or its caller has to know."""
    _, _, section = PAGE.partition("## Scripts that run twice")
    named = set(re.findall(r"`([a-z_]+)`", section.partition("\n## ")[0]))
    lua = ROOT / "rsmq" / "redis" / "lua"
    assert {path.stem for path in {*lua.rglob("*.lua")} - {*(lua / "shared").glob("*")}} <= named
