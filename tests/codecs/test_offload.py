"""The stores of large payloads: folders, what fsspec knows, and options that are refused."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from rsmq import Broker, ConfigError, Settings
from rsmq.codecs import BodyStore, Offload, Zstd
from rsmq.control import Bodies
from rsmq.errors import BodyUnavailable, LostBody, Malformed, StoreUnavailable
from rsmq.model.body import check_ref, digest_of, is_outside, without_ref
from rsmq.model.encoding import Encoding
from tests.codecs.stores import MemoryStore
from tests.contract.witness import Witness, settled

NAME = "a" * 32 + "/t/" + "0" * 64 + "." + "1" * 32


S3 = "S3_TEST_BUCKET"
"""Names a bucket of a running server, such as s3://bodies/test; AWS_ENDPOINT_URL and the AWS keys say where it is."""


def store_of(kind: str, folder: Path) -> Offload:
    """A store of each kind."""
    if kind == "s3":
        if S3 not in os.environ:
            pytest.skip(f"no S3 server: {S3} is not set")
        pytest.importorskip("s3fs")
        return Offload(f"{os.environ[S3]}/{folder.name}-{os.urandom(4).hex()}")
    if kind != "path":
        pytest.importorskip("fsspec")
    stores: dict[str, Any] = {
        "path": folder / "not there yet", "file": f"file://{folder}/with%20blank", "memory": f"memory://{folder.name}",
        "local": f"local://{folder}/deep/er",
    }  # fmt: skip
    return Offload(stores[kind])


@pytest.mark.parametrize("kind", ["path", "file", "memory", "local", "s3"])
async def test_a_store_keeps_lists_and_deletes_bodies(tmp_path: Path, kind: str) -> None:
    """Each kind in the same way: with times and sizes, and what is not there is no error to delete."""
    offload = store_of(kind, tmp_path)
    assert await offload.survey("a" * 32, list) == []
    await offload.put(NAME, b"body")
    await offload.put(f"{'a' * 32}/u/{'2' * 64}.{'3' * 32}", b"")
    assert await offload.fetch(NAME) == b"body"
    found = {name: size for name, at, size in await offload.survey("a" * 32, list) if at > 1_700_000_000}
    assert found.pop(f"{'a' * 32}/store") == len(b"bodies of rsmq")
    assert found == {NAME: 4, f"{'a' * 32}/u/{'2' * 64}.{'3' * 32}": 0}
    await offload.delete(NAME)
    await offload.delete(NAME)
    with pytest.raises(LostBody, match="any more"):
        await offload.fetch(NAME)
    with pytest.raises(BodyUnavailable, match="no folder of this server"):
        await offload.fetch(NAME.replace("a" * 32, "b" * 32))


@pytest.mark.parametrize("kind", ["path", "file", "s3"])
async def test_a_sweep_sees_what_another_process_has_put_and_deleted_since_the_last_one(
    tmp_path: Path, kind: str
) -> None:
    """Nothing that a file system remembers of an older listing is believed."""
    one = store_of(kind, tmp_path)
    await one.put(NAME, b"body")
    assert NAME in {name for name, _, _ in await one.survey("a" * 32, list)}
    newer = NAME.replace("1" * 32, "2" * 32)
    put, delete = (ELSEWHERE.format(call) for call in (f"put({newer!r}, b'newer')", f"delete({NAME!r})"))
    for code in (put, delete):
        where = tmp_path / "not there yet" if kind == "path" else one._shown
        done = await anyio.run_process([sys.executable, "-c", code, str(where)])
        assert done.returncode == 0
    assert {name for name, _, _ in await one.survey("a" * 32, list)} - {f"{'a' * 32}/store"} == {newer}
    assert await one.fetch(newer) == b"newer"


ELSEWHERE = "import sys; from rsmq.codecs import Offload; Offload(sys.argv[1]).store.{}"
"""A program that does something with a store."""


