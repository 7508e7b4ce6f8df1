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
"""Function that names a panel in the words of its paper."""
SHOWN = 4
"""Findings quoted in a verdict's sentence, those against the claim first."""


class Finding(NamedTuple):
    """Whether a claim holds in one panel: True, False, or None if it cannot be decided."""

    label: str
    holds: bool | None
    said: str
    """Numbers on which the finding is based."""


@dataclass(frozen=True)
class Verdict:
    """Status of a claim, and the findings as a sentence."""

    status: str
    sentence: str


@dataclass(frozen=True)
class Claim:
    """Statement of the paper about a table or a figure."""

    id: str
    series: str
    where: str
    text: str
    """Claim at the paper's scale; TARGET stands for the test accuracy to reach."""
    findings: Callable[[Results], Iterable[Finding]]
    small: str | None = None
    """Claim at quick scale, if it differs: there the data are others, and settings fewer."""

    def stated(self, series: Series, scale: Scale) -> str:
        """Text of the claim with the target of a scale."""
        text = self.small if scale == "quick" and self.small is not None else self.text
        goal = series.goal(scale)
        return text if goal is None else text.replace("TARGET", f"{100 * goal:g} %")

    def judge(self, results: Results, label: Label) -> Verdict:
        findings = list(self.findings(results))
        decided = [finding for finding in findings if finding.holds is not None]
        if not decided:
            return Verdict(OPEN, "")
        true, false = ([f for f in decided if f.holds is which] for which in (True, False))
        partial = _partial(results, label)
        complete = len(decided) == len(findings) and not partial
        against = NOT_SO_FAR if partial else NOT_HELD
        status = (HELD if complete else HELD_AS_MEASURED) if not false else against if not true else PARTLY
        shown = [*false, *true][:SHOWN]
        parts = [f"{finding.label}: {finding.said}" for finding in shown]
        if len(decided) > 1:
            parts = [f"{'' if f.holds else 'not '}{part}" for f, part in zip(shown, parts, strict=True)]
            parts.insert(0, f"{len(true)} of {len(decided)}")
        if len(shown) < len(decided):
            parts.append(f"and {len(decided) - len(shown)} more")
        if len(decided) < len(findings):
            parts.append("cannot be told: " + ", ".join(f.label for f in findings if f.holds is None))
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
