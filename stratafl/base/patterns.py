"""Parts of something by their dotted names: the last part, the whole name, or a pattern."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from stratafl.base.errors import InvalidInput, unknown


def matching(field: str, patterns: Sequence[str], names: Collection[str], words: Collection[str] = ()) -> list[str]:
    """The names that match any pattern; a pattern that matches none is refused. words: names of
    another kind, which may have been meant then."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InvalidInput(field, patterns, "must be a list of names")
    found: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidInput(field, pattern, "must be a name, or a pattern of names")
        mine = [name for name in names if name.rpartition(".")[2] == pattern or fnmatchcase(name, pattern)]
        if not mine:
            raise unknown(field, pattern, last_parts(names).union(words))
        found |= dict.fromkeys(mine)
    return list(found)


def last_parts(names: Collection[str]) -> set[str]:
    """The last part of each dotted name."""
    return {name.rpartition(".")[2] for name in names}


def is_within(name: str, wholes: Collection[str]) -> bool:
    """Whether a name is one of these, or of something in one of these."""
    return any(name == whole or name.startswith(f"{whole}.") for whole in wholes)
