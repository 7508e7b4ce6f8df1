"""Checks of user input: numbers, choices, names and patterns of names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from numbers import Integral, Rational, Real
from typing import Any, TypeVar

from stratafl.base.errors import InvalidInput, format_value, unknown_name

Known = TypeVar("Known", bound=str)


def plain(value: Any) -> Any:
    """Convert an array or a tensor to Python numbers in lists; return anything else unchanged."""
    with suppress(Exception):  # a tensor need not have values
        return value.tolist()
    return value


def check_choice(field: str, name: object, choices: Iterable[Known]) -> Known:
    """Return `name` if it is one of these choices, with their type, or raise `InvalidInput`."""
    for choice in choices:
        if isinstance(name, str) and name == choice:
            return choice
    raise unknown_name(field, name, choices)


def find_name(field: str, name: object, names: Iterable[Known]) -> Known:
    """Return the known name that `name` is, whatever its case, or raise `InvalidInput`."""
    known = list(names)
    if isinstance(name, str):
        for match in (lambda text: text, str.lower):
            for candidate in known:
                if match(candidate) == match(name):
                    return candidate
    raise unknown_name(field, name, known)


def check_keys(field: str, table: Iterable[Any], keys: Collection[str]) -> None:
    """Reject a table that has other keys than these."""
    for key in table:
        if key not in keys:
            raise unknown_name(f"{field} key", key, keys)


def name_and_params(field: str, value: object, instead: str = "") -> tuple[str, dict[str, Any]]:
    """Split a bare name, or a table with a key `name`, into the name and its parameters.

    instead: other accepted forms, which the caller has handled before; for the message.
    """
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        # what is no text cannot be a parameter, and is refused under the name it is shown by
        return value["name"], {
            key if isinstance(key, str) else format_value(key): parameter
            for key, parameter in value.items()
            if key != "name"
        }
    if isinstance(value, Mapping) and "name" in value:
        raise InvalidInput(f"{field}.name", value["name"], "unknown; must be a text")
    allowed = f"a name, a table with a name, or {instead}" if instead else "a name, or a table with a name"
    raise InvalidInput(field, value, f"must be {allowed}")


def check_number(
    field: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    kind: str = "finite",
) -> float:
    """Return `value` as a float if it is a finite number within the bounds, or raise
    `InvalidInput`."""
    result = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            result = float(value)
    if (
        math.isfinite(result)
        and (above is None or result > above)
        and (at_least is None or result >= at_least)
        and (below is None or result < below)
        and (at_most is None or result <= at_most)
    ):
        return result
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    allowed_range = " and ".join(f"{word} {_written(bound)}" for word, bound in bounds.items() if bound is not None)
    raise InvalidInput(field, value, f"must be a {kind} number {allowed_range}".rstrip())


def _written(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def check_integer(field: str, value: object, *, at_least: float | None = None, at_most: float | None = None) -> int:
    """Return `value` as an int if it is an integer within the bounds, or raise `InvalidInput`."""
    result = check_number(field, value, at_least=at_least, at_most=at_most, kind="whole")
    if result != int(result):
        raise InvalidInput(field, value, "must be a whole number")
    return int(value)  # type: ignore[call-overload]  # exact also beyond 2^53


def check_count_or_fraction(field: str, value: object, allowed: str) -> int | float:
    """Check a number of children (an integer type) or a fraction of them (a float type).

    The type tells 1, a single child, from 1.0, all children.
    """
    is_whole = isinstance(value, Integral)
    if not isinstance(value, Real) or isinstance(value, bool) or (isinstance(value, Rational) and not is_whole):
        raise InvalidInput(field, value, allowed)
    if is_whole:
        return check_integer(field, value, at_least=1, at_most=1 << 31)
    return check_number(field, value, above=0, at_most=1)


def repeated(names: Iterable[str]) -> str | None:
    """First name that occurs twice, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def matching(field: str, patterns: Sequence[str], names: Collection[str], words: Collection[str] = ()) -> list[str]:
    """Select the names that match any of the patterns; a pattern without a match is refused.

    words: accepted words that are no patterns, for the message.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InvalidInput(field, patterns, "must be a list of names")
    selected: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidInput(field, pattern, "must be a name, or a pattern of names")
        matches = [name for name in names if name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise unknown_name(field, pattern, last_parts(names).union(words))
        selected |= dict.fromkeys(matches)
    return list(selected)


def last_parts(names: Collection[str]) -> set[str]:
    """Last part of each dotted name."""
    return {name.rpartition(".")[2] for name in names}


def is_within(name: str, outer: Collection[str]) -> bool:
    """Whether a name is one of these, or is inside one of these."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in outer)
