"""A run from the outside: iterating, results, data and dropout."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stratafl import InvalidInput, Result, Topology
from stratafl.core.optimizer import step_decay
from tests.flat import client_options, simulate, update_of
from tests.problems import without

PARTS = [[0, 1, 2, 3], [4, 5], [6, 7, 8], [9, 10, 11]]
TREE = {"north": 2, "south": ["a", "b"]}


def samples(n: int = 12) -> tuple[Tensor, Tensor]:
    maker = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=maker), torch.arange(n) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def dropout_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def study(model=network, data=None, **changes):
    """A classification study of four clients in two groups; batches of two."""
    settings = {
        "partition": PARTS,
        "tree": TREE,
        "rules": "mtgc",
        "periods": [2, 2],
        "rounds": 3,
        "batch": 2,
        **changes,
    }
    return simulate(model, samples() if data is None else data, **settings)


def assert_same(one: Result, other: Result) -> None:
    for a, b in zip(one.models, other.models, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.corrections, other.corrections, strict=True):
        assert torch.equal(a, b)


# -- iterating ------------------------------------------------------------------------------------


def test_iterating_gives_one_result_per_round() -> None:
    results = list(study(test=samples()))
    assert [record.round for record in results] == [1, 2, 3]
    assert [record.steps for record in results] == [4, 8, 12]
    assert [record.lr for record in results] == [0.1] * 3
    assert all(record.seconds > 0 and record.refused == () for record in results)
    assert all(set(record.metrics) == {"loss", "accuracy"} for record in results)


def test_stopping_and_going_on_changes_nothing() -> None:
    sim = study()
    for record in sim:
        if record.round == 1:
            break
    early = sim.result()
    assert [record.round for record in early.history] == [1]
    late = sim.run()
    assert [record.round for record in late.history] == [1, 2, 3]
    assert_same(late, study().run())
    assert len(early.history) == 1
    assert not torch.equal(early.models[0], late.models[0])
    assert [record.round for record in sim] == [1, 2, 3]


def test_more_rounds_can_be_asked_for() -> None:
    sim = study(rounds=1)
    sim.run()
    sim.rounds = 3
    assert_same(sim.run(), study(rounds=3).run())


def test_an_early_result_is_not_changed_by_the_rounds_after_it() -> None:
    sim = study()
    next(sim)
    early = sim.result()
    account, model = early.communication.client(0), early.models[0].clone()
    sim.run()
    assert torch.equal(early.models[0], model)
    assert early.communication.client(0) == account


def test_the_leaf_may_be_changed_between_rounds() -> None:
    sim = study(leaf=0.1)
    next(sim)
    sim.client_update = update_of(client_options(0.05))
    changed = [record.lr for record in sim]
    scheduled = study(leaf=client_options(step_decay(0.1, every=1, factor=0.5)), rounds=2).run()
    assert changed[0] == scheduled.history[1].lr
    sim = study(leaf=0.1, rounds=2)
    next(sim)
    sim.client_update = update_of(client_options(0.05))
    assert_same(sim.run(), scheduled)


# -- the result -----------------------------------------------------------------------------------


def test_the_root_module_predicts_like_its_row() -> None:
    result = study().run()
    inputs = samples()[0]
    module = result.module.eval()
    assert torch.equal(torch.cat([p.flatten() for p in module.parameters()]), result.models[0][0])
    row, buffers = result.models[0][0], result.buffers[0][0]
    torch.testing.assert_close(module(inputs), result.flat.call(row, buffers, inputs))


def test_models_and_corrections_of_every_level() -> None:
    result = study().run()
    P = 3 * 4 + 4 + 4 * 3 + 3
    assert [tuple(rows.shape) for rows in result.models] == [(1, P), (2, P), (4, P)]
    assert [tuple(rows.shape) for rows in result.corrections] == [(2, P), (4, P)]
    mean = result.tree.mean(1, result.models[1])
    torch.testing.assert_close(mean, result.models[0])
    assert result.corrections[0].abs().max() > 0
    assert study(rules="hfedavg").run().corrections == [None, None]


def test_a_named_node_s_model() -> None:
    result = study().run()
    for level, names in enumerate(result.tree.names):
        for i, name in enumerate(names):
            parameters = result.model_of(name).parameters()
            row = torch.cat([p.detach().flatten() for p in parameters])
            assert torch.equal(row, result.models[level][i])
    with pytest.raises(InvalidInput, match="node = 'west'"):
        result.model_of("west")


@pytest.mark.parametrize("test", [None, samples()], ids=["no test data", "test data"])
def test_the_module_s_mode_does_not_depend_on_test_data(test) -> None:
    expected = study(dropout_network, rounds=1, test=samples()).run().module.training
    assert study(dropout_network, rounds=1, test=test).run().module.training == expected


def test_no_test_data_no_metrics() -> None:
    assert [record.metrics for record in study()] == [{}, {}, {}]


def test_evaluate_every_and_at_the_end() -> None:
    evaluated = [bool(record.metrics) for record in study(rounds=5, evaluate_every=2, test=samples())]
    assert evaluated == [False, True, False, True, True]


def test_metrics_are_those_of_the_root_module() -> None:
    inputs, labels = samples()
    result = study(test=(inputs, labels)).run()
    with torch.no_grad():
        scores = result.module.eval()(inputs)
    metrics = result.history[-1].metrics
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(scores, labels)), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(float((scores.argmax(1) == labels).float().mean()))


def test_every_node_of_the_levels_asked_for() -> None:
    inputs, labels = samples()
    result = study(test=(inputs, labels), evaluate_levels=[0, 1, 2]).run()
    nodes = result.history[-1].nodes
    assert list(nodes) == ["north", "south", "north/0", "north/1", "south/a", "south/b"]
    with torch.no_grad():
        scores = result.model_of("south/a").eval()(inputs)
    loss = float(F.cross_entropy(scores, labels))
    assert nodes["south/a"]["loss"] == pytest.approx(loss, rel=1e-6)
    assert study(rounds=1, test=samples()).run().history[0].nodes == {}


# -- what goes in ---------------------------------------------------------------------------------


def test_a_data_set_is_as_good_as_tensors() -> None:
    tensors = study(test=samples()).run()
    loaded = study(data=TensorDataset(*samples()), test=TensorDataset(*samples())).run()
    assert_same(tensors, loaded)
    assert loaded.history[-1].metrics == tensors.history[-1].metrics
    arrays = study(data=tuple(t.numpy() for t in samples())).run()
    assert_same(tensors, arrays)


def test_partitions_of_any_kind() -> None:
    lists = study().run()
    assert_same(lists, study(partition=[np.array(part) for part in PARTS]).run())
    assert_same(lists, study(partition=[torch.tensor(part) for part in PARTS]).run())


def test_a_factory_is_called_under_the_seed() -> None:
    one, again, other = (study(seed=seed, rounds=1).run() for seed in (0, 0, 1))
    assert_same(one, again)
    assert not torch.equal(one.models[0], other.models[0])
    modules: list[nn.Module] = []

    def factory() -> nn.Module:
        modules.append(network())
        return modules[-1]

    study(factory)
    assert len(modules) == 1
    assert_same(study(copy.deepcopy(modules[0]), rounds=1).run(), one)


def test_a_loss_of_one_s_own() -> None:
    def scaled(outputs: Tensor, labels: Tensor) -> Tensor:
        return 2 * F.cross_entropy(outputs, labels)

    doubled = study(loss=scaled, leaf=0.05, rules="hfedavg").run()
    plain = study(leaf=0.1, rules="hfedavg").run()
    torch.testing.assert_close(doubled.models[0], plain.models[0])


def test_a_client_smaller_than_a_batch() -> None:
    small = study(batch=3, sampling="shuffle").run()
    assert small.models[2].isfinite().all()
    # with batches larger than any client, every step is a full batch in another order
    huge, full = study(batch=100).run(), study(batch=None).run()
    torch.testing.assert_close(huge.models[0], full.models[0])


def test_weights_by_samples() -> None:
    by_samples = study(weights="samples").run()
    assert_same(by_samples, study(weights=[4, 2, 3, 3]).run())
    tree = Topology.of(TREE).weighted("samples", [4, 2, 3, 3])
    assert_same(by_samples, study(tree=tree).run())
    assert not torch.equal(by_samples.models[0], study().run().models[0])


def test_the_seed_decides_the_batches() -> None:
    module = network()
    assert_same(study(module, seed=5).run(), study(module, seed=5).run())
    other = study(module, seed=6).run()
    assert not torch.equal(study(module, seed=5).run().models[0], other.models[0])


# -- randomness inside the model ------------------------------------------------------------------


def test_dropout_is_repeatable_and_draws_from_the_seed() -> None:
    torch.manual_seed(3)
    module = dropout_network()
    one = study(module, seed=1).run()
    torch.manual_seed(99)
    torch.rand(5)
    assert_same(one, study(module, seed=1).run())
    assert not torch.equal(one.models[0], study(module, seed=2).run().models[0])
    plain = copy.deepcopy(module)
    plain[1] = nn.Identity()
    assert not torch.equal(one.models[0], study(plain, seed=1).run().models[0])


def test_twins_drop_out_differently() -> None:
    inputs, labels = samples(6)
    twins = torch.cat([inputs, inputs]), torch.cat([labels, labels])
    settings = {"partition": [range(6), range(6, 12)], "tree": 2, "periods": [2], "batch": None}
    rows = study(dropout_network, twins, rounds=1, **settings).run().models[1]
    assert not torch.equal(rows[0], rows[1])
    rows = study(network, twins, rounds=1, **settings).run().models[1]
    assert torch.equal(rows[0], rows[1])


def test_a_client_s_dropout_does_not_depend_on_the_others() -> None:
    everybody = study(dropout_network, rules="hfedavg", rounds=1, periods=[1, 2]).run()
    some = study(dropout_network, rules="hfedavg", rounds=1, periods=[1, 2], participation=without(0, 2)).run()
    assert torch.equal(everybody.models[2][3], some.models[2][3])


@pytest.mark.parametrize("restart", ["zero", "gradient"])
def test_the_global_generator_is_left_alone(restart: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    study(dropout_network, rules={"name": "mtgc", "restart": restart}, test=samples(), participation=0.5).run()
    assert torch.equal(torch.get_rng_state(), before)
