"""Commands and encoded payloads: read with the keys of the environment, otherwise named; and no key is ever shown."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import anyio
import pytest
from sqlalchemy import create_engine

from rsmq import Broker, Message, Reject, Settings
from rsmq.cli.keys import ELSEWHERE
from rsmq.codecs import Encrypt, Keyring, Offload, Zstd
from rsmq.gateway.fleet.message import Published
from rsmq.gateway.fleet.retained import Retained, stamp
from rsmq.inspector.key_status import KINDS
from rsmq.model.kept_result import KeptResult
from rsmq.sql import Outbox, create_tables
from tests.cli.conftest import Cli, Running
from tests.contract.witness import ask, dies, letters_of
from tests.patience import until

KEY, OTHER = b"\x11" * 32, b"\x22" * 32
KEYS = f"k1={b64encode(KEY).decode()}"
APP = """
from rsmq import Broker
from rsmq.codecs import Encrypt, Keyring, Zstd

broker = Broker(codecs=[Zstd(), Encrypt(Keyring.from_env("RSMQ_KEYS"))])

@broker.handler("orders", group="billing")
async def bill(order: dict) -> None:
    raise ValueError("no")
"""
SHOWN = [KEYS[3:20], KEY.hex(), repr(KEY)[2:20]]


@pytest.fixture
def broker(server_url: str, prefix: str) -> Broker:
    """Publishes with the key `k1`, and makes every message a dead letter."""
    keyring = Keyring({"k1": KEY})
    made = Broker(Settings(url=server_url, prefix=prefix, preflight="warn"), codecs=[Zstd(), Encrypt(keyring)])

    @made.handler("orders", group="billing", partitions=2)
    async def bill(order: dict[str, Any]) -> None:
        raise Reject("no stock")

    return made


async def test_commands_read_with_the_keys_of_the_environment(broker: Broker, cli: Cli) -> None:
    """`tail`, `dlq show`, `message show`, `message find --where`, `schema check`; without the key they name it."""
    (cli.directory / "app.py").write_text(APP)
    async with broker, broker.running():
        ref = await broker.publish("orders", {"n": 7, "to": "ada"}, key="c-1")
        await dies(broker, "orders", "billing", 1)

    async def both(*args: str) -> tuple[str, str]:
        with_key = await anyio.to_thread.run_sync(partial(cli, *args, RSMQ_KEYS=KEYS))
        without = await anyio.to_thread.run_sync(partial(cli, *args))
        for each in (with_key, without):
            assert not [secret for secret in SHOWN if secret in each.stdout + each.stderr], args
        assert "Traceback" not in with_key.stderr + without.stderr
        return with_key.stdout, without.stdout

    found, sealed = await both("tail", "orders")
    assert '{"n":7,"to":"ada"}' in found
    assert "(encrypted (k1))" in sealed
    assert "ada" not in sealed
    found, sealed = await both("tail", "orders", "--json")
    assert (json.loads(found)["data"], json.loads(sealed)["data"]) == ({"n": 7, "to": "ada"}, None)
    assert json.loads(sealed)["sealed"] == "encrypted (k1)"
    letters = json.loads((await both("dlq", "list", "orders", "billing", "--json"))[0])
    found, sealed = await both("dlq", "show", "orders", "billing", letters[0]["id"])
    assert 'data: {"n":7' in found
    assert "data: (encrypted (k1))" in sealed
    found, sealed = await both("message", "show", str(ref), "--topic", "orders")
    assert 'data: {"n":7' in found
    assert "data: (encrypted (k1))" in sealed
    found, sealed = await both("message", "find", "orders", "--where", "n=7", "--json")
    assert [len(json.loads(each)) for each in (found, sealed)] == [1, 0]
    found, sealed = await both("dlq", "list", "orders", "billing", "--where", "to=ada", "--json")
    assert [len(json.loads(each)) for each in (found, sealed)] == [1, 0]
    for command in (["dlq", "list"], ["dlq", "replay", "--dry-run"], ["dlq", "replay"]):
        at = ["orders", "billing", "--where", "to=ada"]
        without = await anyio.to_thread.run_sync(partial(cli, *command[:2], *at, *command[2:]))
        assert "the payload of 1 dead letter could not be read, so its fields are unknown" in without.stderr, command
        assert "(encrypted (k1): 1): see RSMQ_KEYS" in without.stderr
        assert without.returncode == 0
    without = await anyio.to_thread.run_sync(partial(cli, "message", "find", "orders", "--where", "n=7"))
    assert "the payload of 1 message could not be read" in without.stderr
    other = f"k2={b64encode(OTHER).decode()}"
    check = await anyio.to_thread.run_sync(partial(cli, "schema", "check", "app:broker", RSMQ_KEYS=other))
    assert check.returncode == 1
    assert "needs the key k1" in check.stdout


def test_a_wrong_key_is_a_sentence(cli: Cli) -> None:
    """Not a traceback, and the text of the variable is not in it."""
    (cli.directory / "app.py").write_text(APP)
    done = cli("worker", "app:broker", RSMQ_KEYS=f"{KEYS[3:]}=k1")
    assert done.returncode == 2
    assert "RSMQ_KEYS: key 1 has no id in front of it" in done.stderr
    assert not [secret for secret in SHOWN if secret in done.stdout + done.stderr]


async def test_a_worker_and_the_doctor_show_no_key(broker: Broker, cli: Cli, start: Callable[..., Running]) -> None:
    """The log of a worker at `debug`, its tracebacks, and what the doctor says of a key that is missing."""
    (cli.directory / "app.py").write_text(APP)
    other = b64encode(OTHER).decode()
    cli.environment["RSMQ_KEYS"] = f"k2={other}"
    running = await anyio.to_thread.run_sync(lambda: start("worker", "app:broker", "--log-level", "debug"))
    async with broker:
        await broker.publish("orders", {"n": 1})
        async with Broker(
            Settings(url=broker.settings.url, prefix=broker.settings.prefix, preflight="warn"),
            codecs=[Encrypt(Keyring({"k2": OTHER}))],
        ) as second:
            await second.publish("orders", {"n": 2})
    await anyio.to_thread.run_sync(running.expect, "messages wait for the key k1")
    await anyio.to_thread.run_sync(running.expect, "ValueError: no")
    said = ""
    with anyio.fail_after(60):
        while "need the key k1" not in said:
            doctor = await anyio.to_thread.run_sync(partial(cli, "doctor"))
            said = " ".join(doctor.stdout.split())
            await anyio.sleep(0.05)
    members = await anyio.to_thread.run_sync(partial(cli, "member", "list", "orders", "--json"))
    assert "key k1" in dict(json.loads(members.stdout)[0]["missing_keys"])
    text = "\n".join(running.lines) + doctor.stdout + doctor.stderr + members.stdout
    assert not [secret for secret in (*SHOWN, other[:17], OTHER.hex()) if secret in text]


async def test_keys_status_counts_each_key_where_it_is(broker: Broker, cli: Cli, tmp_path: Path) -> None:
    """Backlog, parked, delayed, dead and kept messages, and rows of an outbox: of which key, and which are here."""
    settings = Settings(url=broker.settings.url, prefix=broker.settings.prefix, preflight="warn")
    old = Broker(settings, codecs=[Encrypt(Keyring({"k0": OTHER}))])
    database = f"sqlite:///{tmp_path / 'o.db'}"
    engine = create_engine(database)
    with engine.begin() as link:
        create_tables(link)
        Outbox(engine, prefix="p", codecs=[Encrypt(Keyring({"k9": OTHER}))]).publish(link, "orders", {"n": 1})
    engine.dispose()
    async with broker:
        async with broker.running():
            await broker.publish("orders", {"n": 1})
            await dies(broker, "orders", "billing", 1)
            async with old:
                await old.publish("orders", {"n": 2})
            (consumer,) = broker.worker.consumers if broker.worker is not None else ()
            await until(lambda: "key k0" in consumer.missing_keys, "it is parked")
        async with old:
            await old.publish("orders", {"n": 3}, delay="1d")
        await broker.publish_many("orders", [{"n": 4}, {"n": 5}])
        await broker.schedules.upsert("hourly", "1h", "orders", {"n": 6})
        kept = KeptResult(b"x", "application/json", "a256gcm=k5")
        steps, result = (broker.keys.steps("orders", 0, "billing"), broker.keys.result("orders", 0, "billing", "m-1"))
        await broker.client.execute_command("HSET", steps, "m-1|charge", kept.write(), "1-0", "charge")
        await broker.client.execute_command("SET", result, kept.write())
        stream = broker.keys.stream("orders", 0)
        await broker.client.execute_command("XADD", stream, "*", "data", "{}")
    run = partial(cli, "keys", "status", "orders", "--outbox", database, "--results", RSMQ_KEYS=KEYS)
    done = await anyio.to_thread.run_sync(lambda: run("--json"))
    assert done.returncode == 0, done.stderr
    found = {each.pop("key"): each for each in json.loads(done.stdout)}
    nothing = dict.fromkeys((*KINDS, *ELSEWHERE), 0)
    assert found == {
        "k1": nothing | {"backlog": 2, "dead_letters": 1, "schedules": 1, "kept": 1, "here": True},
        "k5": nothing | {"steps": 1, "results": 1, "here": False},
        "k0": nothing | {"parked": 1, "delayed": 1, "here": False},
        "k9": nothing | {"outbox": 1, "here": False},
        None: nothing | {"backlog": 1, "here": False},
    }
    text = (await anyio.to_thread.run_sync(run)).stdout
    assert "(not encrypted)" in text
    assert "Not looked at: archives" in text
    assert not [secret for secret in SHOWN if secret in text + done.stdout]
    assert (await anyio.to_thread.run_sync(partial(cli, "keys", "status", "nothing"))).returncode == 1


async def test_letters_are_shown_with_the_key_and_named_without_it(broker: Broker, cli: Cli) -> None:
    """`device show`, `retained list`, `keys status --devices`; `device tail` acknowledges none that it cannot show."""
    async with broker:
        await broker.publish("orders", {"n": 1})
        await broker.send("phone-42", {"to": "ada"}, topic="orders")
        batcher = broker._connection.inboxes.batcher
        retained = Retained(broker.client, broker.keys, batcher, 10, lambda _: broker.encoding)
        await retained.keep(Published("house/door", b"open-secret", 1, True, "c", None, b""), stamp(b"1-1"))

    async def both(*args: str) -> tuple[CompletedProcess[str], CompletedProcess[str]]:
        with_key = await anyio.to_thread.run_sync(partial(cli, *args, RSMQ_KEYS=KEYS))
        return with_key, await anyio.to_thread.run_sync(partial(cli, *args))

    counted, _ = await both("keys", "status", "orders", "--devices", "--json")
    (use,) = json.loads(counted.stdout)
    assert (use["key"], use["letters"], use["retained"], use["wills"], use["here"]) == ("k1", 1, 1, 0, True)
    for command, secret in ((("device", "show", "phone-42"), "ada"), (("retained", "list"), "open-secret")):
        shown, sealed = await both(*command)
        assert secret in shown.stdout
        assert "(encrypted (k1))" in sealed.stdout
        assert secret not in sealed.stdout
    sealed = (await both("device", "show", "phone-42", "--json"))[1]
    assert json.loads(sealed.stdout)["letters"][0]["sealed"] == "encrypted (k1)"
    refused = await anyio.to_thread.run_sync(partial(cli, "device", "tail", "--client", "phone-42", "-n", "1"))
    assert refused.returncode == 1
    assert "needs the key k1" in refused.stderr
    tail = partial(cli, "device", "tail", "--client", "phone-42", "-n", "1", RSMQ_KEYS=KEYS)
    assert "ada" in (await anyio.to_thread.run_sync(tail)).stdout


WRITING = (
    ("publish", "orders", '{"to": "ada"}'),
    ("schedule", "add", "orders", "hourly", '{"to": "ada"}', "--every", "1h"),
    ("device", "send", "phone-42", '{"to": "ada"}'),
)


@pytest.mark.parametrize("command", WRITING, ids=lambda command: command[0])
async def test_a_command_stores_what_it_writes_as_the_newest_entry_is(
    broker: Broker, cli: Cli, command: tuple[str, ...]
) -> None:
    """Beside encrypted entries it needs the keys, or `--plain`; where there are none, keys decide."""

    async def stored() -> bytes:
        entries = await ask(broker, "XREVRANGE", broker.keys.stream("orders", 0), "+", "-", "COUNT", 1)
        added = await ask(broker, "HVALS", broker.keys.every("orders", 0))
        letters = await ask(broker, "ZREVRANGE", broker.keys.inbox("phone-42"), 0, 0)
        found = [part for _, fields in entries for part in fields] + [each for each in added if b"payload" in each]
        found += [await ask(broker, "GET", broker.keys.letter("phone-42", int(each))) for each in letters]
        return b" ".join(found).replace(b64encode(b'{"to":"ada"}'), b"ada")

    async def run(*more: str, **environment: str) -> CompletedProcess[str]:
        return await anyio.to_thread.run_sync(partial(cli, *command, *more, **environment))

    async with broker:
        await broker.topics.ensure("orders", 1)
        for _ in range(2):  # the first time there is nothing
            done = await run(RSMQ_KEYS=KEYS)
            assert done.returncode == 0, done.stderr
            assert (b"a256gcm=k1" in await stored(), b"ada" in await stored()) == (True, False)
            await broker.publish("orders", {"n": 1})
            await broker.send("phone-42", {"n": 1})
        refused = await run()
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False), refused.stderr
        said = " ".join(refused.stderr.split())
        assert "is encrypted (key k1), and there are no keys here: set RSMQ_KEYS" in said
        assert "add --plain to store it readable" in said
        assert b"ada" not in await stored()
        assert (await run("--plain", RSMQ_KEYS=KEYS)).returncode == 0
        assert b"ada" in await stored()
        if command[0] != "schedule":
            assert (await run(RSMQ_KEYS=KEYS)).returncode == 0
            assert b"ada" in await stored(), "now the newest one is readable"


async def test_a_worker_that_is_killed_while_messages_wait_for_a_key_is_charged_once(
    broker: Broker, cli: Cli, start: Callable[..., Running]
) -> None:
    """SIGKILL, three times; then a worker with the key handles all of them, in the order of their key. What waits has
    not started, so only the start after the last takeover is charged, however often workers die before."""
    (cli.directory / "app.py").write_text(APP)
    cli.environment["RSMQ_KEYS"] = f"k2={b64encode(OTHER).decode()}"
    settings = Settings(url=broker.settings.url, prefix=broker.settings.prefix, preflight="warn")
    both = Broker(settings, codecs=[Encrypt(Keyring({"k1": KEY, "k2": OTHER}))])
    seen = list[tuple[int, int]]()

    @both.handler("orders", group="billing", partitions=2)
    async def take(order: dict[str, Any], message: Message) -> None:
        seen.append((order["n"], message.attempt))

    publisher = Broker(settings, codecs=[Encrypt(Keyring({"k1": KEY}))])
    async with publisher:
        await publisher.topics.ensure("orders", 2)
        for n in range(6):
            await publisher.publish("orders", {"n": n}, key="a" if n % 2 else None)
    for _ in range(3):
        running = await anyio.to_thread.run_sync(lambda: start("worker", "app:broker"))
        await anyio.to_thread.run_sync(running.expect, "messages wait for the key k1")
        await anyio.to_thread.run_sync(running.kill)
    async with both, both.running():
        await until(lambda: len(seen) == 6, "all are handled")
        assert await letters_of(both, "orders", "billing") == []
    assert [n for n, _ in seen if n % 2] == [1, 3, 5]
    assert {attempt for _, attempt in seen} <= {1, 2}


async def test_commands_read_the_store_that_the_environment_names(cli: Cli, settings: Settings, tmp_path: Path) -> None:
    """`tail` shows a large payload, or where it lies; `rsmq bodies` counts, says what is lost, and asks before it
    sweeps."""
    folder = tmp_path / "bodies"
    plain = Broker(Settings(url=settings.url, prefix=settings.prefix, preflight="warn"))
    large = Broker(plain.settings, offload=Offload(folder, above="1kB"))
    async with large:
        await large.publish("orders", {"n": 7, "x": "x" * 2000})

    async def run(*args: str, **env: str) -> Any:
        return await anyio.to_thread.run_sync(partial(cli, *args, **env))

    tail = ("tail", "orders", "-n", "1", "--json")
    assert '"n":7' in (await run(*tail, RSMQ_BODIES=str(folder))).stdout.replace(" ", "")
    assert "in the store of bodies (ref)" in (await run(*tail)).stdout
    found = await run("bodies", "status", "--json", RSMQ_BODIES=str(folder))
    (row,) = json.loads(found.stdout)
    assert (row["topic"], row["bodies"], row["named"], row["lost"]) == ("orders", 1, 1, [])
    assert "which store?" in (await run("bodies", "status")).stderr
    refused = await run("bodies", "sweep", "--store", str(folder), "--keep", "1h", "--yes")
    assert (refused.returncode, "at least 6 hours" in refused.stderr) == (2, True)
    swept = await run("bodies", "sweep", "--store", str(folder), "--yes")
    assert (swept.returncode, "orders" in swept.stdout) == (0, True)
    (body,) = folder.glob("*/orders/*")
    body.unlink()
    await anyio.to_thread.run_sync((body.parent / body.name.replace("a", "b")).touch)
    lost = await run("bodies", "status", "--store", str(folder))
    assert (lost.returncode, f"an entry names {body.parents[1].name}/orders/{body.name}" in lost.stdout) == (1, True)
