"""Arguments in docstrings, one `name: what it is` a line, as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

LINE = re.compile(r"^(\w+(?:, \w+)*): +(?=\S)|^(\w+) {3,}(?=\S)")
"""A line that begins with the argument's name, or with several."""


class ArgumentLists(griffe.Extension):
    """Show the house's way to document arguments as what it means."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = listed(func.docstring.value)


def listed(text: str) -> str:
    """The same text, with paragraphs of arguments as lists."""
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if not lines or not LINE.match(lines[0]):
        return text
    made: list[str] = []
    for line in lines:
        begins = LINE.match(line)
        if begins:
            made.append(f"- `{begins[1] or begins[2]}`: {line[begins.end() :]}")
        else:
            made.append(f"  {line.strip()}")
    return "\n".join(made)
