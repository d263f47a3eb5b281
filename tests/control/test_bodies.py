"""The sweep of bodies: what an entry names stays, wherever the entry goes meanwhile, and the rest goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rsmq import Broker, Message, Reject, Retry, RetryPolicy, Settings
from rsmq.codecs import Offload
from rsmq.control import Bodies
from rsmq.control import bodies as module
from rsmq.errors import BrokerError, StoreUnavailable
from rsmq.redis.identity import deployment_id
from rsmq.redis.scripts import BURY_MESSAGE, RELEASE_DELAYED, REPLAY_DEAD_LETTER
from rsmq.redis.streams import trim
from tests.codecs.stores import MemoryStore
from tests.contract.witness import ask, dies
from tests.patience import until

pytestmark = pytest.mark.usefixtures("no_task_left")
NEVER = timedelta(0)
LARGE = b"x" * 2000


@pytest.fixture
def store() -> MemoryStore:
    """The store of a test."""
    return MemoryStore()


@pytest.fixture
def broker(settings: Settings, store: MemoryStore) -> Broker:
    """One that puts more than 1 kB into it."""
    return Broker(replace(settings, preflight="warn", partitions=1), offload=Offload(store, above="1kB"))


def bodies_of(broker: Broker, kind: type[Bodies] = Bodies, **options: Any) -> Bodies:
    """The sweep without a wait, if nothing else is said."""
    offload = broker.encoding.bodies
    assert isinstance(offload, Offload)
    return kind(broker.client, broker.keys, broker.topics, offload, **{"keep": NEVER, "grace": NEVER, **options})


def store_of(broker: Broker) -> MemoryStore:
    """The store of a broker."""
    offload = broker.encoding.bodies
    assert isinstance(offload, Offload)
    assert isinstance(offload.store, MemoryStore)
    return offload.store


async def pending(broker: Broker) -> bool:
    """Whether one message is pending."""
    return bool((await ask(broker, "XPENDING", broker.keys.stream("t", 0), "g"))[0] == 1)


async def swept(broker: Broker, **options: Any) -> int:
    """How many bodies two sweeps delete: the first one notes them."""
    bodies = bodies_of(broker, **options)
    states = [await bodies.sweep(), await bodies.sweep()]
    return sum(each.removed for state in states for each in state)


async def test_a_body_stays_in_every_state_of_its_message(broker: Broker, store: MemoryStore) -> None:
    """Unread, running, parked, delayed, dead, replayed and dead again, settled but kept. All can be read after it."""
    seen, broken = list[int](), {1, 2}

    @broker.handler("t", group="g", retry=RetryPolicy(max_attempts=3))
    async def take(payload: bytes, message: Message) -> None:
        number = payload[0]
        seen.append(number)
        if number in broken:
            raise Reject("no") if number == 1 else Retry("later", after="1h")
        if number == 3:
            assert await swept(broker) == 0, "while it runs"

    async with broker, broker.running():
        for n in range(5):
            delay = "1h" if n == 4 else None
            await broker.publish("t", bytes([n]) + LARGE, delay=delay, key=str(n))
        await dies(broker, "t", "g", 1)
        await until(lambda: seen.count(3) == seen.count(2) == 1, "the others are handled")
        await until(lambda: pending(broker), "they are settled, but for the one that waits behind its key")
        assert await swept(broker) == 0
        topic = await broker.topics.find("t")
        assert topic is not None
        await trim(broker.client, broker.keys, "t", 0, keep_age_ms=0, keep_length=0, exact=True)
        assert await swept(broker) == 2, "what is settled and not kept: of 0 and 3"
        assert await broker.dead_letters.replay(topic, "g") == 1
        await until(lambda: seen.count(1) == 2, "it is handled again, and dies again")
        await dies(broker, "t", "g", 1)
        assert await swept(broker) == 0
        (state,) = await bodies_of(broker).status()
        assert (state.bodies, state.named, state.unnamed, state.lost) == (3, 3, 0, [])
        assert state.size == 3 * len(bytes([0]) + LARGE)
        broken.discard(1)
        assert await broker.dead_letters.replay(topic, "g") == 1
        await until(lambda: seen.count(1) == 3, "it is handled")
        assert (await broker.dead_letters.purge(topic, "g")) == 0
    async with broker:
        await broker.topics.delete("t")
        assert await swept(broker) == 3, "the topic is deleted"
        assert store.names == set()
        assert await ask(broker, "EXISTS", broker.keys.bodies("t")) == 0


async def test_a_body_goes_an_hour_after_its_last_entry_and_not_before_its_time(
    broker: Broker, store: MemoryStore
) -> None:
    """`keep` counts by the store's clock from the put; the hour counts from the first sweep that finds no entry."""
    async with broker:
        await broker.publish("t", LARGE)
        await broker.topics.delete("t")
        assert await swept(broker, keep=timedelta(hours=1)) == 0, "it is young"
        assert await swept(broker, grace=timedelta(hours=1)) == 0, "nothing has named it for a moment only"
        noted = await ask(broker, "ZRANGE", broker.keys.bodies("t"), 0, -1)
        assert [name.decode() for name in noted] == list(store.names)
        assert await ask(broker, "PTTL", broker.keys.bodies("t")) > 0
        for name in store.names:
            store.times[name] -= 3601
        assert await swept(broker, keep=timedelta(hours=1)) == 1


