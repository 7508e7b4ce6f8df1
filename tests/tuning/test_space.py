"""Search spaces, and settings as files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stratafl.base.errors import InvalidInput
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.sections import Schedule
from stratafl.tuning.task import budgets_of, space_of


def experiment(**changes: Any) -> Experiment:
    tables = {
        "rounds": 8,
        "tree": {"shape": "2x3"},
        "method": {"name": "fedprox", "mu": 0.1},
        "schedule": {"periods": [4, 10]},
        "client": {"lr": 0.1, "batch_size": 20},
    }
    return Experiment.from_table({**tables, **changes})


def test_an_experiment_has_neighbours() -> None:
    space = space_of(experiment())
    axes = {axis.name: axis.values for axis in space.axes}
    assert axes["periods.1"] == (1, 2, 4, 8, 16) and axes["periods.2"] == (2, 5, 10, 20, 40)
    assert axes["lr"] == (0.025, 0.05, 0.1, 0.2, 0.4) and axes["batch"] == (10, 20, 40)
    assert axes["participation"] == (0.5, 1.0)
    assert [each["name"] for each in axes["method"]] == ["fedprox", "hfedavg", "mtgc"]
    assert space.baseline is not None and space.experiment_of(space.baseline) == space.experiment


def test_longer_periods_have_fewer_rounds() -> None:
    space = space_of(experiment(), {"defaults": False, "periods": [[4, 8], [10, 3]]})
    rounds = {tuple(e.schedule.periods): e.rounds for e in map(space.experiment_of, [(0, 1), (1, 1), (0, 0)])}
    assert rounds == {(4, 10): 8, (8, 10): 4, (4, 3): 27}
    double = space_of(experiment(), {"effort": 2.0})
    assert double.baseline is None, "it is another run"
    places = tuple(axis.baseline or 0 for axis in double.axes)
    assert double.experiment_of(places).rounds == 16


def test_passes_are_the_lowest_period() -> None:
    base = experiment(schedule={"periods": [4, 2], "unit": "epochs"})
    space = space_of(base, {"defaults": False, "periods": [[4], [1, 2]]})
    one = space.experiment_of((0,))
    assert (one.schedule, one.rounds) == (Schedule(periods=[4, 1], unit="epochs"), 16)


def test_participation_is_the_clients() -> None:
    base = experiment(schedule={"periods": [4, 10], "participation": [1.0, 0.75]})
    space = space_of(base, {"defaults": False, "participation": [0.75, 0.5]})
    assert space.experiment_of((0,)).schedule.participation == (1.0, 0.5)
    assert space.experiment_of((1,)) == base


def test_any_key_can_be_searched() -> None:
    space = space_of(
        experiment(), {"defaults": False, "client.weight_decay": [0.9, 0.0], "client": {"clip_norm": [1.0]}}
    )
    chosen = space.experiment_of((1, 0))
    assert chosen.client.weight_decay == 0.9 and chosen.client.clip_norm == 1.0
    assert space.label((1, 0)) == "client.weight_decay 0.9 client.clip_norm 1.0"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"defaults": False}, "leaves nothing to choose"),
        ({"defaults": False, "lr": [0.1]}, "leaves nothing to choose"),
        ({"lr": []}, "tune.lr = .*must be a list of values"),
        ({"lr": 0.1}, "tune.lr = 0.1: must be a list of values"),
        ({"lr": [0.1, 0.1]}, "has a value twice"),
        ({"lr": [0.1, -1.0]}, "lr = -1.0"),
        ({"rate": [0.1]}, "tune key = 'rate': unknown"),
        ({"periods": [[1, 2]]}, "a list of values per edge level, root first, 2 of them"),
        ({"periods": [[1, 2], [0, 4]]}, "periods = 0"),
        ({"method": ["mtgcc", "mtgc"]}, "did you mean 'mtgc'"),
        ({"effort": 0}, "tune.effort"),
        ({"defaults": 1}, "tune.defaults"),
        ({"client.speed": [1, 2]}, "client key = 'speed'"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_trained(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        space_of(experiment(), plan)


def test_the_guide_has_a_table_that_can_be_searched() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "plan.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    for given in (text, text.replace("# participation", "participation").replace("# batch", "batch")):
        space = space_of(experiment(), tomllib.loads(given)["tune"])
        assert {"periods.1", "periods.2", "lr", "method", "client.optimizer"} <= {axis.name for axis in space.axes}


def test_a_file_with_a_tune_table_is_an_experiment() -> None:
    assert Experiment.from_table({"tune": {"lr": [0.1, 0.2]}, "client": {"lr": 0.3}}).client.lr == 0.3


@pytest.mark.parametrize(
    "given",
    [
        experiment(),
        experiment(client={"lr": 1e-5, "batch_size": "full", "lr_schedule": {"name": "step", "every": 3}}),
        experiment(method={"rules": ["average", {"name": "fedprox", "mu": 0.5}]}),
        experiment(data={"source": 'a "file"\\ü.csv', "columns": {"inputs": ["a b", "c"], "tab\t": "\x7f"}}),
        experiment(evaluation={"stop_when": "loss <= 0.1", "levels": (0, 1)}),
    ],
)
def test_a_setting_as_a_file_is_the_same(given: Experiment) -> None:
    assert Experiment.from_table(tomllib.loads(given.to_toml())) == given


def test_budgets() -> None:
    assert budgets_of(["seconds=3600", "bytes=1e9"]) == {"seconds": 3600.0, "bytes": 1e9}
    for texts in (["seconds"], ["seconds=0"], ["tea=1"], ["seconds=1", "seconds=2"]):
        with pytest.raises(InvalidInput):
            budgets_of(texts)
