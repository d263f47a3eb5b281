"""Answers that need no command, for a shell that waits at each key: the version, and names of commands and options.

Typer would import pydantic and rich for them. Here bash and zsh get the form that its scripts expect
(`rsmq --install-completion`). What is not in the index, such as the values of an option, is left to the commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rsmq.cli import index
from rsmq.model.distribution import OWN
from rsmq.model.extension import extensions
from rsmq.model.words import installed

ROOT_OPTIONS: Final = {
    "--version": "Print the version.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
}
HELP: Final = {"--help": "Show this message and exit."}
ESCAPES: Final = str.maketrans({'"': '""', "'": "''", "$": r"\$", "`": r"\`", ":": r"\\:"})
"""Of a text between double quotes inside single quotes, in zsh."""


def answered(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Print the answer, if this is one of these questions. If it cannot be written, the command says why."""
    shell = environment.get("_RSMQ_COMPLETE")
    if shell is None:
        text = f"rsmq {installed(OWN)}" if arguments == ["--version"] else None
    elif shell in ("complete_bash", "complete_zsh") and (words := completed_words(environment)) is not None:
        text = completion(words, is_zsh=shell == "complete_zsh")
    else:
        text = None
    if text is None:
        return False
    try:
        print(text, flush=True)
    except OSError:
        return False
    return True


def completed_words(environment: Mapping[str, str]) -> list[str] | None:
    """The words of a line that a shell completes, without `rsmq`; None if none does. The last one is not finished."""
    if not environment.get("_RSMQ_COMPLETE", "").startswith("complete"):
        return None
    line = environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()
    at = int(environment["COMP_CWORD"]) if environment.get("COMP_CWORD", "").isdecimal() else len(words) - 1
    if not environment.get("COMP_CWORD") and line.endswith(tuple(" \n\t")):
        at += 1
    return [*words[1:at], words[at] if at < len(words) else ""]


def completion(words: Sequence[str], *, is_zsh: bool) -> str | None:
    """The names that go on with the last word. None if the index does not know."""
    *before, last = words
    found = names(before, is_option=last.startswith("-"))
    if found is None:
        return None
    fitting = {name: text for name, text in found.items() if name.startswith(last)}
    if not is_zsh:
        return "\n".join(fitting)
    if not fitting:
        return "_files"
    lines = (f'"{name}":"{shortened(text).translate(ESCAPES)}"' for name, text in fitting.items())
    return f"_arguments '*: :(({chr(10).join(lines)}))'"


def names(before: Sequence[str], *, is_option: bool) -> dict[str, str] | None:
    """The names that may come after these words, with their help."""
    if not before:
        return {**ROOT_OPTIONS, **HELP} if is_option else dict(commands())
    entry = index.top(before[0])
    if entry is not None and "commands" in entry:
        if len(before) == 1:
            return HELP if is_option else {name: each["help"] for name, each in entry["commands"].items()}
        entry = entry["commands"].get(before[1])
    return None if entry is None or not is_option else {**dict(options(entry, before)), **HELP}


def commands() -> Iterator[tuple[str, str]]:
    """All commands. Those of other distributions are not imported for their help."""
    for name, entry in index.read().items():
        yield name, entry["help"]
    for each in extensions("rsmq.commands"):
        if index.top(each.name) is None:
            yield each.name, f"From {each.distribution}."


def options(entry: index.Entry, before: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a command that may still be given."""
    for spellings, (kind, text) in entry["options"].items():
        every = spellings.replace("/", " ").split()
        if kind == "values" or not set(every) & set(before):
            yield from ((name, text) for name in every)


def shortened(text: str) -> str:
    """What fits into a list."""
    return text if len(text) <= 60 else f"{text[:57].rsplit(' ', 1)[0]}..."
