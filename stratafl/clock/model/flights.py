"""The work under way at an edge level where late work counts, on the clock.

A child's way from its parent's model to its report is a sequence of phases. Its report is a
transfer that may share the parent's pipe with others that began before or after it: what is left of
it when a meeting closes goes on from there.

Shape suffixes: N nodes of a level, R = 1 round, F phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Phase(NamedTuple):
    """A part of a child's way, which ends at these times."""

    what: str
    end_RN: np.ndarray


class Report(NamedTuple):
    """What a child sends in the end."""

    begin_RN: np.ndarray
    bytes_RN: np.ndarray
    delay_RN: np.ndarray
    """Between the last byte's sending and its arrival."""
    full_RN: np.ndarray
    """Whether there is a model in it."""


@dataclass(eq=False)
class Flights:
    """Of all nodes of a level; only those of which `is_RN` is true mean anything."""

    is_RN: np.ndarray
    whats: tuple[str, ...]
    bounds_FRN: np.ndarray
    """When each phase begins; the last entry is when the report was ready."""
    report: Report

    @staticmethod
    def begun(
        before: Flights | None, who_RN: np.ndarray, told_RN: np.ndarray, phases: Sequence[Phase], report: Report
    ) -> Flights:
        """With those in the mask at the beginning of their way."""
        shape = who_RN.shape
        whats = tuple(phase.what for phase in phases)
        bounds = np.stack([np.broadcast_to(each, shape) for each in (told_RN, *(phase.end_RN for phase in phases))])
        new = Report(*(np.broadcast_to(each, shape).copy() for each in report))
        if before is None:
            return Flights(who_RN.copy(), whats, bounds, new)
        mixed = Report(*(np.where(who_RN, one, other) for one, other in zip(new, before.report, strict=True)))
        return Flights(before.is_RN | who_RN, whats, np.where(who_RN, bounds, before.bounds_FRN), mixed)

    def spans(self, heard_RN: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """What each does from when to when, until its report is heard; the way up comes last."""
        own = [(what, self.bounds_FRN[n], self.bounds_FRN[n + 1]) for n, what in enumerate(self.whats)]
        return [*own, ("up", self.bounds_FRN[-1], heard_RN)]

    def merged(self, came_RN: np.ndarray, left_RN: np.ndarray, sent_RN: np.ndarray, closed_RN: np.ndarray) -> None:
        """Without those that were heard; the others' transfers go on with what is left of them, and
        are over where nothing is."""
        begin_RN = np.where(left_RN > 0, np.maximum(self.report.begin_RN, closed_RN), sent_RN)
        self.is_RN = self.is_RN & ~came_RN
        self.report = self.report._replace(begin_RN=begin_RN, bytes_RN=left_RN)
