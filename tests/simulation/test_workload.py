"""The workload that a run notes when it is set up, and prices that need nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import InvalidInput, cost
from stratafl.costs.costs import PriceableRun
from stratafl.experiment.experiment import Experiment
from stratafl.network.messages import message_sizes, scaled_sizes
from stratafl.rules.registry import entries, rules_for
from stratafl.runs import StoredRun, read_run
from tests.costs.test_pricing import CASES, NETWORK, experiment, trained
from tests.flat import simulate

OWN_MODEL = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, input_shape, classes):
        super().__init__(nn.Linear(input_shape[0], 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, classes))
"""
OWN_DATA = """
import numpy as np


def load(clients):
    draw = np.random.default_rng(0)
    sizes = [20 + 3 * client for client in range(clients)]
    train = [(draw.normal(size=(size, 5)).astype(np.float32), draw.integers(0, 4, size)) for size in sizes]
    return {"train": train, "classes": list("abcd")}
"""
OWN_RULE = """
import torch

from stratafl import average, register


@register("digest", summary="Average, and send the largest values once more.")
def digest():
    plain = average()

    def up(state, x, edge):
        state, message = plain.up(state, x, edge)
        return state, {**message, "top": x.topk(min(x.shape[1], 100)).values}

    return plain._replace(up=up)
"""


@pytest.mark.parametrize("name", ["MTGC", "SCAFFOLD", "a server's momentum", "epochs and an optimizer of its own"])
def test_noted_and_reconstructed_workloads_cost_the_same(name: str, tmp_path: Path) -> None:
    run = trained(experiment(**CASES[name]), tmp_path)
    noted, made_again = PriceableRun.of(run), PriceableRun.of(replace(run, workload={}))
    assert noted.flops == made_again.flops and noted.flops
    for one, other in zip(costs_of(noted), costs_of(made_again), strict=True):
        np.testing.assert_array_equal(one, other)


def costs_of(ready: PriceableRun) -> list[np.ndarray]:
    costs = ready.cost_on(NETWORK)
    return [costs.seconds_R, costs.joules_R, costs.money_R, *costs.bytes]


@pytest.mark.parametrize("method", [*(method.name for method in entries()), {"rules": ["momentum", "scaffold"]}])
def test_message_sizes_scale_with_the_model(method: object) -> None:
    rules = rules_for(method["rules"] if isinstance(method, dict) else method, 2)
    for dtype in (torch.float32, torch.float64):
        assert scaled_sizes(rules, 12_345, 67, dtype=dtype) == message_sizes(rules, 12_345, 67, dtype=dtype)
        assert scaled_sizes(rules, 3, 0, dtype=dtype) == message_sizes(rules, 3, 0, dtype=dtype)


def own_study(folder: Path, **more: dict) -> StoredRun:
    """A run on data, a model and a rule of its user's, whose files are gone afterwards."""
    texts = {"net.py": OWN_MODEL, "data.py": OWN_DATA, "rule.py": OWN_RULE}
    for name, text in texts.items():
        (folder / name).write_text(text)
    tables = {
        "tree": {"shape": "2x2"},
        "data": {"source": f"{folder / 'data.py'}:load"},
        "model": {"name": f"{folder / 'net.py'}:Net"},
        "method": {"name": "digest"},
        "schedule": {"periods": [2, 1], "participation": [1.0, 0.5], "unit": "epochs"},
        "client": {"batch_size": 8},
        "rounds": 2,
        "storage": {"checkpoint_every": 0},
        "plugins": [str(folder / "rule.py")],
    }
    run = trained(
        Experiment.from_table(
            {key: {**tables.get(key, {}), **more[key]} if key in more else tables[key] for key in tables}
        ),
        folder / "runs",
    )
    for name in texts:
        (folder / name).unlink()
    return run


