"""What the code does not do: run data as code, format data into scripts, or act when it is only imported."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsmq.redis.scripts import read, source_of
from tests.repository.test_architecture import MODULES, PACKAGE, SCRIPTS, TREES, script_name
from tests.servers import Server

RUNS_DATA = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib", "yaml", "code",
    "codeop", "runpy", "xmlrpc", "dbm",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "literal_eval"}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}
CORE = {
    "redis", "anyio", "tenacity", "mmh3", "pydantic", "typer", "rich", "uuid-utils",
}  # fmt: skip


OWN_DATA = {
    ("rsmq.handler.carried", "pickle"),
    ("rsmq.handler.child_process", "pickle"),
    ("rsmq.handler.child_process", "runpy"),
    ("rsmq.consumer.running.process_pool", "pickle"),
}
"""A worker and the processes of its own handlers, over a pair of sockets that no other process has. They read what the
other one has written, whether an error can be sent so, and the program that the worker runs itself."""


def offences(tree: ast.AST) -> Iterator[str]:
    """What in a module could run data as code or hand it to a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in RUNS_DATA)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_DATA:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            called = node.func
            name = (
                called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            )
            is_plain = isinstance(called, ast.Name) or ast.unparse(called).startswith("builtins.")
            if (name in CALLS and is_plain) or name in SHELLS:
                yield ast.unparse(called)
            yield from (
                "shell=True" for each in node.keywords if each.arg == "shell" and ast.unparse(each.value) != "False"
            )


def test_nothing_runs_data_as_code() -> None:
    """No module imports pickle or its like, evaluates text, or calls a shell."""
    found = {(module, each) for module, tree in TREES.items() for each in offences(tree)}
    assert found - OWN_DATA == set()


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "eval('1')", "import yaml\nyaml.load(x)", "exec(data)",
     "os.system(data)", "subprocess.run(data, shell=True)", "__import__(data)"],
)  # fmt: skip
def test_the_look_at_the_code_finds_it(source: str) -> None:
    """What is looked for is found."""
    assert list(offences(ast.parse(source)))


def test_no_script_is_made_of_data() -> None:
    """A script is a file of the package: no EVAL of a text that was put together."""
    named = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("EVAL", "EVAL_RO", "FUNCTION", "FCALL")
    }
    assert named <= {
        "rsmq.redis.scripts", "rsmq.heartbeat.heartbeat", "rsmq.redis.preflight.facts", "rsmq.redis.wire.slots",
        "rsmq.testing.idle",  # a constant, which moves the times of a test
    }  # fmt: skip
    (read,) = re.findall(r'get_data\("rsmq.redis", .*', MODULES["rsmq.redis.scripts"].read_text(encoding="utf-8"))
    assert read.endswith('f"lua/{name}.lua")')
    names = re.findall(r'Script\(("[a-z]+/\w+"|[^)]*)\)', "".join(path.read_text() for path in MODULES.values()))
    assert all(name.startswith('"') for name in names if name), "a script is named by a literal"


def names_of_keys(text: str) -> set[str]:
    """The variables of a script that hold declared keys: from KEYS, from a table of these, or passed to a function."""
    own = {"KEYS"} | set(re.findall(r"(\w+)\[[^\n]*?\] = KEYS\[", text))
    own |= set(re.findall(r"local (\w+) = [^\n]* and KEYS\[\w+\]$", text, re.MULTILINE))
    own |= set(re.findall(r"(\w+)\[\w+\] = \{ KEYS\[[^\]]+\](?:, KEYS\[[^\]]+\])* \}", text))
    for names, table in re.findall(r"local ([\w, ]+) = unpack\((\w+)\[", text):
        own |= set(names.split(", ")) if table in own else set()
    known = 0
    while known < len(own):  # a function may get its key from one that stands below it
        known = len(own)
        for names, values in re.findall(r"local ([\w, ]+) = ([^\n]*)", text):
            for name, value in zip(names.split(", "), values.split(", "), strict=False):
                is_beside = re.fullmatch(r"(\w+) \.\. ':' \.\. group \.\. ':\w+'", value)
                if (is_beside[1] if is_beside else value.partition("[")[0]) in own:
                    own.add(name)
        for function, parameters in re.findall(r"local function (\w+)\(([^)]*)\)", text):
            calls = [arguments(rest) for rest in re.findall(rf"(?<!function )\b{function}(\([^\n]*)", text)]
            for at, name in enumerate(parameters.split(", ")):
                if calls and all(len(call) > at and call[at].partition("[")[0] in own for call in calls):
                    own.add(name)
    return own


