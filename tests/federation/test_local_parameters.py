"""Parameters and buffers that stay with the clients: never sent, never averaged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import Simulation
from stratafl.base.errors import InvalidInput
from stratafl.core.flat_module import FlatModule
from stratafl.data.batches import batch_indices
from stratafl.experiment.experiment import Experiment
from stratafl.federation.local_parameters import match_local_parameters
from stratafl.simulation.build import build
from tests.flat import client_options, simulate

PARTS = torch.arange(48).chunk(4)
GROUPS = [[0, 1], [2, 3]]
ENGINES = ["loop", "vmap", "stacked"]


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 6, generator=random, dtype=torch.float64)
    return inputs + torch.arange(48)[:, None] // 12, torch.arange(48) % 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.into(x)).relu())


class Grouped(nn.Module):
    """A module without running statistics, which every engine can train."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.head = nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.into(x)).relu())


def run(kind: type = Normed, rules: Any = "mtgc", keep: Any = "batch_norm", **more: Any) -> Simulation:
    settings = {"periods": [2, 3], "rounds": 2, "batch": 5, "test": data(), "drift": "none"}
    return simulate(lambda: kind().double(), data(), PARTS, "2x2", rules, local_parameters=keep, **settings | more)


def mean(states: list[dict[str, Tensor]], names: list[str]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in names}


def fedbn_rounds(module: nn.Module) -> list[dict[str, Tensor]]:
    """Hierarchical averaging of everything but the batch norms, written out: the clients' models
    before the last meeting."""
    (inputs, targets), module = data(), module.train()
    clients = [copy.deepcopy(module.state_dict()) for _ in PARTS]
    shared = [name for name in clients[0] if not name.startswith("norm.")]
    step = 0
    for _ in range(2):
        for _ in range(2):
            for number, part in enumerate(PARTS):
                module.load_state_dict(clients[number])
                for chosen in batch_indices(0, number, len(part), step, 3, 5):
                    module.zero_grad()
                    F.cross_entropy(module(inputs[part[chosen]]), targets[part[chosen]]).backward()
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter -= 0.1 * parameter.grad
                clients[number] = copy.deepcopy(module.state_dict())
            step += 3
            last = copy.deepcopy(clients)
            for group in GROUPS:
                new = mean([clients[number] for number in group], shared)
                for number in group:
                    clients[number] |= copy.deepcopy(new)
        new = mean(clients, shared)
        for client in clients:
            client |= copy.deepcopy(new)
    return last


def test_fedbn_is_fedbn() -> None:
    simulation = run(rules="hfedavg", leaf=0.1)
    start = simulation.result().module
    result = simulation.run()
    expected = fedbn_rounds(start)
    for number, name in enumerate(result.tree.names[2]):
        state = result.model_of(name).state_dict()
        for key, value in expected[number].items():
            if value.is_floating_point():
                assert torch.allclose(state[key], value, atol=1e-12), (name, key)
    norms = [result.model_of(name).norm.weight for name in result.tree.names[2]]
    assert not torch.allclose(norms[0], norms[1])


@pytest.mark.parametrize("rules", ["hfedavg", "mtgc", "scaffold", "fedprox", "feddyn", "median"])
def test_every_engine_and_rule(rules: str) -> None:
    simulations = [run(Grouped, rules, ["norm", "head.bias"], engine=engine) for engine in ENGINES]
    assert [sim.engine.how for sim in simulations] == ENGINES
    rows = [sim.run().models[-1] for sim in simulations]
    assert all(torch.allclose(rows[0], other, atol=1e-10) for other in rows)
    shared = run(Grouped, rules, None).run()
    assert rows[0].shape == shared.models[-1].shape and not torch.allclose(rows[0], shared.models[-1])


def test_corrections_sum_to_zero_over_what_is_shared() -> None:
    simulation = run()
    next(simulation)
    simulation.advance()  # clients' corrections begin anew with every global round
    result = simulation.result()
    groups, clients = result.corrections
    assert clients.shape == result.models[-1].shape
    for rows in (groups, clients[:2], clients[2:]):
        assert float(rows.sum(dim=0).abs().max()) < 1e-12 < float(rows.abs().max())
    stays = result.flat.unflatten(torch.arange(result.flat.parameters), torch.empty(result.flat.buffers))
    assert not clients[:, [int(i) for name in ("norm.weight", "norm.bias") for i in stays[name]]].any()


def test_bytes_are_those_of_what_is_shared() -> None:
    result = run(rules="hfedavg").run()
    shared = (6 * 5 + 5) + (5 * 3 + 3)
    assert result.communication.level(2).bytes_up == 4 * 2 * 2 * 8 * shared
    complete = run(rules="hfedavg", keep=None).run()
    assert complete.communication.level(2).bytes_up == 4 * 2 * 2 * 8 * (shared + 4 * 5)


