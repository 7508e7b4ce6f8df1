"""Models on the test data of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import is_additive
from stratafl.data.dataset import Given, is_per_client, load_per_client
from stratafl.data.inputs import Pair
from stratafl.data.partition import partition
from stratafl.distributed.communicator import Communicator
from stratafl.metrics.evaluation import EvaluationSums, evaluate, finalize_metrics
from stratafl.metrics.objective import Objective


@dataclass(frozen=True, eq=False)
class ClientTestData:
    """Test data of each client's own; a group's is that of its clients."""

    pair: Pair
    parts: list[Tensor]
    """Each client's sample numbers in it, in the order of the whole tree's leaves; empty for one
    that has none."""

    _first: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    """Per level, the first leaf below each node: siblings are neighbours, so the others follow."""

    def of(self, tree: Tree, level: int, number: int) -> Pair:
        """What a node of the whole tree is evaluated on."""
        if level not in self._first:
            self._first[level] = np.searchsorted(tree.ancestors(level), np.arange(tree.sizes[level] + 1))
        first, end = self._first[level][number : number + 2]
        index = torch.cat(self.parts[first:end])
        return self.pair[0][index], self.pair[1][index]


def load_client_test_data(given: Any, tree: Tree, test: Given | None, columns: object, seed: int) -> Given | None:
    """Each client's own test data: by its sample numbers in the test data, or by a data set for
    each, None for one that has none."""
    made: Given | None
    if given is None:
        made = test if test is not None and test.parts is not None else None
    elif isinstance(given, Given):
        made = given
    else:
        made = _own_test(given, tree, test, columns, seed)
    if made is not None and len(made.parts or ()) != tree.leaves:
        wanted = f"needs one per leaf of the tree, {tree.leaves} of them"
        raise InvalidInput("test" if given is None else "test_partition", f"{len(made.parts or ())} parts", wanted)
    return made


def _own_test(given: Any, tree: Tree, test: Given | None, columns: object, seed: int) -> Given:
    if isinstance(given, str | bytes | dict) or getattr(given, "ndim", 1) == 0 or not hasattr(given, "__len__"):
        wanted = f"must be a list of sample numbers, or a data set, for each of the {tree.leaves} leaves"
        raise InvalidInput("test_partition", given, wanted)
    present = [each for each in given if each is not None]
    if is_per_client(present):
        made = load_per_client("test_partition", present, columns=columns, seed=seed)
        parts = iter(made.parts or ())
        return made._replace(parts=[np.empty(0, dtype=np.int64) if each is None else next(parts) for each in given])
    if test is None:
        raise InvalidInput("test_partition", "sample numbers", "are those of test data, and there is none")
    count = len(test.supply.targets_N)
    numbers = [
        partition.check_sample_numbers(f"test_partition[{leaf}]", each, count) for leaf, each in enumerate(given)
    ]
    return test._replace(parts=numbers)


def is_evaluation_round(round: int, every: int, rounds: int) -> bool:
    """Whether a global round, counted from 1, is one after which the root is evaluated; the last
    one always is."""
    return round % every == 0 or round == rounds


def evaluate_model(flat: FlatModule, objective: Objective, test: Pair, x_P: Tensor, b_B: Tensor) -> EvaluationSums:
    """What a model did on test data; an evaluation leaves everything as it was."""
    buffers_B = b_B.clone()
    flat.eval()
    loss, chosen = objective.loss, objective.metrics
    return evaluate(lambda inputs: flat.call(x_P, buffers_B, inputs), loss, *test, metrics=chosen)


def shard_for_rank(ranks: Communicator, objective: Objective, test: Pair) -> Pair:
    """The part of the test data that is this rank's to look at."""
    if ranks.count == 1:
        return test
    if is_additive(objective.loss) and all(metric.is_additive for metric in objective.metrics):
        return test[0].tensor_split(ranks.count)[ranks.rank], test[1].tensor_split(ranks.count)[ranks.rank]
    # a loss or metric whose parts do not add up is asked once, of everything
    return test if ranks.is_first else (test[0][:0], test[1][:0])


def evaluate_level(
    tree: Tree,
    level: int,
    flat: FlatModule,
    objective: Objective,
    test: Pair | ClientTestData,
    own_NP: Tensor,
    own_NB: Tensor,
) -> dict[str, dict[str, float]]:
    """The metrics of all nodes of a level that this process answers for, by name; of those that
    have test data, where each has its own."""
    found = {}
    for node in map(int, np.flatnonzero(tree.counted(level))):
        name = tree.names[level][node]
        pair = test.of(tree.whole, *tree.whole.find(name)) if isinstance(test, ClientTestData) else test
        if len(pair[1]):
            done = evaluate_model(flat, objective, pair, own_NP[node], own_NB[node])
            found[name] = finalize_metrics([done], objective.metrics)
    return found
