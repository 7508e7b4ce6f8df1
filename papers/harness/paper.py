"""Description of a paper for the harness; each paper is one `Paper` in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papers.harness.claims import Claim
from papers.harness.results import Results
from papers.harness.series import Case, Panel, Scale, Series
from stratafl.base.errors import unknown_name

SEARCH = "search"
"""Name of the series that searches for settings the paper leaves open; `all` leaves it out."""


@dataclass(frozen=True)
class Paper:
    """Publication: its series and claims, its vocabulary, and texts about this paper only."""

    series: Mapping[str, Series]
    """Tables and figures by name, in the order of reports."""
    claims: Sequence[Claim]
    methods: Mapping[str, str]
    """Titles of the methods."""
    label: Callable[[Panel], str]
    """Short name of a panel."""
    heading: Callable[[Panel], str]
    """Name of a panel in the words of the paper."""
    draw: Callable[[Results, Path], list[Path]]
    """Draw a figure in the paper's form; returns the files, none if nothing was measured."""
    published: Callable[[Results, Panel, str], dict[str, Any]]
    """Further cells of a row: the paper's own numbers, and ratios to them."""
    published_rounds: Callable[[Series, Case], float | None]
    """Rounds that the paper's own run needed until it stopped, or None if it does not say."""
    extra_results: Callable[[Results], dict[str, Any]]
    """Further results of a series, beside its rows and claims."""
    remarks: Callable[[Mapping[str, Any]], list[str]]
    """Lines of Markdown about these further results."""
    introduction: str
    """Scope of the page of claims, as the rest of a sentence."""
    open_settings: Callable[[Mapping[str, Any] | None, Scale], list[str]]
    """Lines about settings that the paper leaves open, given the results of the search."""
    elsewhere: Callable[[Path], list[str]]
    """Lines about measurements made by other commands, given the folder of the results."""
    why_far: Mapping[str, str]
    """Known reasons for results far from the paper's, by the first part of a panel."""
    errata: Mapping[str, str]
    """Contradictions within the paper, by series."""
    missing_data: Mapping[str, str]
    """Reasons why a series cannot be measured here."""

    @property
    def all(self) -> tuple[str, ...]:
        """Names of the series that `all` stands for: all tables and figures of the paper."""
        return tuple(name for name in self.series if name != SEARCH)

    def find(self, name: str) -> Series:
        """Series of a name."""
        if name not in self.series:
            raise unknown_name("WHAT", name, ("all", *self.series))
        return self.series[name]

    def claims_of(self, series: str) -> list[Claim]:
        """Claims about a series."""
        return [claim for claim in self.claims if claim.series == series]
