"""How long a browser needs to open the dashboard: `python -m benchmarks.dashboard`, which needs Chromium."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from statistics import median

from playwright.sync_api import sync_playwright

from rsmq import Broker, Settings
from rsmq.testing import ThrowawayServer

ENDED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


async def fill(url: str, topics: int) -> None:
    """Topics with one message and one group each."""
    async with Broker(Settings(url=url, preflight="warn", partitions=4)) as broker:
        for n in range(topics):
            await broker.publish(f"topic-{n:03}", {"n": n}, key=str(n))
            for partition in range(4):
                stream = broker.keys.stream(f"topic-{n:03}", partition)
                await broker.client.execute_command("XGROUP", "CREATE", stream, "billing", "0", "MKSTREAM")


def opened(url: str, times: int) -> list[float]:
    """Seconds from the request to the event `load`, each time in a fresh context of one browser."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        found = []
        for _ in range(times):
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            page = context.new_page()
            page.goto(url)
            page.get_by_text("topic-000").first.wait_for()
            found.append(page.evaluate(ENDED) / 1000)
            context.close()
        browser.close()
    return found


def main() -> None:
    """Print the median, the fastest and the slowest, of the first rows and of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=200)
    parser.add_argument("--times", type=int, default=9)
    wanted = parser.parse_args()
    with ThrowawayServer() as server:
        asyncio.run(fill(server.url, wanted.topics))
        command = [sys.executable, "-m", "rsmq", "dashboard", "--port", "0", "--json", "--url", server.url]
        dashboard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert dashboard.stdout is not None
        url = json.loads(dashboard.stdout.readline())["url"]
        for name, query in (("the first rows", ""), ("all rows", "?rows=all")):
            found = opened(url + query, wanted.times)
            print(
                f"{wanted.topics} topics, {name}: {median(found):.2f} s ({min(found):.2f} to {max(found):.2f}), "
                f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
            )
        dashboard.terminate()
        dashboard.wait()


if __name__ == "__main__":
    main()
