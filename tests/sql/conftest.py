"""Databases for the tests of rsmq.sql: each test has an empty one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from rsmq import Broker, Settings
from rsmq.sql import create_tables
from tests.sql.databases import MariaDB, Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for all tests."""
    with Postgres() as running:
        yield running


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """One MariaDB for all tests, if the machine has one."""
    with MariaDB() as running:
        yield running


def new_url(driver: str, tmp_path: Path, request: pytest.FixtureRequest) -> URL:
    """An empty database for a driver."""
    if "sqlite" in driver:
        return make_url(f"{driver}:///{tmp_path / 'test.db'}")
    server = request.getfixturevalue("mariadb" if driver in ("pymysql", "asyncmy") else "postgres")
    url: URL = server.url(driver, server.new_database())
    return url


@pytest.fixture(params=["asyncpg", "psycopg", "sqlite+aiosqlite"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """An async engine of each kind, with the tables."""
    engine = create_async_engine(new_url(request.param, tmp_path, request))
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    yield engine
    await engine.dispose()


@pytest.fixture(params=["psycopg", "sqlite", "pymysql"])
def sync_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A plain engine of each kind, with the tables."""
    engine = create_engine(new_url(request.param, tmp_path, request), poolclass=NullPool)
    with engine.begin() as connection:
        create_tables(connection)
    yield engine
    engine.dispose()


@pytest.fixture
async def pg(postgres: Postgres) -> AsyncIterator[AsyncEngine]:
    """An async engine on PostgreSQL, with the tables."""
    engine = create_async_engine(postgres.url("asyncpg", postgres.new_database()))
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    yield engine
    await engine.dispose()


@pytest.fixture
def broker(server_url: str, prefix: str) -> Broker:
    """A broker with the default settings."""
    return Broker(Settings(url=server_url, prefix=prefix, preflight="warn"))
