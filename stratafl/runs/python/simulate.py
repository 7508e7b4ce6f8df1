"""The public function: a run from a user's own model, data and tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stratafl.base.topology import Shape, Tree
from stratafl.core.client_training import Augment
from stratafl.core.client_update import Leaf
from stratafl.core.losses import LossLike
from stratafl.core.participation import Participation
from stratafl.core.schedule import Schedule
from stratafl.data.batches import Sampling
from stratafl.distributed.communicator import Communicator
from stratafl.engine.factory import EngineName
from stratafl.engine.precision import Precision
from stratafl.metrics.drift import Diagnose
from stratafl.metrics.metrics import MetricsLike
from stratafl.metrics.objective import GoalLike
from stratafl.network.specification import NetworkLike
from stratafl.network.waiting import Wait
from stratafl.rules.registry import RuleLike
from stratafl.simulation.groups import Data, Evaluation, Execution, Initial, Method, Parts, Problem
from stratafl.simulation.prepare import set_up
from stratafl.simulation.simulation import Recorder, Simulation


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    data: Data,
    partition: Parts | None,
    tree: Tree | Shape,
    rules: RuleLike | Sequence[RuleLike] = "mtgc",
    *,
    periods: Sequence[int] | Schedule, rounds: int,
    leaf: Leaf | float = 0.1, batch: int | None = 32, sampling: Sampling = "epochs",
    participation: Participation | Sequence[Participation] = None, weights: str | Sequence | np.ndarray | None = None,
    test: Data | None = None, test_partition: Sequence[Any] | None = None,
    loss: LossLike | None = None, metrics: MetricsLike | None = None,
    augment: Augment | None = None,
    columns: Mapping[str, object] | None = None, lazy: bool = False, initial: Initial | None = None,
    keep_at_home: str | Sequence[str] | None = None,
    evaluate_every: int = 1, evaluate_levels: Sequence[int] = (0,),
    stop_at: float | None = None, stop_when: GoalLike | None = None,
    diagnose: Diagnose = "drift",
    update_limit: float | None = None, update_factor: float | Sequence[float] | None = None,
    network: NetworkLike | None = None, wait: Wait | Sequence[Wait] = None, seed: int = 0,
    device: str | torch.device = "cpu", engine: EngineName | None = None, precision: Precision = "fp32",
    ranks: Communicator | None = None, save: str | Path | None = None,
) -> Simulation:  # fmt: skip
    """Set up a run: iterate over what it returns for a result per global round, or call `run()`.
    `stratafl.simulation.groups` says more of each argument.

    model: a module, or a function that builds one, called with all generators set from the seed.
    data, test: (inputs, targets), a map-style data set, or a list of such, one per client.
    partition: each client's sample numbers, or a `Partition`; None for data client by client.
    tree: a `Tree` or one of its notations: "2x3x4" is balanced, [2, 3, 4] three unequal groups.
    rules: a method's name, a table with parameters, or one rule per edge level, root first.
    periods: how often each level synchronises in units of the level below: [E, H] of the paper.
    leaf: the clients' chain, or just its learning rate: a number, or a function of the round.
    batch, sampling: samples per step, None for all; "epochs" shuffles without replacement.
    test_partition: each client's own test data: sample numbers in `test`, or a data set for each.
    loss: a name, an import path, or (outputs, targets) -> scalar; cross-entropy unless given.
    metrics: by name: (outputs, targets) -> number, an object of torchmetrics, or a name as "f1".
    weights: of siblings: "uniform", "samples" or numbers; the tree's own unless given.
    participation: per level, or the clients' alone: all, a fraction, a number, or `Draw` -> a mask.
    initial: a state dict, or a file of one, to start from instead of the module's own values.
    keep_at_home: what stays with each client: "batch_norm", or names of parts or parameters.
    columns: of data whose items are tables: which are inputs and targets.
    lazy: read a data set's items anew for every batch, so that random transforms draw anew.
    evaluate_levels: levels whose every node is evaluated besides the root.
    stop_at, stop_when: an accuracy, or {"f1": 0.8} or "loss <= 0.1", that ends the run early.
    augment: (inputs, seed, client, step) -> inputs, applied to every training batch.
    engine: "loop", "stacked", "vmap" or "auto", the same up to rounding; None: see docs/engine.md.
    precision: of the products in training: "fp32", "tf32", "bf16" or "fp16".
    diagnose: what is measured of the levels' drift: "none", "drift" or "ideal".
    update_limit, update_factor: refuse updates far larger or longer than their siblings'.
    network, wait: in whose virtual time it goes on, and whom parents wait for in it.
    ranks: the processes that share the run, each of which must call this in the same way.
    save: a folder to keep the run in, and to go on with it from: see `Simulation.save`.
    """
    task = model, data, partition, tree, weights, test, loss, augment
    problem = Problem(*task, initial, columns, lazy, test_partition, keep_at_home)
    how = rules, periods, leaf, batch, sampling, participation, seed, update_limit, update_factor
    method = Method(*how, network, wait)
    evaluation = Evaluation(rounds, evaluate_every, evaluate_levels, stop_at, diagnose, metrics, stop_when)
    return _kept(save, problem, method, evaluation, Execution(device, engine, precision, ranks))


def _kept(save: str | Path | None, *groups: Any) -> Simulation:
    """A run that knows how it can be kept, and is where that was asked for."""
    simulation = set_up(*groups)
    simulation.open_recorder = partial(_record, groups)
    if save is not None:
        simulation.save(save)
    return simulation


def _record(groups: Any, *arguments: Any) -> Recorder | None:
    from stratafl.runs.python.saved import saved  # what writes files is needed only now

    return saved(groups, *arguments)
