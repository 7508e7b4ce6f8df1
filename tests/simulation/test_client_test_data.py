"""Test data of each client's own, against a computation by hand."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from stratafl import InvalidInput, Simulation
from stratafl.base.topology import Topology
from stratafl.data.dataset import ClientIndex
from stratafl.data.partition.partition import Labels, like_train
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import load_data
from stratafl.experiment.sections import Data
from stratafl.metrics.records import RoundResult, over_nodes
from stratafl.simulation.build import build
from stratafl.simulation.evaluate import ClientTestData
from tests.flat import simulate

random = torch.Generator().manual_seed(5)
X = torch.randn(60, 4, generator=random)
Y = (X + 0.5 * torch.randn(60, 4, generator=random)).argmax(dim=1)
TEST_X = torch.randn(50, 4, generator=random)
TEST_Y = TEST_X.argmax(dim=1)
PARTS = [range(15 * client, 15 * client + 15) for client in range(4)]
OWN = [list(range(0, 11)), list(range(11, 18)), [], list(range(5, 50))]
NAMES = Topology.of("2x2").names


def run(**settings: Any) -> Simulation:
    options = {
        "periods": [2, 2],
        "rounds": 2,
        "leaf": 0.2,
        "batch": 4,
        "test": (TEST_X, TEST_Y),
        "evaluate_levels": [0, 1, 2],
        "test_partition": OWN,
        "metrics": ["f1"],
    }
    return simulate(lambda: nn.Linear(4, 4), (X, Y), PARTS, "2x2", "hfedavg", seed=1, **{**options, **settings})


def by_hand(result: Any, name: str, samples: list[int]) -> dict[str, float]:
    scores = result.model_of(name)(TEST_X[samples]).detach()
    said, true = scores.argmax(dim=1), TEST_Y[samples]
    f1 = [
        2 * int(((said == k) & (true == k)).sum()) / count
        for k in range(4)
        if (count := int((said == k).sum() + (true == k).sum()))
    ]
    return {
        "loss": float(F.cross_entropy(scores, true)),
        "accuracy": float((said == true).double().mean()),
        "f1": sum(f1) / len(f1),
    }


def test_every_node_is_evaluated_on_its_own() -> None:
    """A client on its own test data, a group on that of its clients, the root on all there is."""
    result = run().run()
    last = result.history[-1]
    expected = {
        NAMES[2][client]: by_hand(result, NAMES[2][client], samples) for client, samples in enumerate(OWN) if samples
    }
    expected |= {NAMES[1][g]: by_hand(result, NAMES[1][g], OWN[2 * g] + OWN[2 * g + 1]) for g in range(2)}
    assert set(last.nodes) == set(expected), "one that has none is left out"
    for name, metrics in expected.items():
        assert last.nodes[name] == pytest.approx(metrics, rel=1e-5)
    assert last.metrics == pytest.approx(by_hand(result, "root", list(range(50))), rel=1e-5)
    for level in (1, 2):
        for metric, worst in (("loss", max), ("accuracy", min), ("f1", min)):
            values = [expected[name][metric] for name in NAMES[level] if name in expected]
            assert last.over_nodes[str(level)][metric] == pytest.approx(
                {"mean": statistics.fmean(values), "worst": worst(values), "deviation": float(np.std(values))}, rel=1e-5
            )


def test_data_sets_per_client_are_together_the_test_data() -> None:
    data_sets = [None if not samples else (TEST_X[samples], TEST_Y[samples]) for samples in OWN]
    data_sets[1] = TensorDataset(*data_sets[1])  # type: ignore[misc, assignment, call-overload]
    both, alone = run(test_partition=data_sets).run().history[-1], run(test_partition=data_sets, test=None).run()
    assert both.nodes == run().run().history[-1].nodes
    together = [number for samples in OWN for number in samples]
    assert alone.history[-1].nodes == both.nodes
    assert alone.history[-1].metrics == pytest.approx(by_hand(alone, "root", together), rel=1e-5)


def test_without_it_all_nodes_have_the_same_test_data() -> None:
    result = run(test_partition=None).run()
    expected = [by_hand(result, name, list(range(50))) for name in NAMES[2]]
    assert [result.history[-1].nodes[name] for name in NAMES[2]] == [
        pytest.approx(metrics, rel=1e-5) for metrics in expected
    ]
    assert result.history[-1].over_nodes["2"]["accuracy"]["worst"] == min(metrics["accuracy"] for metrics in expected)


def test_records_keep_it_and_earlier_ones_lack_it() -> None:
    last = run().run().history[-1]
    values = vars(last)
    assert RoundResult.of(values) == last
    assert RoundResult.of({key: value for key, value in values.items() if key != "over_nodes"}).over_nodes == {}
    for wrong in ({"1": 3}, {"1": {"loss": 3}}, {"1": {"loss": {"mean": "x"}}}):
        with pytest.raises(InvalidInput, match=r"record\.metrics"):
            RoundResult.of({**values, "over_nodes": wrong})


def test_with_one_that_is_no_number_there_is_no_mean() -> None:
    tree = Topology.of(2)
    statistics = over_nodes(tree, {"0": {"loss": math.nan}, "1": {"loss": 1.0}}, {"loss": "lower"})["1"]["loss"]
    assert list(statistics) == ["mean", "worst", "deviation"] and all(map(math.isnan, statistics.values()))


def test_a_matrix_of_sample_numbers_is_a_list_of_them() -> None:
    numbers = np.arange(8).reshape(4, 2)
    records = [next(run(test_partition=partition)) for partition in (numbers.tolist(), numbers, torch.tensor(numbers))]
    assert records[0].nodes == records[1].nodes == records[2].nodes != {}


def test_the_clients_below_a_node_are_looked_for_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, asked = Topology.of([[2, 1], [3], [1, 2, 2]]), []
    ancestors = Topology.ancestors
    monkeypatch.setattr(Topology, "ancestors", lambda tree, level: asked.append(level) or ancestors(tree, level))
    client_data = ClientTestData((torch.arange(11), torch.arange(11)), ClientIndex(torch.arange(11), np.arange(12)))
    for level in range(4):
        for number in range(tree.sizes[level]):
            below = [leaf for leaf, name in enumerate(tree.names[3]) if name in tree.subtree(level, number)]
            assert client_data.of(tree, level, number)[1].tolist() == below
    assert asked == [0, 1, 2, 3]


WRONG = [
    ({"test_partition": OWN[:3]}, "needs one per client of the tree, 4 of them"),
    ({"test_partition": [[0], [1], [2], [50]]}, r"test_partition\[3\] = 50: sample numbers go from 0 to 49"),
    ({"test_partition": [[0], [1], [2], [0.5]]}, r"test_partition\[3\] = \[0.5\]: must be a list of whole numbers"),
    ({"test": None}, "there is none"),
    ({"test_partition": np.arange(6).reshape(3, 2)}, r"data.test_partition = '3 parts': needs one per client"),
    ({"test_partition": torch.arange(6).reshape(3, 2)}, r"data.test_partition = '3 parts': needs one per client"),
    ({"test_partition": []}, r"data.test_partition = '0 parts': needs one per client"),
    ({"test_partition": np.array(1.0)}, "must be a list of sample numbers"),
    ({"test_partition": "like_tarin"}, "did you mean 'like_train'"),
    ({"test_partition": [(X, Y), (X, Y), (X, Y), (X[:, :2], Y)]}, "of one shape"),
]


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=[case[1] for case in WRONG])
def test_what_is_wrong_is_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        run(**settings)


# -- like the training data ------------------------------------------------------------------------


def test_each_client_has_its_share_of_each_class() -> None:
    y_train = np.array([0] * 30 + [1] * 60 + [2] * 10)
    leaves = [np.arange(0, 20), np.arange(20, 60), np.arange(60, 90)]  # nobody holds class 2
    y_test = np.array([0, 1, 2] * 30)
    parts = like_train(Labels(y_train, y_test), leaves, seed=0)
    counts = [np.bincount(y_test[part], minlength=3).tolist() for part in parts]
    assert counts == [[20, 0, 0], [10, 15, 0], [0, 15, 0]]
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    again, other = (like_train(Labels(y_train, y_test), leaves, seed) for seed in (0, 1))
    assert all(map(np.array_equal, parts, again)) and not all(map(np.array_equal, parts, other))


def test_owners_keep_their_test_samples() -> None:
    owner_train, owner_test = np.array([0, 0, 1, 1, 2, 2]), np.array([2, 0, 1, 3, 0])
    data = Labels(np.zeros(6, int), np.zeros(5, int), owner_train=owner_train, owner_test=owner_test)
    first, second = like_train(data, [np.array([0, 1, 4, 5]), np.array([2, 3])], 0)
    assert (first.tolist(), second.tolist()) == ([0, 1, 4], [2])
    divided = like_train(data, [np.array([0, 2, 4]), np.array([1, 3, 5])], 0)
    assert sorted(np.concatenate(divided)) == [0, 1, 2, 3, 4], "by class where an owner's samples are divided"


def test_what_is_no_class_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs one class for each sample"):
        like_train(Labels(np.zeros(4), np.zeros(4)), [np.arange(4)], 0)


def test_a_config_has_it() -> None:
    config = Experiment.from_table(
        {
            "tree": {"shape": "2x2"},
            "model": {"name": "logistic"},
            "schedule": {"periods": [1, 2]},
            "data": {
                "source": "digits",
                "partition": ["iid", {"name": "classes", "k": 2}],
                "test_partition": "like_train",
            },
            "rounds": 1,
            "evaluation": {"levels": [1, 2]},
        }
    )
    sim = build(config)
    test, client_test = sim.evaluator.test, sim.evaluator.client_test
    assert client_test is not None and test is not None
    assert 0 < sum(map(len, client_test.clients)) <= len(test[1])
    last = sim.run().history[-1]
    assert set(last.over_nodes) == {"1", "2"} and set(last.over_nodes["2"]["accuracy"]) == {
        "mean",
        "worst",
        "deviation",
    }
    held = load_data(config.data, Topology.of("2x2"), 0)
    for client, samples in enumerate(held.clients):
        tested = test[1][client_test.clients[client]]
        assert set(held.samples.targets_N[samples].tolist()) == set(tested.tolist())


def test_its_images_are_turned_as_the_client_s_are() -> None:
    data = Data(rotation={"start": 0, "step": 90, "level": 1}, test_partition="like_train")
    held = load_data(data, Topology.of("2x1"), 0)
    upright = load_data(Data(), Topology.of("2x1"), 0)
    assert held.client_test is not None and held.client_test.clients is not None
    images, (first, second) = held.client_test.samples.head(400), held.client_test.clients
    straight = upright.test.samples.head(400)
    assert torch.equal(images[first], straight[first])
    assert not torch.equal(images[second], straight[second])
    turned = torch.rot90(straight[second], 1, (2, 3)), torch.rot90(straight[second], -1, (2, 3))
    assert any(torch.allclose(images[second], image, atol=0.05) for image in turned)
    assert torch.equal(held.test.samples.head(400), straight), "the root's stay upright"


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"data.test_partition = 'like': unknown; did you mean 'like_train'"):
        load_data(Data(test_partition="like"), Topology.of("2x2"), 0)
