"""One kind of complaint about input: it names the field, what was given, and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from pathlib import Path


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
    begun = [choice for choice in choices if str(name) and choice.startswith(str(name))]
    near = begun or difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, name, f"unknown; {hint}known: {', '.join(choices)}")


def _short(value: object, limit: int = 80) -> str:
    if isinstance(value, Path):
        return repr(str(value))  # whole: it is its end that says which file
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
    kind: str = "finite",
) -> float:
    """The value itself if it is a finite number within the bounds, otherwise the complaint."""
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    wanted = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    complaint = InvalidInput(field, value, f"must be a {kind} number {wanted}".rstrip())
    if not isinstance(value, Real) or isinstance(value, bool):
        raise complaint
    try:
        result = float(value)
    except OverflowError:
        raise complaint from None
    if (
        not math.isfinite(result)
        or (above is not None and not result > above)
        or (at_least is not None and not result >= at_least)
        or (below is not None and not result < below)
        or (at_most is not None and not result <= at_most)
    ):
        raise complaint
    return result


def whole(field: str, value: object, *, at_least: float | None = None, at_most: float | None = None) -> int:
    """The value as an int if it is a whole number within the bounds, otherwise the complaint."""
    result = number(field, value, at_least=at_least, at_most=at_most, kind="whole")
    if result != int(result):
        raise InvalidInput(field, value, "must be a whole number")
    return int(value)  # type: ignore[call-overload]  # exact also beyond 2^53
