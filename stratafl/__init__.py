"""Hierarchical federated learning on trees of any depth, with multi-timescale gradient correction.

Public names are loaded when they are first asked for: `import stratafl` alone loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratafl.base.version import __version__

if TYPE_CHECKING:
    from stratafl.base.errors import InvalidInput, UserCodeError
    from stratafl.base.topology import Tree
    from stratafl.core.leaf import clip, constant, corrections, cosine, decay, leaf, step_decay
    from stratafl.core.measure.record import RoundResult
    from stratafl.core.measure.result import Result
    from stratafl.core.measure.track import tracking
    from stratafl.core.optimise.optimiser import SGD, Adam, AdamW, Optimiser
    from stratafl.core.rule import Edge, Rule, average
    from stratafl.core.schedule import Draw, Schedule
    from stratafl.report.costs.pricing import price
    from stratafl.rules import adam, feddyn, fedprox, median, momentum, mtgc, scaffold, yogi
    from stratafl.rules.registry import place, register
    from stratafl.runs.python.simulate import simulate
    from stratafl.runs.trackers import MLflow, TensorBoard, WeightsAndBiases
    from stratafl.simulation.run import Simulation

_ROOMS = {
    "base.errors": (
        "InvalidInput",
        "UserCodeError",
    ),
    "base.topology": ("Tree",),
    "core.leaf": (
        "clip",
        "constant",
        "corrections",
        "cosine",
        "decay",
        "leaf",
        "step_decay",
    ),
    "core.measure.record": ("RoundResult",),
    "core.measure.result": ("Result",),
    "core.measure.track": ("tracking",),
    "core.optimise.optimiser": (
        "SGD",
        "Adam",
        "AdamW",
        "Optimiser",
    ),
    "core.rule": (
        "Edge",
        "Rule",
        "average",
    ),
    "core.schedule": (
        "Draw",
        "Schedule",
    ),
    "report.costs.pricing": ("price",),
    "rules": (
        "adam",
        "feddyn",
        "fedprox",
        "median",
        "momentum",
        "mtgc",
        "scaffold",
        "yogi",
    ),
    "rules.registry": (
        "place",
        "register",
    ),
    "runs.python.simulate": ("simulate",),
    "runs.trackers": (
        "MLflow",
        "TensorBoard",
        "WeightsAndBiases",
    ),
    "simulation.run": ("Simulation",),
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Draw",
    "Edge",
    "InvalidInput",
    "MLflow",
    "Optimiser",
    "Result",
    "RoundResult",
    "Rule",
    "Schedule",
    "Simulation",
    "TensorBoard",
    "Tree",
    "UserCodeError",
    "WeightsAndBiases",
    "__version__",
    "adam",
    "average",
    "clip",
    "constant",
    "corrections",
    "cosine",
    "decay",
    "feddyn",
    "fedprox",
    "leaf",
    "median",
    "momentum",
    "mtgc",
    "place",
    "price",
    "register",
    "scaffold",
    "simulate",
    "step_decay",
    "tracking",
    "yogi",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
