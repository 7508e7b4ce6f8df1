"""One kind of complaint about input: it names the field, what was given, and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real


class InvalidInput(ValueError):
    """A value the user gave that cannot be used; the message is one line meant for them."""

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field} = {_short(value)}: {allowed}")


class MissingExtra(ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str):
        super().__init__(f"{feature} needs the package {package}: pip install 'stratafl[{extra}]'")


def unknown(field: str, name: object, known: Iterable[str]) -> InvalidInput:
    """The complaint about a name nobody knows, with the nearest one that exists."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, name, f"unknown; {hint}known: {', '.join(choices)}")


def _short(value: object, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def number(
    field: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    whole: bool = False,
) -> float:
    """The value itself if it is a finite number within the bounds, otherwise the complaint."""
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    wanted = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    allowed = f"must be a {'whole' if whole else 'finite'} number {wanted}".rstrip()
    try:
        finite = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite or (whole and value != int(value)):
        raise InvalidInput(field, value, allowed)
    if (
        (above is not None and not value > above)
        or (at_least is not None and not value >= at_least)
        or (below is not None and not value < below)
        or (at_most is not None and not value <= at_most)
    ):
        raise InvalidInput(field, value, allowed)
    return int(value) if whole else float(value)
