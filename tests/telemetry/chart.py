"""Renders the Helm chart: the few forms of Go's templates that it uses, so that its tests need no Helm.

Its answers were compared with those of Go's own engine and sprig. A form that is not known here is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

WORD: Final = re.compile(r'"[^"]*"|\S+')


def render(chart: Path, name: str, **changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The manifests of a release, with some of the values changed."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for key, change in changes.items():
        values[key] = {**values[key], **change}
    data = {"Values": values, "Release": {"Name": name}}
    texts = [Template(path.read_text(), data).text for path in sorted((chart / "templates").glob("*.yaml"))]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


class Template:
    """One file, rendered."""

    def __init__(self, text: str, data: Mapping[str, Any]) -> None:
        self._parts, at = list[tuple[str, str]](), 0
        for found in re.finditer(r"(\s*)\{\{(-?) (.*?) \}\}", text, re.DOTALL):
            self._parts.append(("text", text[at : found.start()] + ("" if found[2] else found[1])))
            self._parts.append(("action", found[3]))
            at = found.end()
        self._parts.append(("text", text[at:]))
        self._at = 0
        self.text = self._block(data, {}, is_shown=True)
        assert self._at == len(self._parts), "an end too many"

    def _block(self, data: Mapping[str, Any], names: Mapping[str, Any], *, is_shown: bool) -> str:
        """Up to the `end` of this block."""
        made = ""
        while self._at < len(self._parts):
            kind, content = self._parts[self._at]
            self._at += 1
            if kind == "text":
                made += content
            elif content == "end":
                break
            elif content.startswith("if "):
                wanted = bool(self._value(content[3:], data, names)) if is_shown else False
                made += self._block(data, names, is_shown=wanted)
            elif content.startswith("range "):
                made += self._range(content, data, names, is_shown=is_shown)
            elif is_shown:
                value = self._value(content, data, names)
                made += str(value).lower() if isinstance(value, bool) else str(value)
        return made if is_shown else ""

    def _range(self, content: str, data: Mapping[str, Any], names: Mapping[str, Any], *, is_shown: bool) -> str:
        found = re.fullmatch(r"range (\$\w+), (\$\w+) := (\S+)", content)
        assert found is not None, content
        start, made = self._at, ""
        items = sorted(self._value(found[3], data, names).items()) if is_shown else []
        for key, value in items:
            self._at = start
            made += self._block(data, {**names, found[1]: key, found[2]: value}, is_shown=True)
        if not items:
            self._block(data, names, is_shown=False)
        return made

    def _value(self, expression: str, data: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
        first, *filters = expression.split(" | ")
        words = [self._word(each, data, names) for each in WORD.findall(first)]
        if first.startswith("eq "):
            value: Any = words[1] == words[2]
        elif first.startswith("max "):
            value = max(words[1:])
        else:
            (value,) = words
        for each in filters:
            value = {"quote": lambda text: json.dumps(str(text)), "toJson": json.dumps}[each](value)
        return value

    @staticmethod
    def _word(word: str, data: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
        if word in ("eq", "max"):
            return word
        if word.startswith("$"):
            return names[word]
        if not word.startswith("."):
            return json.loads(word)
        value: Any = data
        for part in word[1:].split("."):
            value = value[part]
        return value
