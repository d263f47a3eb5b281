"""Tokens cannot be guessed quickly, and the guesses of others do not keep the right user out for long."""

from __future__ import annotations

import httpx
from starlette.responses import PlainTextResponse

from rsmq.dashboard.access import AccessControl, Rules
from rsmq.dashboard.login_limit import MOST_BUCKETS, OF_ADDRESS, OF_ALL, LoginLimit, network_of


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_address_has_some_attempts_and_then_one_at_a_time() -> None:
    """What it says to wait is enough, and refused attempts do not make it longer."""
    clock = Clock()
    limit = LoginLimit(clock)
    assert [limit.take("192.0.2.1") for _ in range(OF_ADDRESS.attempts)] == [0] * OF_ADDRESS.attempts
    assert {limit.take("192.0.2.1") for _ in range(10_000)} == {OF_ADDRESS.seconds}
    assert limit.take("192.0.2.2") == 0
    clock.now += OF_ADDRESS.seconds
    assert limit.take("192.0.2.1") == 0
    assert limit.take("192.0.2.1") == OF_ADDRESS.seconds
    clock.now += OF_ADDRESS.seconds * OF_ADDRESS.attempts
    assert [limit.take("192.0.2.1") for _ in range(OF_ADDRESS.attempts)] == [0] * OF_ADDRESS.attempts


def test_right_token_is_no_guess() -> None:
    """A user who logs in often is not held back, and has all attempts again after wrong ones."""
    limit = LoginLimit(Clock())
    for _ in range(10 * OF_ALL.attempts):
        assert limit.take("192.0.2.1") == 0
        limit.succeeded("192.0.2.1")


def test_many_addresses_share_a_limit_that_spares_known_ones() -> None:
    """Guesses from everywhere are bounded; an address that has logged in before has its own allowance."""
    clock = Clock()
    limit = LoginLimit(clock)
    limit.take("198.51.100.7")
    limit.succeeded("198.51.100.7")
    allowed = sum(limit.take(f"10.0.{n // 250}.{n % 250}") == 0 for n in range(5000))
    assert allowed == OF_ALL.attempts
    assert limit.take("203.0.113.9") == 1
    assert limit.take("198.51.100.7") == 0
    clock.now += 2 * OF_ALL.seconds  # the known address took one, too
    assert limit.take("203.0.113.9") == 0


def test_memory_of_attempts_is_bounded() -> None:
    """A month of guesses from ever new addresses leaves no more than the recent ones."""
    clock = Clock()
    limit = LoginLimit(clock)
    for n in range(20 * MOST_BUCKETS):
        clock.now += OF_ALL.seconds
        limit.take(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}")
        assert len(limit._buckets) <= MOST_BUCKETS + 1


def test_ipv6_addresses_of_one_network_are_one() -> None:
    """A visitor has 2 ** 64 of them."""
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("") == ""
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


async def test_hundreds_of_guesses_get_few_answers_and_the_right_user_gets_in_after_them() -> None:
    """While an address is held back, even the right token is refused; after the time in the answer it opens."""
    clock, token = Clock(), "a-token-of-thirty-two-characters"
    app = AccessControl(PlainTextResponse("the page"), Rules(token=token), clock)
    transport = httpx.ASGITransport(app, client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as guesser:
        answers = [await guesser.post("/login", data={"token": f"guess {n}"}) for n in range(300)]
        statuses = [each.status_code for each in answers]
        assert statuses == [401] * OF_ADDRESS.attempts + [429] * (300 - OF_ADDRESS.attempts)
        refused = await guesser.post("/login", data={"token": token})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, f"{OF_ADDRESS.seconds:.0f}")
        assert (await guesser.get("/")).status_code == 401
        clock.now += int(refused.headers["retry-after"])
        assert (await guesser.post("/login", data={"token": token})).status_code == 303
        assert (await guesser.get("/")).text == "the page"