async def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the end of a write leaves nothing under the name, and nothing beside it."""
    offload = Offload(tmp_path)
    await offload.put(NAME, b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            await offload.put(NAME.replace("1", "4"), b"after")
    assert [path.name for path in (tmp_path / ("a" * 32) / "t").iterdir()] == [NAME.rpartition("/")[2]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("",), "write a folder"), ((None,), "write a folder"), ((MemoryStore,), "write a folder"),
        (("nothing://x",), "cannot be used"), (("/x", "1MiB", "1KiB"), "the first is not above the second"),
        (("/x", "1KiB", "2GiB"), "at most 1GiB"), (("/x", "many"), "above='many' is not possible"),
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    """With what to write instead."""
    names = ("store", "above", "largest")
    with pytest.raises(ConfigError, match=text):
        Offload(**dict(zip(names, arguments, strict=False)))


def test_what_would_lose_bodies_is_refused(tmp_path: Path) -> None:
    """A `keep` that ends before a put is stale; a folder in the place of the store."""
    with pytest.raises(ConfigError, match="at least 6 hours"):
        Offload(tmp_path, keep=timedelta(hours=5))
    with pytest.raises(ConfigError, match="write offload=Offload"):
        Broker(offload=str(tmp_path))  # type: ignore[arg-type]
    assert isinstance(MemoryStore(), BodyStore)


async def test_a_password_of_a_store_is_in_no_text(tmp_path: Path) -> None:
    """Neither of the store, nor of the errors of its file system."""

    class Away(MemoryStore):
        def _reach(self) -> None:
            raise OSError("cannot reach https://me:geheim@host/bucket")

    offload = Offload(Away())
    with pytest.raises(StoreUnavailable) as put:
        await offload.put(NAME, b"x")
    with pytest.raises(BodyUnavailable) as got:
        await offload.fetch(NAME)
    with pytest.raises(ConfigError) as refused:
        Offload("nothing://me:geheim@host/bucket")
    assert not any("geheim" in text for text in map(str, (put.value, got.value, refused.value, offload)))
    assert "***@host/bucket" in str(put.value)


def test_a_name_belongs_to_one_topic_and_a_digest_to_one_message() -> None:
    """What an entry may say, and the vectors of the wire format."""
    assert check_ref(NAME.encode(), "t") == NAME
    for ref, topic in ((NAME, "u"), (NAME + "0", "t"), ("../" + NAME, "t"), (NAME.replace("/t/", "/../"), "..")):
        with pytest.raises(Malformed):
            check_ref(ref.encode(), topic)
    page = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
    assert digest_of(b"018bcfe5-687b-7000-8000-000000000000", b'{"n":1}').hex() in page
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc")
    assert [is_outside(enc) for enc in (b"ref", b"zstd;ref", b"zstd", b"xref", b"ref;zstd")] == [True, True] + [
        False
    ] * 3
    assert [without_ref(enc) for enc in (b"ref", b"zstd;a256gcm=k;ref")] == [b"", b"zstd;a256gcm=k"]


def test_who_has_no_store_encodes_as_before() -> None:
    """The same bytes and fields, and nothing to do for a plain broker."""
    encoding = Encoding([Zstd(above=0)])
    stored = encoding.extend(b"x" * 5000, "m", None, "text/plain", ("expires", "1"))
    assert stored == (encoding.encode(b"x" * 5000, "m")[0], ("expires", "1", "enc", "zstd"))
    assert not Encoding()
    assert Encoding(bodies=Offload(MemoryStore()))


async def test_a_broker_with_a_store_over_s3(tmp_path: Path, settings: Settings, witness: Witness) -> None:
    """From the put to the sweep: bodies small and of several parts are handled, stay while they are named, and go."""
    offload = store_of("s3", tmp_path)
    broker = Broker(replace(settings, preflight="warn", partitions=1), offload=offload)
    sizes = [200_000, 60 << 20]

    @broker.handler("t", group="g")
    async def take(payload: bytes) -> None:
        witness.note(len(payload))

    async with broker:
        for size in sizes:
            await broker.publish("t", bytes(size))
        async with broker.running():
            await witness.sees(sizes)
            await settled(broker, "t")
        bodies = Bodies(broker.client, broker.keys, broker.topics, offload, keep=timedelta(0), grace=timedelta(0))
        assert [each.removed for state in [await bodies.sweep(), await bodies.sweep()] for each in state] == [0, 0]
        (state,) = await bodies.status()
        assert (state.bodies, state.size, state.named, state.lost) == (2, sum(sizes), 2, [])
        await broker.topics.delete("t")
        assert [each.removed for state in [await bodies.sweep(), await bodies.sweep()] for each in state] == [0, 2]
        assert await bodies.status() == []
