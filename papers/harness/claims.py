"""Claims of a paper and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from papers.harness.results import DIVERGED, Results, Value
from papers.harness.series import Panel, Scale, Series

HELD, HELD_AS_MEASURED, PARTLY, OPEN = "held", "held as far as measured", "held in part", "not measured yet"
NOT_HELD, NOT_SO_FAR = "not held", "not held so far"
Label = Callable[[Panel], str]
"""Names a panel for people, in the words of its paper."""
SHOWN = 4
"""Findings quoted in a verdict's sentence, those against the claim first."""


class Finding(NamedTuple):
    """True if a claim holds in one panel, False if not, None where it cannot be decided."""

    label: str
    holds: bool | None
    said: str
    """The numbers behind it."""


@dataclass(frozen=True)
class Verdict:
    """Status of a claim, and the findings as a sentence."""

    status: str
    sentence: str


@dataclass(frozen=True)
class Claim:
    """A statement of the paper about a table or a figure."""

    id: str
    series: str
    where: str
    text: str
    """The claim at the paper's scale; TARGET stands for the test accuracy to be reached."""
    findings: Callable[[Results], Iterable[Finding]]
    small: str | None = None
    """The claim at quick scale, where that has neither the paper's data nor as many settings."""

    def stated(self, series: Series, scale: Scale) -> str:
        """The text of the claim with the target of this scale."""
        text = self.small if scale == "quick" and self.small is not None else self.text
        goal = series.goal(scale)
        return text if goal is None else text.replace("TARGET", f"{100 * goal:g} %")

    def judge(self, results: Results, label: Label) -> Verdict:
        found = list(self.findings(results))
        told = [finding for finding in found if finding.holds is not None]
        if not told:
            return Verdict(OPEN, "")
        true, false = ([f for f in told if f.holds is which] for which in (True, False))
        partial = _partial(results, label)
        whole = len(told) == len(found) and not partial
        against = NOT_SO_FAR if partial else NOT_HELD
        status = (HELD if whole else HELD_AS_MEASURED) if not false else against if not true else PARTLY
        shown = [*false, *true][:SHOWN]
        parts = [f"{finding.label}: {finding.said}" for finding in shown]
        if len(told) > 1:
            parts = [f"{'' if f.holds else 'not '}{part}" for f, part in zip(shown, parts, strict=True)]
            parts.insert(0, f"{len(true)} of {len(told)}")
        if len(shown) < len(told):
            parts.append(f"and {len(told) - len(shown)} more")
        if len(told) < len(found):
            parts.append("cannot be told: " + ", ".join(f.label for f in found if f.holds is None))
        return Verdict(status, "; ".join(parts) + (f" ({partial})" if partial else ""))


def _partial(results: Results, label: Label) -> str:
    """Remark on panels whose runs have not reached the series' last round, or an empty string."""
    short = [f"{label(panel)} at {at}" for panel in results.panels if (at := results.unfinished(panel))]
    return "unfinished: " + ", ".join(short) if short else ""


def percent(value: Value | None) -> str:
    """Format an accuracy in per cent, with the number of diverged runs."""
    if value is None or value.diverged == DIVERGED:
        return "?" if value is None else DIVERGED
    return f"{100 * value.mean:.1f} %" + (f" ({value.diverged})" if value.diverged else "")
