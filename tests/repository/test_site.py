"""The documentation site, built from this tree and opened in a browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browsers import browser, sync_api
from tests.site import build

pytest.importorskip("zensical", reason="the extra `docs` is not installed")
__all__ = ["browser"]

ROOT = Path(__file__).parents[2]
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(11, 12, 15)"}
TOO_WIDE = (
    "[...document.querySelectorAll('pre > code')].filter((each) => each.scrollWidth > each.clientWidth + 1).length"
)
RESULTS = 'div[style*="z-index"] a[href*="h="]'


class Quiet(SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *args: object) -> None:
        """Not on the terminal of the tests."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of a directory."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_the_site_is_complete_and_works_without_other_hosts(tmp_path: Path, browser: sync_api.Browser) -> None:
    """It is built once for all of it, because that takes long."""
    for name in ("zensical.toml", "docs", "rsmq"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path)
    build(tmp_path)  # without a warning: each link leads somewhere, each heading that it names exists
    with served(tmp_path / "site") as url:
        for scheme, color in BACKGROUNDS.items():
            check_page(browser, url, scheme, color)
        check_search(browser, url)


def check_page(browser: sync_api.Browser, url: str, scheme: str, color: str) -> None:
    """On a phone, in one of the two schemes: the colours, no request to another host, no line that is too long."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 800})
    page, asked = context.new_page(), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{url}tutorial/")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == color
    assert [each for each in asked if not each.startswith(url)] == []
    assert page.evaluate(TOO_WIDE) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def check_search(browser: sync_api.Browser, url: str) -> None:
    """A word of both is found on a page that was written before it is found in the reference."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    for word, guide in (("retry", "how-to/"), ("middleware", "how-to/"), ("cancel", "how-to/")):
        page = context.new_page()  # with the next word typed, the results of the last one stay for a moment
        page.set_default_timeout(30_000)
        page.goto(url)
        page.wait_for_load_state("networkidle")
        page.keyboard.press("/")
        page.keyboard.insert_text(word)
        results = page.locator(f'{RESULTS}[href*="h={word}"]')
        results.nth(5).wait_for()
        found = [each.removeprefix(url) for each in results.evaluate_all("all => all.map((each) => each.href)")]
        generated = [at for at, each in enumerate(found) if each.startswith("reference/")]
        written = [at for at, each in enumerate(found) if each.startswith(guide)]
        assert written, (word, found)
        assert min(written) < min(generated, default=len(found)), (word, found)
    context.close()