async def test_what_is_named_again_begins_anew(broker: Broker, store: MemoryStore) -> None:
    """As after a failover that has lost a trim: the note of the first sweep counts no more."""
    async with broker:
        await broker.publish("t", LARGE)
        stream = broker.keys.stream("t", 0)
        ((_, fields),) = await ask(broker, "XRANGE", stream, "-", "+")
        await ask(broker, "XTRIM", stream, "MAXLEN", 0)
        await bodies_of(broker).sweep()
        await ask(broker, "XADD", stream, "*", *fields)
        assert await swept(broker) == 0
        assert await ask(broker, "EXISTS", broker.keys.bodies("t")) == 0
        await ask(broker, "XTRIM", stream, "MAXLEN", 0)
        (state,) = await bodies_of(broker).sweep()
        assert (state.removed, state.unnamed) == (0, 1)


async def test_spoiled_notes_of_a_sweep_are_forgotten(broker: Broker, store: MemoryStore) -> None:
    """Another client may write anything: the body beside them is noted, and deleted."""
    async with broker:
        await broker.publish("t", LARGE)
        await broker.topics.delete("t")
        await ask(broker, "ZADD", broker.keys.bodies("t"), "-inf", b"\xff\xfe", 1, "word", "inf", "")
        assert await swept(broker) == 1
        assert await ask(broker, "EXISTS", broker.keys.bodies("t")) == 0


async def test_a_sweep_that_ends_halfway_leaves_nothing(broker: Broker, store: MemoryStore) -> None:
    """The store goes away at the second delete: what is left goes with the next sweep, and no note stays."""
    async with broker:
        for _ in range(3):
            await broker.publish("t", LARGE)
        await broker.topics.delete("t")
        await bodies_of(broker).sweep()
        delete, calls = store.delete, list[str]()

        def failing(name: str) -> None:
            calls.append(name)
            if len(calls) == 2:
                delete(name)
                raise ConnectionError("after the delete")
            delete(name)

        store.delete = failing  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="after the delete"):
            await bodies_of(broker).sweep()
        assert len(store.names) == 1
        assert await swept(broker) == 1
        assert await ask(broker, "EXISTS", broker.keys.bodies("t")) == 0


async def test_what_is_published_again_while_a_sweep_deletes_has_a_body(broker: Broker, store: MemoryStore) -> None:
    """The same id and bytes: each put has a name of its own, so the sweep deletes the earlier body only."""
    async with broker:
        await broker.publish("t", LARGE, message_id="m")
        (before,) = store.names
        await ask(broker, "DEL", broker.keys.stream("t", 0), broker.keys.dedup("t", 0, "m"))
        await bodies_of(broker).sweep()
        offload = broker.encoding.bodies
        assert isinstance(offload, Offload)
        forget = offload.delete

        async def publishing(name: str) -> None:
            await broker.publish("t", LARGE, message_id="m")
            await forget(name)

        offload.delete = publishing  # type: ignore[method-assign]
        (state,) = await bodies_of(broker).sweep()
        assert state.removed == 1
        (after,) = store.names
        assert after != before
        (state,) = await bodies_of(broker).status()
        assert (state.named, state.lost) == (1, [])


