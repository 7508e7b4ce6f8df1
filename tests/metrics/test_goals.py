"""Targets at which a run stops: any value of any metric, with errors for all others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stratafl import InvalidInput, Simulation
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import Goal, default_metric, parse_goal, parse_goals
from stratafl.runs import StoredRun, read_run
from stratafl.runs.session import RunSession
from stratafl.simulation.build import build
from stratafl.sweeps import Sweep, table
from tests.flat import simulate

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
TRUE = X @ torch.tensor([1.0, -2.0, 0.5])
LABELS = (TRUE > 0).long()
PARTS = [range(10 * client, 10 * client + 10) for client in range(4)]


def regression(**settings: Any) -> Simulation:
    options = {"periods": [1, 5], "rounds": 30, "leaf": 0.05, "test": (X, TRUE), "loss": "mse", **settings}
    return simulate(lambda: nn.Linear(3, 1), (X, TRUE), PARTS, "2x2", "mtgc", **options)


def classes(**settings: Any) -> Simulation:
    options = {"periods": [1, 5], "rounds": 30, "leaf": 0.05, "test": (X, LABELS), **settings}
    return simulate(lambda: nn.Linear(3, 2), (X, LABELS), PARTS, "2x2", "mtgc", **options)


GIVEN = [
    ("loss <= 0.1", (Goal("loss", 0.1, "<="),)),
    ("f1>=.5", (Goal("f1", 0.5, ">="),)),
    ("my metric >= -1e-3", (Goal("my metric", -1e-3, ">="),)),
    ({"accuracy": 0.8, "loss": 1}, (Goal("accuracy", 0.8), Goal("loss", 1))),
    (0.8, (Goal("accuracy", 0.8, ">="),)),
    ("0.8", (Goal("accuracy", 0.8, ">="),)),
    (" accuracy = 8e-1 ", (Goal("accuracy", 0.8),)),
    ("loss=-2", (Goal("loss", -2.0),)),
]


@pytest.mark.parametrize(("goal", "goals"), GIVEN, ids=[str(case[0]) for case in GIVEN])
def test_how_a_goal_is_written(goal: Any, goals: tuple[Goal, ...]) -> None:
    assert parse_goals("stop_when", goal) == goals


@pytest.mark.parametrize(
    "goal",
    ["loss", "loss < 1", "<= 1", "= 1", "loss=", "loss == 1", "loss <= x", "loss <= nan", "nan", "2", "accuracy=2",
     "accuracy >= 75", {"accuracy": 75}, {}, {"loss": "x"}, [1], True, 2],
)  # fmt: skip
def test_what_is_no_goal_is_refused(goal: Any) -> None:
    with pytest.raises(InvalidInput, match="stop_when"):
        parse_goals("stop_when", goal)


def test_a_goal_knows_which_way_it_lies() -> None:
    goal = Goal("error", 0.5)
    assert goal.with_direction({"error": "lower"}).is_reached(0.4) and not goal.with_direction({}).is_reached(0.4)
    assert Goal("loss", 0.5).with_direction({}).sign == "<=", "as in runs that do not say"
    assert not Goal("loss", 0.5, "<=").is_reached(math.nan) and not Goal("loss", 0.5, "<=").is_reached(None)
    assert Goal("loss", 0.5, "<=").first_round([2, 4, 6], [1.0, 0.5, 0.1]) == 4
    assert str(Goal("loss", 0.5, "<=")) == "loss <= 0.5"
    with pytest.raises(InvalidInput, match="one metric"):
        parse_goal("target", {"a": 1, "b": 2})


def test_a_number_alone_is_a_value_of_the_default_metric() -> None:
    assert parse_goal("--target", "2.5", "f1") == Goal("f1", 2.5)
    assert default_metric(["loss", "auc", "accuracy"]) == "accuracy"
    assert default_metric(["loss", "f1", "auc"]) == "auc" and default_metric(["loss"]) == "loss"


@pytest.mark.parametrize(
    "goal", [{"loss": 0.05}, "loss <= 0.05", "loss=0.05", {"loss": 0.05, "rmse": 10}, "rmse <= 0.2236068"]
)
def test_a_regression_stops_at_its_target(goal: Any) -> None:
    everything = [record.metrics["loss"] for record in regression().run().history]
    first = next(round for round, loss in enumerate(everything, 1) if loss <= 0.05)
    assert 1 < first < 30
    assert len(regression(stop_when=goal, metrics=["rmse"]).run().history) == first


def test_all_of_several_are_to_be_reached() -> None:
    one = len(regression(stop_when={"loss": 0.05}).run().history)
    both = regression(stop_when={"loss": 0.05, "mae": 0.01}, metrics=["mae"]).run().history
    assert len(both) > one and both[-1].metrics["mae"] <= 0.01 < both[-2].metrics["mae"]


def test_stop_at_is_an_accuracy() -> None:
    one, other = classes(stop_when=0.85).run().history, classes(stop_when={"accuracy": 0.85}).run().history
    assert 1 < len(one) == len(other) < 30


REFUSED = [
    (regression, {"stop_when": 0.8}, "evaluation.stop_when = 0.8: 'accuracy' is not measured; measured are loss"),
    (regression, {"stop_when": {"f1": 0.8}, "metrics": ["mae"]}, "'f1' is not measured; measured are loss, mae"),
    (classes, {"stop_when": 0.8, "test": None}, "'accuracy' is not measured; there is no test data"),
    (classes, {"stop_when": 1.5}, "evaluation.stop_when = 1.5: must be a finite number above 0 and at most 1"),
]


@pytest.mark.parametrize(("make", "settings", "said"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_never_reached_is_refused(make: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make(**settings)


CONFIG = {
    "tree": {"shape": "2x2"},
    "data": {"source": "synthetic", "arguments": {"samples": 30, "features": 5, "classes": 3}},
    "model": {"name": "logistic"},
    "schedule": {"periods": [1, 5]},
    "evaluation": {"metrics": ["f1", "perplexity"]},
    "rounds": 40,
}


def stored(folder: Path, stop_when: str | None = None) -> StoredRun:
    config = Experiment.from_table(CONFIG).replace({"evaluation.stop_when": stop_when})
    return read_run(RunSession.start(config, "one", folder).run().path)


def test_a_config_stops_and_its_folder_says_which_way_is_better(tmp_path: Path) -> None:
    run = stored(tmp_path, stop_when="perplexity <= 1.5")
    values = [record["metrics"]["perplexity"] for record in run.rounds]
    assert 1 < len(values) < 40 and values[-1] <= 1.5 < min(values[:-1])
    assert run.better == {"loss": "lower", "accuracy": "higher", "f1": "higher", "perplexity": "lower"}
    described = json.loads((run.path / "run.json").read_text())
    del described["better"]
    (run.path / "run.json").write_text(json.dumps(described))
    assert read_run(run.path).better == {}, "a folder of an earlier version"


def test_a_sweep_counts_rounds_to_any_target(tmp_path: Path) -> None:
    run = stored(tmp_path)
    values = [record["metrics"]["perplexity"] for record in run.rounds]
    first = next(round for round, value in enumerate(values, 1) if value <= 1.5)

    def rows(target: Any) -> Any:
        plan = Sweep.of({"base": CONFIG, **({} if target is None else {"target": target})}, "study")
        return table(plan.entries, {plan.entries[0].name: run}, plan.target)[0]

    for target in ({"perplexity": 1.5}, "perplexity <= 1.5"):
        row = rows(target)
        assert (row.metric, row.reached, row.rounds, row.final) == ("perplexity", 1, first, values[-1])
    assert rows({"perplexity": 0.1}).rounds_text == ">40"
    assert rows(0.2).metric == rows(None).metric == "accuracy"
    for record in run.rounds:
        record["metrics"].pop("accuracy")
    assert rows(None).metric == "f1", "as a report of the same runs has it"
    with pytest.raises(InvalidInput, match="target"):
        rows({"loss": "low"})


def test_a_config_that_stops_at_nothing_measured_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'auc' is not measured; measured are loss, accuracy, f1, perplexity"):
        build(Experiment.from_table(CONFIG).replace({"evaluation.stop_when": {"auc": 0.9}}))
