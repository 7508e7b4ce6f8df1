"""Quantities with units, as users type and read them."""

from __future__ import annotations

import re

from stratafl.base.errors import InvalidInput

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = ("B", "kB", "MB", "GB", "TB")
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-z]*)")


def parse_duration(field: str, text: str) -> float:
    """The seconds of "90", "90s", "30m", "1.5h" or "2d"."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or match[2] not in SECONDS or float(match[1]) <= 0:
        raise InvalidInput(field, text, "must be a time above 0, such as 90s, 30m or 8h")
    return float(match[1]) * SECONDS[match[2]]


def byte_count(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    *smaller, largest = BYTES
    for unit in smaller:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {largest}"