async def test_a_sweep_deletes_nothing_of_another_server_or_while_this_one_fails(
    broker: Broker, store: MemoryStore, settings: Settings
) -> None:
    """Each server has a folder of its own name, so a wrong address or a new server costs nothing."""
    async with broker:
        await broker.publish("t", LARGE)
    other = Broker(replace(settings, prefix=f"{settings.prefix}b", preflight="warn"), offload=Offload(store))
    async with other:
        assert await swept(other) == 0
    async with broker:
        await ask(broker, "DEL", broker.keys.stream("t", 0), broker.keys.topic("t"))
        await ask(broker, "SET", broker.keys.stream("t", 0), "of a foreign type")
        with pytest.raises(BrokerError):
            await swept(broker)
        assert len(store.names) == 1
        await ask(broker, "DEL", broker.keys.stream("t", 0))
        await ask(broker, "DEL", broker.keys.deployment)
        assert await swept(broker) == 0, "the server has lost all its data, its id too"
        assert len(store.names) == 1


async def test_a_lost_body_is_named(broker: Broker, store: MemoryStore) -> None:
    """By `status`: an entry names it, and the store does not have it."""
    async with broker:
        await broker.publish("t", LARGE)
        await broker.publish("t", LARGE)
        name = min(store.names)
        del store.bodies[name]
        (state,) = await bodies_of(broker).status()
        assert state.lost == [name]


# -- moves between the calls of a sweep -------------------------------------------------------------------------------


class Interrupted:
    """The client of a sweep: at chosen calls of its scripts something else happens first."""

    def __init__(self, client: Any, moves: Sequence[tuple[int, Callable[[], Awaitable[None]]]]) -> None:
        self._client = client
        self._moves = list(moves)
        self.calls = 0
        self.is_cluster = client.is_cluster

    async def _call(self, command: Sequence[Any]) -> None:
        if not command[0].startswith("EVAL"):
            return
        self.calls += 1
        while self._moves and self._moves[0][0] <= self.calls:
            await self._moves.pop(0)[1]()

    async def execute_command(self, *command: Any) -> Any:
        await self._call(command)
        return await self._client.execute_command(*command)

    async def pipelined(self, commands: Sequence[Any]) -> Any:
        return await self._client.pipelined(commands)


class LettersFirst(Bodies):
    """A mutant: it reads the dead letters of a partition, then its stream, by two calls."""

    async def _streams(self, names: Sequence[str], *args: Any) -> AsyncIterator[list[str]]:
        for name in reversed(names):
            async for page in super()._streams([name], *args):
                yield page


class OnePass(Bodies):
    """A mutant: one pass is enough."""

    async def named(self, deployment: str, topic: str, bodies: Set[str]) -> module.NamedBodies:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MOST_PASSES", 1)
            return module.NamedBodies((await super().named(deployment, topic, bodies)).names, is_all=True)


class World:
    """One message with a body in the last partition, moved by the scripts that move it in life."""

    def __init__(self, broker: Broker, partitions: int) -> None:
        self._broker, self._client, self._keys = broker, broker.client, broker.keys
        self._partitions, self._own = partitions, partitions - 1

    async def make(self, begin: str) -> None:
        """A topic with this message in it."""
        for p in range(self._partitions):
            await ask(self._broker, "DEL", *self._names(p))
            await ask(self._broker, "XGROUP", "CREATE", self._keys.stream("t", p), "g", "0", "MKSTREAM")
        options: dict[str, Any] = {} if begin != "delayed" else {"delay": "1ms"}
        await self._broker.publish("t", LARGE, key="b", **options)
        if begin == "dead":
            await self.die()

    def _names(self, p: int) -> tuple[str, str, str]:
        return self._keys.stream("t", p), self._keys.delayed("t", p), self._keys.dlq("t", p, "g")

    async def release(self) -> None:
        """Its time has come."""
        stream, delayed, _ = self._names(self._own)
        while await ask(self._broker, "ZCARD", delayed):
            await RELEASE_DELAYED(self._client, (stream, delayed, self._keys.unique("t", self._own)), (10, 0, "reject"))

    async def die(self) -> None:
        """It becomes a dead letter, and retention removes its entry."""
        stream, _, dlq = self._names(self._own)
        for entry_id, _ in (await ask(self._broker, "XREADGROUP", "GROUP", "g", "m", "STREAMS", stream, ">"))[0][1]:
            args = ("m", "", "g", entry_id, 1, 100, 0, "dlq.reason", "failed")
            word = await BURY_MESSAGE(self._client, (stream, f"{stream}:none", f"{stream}:none", dlq), args)
            assert word[0] == b"OK"
        await trim(self._client, self._keys, "t", self._own, keep_age_ms=0, keep_length=0, exact=True)
        assert await ask(self._broker, "XLEN", stream) == 0

    async def replay(self) -> None:
        """By its script, within its partition."""
        stream, _, dlq = self._names(self._own)
        ((entry_id, _),) = await ask(self._broker, "XRANGE", dlq, "-", "+")
        assert (await REPLAY_DEAD_LETTER(self._client, (stream, dlq), (entry_id, "g", 0, "reject")))[0] == b"OK"

    async def move(self) -> None:
        """To a partition that is read before, as a stray message: copied, then deleted."""
        stream, _, _ = self._names(self._own)
        ((entry_id, fields),) = await ask(self._broker, "XRANGE", stream, "-", "+")
        await ask(self._broker, "XADD", self._names(0)[0], "*", *fields)
        await ask(self._broker, "XDEL", stream, entry_id)


