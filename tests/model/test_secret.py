"""A secret that its JSON hides is refused, and not published as asterisks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretBytes, SecretStr, field_serializer

from rsmq import NotJson
from rsmq.model.message import encode_payload


class Login(BaseModel):
    """A model as users write it."""

    user: str
    token: SecretStr = Field(serialization_alias="t")


class Open(Login):
    """One that says how its secret is written."""

    @field_serializer("token", when_used="json")
    def reveal(self, token: SecretStr) -> str:
        return token.get_secret_value()


@dataclass
class Pair:
    """A plain dataclass around it."""

    first: Any


LOGIN = Login(user="ada", token=SecretStr("hunter2"))


@pytest.mark.parametrize("payload", [
    SecretStr("x"), SecretBytes(b"x"), LOGIN, [LOGIN], [LOGIN, None], {"a": {"b": LOGIN}}, Pair(LOGIN),
    Pair([SecretStr("x")]),
])  # fmt: skip
def test_secret_that_would_arrive_as_asterisks_is_refused(payload: Any) -> None:
    """At any depth."""
    with pytest.raises(NotJson, match="would arrive as asterisks"):
        encode_payload(payload)


@pytest.mark.parametrize("payload", [
    Open(user="**********", token=SecretStr("hunter2")), {"text": "**********"}, ["*****"],
    Login(user="a", token=SecretStr("")), [Login(user="a", token=SecretStr("")), None],
    [Open(user="ada", token=SecretStr("hunter2")), None],
])  # fmt: skip
def test_secret_that_its_model_writes_and_other_asterisks_are_published(payload: Any) -> None:
    """What was meant is written."""
    data, _ = encode_payload(payload)
    assert not isinstance(payload, Open) or b"hunter2" in data


@pytest.mark.parametrize("payload", ["hunter2 \ud800", {"token": "hunter2 \ud800"}, {"token": b"hunter2 \xff"}])
def test_the_error_of_a_text_that_is_not_unicode_does_not_have_the_text(payload: Any) -> None:
    """Python's own error has all of it, and what collects errors shows their causes."""
    with pytest.raises(NotJson) as caught:
        encode_payload(payload)
    assert caught.value.__suppress_context__ or not isinstance(caught.value.__context__, UnicodeError)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"
