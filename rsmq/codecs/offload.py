"""Large payloads lie in a store outside of the server, and their messages say where: `Broker(offload=Offload(...))`.

A folder of the file system, or any file system that fsspec has, such as `s3://bucket/folder` with the package
s3fs. When a body may be deleted is decided from the entries that name it, by the sweep of each worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

from rsmq.errors import BodyUnavailable, ConfigError, LostBody, StoreUnavailable
from rsmq.model.body import BodyStore
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.size import as_size

T = TypeVar("T")

LARGEST: Final = 1 << 30
SHORTEST_KEEP: Final = timedelta(hours=6)
"""Several times as long as a put stays fresh: what an entry is about to name is not deleted."""
PATIENCE: Final = 30.0
"""Seconds for one call of a store."""
FOLDERS: Final = frozenset({"memory", "ftp", "hdfs", "sftp", "smb", "webdav"})
"""File systems of fsspec in which a folder must be there before its files."""
MOST_CALLS: Final = 16
"""Calls of a store at once, each in a thread."""
STANDING: Final = "store"
"""An object in the folder of each server: while it cannot be read, a body that is not found is not lost."""


class Offload:
    """Payloads of more than `above` bytes, as they are stored, go to a store; `largest`: before they are encoded.

    `store` is a folder such as `/srv/bodies`, a URL that fsspec knows such as `s3://bucket/folder`, or an object with
    the four methods of `rsmq.codecs.BodyStore`. Each worker deletes bodies that no entry names any more, at the
    earliest `keep` after they were put; `keep` is also for how long a backup of the server finds its bodies. Ticks of
    schedules go there, too, and rows of an outbox when they are relayed. Not so letters and retained messages of
    devices, what devices publish, answers to requests, and results. Raises ConfigError.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | BodyStore,
        *,
        above: int | str = "128KiB",
        largest: int | str = "64MiB",
        keep: Duration = timedelta(days=1),
    ) -> None:
        self.store, self._shown = _opened(store)
        self.above = _size("above", above)
        self.largest = _size("largest", largest)
        if not 0 < self.largest <= LARGEST or self.above > self.largest:
            raise ConfigError(
                f"above={above!r}, largest={largest!r}: write sizes of which the first is not above the second, and "
                f"the second at most 1GiB"
            )
        self.keep = checked_duration("keep", keep)
        if self.keep < SHORTEST_KEEP:
            raise ConfigError(f"keep={keep!r} is too short: bodies are kept for at least 6 hours")
        self._limiters: WeakKeyDictionary[asyncio.AbstractEventLoop, anyio.CapacityLimiter] = WeakKeyDictionary()
        self._begun = set[str]()

    async def put(self, name: str, data: bytes) -> None:
        """Store a body. Raises StoreUnavailable."""
        try:
            await self._call(self.put_now, name, data)
        except Exception as error:
            raise StoreUnavailable(f"the payload cannot be put into {self._shown}: {problem(error)}") from error

    async def fetch(self, name: str) -> bytes:
        """A body. Raises LostBody, and BodyUnavailable while the store is away."""
        try:
            return await self._call(self.read, name)
        except TimeoutError as error:
            raise BodyUnavailable(self._shown, problem(error)) from error

    def read(self, name: str) -> bytes:
        """The same, for code that may block."""
        try:
            return self.store.get(name)
        except FileNotFoundError:
            return self._missing(name)
        except Exception as error:
            raise BodyUnavailable(self._shown, problem(error)) from error

    async def delete(self, name: str) -> None:
        """Delete a body, if it is there. Raises StoreUnavailable."""
        try:
            await self._call(self.store.delete, name)
        except Exception as error:
            raise StoreUnavailable(f"the body {name} cannot be deleted: {problem(error)}") from error

    async def survey(self, folder: str, take: Callable[[Iterator[tuple[str, float, int]]], T]) -> T:
        """What `take` makes, in a thread, of all names in a folder with their times and sizes. Raises
        StoreUnavailable."""
        try:
            return await anyio.to_thread.run_sync(lambda: take(self.store.list(folder)), abandon_on_cancel=True)
        except Exception as error:
            raise StoreUnavailable(f"the bodies in {self._shown} cannot be listed: {problem(error)}") from error

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something of the store in a thread. Raises TimeoutError, and what it raises."""
        limiter = self._limiters.setdefault(asyncio.get_running_loop(), anyio.CapacityLimiter(MOST_CALLS))
        with anyio.fail_after(PATIENCE):
            return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=limiter)

    def put_now(self, name: str, data: bytes) -> None:
        """`put` for code that may block. Raises what the store raises."""
        folder = name.partition("/")[0]
        if folder not in self._begun:
            self.store.put(f"{folder}/{STANDING}", b"bodies of rsmq")
            self._begun.add(folder)
        self.store.put(name, data)

    def _missing(self, name: str) -> bytes:
        """Raise LostBody if the rest of the store is there. A folder that is not mounted has no bodies either."""
        try:
            self.store.get(f"{name.partition('/')[0]}/{STANDING}")
        except Exception as error:
            raise BodyUnavailable(self._shown, f"it has no folder of this server ({problem(error)})") from error
        raise LostBody(f"its body is not in {self._shown} any more: {name}")

    def __repr__(self) -> str:
        return f"Offload({self._shown!r}, above={self.above})"


class FileStore:
    """Bodies as files below a folder, which all processes see. A body is visible when all of it is on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, data: bytes) -> None:
        """Write a file beside, force it to the disk, and give it its name. If the process is killed before that, the
        file beside is `UNFINISHED`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
        try:
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        above = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(above)
        finally:
            os.close(above)

    def get(self, name: str) -> bytes:
        """The whole file."""
        return (self._folder / name).read_bytes()

    def delete(self, name: str) -> None:
        """Unlink it."""
        (self._folder / name).unlink(missing_ok=True)

    def list(self, folder: str) -> Iterator[tuple[str, float, int]]:
        """All files below a folder."""
        root = self._folder / folder
        for directory, _, names in os.walk(root):
            for name in names:
                path = Path(directory, name)
                try:
                    about = path.stat()
                except FileNotFoundError:
                    continue
                yield path.relative_to(self._folder).as_posix(), about.st_mtime, about.st_size

    def __repr__(self) -> str:
        return f"<FileStore {self._folder}>"


class FsspecStore:
    """Bodies in a file system of fsspec."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ConfigError("Offload needs the package fsspec for a URL: pip install 'rsmq[offload]'") from None
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"the store {shown(url)} cannot be used: {error}") from None
        self._url = shown(url)
        protocols = self._system.protocol
        self._has_folders = not FOLDERS.isdisjoint([protocols] if isinstance(protocols, str) else protocols)

    def put(self, name: str, data: bytes) -> None:
        """One object."""
        path = f"{self._root}/{name}"
        if self._has_folders:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.pipe_file(path, data)

    def get(self, name: str) -> bytes:
        """One object."""
        found: bytes = self._system.cat_file(f"{self._root}/{name}")
        return found

    def delete(self, name: str) -> None:
        """One object."""
        try:
            self._system.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return

    def list(self, folder: str) -> Iterator[tuple[str, float, int]]:
        """All objects below a folder, read anew."""
        self._system.invalidate_cache()
        try:
            found = self._system.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return
        for path, about in found.items():
            yield path.removeprefix(self._root).lstrip("/"), changed(about), int(about.get("size") or 0)

    def __repr__(self) -> str:
        return f"<FsspecStore {self._url}>"


