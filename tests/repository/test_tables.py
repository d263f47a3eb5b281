"""What looks like code in the tables of the pages about moving over exists: names, options, commands and flags."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints, is_typeddict

import pytest
from typer.testing import CliRunner

import pytest_rsmq
import rsmq
from rsmq.cli import make_app
from rsmq.gateway import Gateway, GatewayOptions

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("migrate-*.md"))
SPAN = re.compile(r"`([^`]+)`")
OBJECTS = {"broker": rsmq.Broker, "message": rsmq.Message, "gateway": Gateway}
ELSEWHERE = {"tenacity": "wait_", "fast_depends": "Depends", "typing": "Annotated"}
"""Other libraries whose names stand in tables, and how these begin."""
NOT_OURS = re.compile(r"X[A-Z]+( [A-Z]+)*|wss://|/\w+|\$\S+|rsmq:\{.*|X\w+ .*")
"""Commands of the server, addresses, paths, and topics of MQTT."""
KNOWN = {"GatewayOptions": GatewayOptions, "datetime": datetime}
PLACEHOLDERS = {"x", "message_id", "router"}


def spans(page: Path) -> Iterator[str]:
    """The code in the last column of each table: what it is called in rsmq."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield from SPAN.findall(re.split(r"(?<!\\) \| ", line.rstrip("| "))[-1])


@cache
def options(function: Callable[..., Any]) -> frozenset[str]:
    """The keywords that a function takes, with those of an unpacked TypedDict."""
    target = inspect.unwrap(function)
    names = set[str]()
    for each in inspect.signature(target).parameters.values():
        if each.kind is each.VAR_KEYWORD and isinstance(target, type):
            names |= set(get_type_hints(target))
        elif each.kind is each.VAR_KEYWORD:
            inner = get_type_hints(target, include_extras=True)[each.name].__args__[0]
            assert is_typeddict(get_origin(inner) or inner), (function, inner)
            names |= set(get_type_hints(get_origin(inner) or inner))
        else:
            names.add(each.name)
    return frozenset(names)


@cache
def every_option() -> frozenset[str]:
    """Those of what a user calls most: an option may stand in a table without its call."""
    broker = rsmq.Broker
    calls = (
        broker.handler,
        broker.publish,
        broker.every,
        broker.request,
        broker.connect,
        rsmq.Router,
        rsmq.RetryPolicy,
    )
    return frozenset().union(*map(options, calls))


@cache
def help_of(*words: str) -> str:
    """The help page of a command."""
    done = CliRunner().invoke(make_app(), [*words, "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 0, f"rsmq {' '.join(words)} does not exist"
    return re.sub(r"\x1b\[[0-9;]*m", "", done.output)


def check_command(text: str) -> None:
    """`rsmq noun verb|verb --flag`."""
    words, flags = [], []
    for word in text.replace("\\|", "|").split()[1:]:
        (flags if word.startswith("-") else words).append(word)
    known = [word for word in words if re.fullmatch(r"[a-z|]+", word)]
    pages = [help_of(*known[:1], verb) for verb in known[1].split("|")] if known[1:] else [help_of(*known[:1])]
    for flag in flags:
        assert all(re.search(rf"{flag}(?![\w-])", page) for page in pages), f"{text}: no {flag}"


def check_flags(text: str) -> None:
    """`--flag VALUE` of one of the commands that run something."""
    flag = text.split()[0]
    assert any(re.search(rf"{flag}(?![\w-])", help_of(name)) for name in ("worker", "gateway", "docs")), (
        f"{flag}: no such flag"
    )


def check_python(text: str) -> None:
    """An expression or a decorator: its names exist, and each call takes its keywords."""
    code = re.sub(r"^(@|await |raise |async with )", "", text).removesuffix(":")
    if re.fullmatch(r"\w+=", code):
        code += "0"
    if re.match(r"\w+=", code):
        code = f"_({code})"
    code = re.sub(r"=(?=[,)])", "=0", code)
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = {each.arg for each in node.keywords if each.arg}
            is_bare = isinstance(node.func, ast.Name) and node.func.id == "_"
            assert named <= (every_option() if is_bare else options(found(node.func))), f"{text}: {named}"
        elif isinstance(node, ast.Name | ast.Attribute):
            found(node)


def found(node: ast.expr) -> Any:
    """What a name stands for. Raises AttributeError if it stands for nothing."""
    if isinstance(node, ast.Attribute):
        assert isinstance(node.value, ast.Name), ast.unparse(node)
        return getattr(OBJECTS[node.value.id], node.attr)
    assert isinstance(node, ast.Name), ast.unparse(node)
    if node.id in PLACEHOLDERS or node.id in OBJECTS or node.id == "_" or hasattr(builtins, node.id):
        return OBJECTS.get(node.id)
    if node.id in KNOWN:
        return KNOWN[node.id]
    for module, start in ELSEWHERE.items():
        if node.id.startswith(start):
            return getattr(importlib.import_module(module), node.id)
    return getattr(rsmq, node.id)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_a_table_exists(page: Path) -> None:
    """A keyword that no function takes, or a flag that no command has, fails here."""
    for text in spans(page):
        if text.startswith("rsmq "):
            check_command(text)
        elif text.startswith("--"):
            check_flags(text)
        elif text.startswith("RSMQ_"):
            assert text.removeprefix("RSMQ_").lower() in options(rsmq.Settings), text
        elif text.startswith("rsmq_"):
            assert hasattr(pytest_rsmq, text), text
        elif not NOT_OURS.fullmatch(text):
            check_python(text)


@pytest.mark.parametrize(
    "wrong",
    [
        "lifespan=",
        "broker.lifespam",
        '@broker.handler("a", gruop="b")',
        "RetryPolicy(tries=3)",
        "Brokre()",
        "delya='5s'",
    ],
)
def test_a_mistake_in_a_table_is_found(wrong: str) -> None:
    """Such as `lifespan=`, which two pages had, and the broker does not take."""
    with pytest.raises((AssertionError, AttributeError)):
        check_python(wrong)


@pytest.mark.parametrize("wrong", ["rsmq wroker", "rsmq worker app:broker --process", "rsmq dlq lits"])
def test_a_mistake_in_a_command_is_found(wrong: str) -> None:
    """A noun, a verb and a flag."""
    with pytest.raises(AssertionError):
        check_command(wrong)
