"""Texts from files, made safe to print."""

from __future__ import annotations


def printable(text: object) -> str:
    """A text as one line that a terminal only shows: what would steer it, or cannot be encoded, is spelt out."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in str(text))