def test_a_run_of_own_data_model_and_rule_is_priced(tmp_path: Path) -> None:
    run = own_study(tmp_path)
    ready = PriceableRun.of(run)
    assert ready.flops == 3 * 2 * (5 * 7 + 7 * 4) and ready.recovered.notes == ()
    assert (ready.recovered.parameters, ready.recovered.buffers) == (5 * 7 + 7 + 14 + 7 * 4 + 4, 14)
    assert ready.recovered.workload.steps_N.tolist() == [3, 3, 4, 4]
    assert cost(run.path, "lan_wan")[0].at("all rounds").seconds is not None


@pytest.mark.parametrize(
    "model",
    [
        {"local_parameters": ["2"]},
        {"lora": {"rank": 2, "targets": ["0"]}},
        {"local_parameters": "batch_norm", "lora": {"rank": 2, "targets": ["3"], "train": ["2"]}},
    ],
    ids=str,
)
def test_local_parameters_and_adapters_are_priced(model: dict, tmp_path: Path) -> None:
    ready = PriceableRun.of(own_study(tmp_path, model=model, method={"name": "mtgc"}))
    assert ready.recovered.notes == (), "the bytes that were recorded are those of what was sent"
    assert ready.cost_on(NETWORK).seconds_R.min() > 0


def test_a_saved_run_of_a_program_is_priced(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(90, 6, generator=draw), torch.randint(0, 3, (90,), generator=draw)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    parts = [range(0, 50), range(50, 57), range(57, 90)]
    kept = {"local_parameters": ["2"], "save": tmp_path / "run"}
    simulate(model, data, parts, "3", "hfedavg", periods=[4], batch=10, rounds=2, **kept).run(progress=False)
    ready = PriceableRun.of(read_run(tmp_path / "run"))
    assert ready.flops == 3 * 2 * (6 * 5 + 5 * 3) and ready.recovered.notes == ()
    assert ready.recovered.workload.samples_N.tolist() == [10, 7, 10]
    assert ready.recovered.workload.sizes.model == 4 * (6 * 5 + 5)


class Drawing(nn.Module):
    """Draws random numbers also where it is only looked at, and cannot be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "FlopCounter" in type(torch.utils._python_dispatch._get_current_dispatch_mode()).__name__:
            raise LookupError("not to be watched")
        return self.scale * (x[:, :3] + torch.rand(()) + np.random.rand())


def test_counting_disturbs_nothing_and_may_fail(tmp_path: Path) -> None:
    data = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.random.get_rng_state().tolist(), str(np.random.get_state())
    parts = [range(0, 15), range(15, 30)]
    simulation = simulate(Drawing(), data, parts, "2", "hfedavg", periods=[2], rounds=1, save=tmp_path / "run")
    assert (torch.random.get_rng_state().tolist(), str(np.random.get_state())) == before
    simulation.run(progress=False)
    run = read_run(tmp_path / "run")
    assert run.workload["flops_per_sample"] is None
    with pytest.raises(InvalidInput, match="--flops: the operations of its model could not be counted"):
        cost([run], "lan_wan")
    assert cost([run], "lan_wan", flops_per_sample=100.0)


def test_what_only_repeats_is_noted_once(tmp_path: Path) -> None:
    run = trained(experiment(), tmp_path)
    noted = json.loads((run.path / "run.json").read_text())["workload"]
    assert noted["steps_per_sync"] == [3] and noted["samples_per_step"] == [16]
    assert noted["messages"]["model"] == 4 * noted["parameters"]


@pytest.mark.parametrize(
    "broken",
    [
        {"messages": 3},
        {"steps_per_sync": [1, 2]},
        {"parameters": "many"},
        {"flops_per_sample": []},
        {"flops_per_sample": -1.0},
        {"samples_per_step": [-1]},
    ],
    ids=str,
)
def test_a_broken_workload_is_one_line(broken: dict, tmp_path: Path) -> None:
    run = trained(experiment(rounds=1), tmp_path)
    with pytest.raises(InvalidInput, match=r"the workload in its run\.json cannot be read"):
        PriceableRun.of(replace(run, workload={**run.workload, **broken}))
    with pytest.raises(InvalidInput, match="could not be found when it was set up"):
        PriceableRun.of(replace(run, workload={**run.workload, "messages": None}))
