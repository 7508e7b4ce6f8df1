"""Arguments in docstrings, one `name: what it is` a line, as a list; options of sections with what
they accept."""

from __future__ import annotations

import re
from typing import Any

import griffe

from stratafl.experiment.experiment import SECTIONS, shown_default
from stratafl.experiment.fields import options

LINE = re.compile(r"^(\w+(?:, \w+)*): +(?=\S)|^(\w+) {3,}(?=\S)")
"""A line that begins with the argument's name, or with several."""


class ArgumentLists(griffe.Extension):
    """Show the house's way to document arguments as what it means."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = listed(func.docstring.value)


class SectionOptions(griffe.Extension):
    """Show what an option of a section accepts, instead of the annotation that checks it."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        section = next((kind for kind in SECTIONS.values() if kind.__name__ == cls.name), None)
        if section is None or cls.module.path != section.__module__:
            return
        for name, option in options(section).items():
            attribute = cls.attributes[name]
            if attribute.docstring is not None:
                told = f"Accepts {option.accepts}; default: {shown_default(option)}."
                attribute.docstring.value = f"{attribute.docstring.value}\n\n{told}"
                attribute.annotation = None


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