WITHIN = [("delayed", "release die"), ("stream", "die replay die"), ("dead", "replay die")]
ACROSS = [("stream", "move"), ("dead", "replay move")]


async def losses(broker: Broker, kind: type[Bodies], histories: Sequence[tuple[str, str]]) -> list[str]:
    """Each history with its moves at each of the calls of a sweep: the first after which the sweep names no body."""
    partitions, found = (2 if histories is ACROSS else 1), list[str]()
    await broker.topics.ensure("t", partitions)
    world, deployment = World(broker, partitions), await deployment_id(broker.client, broker.keys)
    for begin, words in histories:
        history = words.split()
        most, places = 1, [1] * len(history)
        while places:
            store_of(broker).bodies.clear()
            await world.make(begin)
            (name,) = store_of(broker).names
            moves = [(place, getattr(world, step)) for place, step in zip(places, history, strict=True)]
            client = Interrupted(broker.client, moves)
            offload = broker.encoding.bodies
            bodies = kind(client, broker.keys, broker.topics, offload, keep=NEVER, grace=NEVER)  # type: ignore[arg-type]
            looked = await bodies.named(deployment, "t", {name})
            most = max(most, client.calls)
            if looked.is_all and name not in looked.names:
                found.append(f"{begin}: {words} at {places}")
                break
            places = following(places, most)
    return found


def following(places: list[int], most: int) -> list[int]:
    """The next choice of ascending places, up to `most`; none after the last."""
    for position in reversed(range(len(places))):
        if places[position] < most:
            return [*places[:position], *[places[position] + 1] * (len(places) - position)]
    return []