def changed(about: dict[str, Any]) -> float:
    """Seconds since 1970 of the last put, under any of the names that file systems of fsspec have for it."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        found = about.get(name)
        if found is not None:
            return float(found.timestamp() if hasattr(found, "timestamp") else found)
    raise OSError("the file system does not say when an object was put")


def problem(error: BaseException) -> str:
    """An error of a store as one line. Its text may have an address, but no password."""
    if isinstance(error, TimeoutError):
        return f"no answer within {PATIENCE:g} s"
    return f"{type(error).__name__}: {shown(str(error).partition(chr(10))[0][:200])}"


def shown(url: str) -> str:
    """A URL without what may be a password."""
    front, slashes, rest = url.partition("://")
    user, at, address = rest.rpartition("@")
    return f"{front}{slashes}{'***@' if at and user else ''}{address}" if slashes else url


def _size(name: str, value: int | str) -> int:
    try:
        size = as_size(value)
    except ValueError:
        size = -1
    if size < 0:
        raise ConfigError(f"{name}={value!r} is not possible: write a number of bytes, or text such as '128KiB'")
    return size


def _opened(store: str | os.PathLike[str] | BodyStore) -> tuple[BodyStore, str]:
    """The store, and its name for people."""
    if isinstance(store, str) and "://" in store:
        parts = urlsplit(store)
        if parts.scheme in ("file", "local"):
            return FileStore(Path(unquote(parts.path))), store
        return FsspecStore(store), shown(store)
    if isinstance(store, str | os.PathLike) and os.fspath(store):
        path = Path(store).absolute()
        return FileStore(path), str(path)
    if isinstance(store, BodyStore) and not isinstance(store, type):
        return store, repr(store)
    raise ConfigError(f"Offload({store!r}): write a folder, a URL such as 's3://bucket/folder', or a store of your own")
