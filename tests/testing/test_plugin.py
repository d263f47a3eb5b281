"""The pytest plugin in a separate project: its fixtures work, and it costs nothing if they are not used."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import redis

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[2]
PLUGINS = ("-p", "pytest_rsmq", "-p", "anyio")

CONFTEST = """
import pytest

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

SHOP = """
from rsmq import Broker

broker = Broker()

@broker.handler("orders", group="billing")
async def bill(order: dict[str, int]) -> None:
    if order["n"] < 0:
        raise ValueError("negative")
    await broker.publish("invoices", order)
"""

TESTS = """
import pytest
from shop import broker
from rsmq import Broker

pytestmark = pytest.mark.anyio
seen = set()

@pytest.mark.parametrize("n", [1, 2])
async def test_bill(rsmq_harness, rsmq_url, rsmq_prefix, n):
    seen.add((rsmq_url, rsmq_prefix))
    async with rsmq_harness(broker) as test:
        [outcome] = await test.publish_and_handle("orders", {"n": n})
        assert outcome.is_done
        await test.assert_published("invoices", {"n": n})

def test_one_server_and_a_prefix_each():
    assert len(seen) == 2 and len({url for url, _ in seen}) == 1

async def test_a_broker_of_its_own(rsmq_settings):
    async with Broker(rsmq_settings) as own:
        await own.publish("orders", {})

def test_without_a_loop(rsmq_settings):
    Broker(rsmq_settings).publish_sync("orders", {})

async def test_this_one_fails(rsmq_harness):
    async with rsmq_harness(broker) as test:
        await test.publish_and_handle("orders", {"n": -1})
        await test.assert_published("invoices", {"n": -1})
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A user's project."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of all that is installed here: half the time
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{pytester.path}")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(shop=SHOP, test_shop=TESTS)
    return pytester


def keys_of(url: str) -> int:
    """How many keys the server has."""
    with redis.Redis.from_url(url) as client:
        return len(list(client.scan_iter("test-*")))


def test_project_gets_one_server_and_a_prefix_per_test(project: pytest.Pytester) -> None:
    """Each test has its own prefix on the one server of the session; failures are reported."""
    result = project.runpytest_subprocess(*PLUGINS, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: 'invoices' has 0 messages {'n': -1}, not 1; it has: nothing*"])


@pytest.mark.parametrize("is_configured", [True, False])
def test_configured_server_is_used(project: pytest.Pytester, server_url: str, is_configured: bool) -> None:
    """`--rsmq-url` or the configuration names a server; no key is left there."""
    before = keys_of(server_url)
    project.makepyfile(
        test_url="def test_url(rsmq_url, rsmq_settings):\n    from rsmq import Broker\n"
        f"    assert rsmq_url == {server_url!r}\n    Broker(rsmq_settings).publish_sync('t', {{}})\n"
    )
    project.makeini(f"[pytest]\nrsmq_url = {server_url if is_configured else 'redis://127.0.0.1:1/0'}")
    option = [] if is_configured else [f"--rsmq-url={server_url}"]
    project.runpytest_subprocess(*PLUGINS, "test_url.py", *option).assert_outcomes(passed=1)
    assert keys_of(server_url) == before


def test_unused_plugin_loads_nothing_of_rsmq(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a project without its fixtures the plugin imports nothing of rsmq."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        "import sys\n\ndef test_it():\n    assert 'pytest_rsmq' in sys.modules\n"
        "    assert not {name for name in sys.modules if name.split('.')[0] in ('rsmq', 'redis', 'pydantic')}\n"
    )
    result = pytester.runpytest_subprocess(*PLUGINS)
    result.assert_outcomes(passed=1)


def test_installed_plugin_is_found_by_its_entry_point(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the distribution is installed, its entry point is enough: no `-p`, no line in a conftest."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = pytester.mkdir("rsmq-0.dist-info")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rsmq\nVersion: 0\n")
    named = [f"[{group}]\n{name} = {value}\n" for group, each in entries.items() for name, value in each.items()]
    (about / "entry_points.txt").write_text("".join(named))
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}{os.pathsep}{ROOT}")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        shop=SHOP,
        test_shop="import pytest\nfrom shop import broker\n\n@pytest.mark.anyio\nasync def test_it(rsmq_harness):\n"
        "    async with rsmq_harness(broker) as test:\n"
        "        [outcome] = await test.publish_and_handle('orders', {'n': 1})\n        assert outcome.is_done\n",
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_plugin_loads_one_time_by_both_ways() -> None:
    """The entry point and `-p` name the same plugin, because the entry point has the module's name."""
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\npytest_rsmq = "pytest_rsmq"\n' in text
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pytest_rsmq; assert 'rsmq' not in sys.modules"], cwd=ROOT, check=False
    )
    assert done.returncode == 0
