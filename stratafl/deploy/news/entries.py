"""What is known of every site of a tree, as it travels from each site to its parent, and so to the
root.

Times are ages, in seconds: no two sites need the same clock. A site speaks for itself and for its
subtree; what its parent knows better (how long ago it was heard, how its clock goes, whether it is
waited for) the parent sets.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratafl.base.errors import InvalidInput, one_line
from stratafl.deploy.notes.log import LAST, LONGEST

EVERY = 2.0
"""Seconds between two messages of a site to its parent; what has changed is told sooner."""
SILENT = 8.0
"""Seconds without news, after which a site is missing."""
SKEWED = 2.0
"""Seconds: two clocks that differ by more are said to differ."""
PER_SITE = 1 << 14
"""Bytes in a message for each site of the sender's subtree, and as many for the rest."""
LARGEST_NUMBER = 1e15
TRAFFIC = ("bytes_in", "arrays_in", "bytes_out", "arrays_out")
STATES = ("unknown", "starting", "waiting", "round", "done", "refused", "failing", "damaged", "stopped")
"""unknown: it was never heard. failing: its own process does not run, or cannot do its work."""


@dataclass(frozen=True)
class Entry:
    """What is known of one site."""

    state: str = "unknown"
    round: int = 0
    problem: str = ""
    """The site's own words for what stands in its way now."""
    problem_for: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    """How often each of its processes was started again, since its supervisor was started."""
    restarted: float | None = None
    """Seconds since any of them was; None: never."""
    up: float = 0.0
    """Seconds since its supervisor was started."""
    version: str = ""
    """The version of stratafl that it works with."""
    said: tuple[tuple[int, str], ...] = ()
    """The site's last warnings, each with its number."""
    bytes_in: int = 0
    arrays_in: int = 0
    bytes_out: int = 0
    arrays_out: int = 0
    age: float | None = None
    """Seconds since it told this; None: never."""
    clock: float | None = None
    """Seconds by which its clock is ahead of its parent's."""
    waited: float | None = None
    """Seconds that its parent has been waiting for its reply; None: it does not."""
    why: str = ""
    """What the parent knows of that."""
    took_part: bool = False
    """Whether an update of it ever counted."""
    out: str = ""
    """Since when and why its parent asks it no more; empty while it does."""

    def older(self, seconds: float) -> Entry:
        """The same news, later."""
        if self.age is None:
            return self
        later = {"age": self.age + seconds, "up": self.up + seconds}
        if self.problem:
            later["problem_for"] = self.problem_for + seconds
        if self.waited is not None:
            later["waited"] = self.waited + seconds
        if self.restarted is not None:
            later["restarted"] = self.restarted + seconds
        return dataclasses.replace(self, **later)  # type: ignore[arg-type]

    @property
    def is_silent(self) -> bool:
        """Whether it should have been heard since."""
        return self.age is not None and self.age > SILENT and self.state not in ("stopped", "done")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def of(found: object) -> Entry:
        """Read an entry from what somebody sent: whatever is not as it should be is as if it were
        not there."""
        given = found if isinstance(found, Mapping) else {}
        known = {name: _checked(name, given[name]) for name in _KINDS if name in given}
        return Entry(**{name: value for name, value in known.items() if value is not None})


_KINDS = {each.name: str(each.type) for each in dataclasses.fields(Entry)}


def _checked(name: str, value: Any) -> Any:
    """The value if it can be one of this field, otherwise None."""
    kind = _KINDS[name]
    if name == "state":
        return value if value in STATES else None
    if name == "restarts":
        items = list(value.items())[: len(STATES)] if isinstance(value, Mapping) else []
        return {one_line(str(key), 20): count for key, count in items if _is_number(count) and isinstance(count, int)}
    if name == "said":
        pairs = [each for each in value[-LAST:] if _is_said(each)] if isinstance(value, list | tuple) else []
        return tuple((number, one_line(text, LONGEST)) for number, text in pairs)
    if kind == "str":
        return one_line(value, LONGEST) if isinstance(value, str) else None
    if kind == "bool":
        return value if isinstance(value, bool) else None
    if not _is_number(value) or (value < 0 and name != "clock"):
        return None
    if kind == "int":
        return value if isinstance(value, int) else None
    return float(value)


def _is_said(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and _is_number(value[0]) and isinstance(value[1], str)


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST_NUMBER and (isinstance(value, int) or math.isfinite(value))


Sites = dict[str, Entry]


def largest(names: Collection[str]) -> int:
    """Bytes that news of these sites may have."""
    return PER_SITE * (1 + len(names)) + 6 * sum(len(name.encode(errors="replace")) for name in names)


def encode(sites: Mapping[str, Entry], **rest: float) -> bytes:
    """News of sites as bytes."""
    told = {name: entry.as_dict() for name, entry in sites.items()}
    return json.dumps({**rest, "sites": told}, ensure_ascii=False).encode(errors="replace")


def decode(data: bytes, names: Collection[str]) -> tuple[dict[str, Any], Sites]:
    """What else is in it, and the news of those of these sites that are there."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidInput("news", f"{len(data)} bytes", "no JSON") from None
    sites = found.pop("sites", None) if isinstance(found, dict) else None
    if not isinstance(sites, dict):
        raise InvalidInput("news", f"{len(data)} bytes", "without sites")
    rest = {key: value for key, value in found.items() if _is_number(value)}
    return rest, {name: Entry.of(sites[name]) for name in names if name in sites}
