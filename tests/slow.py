"""Parameters of a test that only the slow suite runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One case of a test, for the slow suite only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_unless(quick: Callable[[Any], object], cases: Iterable[Any]) -> list[Any]:
    """Cases of a test, of one value each: those for which `quick` is false are slow."""
    return [case if quick(case) else slow(case) for case in cases]
