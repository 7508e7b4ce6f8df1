"""Short form of `stratafl.simulate` for tests: one flat list of keywords, and data with a
partition."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratafl import Experiment, Simulation
from stratafl.core.client_update import ClientUpdate
from stratafl.distributed.communicator import Communicator
from stratafl.experiment.algorithm import client_update

SECTIONS = {
    "rules": "method",
    "weights": "tree.weights",
    "periods": "schedule.periods", "participation": "schedule.participation", "wait": "schedule.wait",
    "batch": "client.batch_size", "sampling": "client.sampling",
    "test": "data.test", "test_partition": "data.test_partition", "augment": "data.augment", "columns": "data.columns",
    "lazy": "data.lazy", "initial": "model.initial", "local_parameters": "model.local_parameters",
    "metrics": "evaluation.metrics", "evaluate_every": "evaluation.every", "evaluate_levels": "evaluation.levels",
    "stop_when": "evaluation.stop_when", "drift": "evaluation.drift",
    "update_limit": "aggregation.update_limit", "update_factor": "aggregation.update_factor",
    "device": "execution.device", "engine": "execution.engine", "precision": "execution.precision",
    "checkpoint_every": "storage.checkpoint_every", "keep_state": "storage.keep_state",
}  # fmt: skip
"""Option of each keyword; the others are at the top of an experiment."""


def client_options(
    lr: Any = 0.1, *, momentum: float = 0.0, epochs: int | None = None, **options: Any
) -> dict[str, Any]:
    """Options of the clients, with momentum and epochs as keywords; `lr` may be a function of the
    round."""
    if isinstance(lr, ClientUpdate):
        chain = {"gradient_transforms": lr.transforms, "optimizer": lr.optimizer, "optimizer_state": lr.optimizer_state}
        return {"lr": 1.0, "lr_schedule": lr.lr, **chain, "epochs": lr.epochs}
    if callable(lr):
        options |= {"lr_schedule": lr}
        lr = 1.0
    if momentum:
        options["optimizer"] = {"name": "sgd", "momentum": momentum}
    return {"lr": lr, **options, **({} if epochs is None else {"epochs": epochs})}


def experiment(
    model: Any, data: Any, partition: Any, tree: Any, method: Any = "mtgc", *, leaf: Any = 0.1, **keywords: Any
) -> Experiment:
    """An experiment from flat keywords."""
    options = dict(leaf) if isinstance(leaf, Mapping) else client_options(leaf)
    epochs = options.pop("epochs", None)
    tables: dict[str, Any] = {
        "model": {"name": model},
        "data": {"source": data, "partition": partition},
        "tree": {"shape": tree, "weights": None if hasattr(tree, "weights") else "uniform"},
        "method": method,
        "client": options,
    }
    for name, value in keywords.items():
        section, _, key = SECTIONS.get(name, name).rpartition(".")
        if name == "batch" and value is None:
            value = "full"
        if name == "weights" and value is None:
            continue
        if section:
            tables.setdefault(section, {})[key] = value
        else:
            tables[key] = value
    if epochs is not None:
        tables["schedule"] |= {"periods": [*tables["schedule"]["periods"], epochs], "unit": "epochs"}
    return Experiment(**tables)


def simulate(
    *arguments: Any, save: str | Path | None = None, ranks: Communicator | None = None, **keywords: Any
) -> Simulation:
    """A simulation from flat keywords."""
    return experiment(*arguments, **keywords).start(save=save, ranks=ranks)


def update_of(options: Any, *, rounds: int = 100) -> ClientUpdate:
    """The local update that these options of the clients make; `options` may be a learning rate."""
    options = dict(options) if isinstance(options, Mapping) else client_options(options)
    epochs = options.pop("epochs", None)
    schedule = {} if epochs is None else {"unit": "epochs", "periods": [epochs]}
    return client_update(Experiment(client=options, schedule=schedule, rounds=rounds))
