"""Curves against what a network makes of the rounds: seconds on it, and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stratafl.clock.model.network import Network
from stratafl.clock.price.costs import PricedRun, Pricing
from stratafl.runs import StoredRun
from stratafl.runs.curves import Points, plain_number

SECONDS, COST = "seconds on ", "cost on "
"""How the names of such axes begin; the network's name follows. The page knows them, too."""


@dataclass(frozen=True)
class NetworkAxes:
    """Axes that curves have besides their own."""

    titles: dict[str, str] = field(default_factory=dict)
    """The titles of axes by their names."""
    points: dict[Path, dict[str, Points]] = field(default_factory=dict)
    """A value per round and axis, by run; gaps where a run cannot be priced."""
    priced: dict[Path, list[tuple[PricedRun, Network]]] = field(default_factory=dict)
    """A run on each network on which it can be priced."""
    notes: tuple[str, ...] = ()
    """Which runs cannot be, and why."""


def network_axes(runs: Sequence[StoredRun], networks: Sequence[Network], pricing: Pricing | None = None) -> NetworkAxes:
    """The axes of these networks, and the runs on them. pricing: a new one, which may have been
    given the results of another."""
    titles: dict[str, str] = {}
    points: dict[Path, dict[str, Points]] = {run.path: {} for run in runs}
    on: dict[Path, list[tuple[PricedRun, Network]]] = {}
    pricing = Pricing() if pricing is None else pricing
    ready = [pricing.ready(run) for run in runs if run.rounds] if networks else []
    for network in networks:
        seconds, cost = f"{SECONDS}{network.name}", f"{COST}{network.name}"
        titles[seconds] = seconds
        for each in ready:
            costs = None if each is None else pricing.on(each, network)
            if each is None or costs is None:
                continue
            on.setdefault(each.run.path, []).append((each, network))
            points[each.run.path][seconds] = _points(costs.seconds_R)
            if costs.money_R.any():
                titles[cost] = f"{cost} ({network.currency})" if network.currency else cost
                points[each.run.path][cost] = _points(costs.money_R)
    for run in runs:
        for axis in titles:
            points[run.path].setdefault(axis, [None] * len(run.rounds))
    return NetworkAxes(titles, points, on, tuple(pricing.problems))


def _points(each_R: np.ndarray) -> Points:
    """Up to the end of each round."""
    return [plain_number(float(value)) for value in np.cumsum(each_R)]
