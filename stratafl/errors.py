"""One kind of complaint about input: it names the field, what was given, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InvalidInput(ValueError):
    """A value the user gave that cannot be used; the message is one line meant for them."""

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field} = {_short(value)}: {allowed}")


class MissingExtra(ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str):
        super().__init__(
            f"{feature} needs the package {package}: pip install 'stratafl[{extra}]'"
        )


def unknown(field: str, name: object, known: Iterable[str]) -> InvalidInput:
    """The complaint about a name nobody knows, with the nearest one that exists."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, name, f"unknown; {hint}known: {', '.join(choices)}")


def _short(value: object, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
