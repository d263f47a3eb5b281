"""The embedded servers of this user: which projects have one, which of them run, and how to remove one's data."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rsmq.errors import ConfigError
from rsmq.redis.embedded import keeper
from rsmq.redis.embedded.server import PROJECT, START, state_directory, url_of


@dataclass(frozen=True, slots=True)
class StoredServer:
    """The data of one project. `project` is None for data of an older release, which did not note it."""

    name: str
    directory: Path
    project: Path | None
    url: str
    is_running: bool
    size: int
    used_at: datetime

    @property
    def is_orphaned(self) -> bool:
        """Whether its project does not exist any more."""
        return self.project is not None and not self.project.exists()


def stored_servers() -> list[StoredServer]:
    """All of this user, by name. Starts nothing."""
    home = state_directory()
    found = sorted(each for each in home.iterdir() if (each / keeper.USERS).exists()) if home.is_dir() else []
    return [read(each) for each in found]


def read(directory: Path) -> StoredServer:
    """The facts of one."""
    project, marker = None, directory / keeper.USERS
    with contextlib.suppress(OSError):
        project, marker = Path(os.fsdecode((directory / PROJECT).read_bytes())), directory / PROJECT
    url, path = url_of(directory)
    sizes = []
    for each in directory.rglob("*"):
        with contextlib.suppress(OSError):  # a running server replaces its files
            sizes.append(each.lstat().st_size)
    used_at = datetime.fromtimestamp(marker.stat().st_mtime, UTC)
    return StoredServer(directory.name, directory, project, url, keeper.answers(path), sum(sizes), used_at)


def find(name: str) -> StoredServer:
    """The one with a name, or of a project's directory. Raises ConfigError."""
    servers = stored_servers()
    for each in servers:
        if name == each.name or (each.project is not None and Path(name).resolve() == each.project):
            return each
    known = ", ".join(each.name for each in servers)
    raise ConfigError(f"there is no embedded server {name!r}: {f'there are {known}' if known else 'there are none'}")


def remove(server: StoredServer) -> None:
    """Delete the data of one that no process uses. Raises ConfigError."""
    locks = [keeper.open_lock(server.directory / name) for name in (START, keeper.USERS, keeper.KEEPER)]
    try:
        if not all(map(keeper.try_lock, locks)):  # held until the end: no process can start it meanwhile
            raise ConfigError(f"the server {server.name} is in use: end the processes that use it first")
        shutil.rmtree(server.directory)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(url_of(server.directory)[1])
    finally:
        for lock in locks:
            os.close(lock)
