"""`rsmq.asgi.relay_sse`: a browser at a stream of events, of real servers in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from rsmq import Broker, ConfigError, Settings
from rsmq.asgi import lifespan, relay_sse
from tests.patience import until
from tests.web import served

pytestmark = pytest.mark.anyio


@pytest.fixture
async def broker(server_url: str, prefix: str) -> AsyncIterator[Broker]:
    """Connected, on the shared server."""
    async with Broker(Settings(url=server_url, prefix=prefix, preflight="warn")) as broker:
        yield broker


@asynccontextmanager
async def web(broker: Broker, **options: Any) -> AsyncIterator[str]:
    """The address of a web application with a broker of its own."""
    own = Broker(broker.settings)

    async def serve(request: Request) -> StreamingResponse:
        return relay_sse(request, own, request.path_params["user"], **options)

    app = Starlette(routes=[Route("/{user}", serve)], lifespan=lifespan(own))
    async with served(app, timeout_graceful_shutdown=1) as address:
        yield f"http://{address}"


class Browser:
    """What an EventSource does: reads events, and knows the id of the last one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.last_id = ""
        self.comments = list[str]()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """The events of one connection, each with its name."""
        headers = {"Last-Event-ID": self.last_id} if self.last_id else {}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("GET", f"{self._address}/ada", headers=headers) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            yield self._events(response)

    async def _events(self, response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
        name, data, own = "message", list[str](), ""
        async for line in lines(response):
            field, _, value = line.partition(": ")
            if line.startswith(":"):
                self.comments.append(line)
            elif line:
                name, own = (value if field == "event" else name), (value if field == "id" else own)
                data += [value] if field == "data" else []
            elif data:
                self.last_id = own or self.last_id
                yield name, "\n".join(data)
                name, data, own = "message", [], ""


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines as a browser splits them; httpx splits at more characters."""
    rest = ""
    async for text in response.aiter_text():
        *ended, rest = (rest + text).split("\n")
        for line in ended:
            yield line


def payload(event: tuple[str, Any]) -> Any:
    """That of a letter."""
    return json.loads(event[1])["payload"]


async def test_a_browser_goes_on_behind_its_last_event_at_another_gateway(broker: Broker) -> None:
    """What it has got is acknowledged by its Last-Event-ID; what it has not comes again, in order."""
    await broker.send_many([("ada", {"n": n}) for n in range(3)], topic="results")
    async with web(broker) as one, web(broker) as other:
        browser = Browser(one)
        async with browser.connected() as events:
            assert [payload(await anext(events)) for _ in range(2)] == [{"n": 0}, {"n": 1}]
        await until(lambda: is_offline(broker), "the first stream has ended")
        browser._address = other
        async with browser.connected() as events:
            assert payload(await anext(events)) == {"n": 2}
            await broker.send("ada", "next", topic="results")
            assert payload(await anext(events)) == "next"
            found = await broker.devices.find("ada")
            assert found is not None
            assert found.backlog == 2


async def is_offline(broker: Broker) -> bool:
    """Whether the session of the browser has ended."""
    found = await broker.devices.find("ada")
    return found is not None and found.gateway is None


async def test_a_browser_that_stays_is_not_held_up_by_its_window(broker: Broker) -> None:
    """The oldest event is acknowledged when so many newer ones were sent; lines of a letter are lines of the event."""
    encode = "{0.payload}\nend".format
    async with web(broker, window=2, encode=encode) as address, Browser(address).connected() as events:
        await broker.send_many([("ada", n) for n in range(7)])
        assert [(await anext(events))[1] for _ in range(7)] == [f"{n}\nend" for n in range(7)]


async def test_a_text_arrives_as_it_is_whatever_it_holds(broker: Broker) -> None:
    """Separators that Python counts as ends of lines, and a browser does not: in JSON they would break the string."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh"
    async with web(broker) as address, Browser(address).connected() as events:
        await broker.send("ada", {"text": text})
        assert payload(await anext(events)) == {"text": text}
    async with web(broker, encode="{0.payload}".format) as address, Browser(address).connected() as events:
        for sent, got in (("one\r\ntwo\rthree\n", "one\ntwo\nthree\n"), ("", ""), ("x\u2028y", "x\u2028y")):
            await broker.send("ada", sent)
            while (event := await anext(events))[1].startswith("{"):
                pass
            assert event[1] == got


async def test_the_newest_connection_tells_the_older_one_that_it_is_taken(broker: Broker) -> None:
    """And while nothing comes there are comments."""
    async with web(broker, keep_alive="10ms") as address:
        older = Browser(address)
        async with older.connected() as events, anyio.create_task_group() as tasks:
            told = list[tuple[str, Any]]()

            async def listen() -> None:
                told.append(await anext(events))

            tasks.start_soon(listen)
            await until(lambda: ": waiting" in older.comments, "a comment")
            async with Browser(address).connected() as newer:
                await until(lambda: bool(told), "the older browser gets the event")
                await broker.send("ada", "x")
                assert payload(await anext(newer)) == "x"
        assert told == [("taken", "")]


async def test_an_id_of_an_inbox_that_was_lost_hides_nothing(broker: Broker) -> None:
    """Seqs begin anew then; nor does an id that is none, or a time that is none."""
    async with web(broker) as address:
        browser = Browser(address)
        browser.last_id = "999-1"
        await broker.send("ada", "new")
        for last_id in ("999-1", "words", "9" * 40):
            browser.last_id = last_id
            async with browser.connected() as events:
                assert payload(await anext(events)) == "new"
            await until(lambda: is_offline(broker), "it has ended")
    request = Request({"type": "http", "headers": []})
    with pytest.raises(ConfigError, match="more than 0"):
        relay_sse(request, broker, "ada", keep_alive="0s")


async def test_a_stream_whose_session_the_server_has_lost_ends_whole(broker: Broker) -> None:
    """The data of the server was deleted: the browser connects again, and the log has no error of the application."""
    async with web(broker) as address, Browser(address).connected() as events:
        await broker.send("ada", 1)
        assert payload(await anext(events)) == 1
        *keys, _ = broker.keys.device("ada")
        await broker.client.execute_command("DEL", *keys)
        await broker.send("ada", 2)
        assert await anext(events, None) is None
