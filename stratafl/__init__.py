"""Hierarchical federated learning on trees of any depth, with multi-timescale gradient correction.

Public names are loaded when they are first asked for: `import stratafl` alone loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratafl.base.version import __version__

if TYPE_CHECKING:
    from stratafl.base.errors import InvalidInput, UserCodeError
    from stratafl.base.topology import Topology
    from stratafl.core.client_update import clip, corrections, decay
    from stratafl.core.optimizer import SGD, Adam, AdamW, Optimizer
    from stratafl.core.participation import ParticipationContext
    from stratafl.core.rule import Edge, Rule, average
    from stratafl.core.schedule import SyncSchedule
    from stratafl.costs.pricing import cost, price
    from stratafl.experiment.experiment import Experiment, simulate
    from stratafl.experiment.sections import (
        Aggregation,
        Client,
        Cosine,
        Data,
        Evaluation,
        Execution,
        Method,
        Model,
        Schedule,
        StepDecay,
        Storage,
        Tree,
    )
    from stratafl.metrics.records import RoundResult
    from stratafl.reports.reporting import report
    from stratafl.rules import adam, feddyn, fedprox, median, momentum, mtgc, scaffold, yogi
    from stratafl.rules.registry import place, register
    from stratafl.runs.reader import StoredRun, list_runs, load_run
    from stratafl.runs.trackers import MLflow, TensorBoard, WeightsAndBiases
    from stratafl.simulation.callbacks import tracking
    from stratafl.simulation.result import Result
    from stratafl.simulation.simulation import Simulation
    from stratafl.sweeps.sweep import sweep
    from stratafl.tuning.tuning import tune

# module of each public name, below this package
_MODULES = {
    "InvalidInput": "base.errors",
    "UserCodeError": "base.errors",
    "Topology": "base.topology",
    "clip": "core.client_update",
    "corrections": "core.client_update",
    "decay": "core.client_update",
    "Adam": "core.optimizer",
    "AdamW": "core.optimizer",
    "Optimizer": "core.optimizer",
    "SGD": "core.optimizer",
    "ParticipationContext": "core.participation",
    "average": "core.rule",
    "Edge": "core.rule",
    "Rule": "core.rule",
    "SyncSchedule": "core.schedule",
    "cost": "costs.pricing",
    "price": "costs.pricing",
    "Experiment": "experiment.experiment",
    "Aggregation": "experiment.sections",
    "Client": "experiment.sections",
    "Cosine": "experiment.sections",
    "Data": "experiment.sections",
    "Evaluation": "experiment.sections",
    "Execution": "experiment.sections",
    "Method": "experiment.sections",
    "Model": "experiment.sections",
    "Schedule": "experiment.sections",
    "StepDecay": "experiment.sections",
    "Storage": "experiment.sections",
    "Tree": "experiment.sections",
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
    "simulate": "experiment.experiment",
    "list_runs": "runs.reader",
    "load_run": "runs.reader",
    "StoredRun": "runs.reader",
    "MLflow": "runs.trackers",
    "TensorBoard": "runs.trackers",
    "WeightsAndBiases": "runs.trackers",
    "tracking": "simulation.callbacks",
    "Result": "simulation.result",
    "Simulation": "simulation.simulation",
    "report": "reports.reporting",
    "sweep": "sweeps.sweep",
    "tune": "tuning.tuning",
}

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Aggregation",
    "Client",
    "Cosine",
    "Data",
    "Edge",
    "Evaluation",
    "Execution",
    "Experiment",
    "InvalidInput",
    "MLflow",
    "Method",
    "Model",
    "Optimizer",
    "ParticipationContext",
    "Result",
    "RoundResult",
    "Rule",
    "Schedule",
    "Simulation",
    "StepDecay",
    "Storage",
    "StoredRun",
    "SyncSchedule",
    "TensorBoard",
    "Topology",
    "Tree",
    "UserCodeError",
    "WeightsAndBiases",
    "__version__",
    "adam",
    "average",
    "clip",
    "corrections",
    "cost",
    "decay",
    "feddyn",
    "fedprox",
    "list_runs",
    "load_run",
    "median",
    "momentum",
    "mtgc",
    "place",
    "price",
    "register",
    "report",
    "scaffold",
    "simulate",
    "sweep",
    "tracking",
    "tune",
    "yogi",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
