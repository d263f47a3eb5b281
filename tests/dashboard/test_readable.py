"""A dashboard without keys writes nothing readable beside encrypted messages."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import pytest

from rsmq import Broker, Settings
from rsmq.codecs import Encrypt, Keyring
from rsmq.dashboard import Role, Rules, Visitor, create_app
from tests.dashboard.test_extension import browsing

FORMS = {
    "publish": {"topic": "safe", "payload": "1", "kind": "json", "confirmed": "yes"},
    "add-schedule": {"topic": "safe", "schedule": "s", "rule": "12h", "payload": "1", "confirmed": "yes"},
}


@pytest.mark.parametrize("action", FORMS)
async def test_a_dashboard_without_keys_refuses_what_would_be_readable(settings: Settings, action: str) -> None:
    """With what to do; beside a readable message it publishes."""
    settings = replace(settings, preflight="warn")
    rules = Rules(authorize=lambda _: Visitor("root", Role.ADMIN))
    async with Broker(settings, codecs=[Encrypt(Keyring({"k1": b"1" * 32}))]) as sealed, Broker(settings) as plain:
        await sealed.publish("safe", {"to": "ada"})
        async with browsing(create_app(settings, rules=rules)) as web:
            page = await web.get("/publish/safe")
            answer = await web.post(f"/do/{action}", data=FORMS[action])
            for each in (page, answer):
                assert each.status_code == 400
                assert "is encrypted (key k1), and there are no keys here: set RSMQ_KEYS" in unescape(each.text)
            await plain.publish("safe", {"to": "ada"})
            assert (await web.post(f"/do/{action}", data=FORMS[action])).status_code == 303
