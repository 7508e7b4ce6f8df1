"""Former names of commands and options, understood for one release: the present command line is
printed, and run."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratafl.base.errors import InvalidInput, escape_control

COMMANDS: Mapping[str, Sequence[str]] = {
    "plan": ["tune"],
    "price": ["cost"],
    "methods": ["list", "methods"],
    "models": ["list", "models"],
    "networks show": ["list", "networks"],
    "networks": ["list", "networks"],
    "data list": ["list", "datasets"],
}
"""Former commands, the longer ones first, and the words that they are now."""
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "tune": {"--minimise": "--minimize", "--max-seconds": "--time-limit", "--space": "--search-space"},
    "cost": {"--figure": "--out", "--csv": "--out", "--timeline": "--out"},
    "resume": {"--force": "--allow-changes"},
    "data": {"--partial": "--allow-partial"},
}
"""Former options of present commands, and what they are now."""
RUNS = ("list", "show", "diff", "export")
"""Commands on stored runs; `stratafl runs` alone was the list."""


def present_words(words: Sequence[str]) -> list[str]:
    """The words of a command line by their present names; prints them if they were others."""
    present = _with_present_options(_with_present_command(list(words)))
    if present != list(words):
        print(escape_control(f"note: this is now: {shlex.join(['stratafl', *present])}"), file=sys.stderr)
    return present


def _with_present_command(words: list[str]) -> list[str]:
    for former, present in COMMANDS.items():
        length = len(former.split())
        if words[:length] == former.split():
            timeline = ["timeline"] if former == "price" and _has(words, "--timeline") else []
            return [*present, *timeline, *words[length:]]
    if words[:1] == ["bench"]:
        raise InvalidInput("COMMAND", "bench", "is now, in a checkout of the repository: python -m benchmarks.speed")
    if words[:1] == ["run"] and _has(words, "--resume"):
        return ["resume", *_moved_first("--resume", words[1:])]
    if words[:1] == ["runs"] and not _names_command(words[1:2]):
        is_export = _has(words, "--pack")
        return ["runs", "export" if is_export else "list", *_moved_first("--pack", words[1:])]
    return words


def _names_command(words: Sequence[str]) -> bool:
    """Whether a word after `runs` is one of its commands, perhaps misspelt, and not a folder."""
    return any(
        word in (*RUNS, "--help") or (difflib.get_close_matches(word, RUNS) != [] and not Path(word).exists())
        for word in words
    )


def _with_present_options(words: list[str]) -> list[str]:
    options = OPTIONS.get(words[0], {}) if words else {}
    named = [word.partition("=") for word in words]
    return ["".join((options.get(name, name), *rest)) for name, *rest in named]


def _has(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in words)


def _moved_first(option: str, words: Sequence[str]) -> list[str]:
    """The words with the value of an option in front, as the first argument."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            values = [value] if equals else words[place + 1 : place + 2]
            return [*values, *words[:place], *words[place + (1 if equals else 2) :]]
    return list(words)
