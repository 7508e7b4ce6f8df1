"""A claim of the paper and how it is judged: each panel on its own, then all together in one plain
sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stratafl.paper.recipes import recipe
from stratafl.paper.recipes.base import Scale
from stratafl.paper.recipes.settings import DISTRIBUTIONS, METHODS, TITLES
from stratafl.paper.reproduce.measure import DEAD, Results, Value

HELD, SO_FAR, PARTLY, OPEN = "held", "held as far as measured", "held in part", "not measured yet"
NOT_HELD, NOT_SO_FAR = "not held", "not held so far"
Panel = tuple[str, ...]
SHOWN = 4
"""Findings told in a sentence, those against the claim first; the table has all."""


class Finding(NamedTuple):
    """One panel's answer: None where it cannot be told."""

    label: str
    holds: bool | None
    said: str
    """What was found, in numbers."""


@dataclass(frozen=True)
class Verdict:
    """Whether a claim held, and what was found, in a sentence."""

    status: str
    sentence: str


@dataclass(frozen=True)
class Claim:
    """Something the paper says about a table or a figure."""

    id: str
    recipe: str
    where: str
    text: str
    """The claim at the paper's scale; TARGET stands for the test accuracy to be reached."""
    findings: Callable[[Results], Iterable[Finding]]
    small: str | None = None
    """The claim at quick scale, where that has neither the paper's data nor as many settings."""

    def stated(self, scale: Scale) -> str:
        """What is claimed, with the scale's own target."""
        text = self.small if scale == "quick" and self.small is not None else self.text
        goal = recipe(self.recipe).goal(scale)
        return text if goal is None else text.replace("TARGET", f"{100 * goal:g} %")

    def judge(self, results: Results) -> Verdict:
        found = list(self.findings(results))
        told = [finding for finding in found if finding.holds is not None]
        if not told:
            return Verdict(OPEN, "")
        true, false = ([f for f in told if f.holds is which] for which in (True, False))
        partial = _partial(results)
        whole = len(told) == len(found) and not partial
        against = NOT_SO_FAR if partial else NOT_HELD
        status = (HELD if whole else SO_FAR) if not false else against if not true else PARTLY
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


def _partial(results: Results) -> str:
    """A comparison of runs that did not get as far as the recipe asks says so."""
    short = [f"{label(panel)} at {at}" for panel in results.panels if (at := results.unfinished(panel))]
    return "unfinished: " + ", ".join(short) if short else ""


def label(panel: Panel) -> str:
    """A panel's name for people."""
    return " ".join(TITLES.get(part, part) for part in panel)


def heading(panel: Panel) -> str:
    """A panel's name in the words of the paper."""
    return ", ".join(DISTRIBUTIONS.get(part) or word(part) for part in panel)


def word(part: str) -> str:
    """A data set's title, or a setting such as E10H20 spelt out."""
    e, _, h = part.removeprefix("E").partition("H")
    return f"E = {e}, H = {h}" if e.isdigit() and h.isdigit() else TITLES.get(part, part)


def percent(value: Value | None) -> str:
    """An accuracy in per cent, with how many of its runs diverged."""
    if value is None or value.diverged == DEAD:
        return "?" if value is None else DEAD
    return f"{100 * value.mean:.1f} %" + (f" ({value.diverged})" if value.diverged else "")


def best(line: str, others: Sequence[str] = ()) -> Callable[[Results], list[Finding]]:
    """Whether the line ends with the highest accuracy of all, or of these, in every panel. One that
    is higher is enough to say no, whatever those do that were not measured."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for panel in results.panels:
            rest = [each for each in results.lines(panel) if each != line and (not others or each in others)]
            ours = results.accuracy(panel, line)
            scores = {each: score for each in rest if (score := results.accuracy(panel, each)) is not None}
            rival = max(scores, key=lambda each: scores[each].mean, default=None)
            if ours is None or rival is None or (len(scores) < len(rest) and ours.mean > scores[rival].mean):
                found.append(Finding(label(panel), None, ""))
                continue
            said = f"{percent(ours)}, {METHODS.get(rival, rival)} {percent(scores[rival])}"
            found.append(Finding(label(panel), ours.mean > scores[rival].mean, said))
        return found

    return findings


def above(panel: Panel, high: str, low: str, results: Results) -> Finding:
    """Whether one line of a panel ends above another."""
    a, b = results.accuracy(panel, high), results.accuracy(panel, low)
    if a is None or b is None:
        return Finding(label(panel), None, "")
    return Finding(label(panel), a.mean > b.mean, f"{METHODS[high]} {percent(a)}, {METHODS[low]} {percent(b)}")
