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

# module of each public name, below this package
_MODULES = {
    "InvalidInput": "base.errors",
    "UserCodeError": "base.errors",
    "Tree": "base.topology",
    "clip": "core.client_update",
    "corrections": "core.client_update",
    "decay": "core.client_update",
    "leaf": "core.client_update",
    "Adam": "core.optimizer",
    "AdamW": "core.optimizer",
    "constant": "core.optimizer",
    "cosine": "core.optimizer",
    "Optimiser": "core.optimizer",
    "SGD": "core.optimizer",
    "step_decay": "core.optimizer",
    "Draw": "core.participation",
    "average": "core.rule",
    "Edge": "core.rule",
    "Rule": "core.rule",
    "Schedule": "core.schedule",
    "price": "cost.pricing",
    "RoundResult": "metrics.records",
    "adam": "rules",
    "feddyn": "rules",
    "fedprox": "rules",
    "median": "rules",
    "momentum": "rules",
    "mtgc": "rules",
    "scaffold": "rules",
    "yogi": "rules",
    "place": "rules.registry",
    "register": "rules.registry",
    "simulate": "runs.python.simulate",
    "MLflow": "runs.trackers",
    "TensorBoard": "runs.trackers",
    "WeightsAndBiases": "runs.trackers",
    "tracking": "simulation.callbacks",
    "Result": "simulation.result",
    "Simulation": "simulation.simulation",
}

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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