def arguments(rest: str) -> list[str]:
    """Those of a call, from its opening parenthesis on; commas in calls inside of it do not count."""
    found, depth = [""], 0
    for char in rest:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            break
        if char == "," and depth == 1:
            found.append("")
        elif not (char == "(" and depth == 1):
            found[-1] += char
    return [each.strip() for each in found]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_touches_declared_keys_only(script: Path) -> None:
    """Each key in a script is one of KEYS, or made of one and a number, or of a partition, its group and a word: never
    a name that was found in data. (The id at the end of a result's key cannot reach another key.) Keys of a batch are
    made in one place, `batch_keys`, of the prefix of a key and an id of letters and digits; `fire_batch` writes into a
    stream of the same prefix."""
    source, made = source_of(script_name(script)), read("shared/batch_keys")
    fires, text = read("shared/fire_batch"), source
    for each in (read("shared/can_write"), read("shared/may_write"), made):
        text = text.replace(each, "")
    text = re.sub(r"--.*", "", text)
    assert "stream:sub(1, #prefix) == prefix" in fires
    own = names_of_keys(text) | ({"keys"} if made in source else set()) | ({"stream"} if fires in source else set())
    for asked in re.findall(r"\b(?:can|may)_write\(([^\n]*)\)", text):  # pairs of commands and a key
        assert {re.split(r"[\[.]", key)[0] for key in asked.split(", ")[1::2]} <= own, f"{script.name}: {asked}"
    assert not re.search(r"\bload(string)?\s*\(|\bdofile\b|\bsetfenv\b|\brequire\b", text)
    for command, rest in re.findall(r"\bp?call\('([A-Z]+)',?\s*([^\n]*)", text):
        if command in ("TIME", "PUBLISH", "SPUBLISH", "PUBSUB"):
            continue
        if command in ("XINFO", "XGROUP"):
            rest = rest.split(",", 1)[1].strip()
        if command == "XREAD":
            rest = rest.partition("'STREAMS',")[2].strip()
        first = re.match(r"[\w\[\]]+", rest)
        assert first, f"{script.name}: {command} {rest}"
        name = first[0].partition("[")[0]
        if name == "unpack":  # a list of keys: each is made of a declared one
            listed = re.match(r"unpack\((\w+)", rest)
            assert listed
            made = re.findall(rf"\b{listed[1]}\[[^\]]*\] = ([^\n]*)", text)
            made = made or re.findall(rf"\b{listed[1]} = ([^\n]*)", text)
            names = {re.match(r"(?:\{{ )?(\w+)", each)[1] for each in made} if listed[1] != "KEYS" else {"KEYS"}  # type: ignore[index]
            assert names <= own, f"{script.name}: {command} {rest}: {made}"
        else:
            assert name in own, f"{script.name}: {command} {rest} is no declared key"


def test_importing_does_nothing() -> None:
    """Importing the package opens no socket, starts no thread or process, and loads no plugin."""
    program = """
import json, sys, threading
seen = []
sys.addaudithook(lambda event, args: seen.append(event))
import rsmq
rsmq.Broker()
bad = {"socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"}
print(json.dumps([sorted(bad & set(seen)), threading.active_count()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], 1]


SEAMS = {"rsmq.cli.app", "rsmq.cli.quick", "rsmq.cli.doctor", "rsmq.dashboard.app"}
"""Commands, rules of the doctor and pages of the dashboard are the only things that another distribution can add."""


def test_only_the_seams_load_plugins() -> None:
    """What is installed beside rsmq is not run by a broker, a worker or a gateway."""
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert "entry_points" not in text or module == "rsmq.model.extension", module
        assert "rsmq.model.extension import" not in text or module in SEAMS, module


def test_the_core_is_small() -> None:
    """What every installation gets is a short list: another name on it is a decision."""
    needed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    core = {re.split(r"[\[<>=!~ ;]", each)[0] for each in needed}
    assert core == CORE
    assert PACKAGE.name == "rsmq"


ASKED_OR_DONE_WITHOUT = {
    "acl",  # the preflight asks what it may do, and takes a refusal for an answer
    "eval_ro", "evalsha_ro", "object", "echo", "waitaof", "dbsize",  # where a command's key stands: a table of all
    "readonly",  # the beginning of an error
    "incr",  # `rsmq.testing`
}  # fmt: skip


def test_every_command_is_in_the_rule_of_the_page(server: Server) -> None:
    """Scripts run with the rights of their caller: what the rule lacks fails where something first reaches it. In the
    Python code, each text that is the name of a command counts as one that is sent."""
    page = (PACKAGE.parent / "docs" / "keys.md").read_text(encoding="utf-8")
    rule = page.partition("ACL SETUSER rsmq on")[2].partition("```")[0]
    allowed = {word[1:].partition("|")[0] for word in rule.split() if word.startswith("+")}
    in_scripts = {
        command.lower()
        for script in (PACKAGE / "redis" / "lua").rglob("*.lua")
        for command in re.findall(r"\bp?call\('([A-Z]+)", script.read_text(encoding="utf-8"))
    }
    texts = {
        node.value.lower()
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isupper()
    }
    with server.client() as client:
        listed = {name.decode().lower() for name in client.execute_command("COMMAND LIST")}
    in_python = texts & listed
    assert len(in_scripts) > 40
    assert len(in_python) > 60
    assert (in_scripts | in_python) - allowed - ASKED_OR_DONE_WITHOUT == set()
