"""Curves against what a network makes of the rounds: seconds on it, and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.clock.model.network import Network
from stratafl.clock.price.costs import PricedRun
from stratafl.report.curves import Points, number
from stratafl.runs import StoredRun

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


def network_axes(runs: Sequence[StoredRun], networks: Sequence[Network]) -> NetworkAxes:
    """The axes of these networks, and the runs on them."""
    titles: dict[str, str] = {}
    points: dict[Path, dict[str, Points]] = {run.path: {} for run in runs}
    on: dict[Path, list[tuple[PricedRun, Network]]] = {}
    notes: list[str] = []
    ready = {run.path: _ready(run, notes) for run in runs if run.rounds} if networks else {}
    for network in networks:
        seconds, cost = f"{SECONDS}{network.name}", f"{COST}{network.name}"
        titles[seconds] = seconds
        for path, each in ready.items():
            priced = None if each is None else _priced(each, network, notes)
            if each is None or priced is None:
                continue
            on.setdefault(path, []).append((each, network))
            points[path][seconds] = _points(priced[0])
            if priced[1].any():
                titles[cost] = f"{cost} ({network.currency})" if network.currency else cost
                points[path][cost] = _points(priced[1])
    for run in runs:
        for axis in titles:
            points[run.path].setdefault(axis, [None] * len(run.rounds))
    return NetworkAxes(titles, points, on, tuple(dict.fromkeys(notes)))


def _ready(run: StoredRun, notes: list[str]) -> PricedRun | None:
    try:
        return PricedRun.of(run)
    except InvalidInput as problem:
        notes.append(f"{run.name} cannot be priced: {problem}")
        return None


def _priced(run: PricedRun, network: Network, notes: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        costs = run.on(network)
    except InvalidInput as problem:
        notes.append(f"{run.run.name} cannot be priced on {network.name}: {problem}")
        return None
    return np.cumsum(costs.seconds_R), np.cumsum(costs.money_R)


def _points(values: np.ndarray) -> Points:
    return [number(float(value)) for value in values]
