"""The browser of this machine, for the tests of pages: none is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    """Headless, the one that is installed. Without one, pytest's summary has one line for all tests that need it.

    Not longer than a module: as long as it is open it holds this thread's event loop, and no async test can run.
    """
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"there is no browser here: install one of {', '.join(BROWSERS)}")
    sync_api.expect.set_options(timeout=30_000)  # its own 5 s are too few for a busy machine
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()
