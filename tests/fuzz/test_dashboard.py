"""A fuzzer over the dashboard's HTTP: any request gets an answer that is no error of the server, and no traceback.

Short in every run; `CHAOS=long` tries a hundred times as many.
"""

from __future__ import annotations

import os
import re
import socket
from urllib.parse import quote_from_bytes, urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cli.conftest import Running

pytest.importorskip("starlette", reason="needs the extra `dashboard`")

from tests.dashboard.conftest import Start, open_dashboard, scene, start  # noqa: F401

IS_LONG = os.environ.get("CHAOS") == "long"
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)] if IS_LONG else []

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
TOKEN = b"a-token-of-thirty-two-characters"
PAGES = [
    b"/", b"/members", b"/topic/", b"/group/orders/", b"/messages/", b"/messages/orders", b"/dead-letters",
    b"/dead-letters/orders/", b"/devices", b"/login", b"/static/", b"/do/replay", b"/do/", b"/device/", b"/delayed/",
    b"/parked/orders/", b"/dead-letter/orders/billing/", b"/audit", b"/favicon.ico", b"//", b"/..",
]  # fmt: skip
METHODS = [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"WEIRD"]
NAMES = [
    b"Origin", b"Cookie", b"Referer", b"Content-Type", b"Accept", b"X-Forwarded-For", b"X-Forwarded-Proto", b"Range",
    b"X-Forwarded-Prefix", b"Upgrade", b"Connection", b"Sec-WebSocket-Key", b"Sec-WebSocket-Version", b"Authorization",
    b"If-None-Match", b"Accept-Encoding", b"Accept-Language", b"X-\xff",
]  # fmt: skip
SOME_BYTES = st.binary(max_size=16)
VALUES = st.sampled_from([
    b"", b"http://[", b"null", b"http://localhost", b"rsmq_dashboard=x", b"rsmq_dashboard=\xff; =; ;", b"a=\"\\777\"",
    b"websocket", b"Upgrade", b"13", b"dGhlIHNhbXBsZSBub25jZQ==", b"bytes=0-", b"application/x-www-form-urlencoded",
    b"multipart/form-data", b"application/json", b"gzip;q=x", b"127.0.0.1, x", b"x" * 5000,
]) | SOME_BYTES.filter(lambda raw: not set(raw) & set(b"\0\r\n"))  # fmt: skip
QUERIES = st.sampled_from([
    b"", b"?", b"?range=1h", b"?before=x", b"?until=x", b"?where=x", b"?partition=99", b"?id=%00", b"?%", b"?a[]=1",
])  # fmt: skip
BODIES = SOME_BYTES | st.sampled_from([
    b"", b"token=" + TOKEN, b"token=%ff&token=", b"x" * 5000, b"token", b"{}",
    b"topic=orders&group=billing&id=1/2&confirmed=yes", b"topic=%ff", b"\xff\xfe",
])  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]:
    """Method, target, headers and body."""
    page = draw(st.sampled_from(PAGES) | SOME_BYTES.map(lambda raw: b"/" + quote_from_bytes(raw).encode()))
    rest = draw(st.just(b"") | SOME_BYTES.map(lambda raw: quote_from_bytes(raw, safe="").encode()))
    headers = draw(st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=4))
    return draw(st.sampled_from(METHODS)), page + rest + draw(QUERIES), headers, draw(BODIES)


@pytest.fixture(scope="module", params=[(), ("--token-file", "token")], ids=["open", "with a token"])
def dashboard(request: pytest.FixtureRequest, start: Start, scene: object) -> tuple[Running, int]:  # noqa: F811
    """A real dashboard, and its port."""
    (scene.directory / "token").write_bytes(TOKEN)  # type: ignore[attr-defined]
    running = start("dashboard", "--port", "0", "--allow-changes", *request.param)
    address = running.expect("http://")[0].split()[0]
    return running, urlsplit(address).port or 0


def answer(
    port: int, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes, host: bytes
) -> int:
    """The status of the answer; 0 if the server closed the connection without one."""
    lines = [b"%b %b HTTP/1.1" % (method, target), b"Host: " + host, b"Content-Length: %d" % len(body)]
    lines += [b"%b: %b" % each for each in headers]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", b""]) + body)
        found = STATUS.match(connection.recv(65536))
    return int(found[1]) if found else 0


@settings(
    max_examples=10_000 if IS_LONG else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    request=requests(), host=st.sampled_from([b"localhost", b"127.0.0.1:1"] * 4 + [b"", b"[", b"evil.example", b"\xff"])
)
@example(request=(b"GET", b"/", [(b"Origin", b"http://[")], b""), host=b"localhost")
@example(request=(b"GET", b"/", [(b"X-\xff", b"x")], b""), host=b"localhost")
@example(request=(b"GET", b"/messages/%00", [], b""), host=b"localhost")
@example(request=(b"GET", b"/group/%ff/%ff", [], b""), host=b"localhost")
@example(request=(b"POST", b"/login", [], b"token=%ff&=%"), host=b"localhost")
def test_any_request_gets_an_answer_that_is_no_error_of_the_server(
    dashboard: tuple[Running, int], request: tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes], host: bytes
) -> None:
    """Never a status of 500 or more, and never a traceback in its log."""
    running, port = dashboard
    status = answer(port, *request, host)
    assert status < 500, (status, running.lines[-30:])
    assert not running.matching("Traceback"), running.lines[-60:]
    assert running.process.poll() is None
