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
