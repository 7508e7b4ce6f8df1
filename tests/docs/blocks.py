"""What a page of documentation holds that can be wrong: its code, its configs, and its commands.

A fence's first word is its language. Two comments of Markdown's, which no reader sees, say more:

    <!-- hidden              around a fence: run like any other, to set up what the page talks of
    <!-- not run: WHY -->    before a fence: the one way out, with a reason
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "toml", "bash", "json", "ini", "text")
FENCE = re.compile(r"^ *```+ *(.*?)$")
TITLE = re.compile(r'title="([^"]*)"')
NOT_RUN = re.compile(r"<!-- not run: (.*?) -->")
COMMAND = re.compile(r"stratafl (?=\S)")
SPAN = re.compile(r"`(stratafl\s[^`]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    """Of its first line, counted from 1."""
    title: str = ""
    """The file that the page asks its reader to save it as."""
    not_run: str = ""
    """Why it is not run; empty where it is."""


@dataclass(frozen=True)
class Page:
    """All that is to be tried of a page, in its order."""

    blocks: list[Block]
    commands: list[str]
    """Lines of code that call this package."""
    named: list[str]
    """What the prose names in backquotes."""


def read(text: str) -> Page:
    """A page's blocks and commands."""
    blocks: list[Block] = []
    commands: list[str] = []
    prose: list[str] = []
    opened: tuple[str, int] | None = None
    inside: list[str] = []
    not_run = ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is not None and fence is None:
            inside.append(line)
        elif opened is not None:
            info, first = opened
            made = _block(info, textwrap.dedent("\n".join(inside)) + "\n", first, not_run)
            blocks.append(made)
            if made.language == "bash":
                commands += commands_of(made)
            opened, inside, not_run = None, [], ""
        elif fence is not None:
            opened = fence[1], number + 1
        else:
            marker = NOT_RUN.search(line)
            not_run = marker[1] if marker else not_run if not line.strip() else ""
            if line.startswith("    ") and COMMAND.match(line.strip()):
                commands.append(line.strip())
            prose.append(line)
    assert opened is None, f"a fence that begins in line {opened} does not end"
    named = [" ".join(span.split()) for span in SPAN.findall("\n".join(prose))]
    return Page(blocks, commands, named)


def _block(info: str, text: str, line: int, not_run: str) -> Block:
    title = TITLE.search(info)
    language = (info.split() or ["text"])[0]
    return Block(language, text, line, title[1] if title else "", not_run)


def commands_of(block: Block) -> list[str]:
    """The lines of a block that call this package, in their order."""
    return [line.strip() for line in block.text.splitlines() if COMMAND.match(line.strip())]
