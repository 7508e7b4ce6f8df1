"""Arguments of a run, in four groups.

`simulate` fills them from its arguments and a config from its tables; neither is checked here. The
names that errors use are those of `simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stratafl.base.topology import Shape, Tree
from stratafl.core.client_training import Augment
from stratafl.core.client_update import Leaf
from stratafl.core.losses import LossLike
from stratafl.core.optimizer import LearningRate
from stratafl.core.participation import Participation
from stratafl.core.schedule import Schedule
from stratafl.data.dataset import FederatedData
from stratafl.data.partition.partition import Partition
from stratafl.distributed.communicator import Communicator
from stratafl.metrics.metrics import MetricsLike
from stratafl.metrics.objective import GoalLike
from stratafl.network.specification import NetworkLike
from stratafl.network.waiting import Wait
from stratafl.rules.registry import RuleLike

Array = Tensor | np.ndarray
Single = tuple[Array | Mapping[str, Array], Array] | Dataset
"""(inputs, targets), where inputs may be a table of tensors that the model gets by name; or a
map-style data set of such pairs, or of tables (see `columns`), such as one of Hugging Face's."""
Data = Single | Sequence[Single] | FederatedData
"""One data set for all, or one for each client; or all data of a run, as a config has them."""
Parts = Sequence[Sequence[int] | np.ndarray | Tensor] | Partition


Initial = Mapping[str, Array] | str | Path


@dataclass(frozen=True, eq=False)
class Problem:
    """Model, data and tree of a run."""

    model: nn.Module | Callable[[], nn.Module]
    """A module, or a function that builds one, called with the generators of torch, NumPy and
    Python set from the seed."""
    data: Data
    """(inputs, targets) tensors or arrays, or a map-style data set; or a list of these, one per
    client, in the order of the tree's leaves."""
    partition: Parts | None
    """Each client's sample numbers, in the order of the tree's leaves; what `partition` of
    `stratafl.data.partition.partition` returns; None where data is a list of the clients' own."""
    tree: Tree | Shape
    """A `Tree` or one of its notations: "2x3x4" is balanced, root first; a list, [2, 3, 4], is
    groups of so many clients each."""
    weights: str | Sequence | np.ndarray | None = None
    """The weights of siblings: "uniform", "samples" or numbers (see `Tree.weighted`); the tree's
    own unless given."""
    test: Data | None = None
    """The test data, in any of the forms of data; a list of data sets is one for each client, and
    all of them for the root."""
    loss: LossLike | None = None
    """A name ("mse"), an import path ("my_file.py:loss"), a table of one with its parameters, or a
    function (what the model returns, targets) -> scalar; cross-entropy unless given. Losses of
    PyTorch are given the scores in what the model returns: see docs/objectives.md."""
    augment: Augment | None = None
    """(inputs, seed, client, step) -> inputs, applied to every training batch; see
    `data.transforms`."""
    initial: Initial | None = None
    """What to start from instead of the module's own values: a state dict, of tensors or arrays, or
    the path of one, a .safetensors or .pt file."""
    columns: Mapping[str, object] | None = None
    """The columns of data whose items are tables: inputs (one name, or several that the model gets
    as keywords; all others unless given), targets ("labels" or "label" unless given) and owner."""
    lazy: bool = False
    """Whether a data set's items are read anew for every batch, so that its random transforms draw
    anew: from the client's own stream, keyed by seed, client and step."""
    test_partition: Sequence[Any] | None = None
    """Test data of each client's own, in the order of the tree's leaves: its sample numbers in
    `test`, or a data set for each beside it. Where clients have their own, the nodes of
    `evaluate_levels` are evaluated on it, groups on that of all their clients."""
    keep_at_home: str | Sequence[str] | None = None
    """What of the model stays with each client and is never sent or averaged: "batch_norm", the
    weights and statistics of all batch norms; or a list of names, or patterns, of parts, parameters
    or buffers."""


@dataclass(frozen=True, eq=False)
class Method:
    """Method of a run, its schedule and the settings of training."""

    rules: RuleLike | Sequence[RuleLike]
    """A method's name ("mtgc"), a table with parameters ({"name": "fedprox", "mu": 0.1}), or one
    rule per edge level, root first."""
    periods: Sequence[int] | Schedule
    """How often each level synchronises in units of the level below, root first ([E, H] of the
    paper); their product is the local steps of a global round, a million at most. Where the leaf's
    chain has `epochs`, these are the lowest level's, and the others are given."""
    leaf: Leaf | float | LearningRate
    """The clients' chain, or just its learning rate: a number, or a function of the global round,
    counted from 0."""
    batch: int | None
    """Samples per step, None for full batches; a client that has fewer takes all of its own."""
    sampling: str
    """One of "epochs", which shuffles without replacement, and "replacement"."""
    participation: Participation | Sequence[Participation]
    """Per level, root first, or just the clients': all, a fraction, a number of each parent's
    children, or a function: it gets a `Draw`, and returns a mask of the level's nodes."""
    seed: int
    update_limit: float | None
    """An update so many times larger than its siblings' median is refused, 0 for none; unless
    given, ten thousand where a rule takes the mean of its children. See docs/rules.md."""
    update_factor: float | Sequence[float] | None
    """An update whose norm is so many times its siblings' median is refused, for all levels or one
    number per level, root first; 0 or None for none."""
    network: NetworkLike | None = None
    """Links and devices in whose virtual time the run goes on: a preset's name, the path of a TOML
    file, tables as in one, or a `Network`. See docs/how-to/waiting.md."""
    wait: Wait | Sequence[Wait] = None
    """Whom parents wait for, per level, root first, or just the clients': "all", {"deadline":
    seconds}, {"first": a number, or a fraction of those drawn}; with "late": "counts" the others'
    work counts later, for which {"buffer": a number} is short."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Length of a run, and what is measured in it."""

    rounds: int
    evaluate_every: int
    evaluate_levels: Sequence[int]
    """Levels whose every node is evaluated besides the root."""
    stop_at: float | None
    """A test accuracy; the run ends after the first evaluated round that reaches it. The same as
    stop_when={"accuracy": stop_at}."""
    diagnose: str
    """One of "none"; "drift", which measures how the levels drift apart, at every
    synchronisation; and "ideal", which also measures how far corrections are from the ideal ones,
    and takes full gradients once per edge level and round."""
    metrics: MetricsLike | None = None
    """What is measured on the test data besides the loss, and the accuracy where targets are
    classes. By name: a function (outputs, targets) -> number, a torchmetrics object, the name of a
    metric ("f1"), an import path, or a table of one: {"fn": my_function, "better": "lower"}."""
    stop_when: GoalLike | None = None
    """Values of metrics, {"f1": 0.8} or "loss <= 0.1"; the run ends after the first evaluated round
    that reaches all of them."""


@dataclass(frozen=True, eq=False)
class Execution:
    """Device, engine and processes of a run. Apart from `precision`, they change the result in its
    last bits at most."""

    device: str | torch.device
    engine: str | None
    """One of "loop" (one client after another: the reference), "stacked" (all clients at once: the
    default on a GPU), "vmap" (through `torch.func`), or "auto" (the default). Where none is named
    a CPU has "stacked" or "loop", by the model and the clients: docs/engine.md. All give
    the same result up to rounding."""
    precision: str
    """The type of the products in training: "fp32", "tf32", "bf16" or "fp16"; models and
    corrections stay float32."""
    ranks: Communicator | None
    """The processes that share the run, each of which must set it up in the same way; see
    docs/ranks.md."""
