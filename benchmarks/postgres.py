"""The two-table layout on PostgreSQL that the published design used before: a throw-away server, and batches into it.

    device_session_ctx   one row a client: the last serial number and packet id
    device_publish_msg   one row a message, by client and serial number

Optional: it needs a `postgres` and `initdb` on the path, and `asyncpg`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = """
CREATE TABLE device_session_ctx (
    client_id varchar(255) PRIMARY KEY, last_updated_time bigint NOT NULL,
    last_serial_number bigint, last_packet_id int);
CREATE TABLE device_publish_msg (
    client_id varchar(255) NOT NULL, serial_number bigint NOT NULL, topic varchar NOT NULL, time bigint NOT NULL,
    packet_id int, packet_type varchar(255), qos int NOT NULL, payload bytea NOT NULL, user_properties varchar,
    retain boolean, msg_expiry_interval int, payload_format_indicator int, content_type varchar(255),
    response_topic varchar(255), correlation_data bytea,
    PRIMARY KEY (client_id, serial_number));
"""

TAKE_NUMBERS: Final = """
INSERT INTO device_session_ctx AS ctx SELECT client, $2, 1, 1 FROM unnest($1::text[]) client
ON CONFLICT (client_id) DO UPDATE SET last_updated_time = $2, last_serial_number = ctx.last_serial_number + 1,
    last_packet_id = ctx.last_packet_id % 65535 + 1
RETURNING client_id, last_serial_number, last_packet_id
"""

STORE: Final = """
INSERT INTO device_publish_msg (client_id, serial_number, topic, time, packet_id, packet_type, qos, payload, retain)
SELECT client, serial, 'devices', $4, packet, 'PUBLISH', 1, data, false
FROM unnest($1::text[], $2::bigint[], $3::int[], $5::bytea[]) row (client, serial, packet, data)
"""

USER: Final = "postgres"
SETTINGS: Final = (
    "listen_addresses=", "synchronous_commit=off", "wal_writer_delay=1s", "shared_buffers=512MB", "max_wal_size=4GB",
)  # fmt: skip


def missing() -> str:
    """What has to be installed for this measurement; empty when everything is there."""
    if not shutil.which("postgres") or not shutil.which("initdb"):
        return "no PostgreSQL server here (postgres and initdb on the path)"
    if importlib.util.find_spec("asyncpg") is None:
        return "no PostgreSQL client here (pip install asyncpg)"
    if os.getuid() == 0 and not any(each.pw_name == USER for each in pwd.getpwall()):
        return f"PostgreSQL does not run as root, and there is no user {USER!r}"
    return ""


@dataclass
class Instance:
    """A running server: the directory of its socket, and what it has used once it has ended."""

    socket: str
    cpu_us: float = 0.0


@contextmanager
def postgres() -> Iterator[Instance]:
    """A new server, as durable as an append-only file with fsync every second."""
    user = USER if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        data = Path(directory) / "data"
        data.mkdir(mode=0o700)
        if user:
            shutil.chown(data, user)
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "user": user}
        initialise = [
            "initdb",
            "--pgdata",
            str(data),
            "--username",
            USER,
            "--auth",
            "trust",
            "--no-sync",
            "--locale",
            "C",
        ]
        subprocess.run(initialise, check=True, cwd=data, **quiet)
        options = [each for setting in SETTINGS for each in ("-c", setting)]
        process = subprocess.Popen(["postgres", "-D", data, "-k", data, *options], cwd=data, **quiet)
        instance = Instance(str(data))
        try:
            while not (data / ".s.PGSQL.5432").exists():
                assert process.poll() is None, "PostgreSQL has ended"
                time.sleep(0.02)
            yield instance
        finally:
            process.send_signal(signal.SIGQUIT)  # at once: the checkpoint of an orderly end is not the messages' cost
            _, process.returncode, used = os.wait4(process.pid, 0)
            instance.cpu_us = (used.ru_utime + used.ru_stime) * 1e6


class Tables:
    """A connection that stores batches."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, socket: str, *, create: bool = False) -> Tables:
        """Connect to the server whose socket is in that directory."""
        import asyncpg

        connection = await asyncpg.connect(host=socket, user=USER, database=USER)
        if create:
            await connection.execute(SCHEMA)
        return cls(connection)

    async def add(self, clients: Sequence[str], payloads: Sequence[bytes]) -> None:
        """Store one message for each of some clients, all different, in one transaction of two statements."""
        now = time.time_ns() // 1_000_000
        async with self._connection.transaction():
            numbers = await self._connection.fetch(TAKE_NUMBERS, clients, now)
            serials = [row[1] for row in numbers]
            await self._connection.execute(STORE, clients, serials, [row[2] for row in numbers], now, payloads)

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()
