"""The Python on the pages about applications and tests is run, file by file, as a reader would put it together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n# ([a-z_]+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)

TRIAL = """
import pytest
from rsmq.broker.broker import pointed_at
import billing, database, reports, shop, sms, staging, sync_shop, typed, web

@pytest.mark.anyio
async def test_all_of_it(rsmq_harness, capsys):
    for router in (database.router, sms.router, reports.router):
        shop.broker.include(router)
    async with rsmq_harness(shop.broker) as test:
        [outcome] = await test.publish_and_handle("shop.orders", {"customer": "ada", "cents": 5}, key="ada")
        assert outcome.is_done
        [outcome] = await test.publish_and_handle("customers", {"name": "ada"}, headers={"tenant": "x"})
        assert outcome.is_done
        [outcome] = await test.publish_and_handle("sms", "hello")
        assert outcome.is_done
    assert capsys.readouterr().out == "ada pays 5 (attempt 1)\\n"

@pytest.mark.anyio
async def test_typed_topics(rsmq_harness, capsys):
    async with rsmq_harness(typed.broker) as test:
        identity = await typed.place(typed.Order(customer="ada", cents=7))
        await test.handle()
        [outcome] = await test.outcomes("typed-orders", identity)
        assert outcome.is_done
    assert capsys.readouterr().out == "ada pays 7\\n"

def test_without_a_loop(rsmq_settings):
    with pointed_at(sync_shop.broker.asynchronous, rsmq_settings):
        assert sync_shop.order("ada", 5)
        assert sync_shop.dead_letters() == 0

@pytest.mark.anyio
async def test_the_web_application(rsmq_settings):
    import httpx
    with pointed_at(shop.broker, rsmq_settings):
        async with web.app.router.lifespan_context(web.app) as state:
            async def app(scope, receive, send):
                await web.app({**scope, "state": dict(state)}, receive, send)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
                assert (await client.post("/orders", json={"customer": "ada", "cents": 1})).status_code == 202
"""


KEYS = f"k1={b64encode(bytes(32)).decode()}"
"""What a file of the page reads, as the page says."""


def run(page: str, directory: Path, **more: str) -> str:
    """Write the files of a page, and run pytest over them and over a test that imports each; returns its output."""
    text = (ROOT / "docs" / page).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python"), "every block says in its first line which file it is in"
    modules = sorted({name.removesuffix(".py") for name, _ in blocks if not name.startswith(("test_", "conftest"))})
    more["test_imports.py"] = "".join(f"import {name}\n" for name in modules) + "\ndef test_all_are_imported(): ..."
    for name, code in [*blocks, *more.items()]:
        with (directory / name).open("a") as file:
            file.write(code + "\n\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RSMQ_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "RSMQ_KEYS": KEYS}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "pytest_rsmq",
        "-p",
        "anyio",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
    ]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CONFTEST = 'import pytest\n\n@pytest.fixture\ndef anyio_backend():\n    return "asyncio"\n'


@pytest.mark.parametrize(
    ("page", "more", "tests"),
    [("testing.md", {}, 6), ("application.md", {"test_trial.py": TRIAL, "conftest.py": CONFTEST}, 5)],
)
def test_the_files_of_a_page_work_together(page: str, more: dict[str, str], tests: int, tmp_path: Path) -> None:
    """Everything on it works together."""
    assert f"{tests} passed" in run(page, tmp_path, **more)
