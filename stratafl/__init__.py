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
    from stratafl.core.client_update import clip, corrections, decay, leaf
    from stratafl.core.optimizer import SGD, Adam, AdamW, Optimiser, constant, cosine, step_decay
    from stratafl.core.participation import Draw
    from stratafl.core.rule import Edge, Rule, average
    from stratafl.core.schedule import Schedule
    from stratafl.cost.pricing import price
    from stratafl.metrics.records import RoundResult
    from stratafl.rules import adam, feddyn, fedprox, median, momentum, mtgc, scaffold, yogi
    from stratafl.rules.registry import place, register
    from stratafl.runs.python.simulate import simulate
    from stratafl.runs.trackers import MLflow, TensorBoard, WeightsAndBiases
    from stratafl.simulation.callbacks import tracking
    from stratafl.simulation.result import Result
    from stratafl.simulation.simulation import Simulation

_ROOMS = {
    "base.errors": (
        "InvalidInput",
        "UserCodeError",
    ),
    "base.topology": ("Tree",),
    "core.client_update": (
        "clip",
        "corrections",
        "decay",
        "leaf",
    ),
    "core.optimizer": (
        "SGD",
        "Adam",
        "AdamW",
        "Optimiser",
        "constant",
        "cosine",
        "step_decay",
    ),
    "core.participation": ("Draw",),
    "core.rule": (
        "Edge",
        "Rule",
        "average",
    ),
    "core.schedule": ("Schedule",),
    "cost.pricing": ("price",),
    "metrics.records": ("RoundResult",),
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
    "simulation.callbacks": ("tracking",),
    "simulation.result": ("Result",),
    "simulation.simulation": ("Simulation",),
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
