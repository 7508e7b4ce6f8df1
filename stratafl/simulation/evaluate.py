"""Evaluation of root and nodes on the test data of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from stratafl.base.topology import Topology
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import is_additive
from stratafl.data.dataset import ClientIndex
from stratafl.data.inputs import Pair
from stratafl.distributed.communicator import Communicator
from stratafl.metrics.evaluation import EvaluationSums, evaluate, finalize_metrics
from stratafl.metrics.objective import Objective


@dataclass(frozen=True, eq=False)
class ClientTestData:
    """Each client's own test data; an aggregator's is that of its clients."""

    pair: Pair
    clients: ClientIndex
    """Samples of each client of the whole tree in it; none for a client that has no test data."""

    _first: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    """Cache per level: first client below each node; a node's clients have successive numbers."""

    def of(self, tree: Topology, level: int, number: int) -> Pair:
        """Test data of a node of the whole tree."""
        if level not in self._first:
            self._first[level] = np.searchsorted(tree.ancestors(level), np.arange(tree.sizes[level] + 1))
        index = self.clients.of_range(*self._first[level][number : number + 2])
        return self.pair[0][index], self.pair[1][index]


def is_evaluation_round(round: int, every: int, rounds: int) -> bool:
    """Whether the root is evaluated after a global round, counted from 1; always after the last."""
    return round % every == 0 or round == rounds


def evaluate_model(flat: FlatModule, objective: Objective, test: Pair, x_P: Tensor, b_B: Tensor) -> EvaluationSums:
    """Evaluate a model on test data, without changing its buffers."""
    buffers_B = b_B.clone()
    flat.eval()
    inputs, targets = test
    return evaluate(
        lambda batch: flat.call(x_P, buffers_B, batch), objective.loss, inputs, targets, metrics=objective.metrics
    )


@dataclass(kw_only=True, eq=False)
class Evaluator:
    """Evaluates the nodes of a run on its test data."""

    flat: FlatModule
    objective: Objective
    test: Pair | None
    client_test: ClientTestData | None
    """Each client's own test data; None where all nodes share `test`."""

    def evaluate_root(self, ranks: Communicator, x_1P: Tensor, b_1B: Tensor) -> EvaluationSums:
        """Evaluate the root on this rank's share of the test data; ranks' sums are added later."""
        assert self.test is not None
        inputs, targets = self.test
        if is_additive(self.objective.loss) and all(metric.is_additive for metric in self.objective.metrics):
            share = inputs.tensor_split(ranks.count)[ranks.rank], targets.tensor_split(ranks.count)[ranks.rank]
        else:
            # a loss or metric that is not additive is computed by one rank, from all samples
            share = self.test if ranks.is_first else (inputs[:0], targets[:0])
        return evaluate_model(self.flat, self.objective, share, x_1P[0], b_1B[0])

    def evaluate_level(
        self, tree: Topology, level: int, model_NP: Tensor, buffers_NB: Tensor
    ) -> dict[str, dict[str, float]]:
        """Metrics by name of the nodes of a level that this rank owns; only of nodes with test
        data, where clients have their own."""
        metrics = {}
        for node in map(int, np.flatnonzero(tree.owned(level))):
            name = tree.names[level][node]
            test = self.test
            if self.client_test is not None:
                test = self.client_test.of(tree.whole, *tree.whole.find(name))
            assert test is not None
            if len(test[1]):
                sums = evaluate_model(self.flat, self.objective, test, model_NP[node], buffers_NB[node])
                metrics[name] = finalize_metrics([sums], self.objective.metrics)
        return metrics