@pytest.mark.parametrize("histories", [WITHIN, ACROSS], ids=["within", "across"])
async def test_no_move_between_two_calls_of_a_sweep_hides_a_body(
    broker: Broker, histories: Sequence[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release, death and trim, replay and a move to another partition, at each call and each choice of calls."""
    monkeypatch.setattr("rsmq.redis.topics.MOST_PARTITIONS", 2)
    async with broker:
        assert await losses(broker, Bodies, histories) == []


@pytest.mark.parametrize(("kind", "histories"), [(LettersFirst, WITHIN[1:2]), (OnePass, ACROSS)])
async def test_a_sweep_that_reads_otherwise_hides_one(
    broker: Broker, kind: type[Bodies], histories: Sequence[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search finds each mutant."""
    monkeypatch.setattr("rsmq.redis.topics.MOST_PARTITIONS", 2)
    async with broker:
        assert await losses(broker, kind, histories) != []


async def test_what_is_published_while_a_sweep_reads_costs_no_pass(broker: Broker, store: MemoryStore) -> None:
    """A new message with a body before each call: the names of earlier bodies are all known after two passes."""
    async with broker:
        await broker.publish("t", LARGE)
        (first,) = store.names

        async def publish() -> None:
            await broker.publish("t", LARGE)

        client = Interrupted(broker.client, [(call, publish) for call in range(1, 200)])
        bodies = Bodies(client, broker.keys, broker.topics, broker.encoding.bodies)  # type: ignore[arg-type]
        looked = await bodies.named(await deployment_id(broker.client, broker.keys), "t", {first})
    assert (looked.is_all, first in looked.names) == (True, True)
    assert client.calls <= 6, "two calls a pass, and each script is loaded once"


async def test_a_sweep_that_does_not_come_to_an_end_deletes_nothing(
    broker: Broker, store: MemoryStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries move to another partition and back in each pass, each time behind the reader, and in each pass one of
    them comes to rest, and is found. The last three are never found, but are there."""
    monkeypatch.setattr("rsmq.redis.topics.MOST_PARTITIONS", 2)
    first, second = (broker.keys.stream("t", number) for number in range(2))

    async def move(source: str, target: str, resting: int) -> None:
        for entry_id, fields in (await ask(broker, "XRANGE", source, "-", "+"))[resting:]:
            await ask(broker, "XADD", target, "*", *fields)
            await ask(broker, "XDEL", source, entry_id)

    async with broker:
        await broker.topics.ensure("t", 2)
        for _ in range(2 * module.MOST_PASSES + 3):
            await broker.publish("t", LARGE, key="b")
        await bodies_of(broker).status()  # its scripts are loaded: a pass is four calls
        moves = list[tuple[int, Callable[[], Awaitable[None]]]]()
        for number in range(2 * module.MOST_PASSES):
            moves.append((4 * number + 1, partial(move, first, second, 0)))
            moves.append((4 * number + 4, partial(move, second, first, number + 1)))
        client = Interrupted(broker.client, moves)
        offload = broker.encoding.bodies
        bodies = Bodies(client, broker.keys, broker.topics, offload, keep=NEVER, grace=NEVER)  # type: ignore[arg-type]
        states = [*await bodies.sweep(), *await bodies.sweep()]
        (state,) = await bodies_of(broker).status()
    assert (state.lost, [each.removed for each in states]) == ([], [0, 0])
    assert client.calls == 8 * module.MOST_PASSES
    assert all(each.is_moving for each in states)
    assert "no body of topic t is deleted" in caplog.text


# -- each rule of a sweep, left out ------------------------------------------------------------------------------------


class WithoutGrace(Bodies):
    """A mutant: what nothing names goes at once, not an hour later."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "grace": NEVER})


async def test_what_is_left_of_a_put_that_never_ended_goes_after_keep(broker: Broker, tmp_path: Path) -> None:
    """And not before: it may be a put that still runs."""
    offload = Offload(tmp_path)
    async with broker:
        deployment = await deployment_id(broker.client, broker.keys)
        names = [f"{deployment}/store", f"{deployment}/t/{'0' * 64}.{'1' * 32}"]
        for name in names:
            await offload.put(f"{name}.{'2' * 16}.part", b"half")
        for keep, left in ((timedelta(hours=6), 2), (NEVER, 0)):
            bodies = Bodies(broker.client, broker.keys, broker.topics, offload, keep=keep)
            assert await bodies.status() == []
            await bodies.sweep()
            assert len(list(tmp_path.rglob("*.part"))) == left


class WithoutAge(Bodies):
    """A mutant: a body that was just put may go."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "keep": NEVER})


class Forgetful(Bodies):
    """A mutant: what is named again keeps the note of the first sweep that found no entry."""

    async def _forget(self, key: str, names: Sequence[str | bytes]) -> None: ...


LEFT_OUT: list[tuple[str, Any, Callable[..., Awaitable[None]]]] = [
    ("Bodies", WithoutGrace, test_a_body_goes_an_hour_after_its_last_entry_and_not_before_its_time),
    ("Bodies", WithoutAge, test_a_body_goes_an_hour_after_its_last_entry_and_not_before_its_time),
    ("Bodies", Forgetful, test_what_is_named_again_begins_anew),
    ("token_hex", lambda size: "0" * 2 * size, test_what_is_published_again_while_a_sweep_deletes_has_a_body),
]


@pytest.mark.parametrize(
    ("name", "instead", "test"), LEFT_OUT, ids=["an hour", "keep", "begins anew", "a name for each put"]
)
async def test_a_rule_of_a_sweep_that_is_left_out_is_found(
    broker: Broker,
    store: MemoryStore,
    name: str,
    instead: Any,
    test: Callable[..., Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test that stands for the rule fails without it."""
    if name == "token_hex":
        monkeypatch.setattr("rsmq.model.body.secrets.token_hex", instead)
    else:
        monkeypatch.setattr(bodies_of, "__defaults__", (instead,))
    with pytest.raises((AssertionError, ValueError)):
        await test(broker, store)
