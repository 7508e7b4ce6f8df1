"""Grids: the runs that a sweep file and a grid of Python mean, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratafl import Experiment, InvalidInput, Method, StepDecay, average
from stratafl.metrics.objective import Goal
from stratafl.sweeps import Sweep
from tests.runs.stopped import CONFIG


def test_a_grid_is_every_combination_with_the_seeds_fastest() -> None:
    grid = {"seed": 2, "method": ["hfedavg", {"name": "fedprox", "mu": 0.5}], "client": {"lr": [0.1, 0.2]}}
    plan = Sweep.of({"base": CONFIG, "grid": grid, "target": 0.8}, "study")
    assert [entry.name for entry in plan.entries][:3] == [
        "hfedavg-lr=0.1-seed=0",
        "hfedavg-lr=0.1-seed=1",
        "hfedavg-lr=0.2-seed=0",
    ]
    assert len(plan.entries) == 8
    assert plan.entries[-1].group == "fedprox mu=0.5 lr=0.2"
    experiment = plan.entries[-1].experiment
    assert experiment.method == Method(name="fedprox", params={"mu": 0.5})
    assert (experiment.client.lr, experiment.seed, experiment.model.name) == (0.2, 1, "logistic")


def test_forms_of_keys_and_names_of_variants() -> None:
    same = [{"client.lr": [0.1]}, {"client": {"lr": [0.1]}}]
    for grid in same:
        (entry,) = Sweep.of({"base": CONFIG, "grid": grid}, "study").entries
        assert (entry.name, entry.group, entry.experiment.client.lr) == ("study", "study", 0.1)
    plan = Sweep.of({"base": CONFIG, "grid": {"seed": [7, 8]}}, "study")
    assert [(e.name, e.group) for e in plan.entries] == [("study-seed=7", "study"), ("study-seed=8", "study")]


def test_variants_are_named_changes_and_a_method_in_one_is_whole(tmp_path: Path) -> None:
    variants = {"plain": {"method": {"name": "hfedavg"}}, "slow & steady": {"client.lr": 0.01, "rounds": 9}}
    base = {**CONFIG, "method": {"name": "fedprox", "mu": 0.5}}
    (tmp_path / "base.toml").write_text('rounds = 2\nseed = 5\n\n[model]\nname = "logistic"\n')
    plan = Sweep.of({"config": "base.toml", "base": {"rounds": 4}, "variants": variants}, "study", tmp_path)
    assert [entry.group for entry in plan.entries] == ["plain", "slow & steady"]
    assert [entry.experiment.rounds for entry in plan.entries] == [4, 9]
    assert {entry.experiment.seed for entry in plan.entries} == {5}
    plain, slow = Sweep.of({"base": base, "variants": variants}, "study").entries
    assert plain.experiment.method == Method(name="hfedavg")
    assert slow.experiment.method == Method(name="fedprox", params={"mu": 0.5})
    assert slow.name.startswith("slow-steady-") and slow.name != slow.group


def test_names_that_look_alike_stay_apart() -> None:
    entries = Sweep.of({"base": CONFIG, "grid": {"model.name": ["a/b", "a:b", "x" * 200, "x" * 201]}}, "s").entries
    assert len({entry.name for entry in entries}) == 4
    assert all(len(entry.name) <= 100 for entry in entries)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gird": {}}, "did you mean 'grid'"),
        ({"grid": {"seed": 0}}, "grid.seed = 0"),
        ({"grid": {"client.lr": 0.1}}, "must be a list"),
        ({"grid": {"client.lr": []}}, "must be a list"),
        ({"grid": {"seeds": 2}}, "grid.seeds = 2: is grid.seed now"),
        ({"grid": {"methods": ["mtgc"]}}, "grid.methods = ['mtgc']: is grid.method now"),
        ({"grid": {"run.seed": [1]}}, "grid.run.seed = [1]: is grid.seed now"),
        ({"grid": {"client.lr": [0.1, 0.1]}}, "two runs would be the same"),
        ({"grid": {"seed": 200, "client.lr": list(range(1, 102))}}, "at most 10,000 runs"),
        ({"grid": {"client.lrr": [1]}}, "did you mean 'lr'"),
        ({"grid": {"leaf.lr": [1]}}, "leaf.lr = 1: is client.lr now"),
        ({"grid": {"client.optimizer": ["sgd", "adm"]}}, "did you mean 'adam'"),
        ({"grid": {"rounds": [2, 2.5]}}, "rounds = 2.5"),
        ({"grid": {"client.lr": [0.1, float("nan")]}}, "client.lr = nan"),
        ({"grid": {"schedule.wait": ["all", {"dedline": 3}]}}, "dedline"),
        ({"grid": {"evaluation.levels": [[1], [9]]}}, "evaluation.levels"),
        ({"variants": {"a": {}, "b": {"method": "nonesuch"}}}, "method = 'nonesuch': unknown"),
        ({"target": 2}, "target = 2"),
        ({"config": "nowhere.toml"}, "No such file"),
    ],
)
def test_what_does_not_fit_is_said(values: dict, said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        Sweep.of({"base": CONFIG, **values}, "study")
    assert said in str(problem.value)


# -- a grid of Python ------------------------------------------------------------------------------


def names(grid: dict[str, Any], **options: Any) -> list[str]:
    experiment = Experiment.from_table(CONFIG).replace(method="hfedavg")
    return [entry.name for entry in Sweep.of_grid(experiment, grid, "study", **options).entries]


def test_a_grid_of_python_has_the_names_of_a_file() -> None:
    """A stored run of either form is found by the other."""
    methods = ["hfedavg", {"name": "fedprox", "mu": 0.5}]
    of_file = Sweep.of({"base": CONFIG, "grid": {"method": methods, "client.lr": [0.1, 0.2], "seed": 2}}, "study")
    of_python = Sweep.of_grid(
        Experiment.from_table(CONFIG),
        {"method": ("hfedavg", Method("fedprox", {"mu": 0.5})), "client.lr": np.array([0.1, 0.2]), "seed": range(2)},
        "study",
        target="loss <= 0.3",
    )
    assert of_python.entries == of_file.entries
    assert of_python.target == Goal("loss", 0.3, "<=")


def test_objects_in_a_grid_have_names() -> None:
    assert names({"client.lr_schedule": ["cosine", StepDecay(2)]}) == [
        "lr_schedule=cosine",
        "lr_schedule=-name-step-every-2-a8f00d",
    ]
    assert names({"method": [[average(), average()], "mtgc"]}) == ["method=0", "mtgc"]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"client.lrr": [0.1]}, "did you mean 'lr'"),
        ({"client.lr": 0.1}, "must be a list of values"),
        ({"method": "mtgc"}, "must be a list of values"),
        ({"method": ["mtgc", "mtcg"]}, "did you mean 'mtgc'"),
        ([0.1], "must be a table"),
    ],
)
def test_a_wrong_grid_of_python_is_one_line(grid: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        names(grid)


def test_changes_are_made_to_the_base_and_never_lost() -> None:
    values = {"base": CONFIG, "grid": {"client.lr": [0.1, 0.2]}, "variants": {"short": {"rounds": 1}}}
    changed = Sweep.of(values, "study", changes=["tree.shape=3x2", "method=mtgc"])
    assert [(e.experiment.tree.shape, e.experiment.method.name) for e in changed.entries] == [("3x2", "mtgc")] * 2
    for change, where in (("client.lr=0.3", "grid has client.lr"), ("rounds=3", "variants.short has rounds")):
        with pytest.raises(InvalidInput, match=f"has no effect, since {where}"):
            Sweep.of(values, "study", changes=[change])