def test_clients_are_evaluated_with_their_own() -> None:
    simulation = run(evaluate_levels=[0, 1, 2], test_partition=PARTS)
    result = simulation.run()
    nodes = result.history[-1].nodes
    inputs, targets = data()
    for part, name in zip(PARTS, result.tree.names[2], strict=True):
        model = result.model_of(name).eval()
        right = float((model(inputs[part]).argmax(dim=1) == targets[part]).double().mean())
        assert nodes[name]["accuracy"] == pytest.approx(right), name
    norms = [result.model_of(name).norm for name in result.tree.names[2]]
    expected = torch.stack([norm.running_mean for norm in norms]).mean(dim=0)
    assert torch.allclose(result.module.norm.running_mean, expected), "only to look at"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"participation": 0.5},
        {"leaf": client_options(0.1, momentum=0.9, optimizer_state="keep")},
        {"leaf": client_options(0.01, optimizer="adam", optimizer_state="keep")},
        {"leaf": client_options(0.01, optimizer="adam")},
        {"rules": ["mtgc", "scaffold"], "drift": "ideal"},
    ],
    ids=["plain", "some take part", "momentum", "adam kept", "adam", "ideal"],
)
@pytest.mark.parametrize("kind", [Normed, Grouped])
def test_a_run_goes_on_to_the_same_bits(kind: type, more: dict[str, Any]) -> None:
    keep = "batch_norm" if kind is Normed else ["norm"]
    engine = "loop" if kind is Normed else "stacked"
    uninterrupted = run(kind, keep=keep, engine=engine, **more)
    first = run(kind, keep=keep, engine=engine, **more)
    next(first)
    state = copy.deepcopy(first.state())
    second = run(kind, keep=keep, engine=engine, **more)
    second.restore(state)
    one, other = uninterrupted.run(), second.run()
    assert torch.equal(one.models[-1], other.models[-1]) and torch.equal(one.buffers[-1], other.buffers[-1])


def test_a_kept_state_of_the_optimiser_is_whole() -> None:
    """Momentum goes on where models are shared and where they stay."""
    chain = client_options(0.05, momentum=0.9, optimizer_state="keep")
    one, other = (run(Grouped, keep=["norm"], leaf=chain, engine=engine).run() for engine in ("loop", "stacked"))
    assert torch.allclose(one.models[-1], other.models[-1], atol=1e-12)
    forgetful = run(Grouped, keep=["norm"], leaf=client_options(0.05, momentum=0.9)).run()
    assert not torch.allclose(one.models[-1], forgetful.models[-1])


def test_a_saved_run_is_the_same_again(tmp_path: Path) -> None:
    first, again = (run(save=tmp_path / "run", keep_state=True).run() for _ in range(2))
    assert torch.equal(first.models[-1], again.models[-1]) and torch.equal(first.buffers[-1], again.buffers[-1])
    with pytest.raises(InvalidInput, match="local_parameters"):
        run(keep=None, save=tmp_path / "run", keep_state=True)


def test_a_client_whose_update_is_refused_keeps_what_it_had() -> None:
    inputs, targets = data()
    inputs[PARTS[1]] = float("nan")
    settings = {"periods": [2, 3], "rounds": 2, "batch": 5, "local_parameters": "batch_norm"}
    simulation = simulate(lambda: Normed().double(), (inputs, targets), PARTS, "2x2", "mtgc", **settings)
    result = simulation.run()
    assert result.refused == {"0/1": 4}
    assert torch.equal(result.model_of("0/1").norm.running_mean, torch.zeros(5, dtype=torch.float64))
    assert bool(result.module.norm.running_mean.isfinite().all())


# -- what is given ---------------------------------------------------------------------------------


def test_what_names_mean() -> None:
    flat = FlatModule(Normed())
    norm = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    assert match_local_parameters(flat, None) == []
    assert match_local_parameters(flat, "batch_norm") == match_local_parameters(flat, ["norm"]) == norm
    assert match_local_parameters(flat, ["*.bias"]) == ["into.bias", "norm.bias", "out.bias"]
    assert match_local_parameters(flat, ["batch_norm", "out"]) == [
        "norm.weight",
        "norm.bias",
        "out.weight",
        "out.bias",
        *norm[2:],
    ]


@pytest.mark.parametrize(
    ("kind", "keep", "message"),
    [
        (Normed, ["nrom"], "did you mean 'norm'"),
        (Grouped, "batch_norm", "Grouped has no batch norm"),
        (Normed, "batchnorm", "did you mean 'batch_norm'"),
        (Normed, 3, "must be"),
        (Normed, [torch.arange(2)], "a list of names"),
        (Normed, ["*"], "leaves no parameter"),
        (Normed, ["num_batches_tracked"], "local_parameters"),
    ],
)
def test_mistakes_are_one_line(kind: type, keep: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as problem:
        run(kind, keep=keep)
    assert "\n" not in str(problem.value)


def test_a_pull_behind_the_clip_is_refused() -> None:
    rule = {"name": "feddyn", "alpha": 0.1, "pull": "after_clip"}
    with pytest.raises(InvalidInput, match="pull after the clip"):
        run(rules=["hfedavg", rule])


def test_in_a_config() -> None:
    values = {
        "tree": {"shape": "2x2"},
        "model": {"name": "mlp", "local_parameters": ["*.bias"]},
        "schedule": {"periods": [1, 1]},
        "rounds": 1,
    }
    simulation = build(Experiment.from_table(values))
    assert len(simulation.home.parameters.local_K) > 0
    assert simulation.federation.levels[0].model.shape[1] == len(simulation.home.parameters.shared_S)
