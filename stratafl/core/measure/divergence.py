"""From which round on a run is dead: its test loss is no number any more, and stays so.

Rounds that were not evaluated say nothing, and a run that is finite again in its last evaluated
round lives. (Weights can be finite whose scores are not, and updates that are not finite are
refused: the loss shows it first.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]
"""A round's, as in rounds.jsonl."""


def measured(record: Record) -> dict[str, float]:
    """A round's test metrics, each finite or NaN; empty where it was not evaluated.

    Where the loss is not finite nothing else was measured, either: also in records of versions that
    took the first class for the best of scores that were NaN.
    """
    found = dict(_numbers(record.get("metrics")))
    return dict.fromkeys(found, math.nan) if math.isnan(found.get("loss", 0.0)) else found


def diverged(records: Iterable[Record]) -> int | None:
    """The first round of those up to the last that are not finite; None for a run that lives."""
    return functools.reduce(diverged_after, records, None)


def diverged_after(before: int | None, record: Record) -> int | None:
    """What `diverged` says with one more record, from what it said before that."""
    values = measured(record)
    if not values:
        return before
    return (before or record["round"]) if math.isnan(values.get("loss", min(values.values()))) else None


def _numbers(table: object) -> Iterator[tuple[str, float]]:
    """The numbers in what a file may hold; those that are not finite as NaN."""
    for name, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.nan
            yield str(name), number if math.isfinite(number) else math.nan
