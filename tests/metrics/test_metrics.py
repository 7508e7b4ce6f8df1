"""Metrics: the built-in ones against scikit-learn and torchmetrics, and a user's own."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sklearn
from torch import Tensor, nn

from stratafl import InvalidInput, Simulation
from stratafl.core.losses import parse_loss
from stratafl.experiment.experiment import Experiment
from stratafl.metrics import evaluation as measuring
from stratafl.metrics.evaluation import EvaluationSums, evaluate, finalize_metrics
from stratafl.metrics.metrics import Metric, metric_directions, parse_metrics
from stratafl.simulation.build import build
from tests.flat import simulate
from tests.metrics.evaluated import evaluated

random = torch.Generator().manual_seed(4)
SCORES, LABELS = torch.randn(200, 6, generator=random), torch.randint(5, (200,), generator=random)
SAID = SCORES.argmax(dim=1)
VALUES = torch.randn(200, generator=random)
TRUE = VALUES + 0.5 * torch.randn(200, generator=random)
YES = (TRUE > 0).float()
CLASSES = parse_loss(None)


def measured(metrics: Any, outputs: Any, targets: Tensor, loss: Any = CLASSES, chunk: int = 64) -> dict[str, float]:
    """Metrics of a model that returns `outputs` by their numbers."""
    numbers = torch.arange(len(targets))
    return evaluated(lambda index: outputs[index], parse_loss(loss), numbers, targets, chunk, parse_metrics(metrics))


SKLEARN = {
    "accuracy": sklearn.accuracy_score(LABELS, SAID),
    "balanced_accuracy": sklearn.recall_score(LABELS, SAID, labels=range(5), average="macro"),
    "f1": sklearn.f1_score(LABELS, SAID, average="macro"),
    "top2": sklearn.top_k_accuracy_score(LABELS, SCORES, k=2, labels=range(6)),
    "perplexity": math.exp(sklearn.log_loss(LABELS, SCORES.double().softmax(1), labels=range(6))),
}


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_of_classes_as_scikit_learn_has_them(chunk: int) -> None:
    values = measured(list(SKLEARN), SCORES, LABELS, chunk=chunk)
    assert values.pop("loss") == pytest.approx(float(F.cross_entropy(SCORES, LABELS)), rel=1e-5)
    assert values == pytest.approx(SKLEARN, rel=1e-9)


def test_of_values_as_scikit_learn_has_them() -> None:
    metrics = measured(["mae", "mse", "rmse", "r2"], VALUES[:, None], TRUE, "mse")
    assert metrics == pytest.approx(
        {
            "loss": sklearn.mean_squared_error(TRUE, VALUES),
            "mae": sklearn.mean_absolute_error(TRUE, VALUES),
            "mse": sklearn.mean_squared_error(TRUE, VALUES),
            "rmse": sklearn.root_mean_squared_error(TRUE, VALUES),
            "r2": sklearn.r2_score(TRUE, VALUES),
        },
        rel=1e-6,
    )


def test_of_several_columns_of_values_as_scikit_learn_has_them() -> None:
    offset = torch.tensor([0.0, 100.0])
    true, values = TRUE.view(100, 2) + offset, VALUES.view(100, 2) + offset
    metrics = measured(["r2"], values, true, "mse")
    assert metrics["r2"] == pytest.approx(sklearn.r2_score(true, values), rel=1e-4)
    assert metrics["r2"] < 0.9, "an offset explains nothing"


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("integers", [False, True])
def test_binary_classes(column: bool, integers: bool) -> None:
    """A single score above zero is the positive class, also in a column."""
    targets = YES.long() if integers else YES
    metrics = measured(["accuracy", "f1"], VALUES[:, None] if column else VALUES, targets, "bce_with_logits")
    assert metrics["accuracy"] == pytest.approx(sklearn.accuracy_score(YES, VALUES > 0))
    assert metrics["f1"] == pytest.approx(sklearn.f1_score(YES, VALUES > 0, average="macro"))


def test_labels_that_the_loss_passes_over_are_not_asked_for() -> None:
    some = LABELS.clone()
    some[::3] = 4
    loss = {"name": "cross_entropy", "ignore_index": 4}
    kept = some != 4
    metrics = measured(["f1", "accuracy"], SCORES, some, loss)
    assert metrics["f1"] == pytest.approx(sklearn.f1_score(some[kept], SAID[kept], average="macro"))
    assert metrics["accuracy"] == pytest.approx(sklearn.accuracy_score(some[kept], SAID[kept]))


def test_of_sequences() -> None:
    scores, labels = SCORES.view(20, 10, 6).movedim(2, 1), LABELS.view(20, 10)
    assert measured(["f1"], scores, labels)["f1"] == pytest.approx(SKLEARN["f1"])


def test_torchmetrics_agree_and_remember_nothing() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    objects = {
        "f1": torchmetrics.classification.MulticlassF1Score(6, average="macro"),
        "top2": torchmetrics.classification.MulticlassAccuracy(6, top_k=2, average="micro"),
        "calibration": torchmetrics.classification.MulticlassCalibrationError(6),
    }
    metrics = parse_metrics(objects)
    assert {metric.name: metric.better for metric in metrics} == {
        "f1": "higher",
        "top2": "higher",
        "calibration": "lower",
    }
    once = measured(objects, SCORES, LABELS)
    assert measured(objects, SCORES, LABELS) == once, "nothing is left from the last time"
    builtin = measured(["f1", "top2"], SCORES, LABELS)
    assert once["top2"] == pytest.approx(builtin["top2"])
    # of the sixth class there is nothing, which torchmetrics leaves out as well
    assert once["f1"] == pytest.approx(builtin["f1"], rel=1e-6)
    errors = measured({"mae": torchmetrics.MeanAbsoluteError()}, VALUES, TRUE, "mse")
    assert errors["mae"] == pytest.approx(measured(["mae"], VALUES, TRUE, "mse")["mae"], rel=1e-6)


def test_a_function_sees_everything_at_once_and_as_copies() -> None:
    calls = []

    def gap(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append((len(outputs), len(targets)))
        difference = outputs.max() - outputs.min()
        outputs.zero_()
        return difference

    values = measured({"gap": gap, "again": gap}, SCORES, LABELS, chunk=50)
    assert values["gap"] == values["again"] == float(SCORES.max() - SCORES.min()) and calls == [(200, 200)] * 2


def test_which_way_is_better() -> None:
    def error(outputs: Tensor, targets: Tensor) -> float:
        return 0.0

    metrics = {
        "f1": "f1",
        "mae": error,
        "mine": error,
        "low": {"fn": error, "better": "lower"},
        "up": {"name": "rmse", "better": "higher"},
        "top": {"name": "topk", "k": 2},
    }
    ways = metric_directions(parse_metrics(metrics), accuracy=False)
    assert ways == {
        "loss": "lower",
        "f1": "higher",
        "mae": "lower",
        "mine": "higher",
        "low": "lower",
        "up": "higher",
        "top": "higher",
    }
    assert list(metric_directions((), accuracy=True)) == ["loss", "accuracy"]
    assert [metric.name for metric in parse_metrics(["f1", {"name": "topk", "k": 2}, error])] == ["f1", "top2", "error"]


@pytest.mark.parametrize("metrics", [["f1"], ["mae"], {"mine": lambda outputs, targets: 1.0}])
def test_metrics_of_nan_scores_are_nan(metrics: Any) -> None:
    outputs, targets, loss = (VALUES.clone(), TRUE, "mse") if metrics == ["mae"] else (SCORES.clone(), LABELS, None)
    outputs[3] = math.nan
    values = measured(metrics, outputs, targets, lambda outputs, targets: torch.zeros(()))
    (name,) = {*values} - {"loss", "accuracy"}
    assert math.isnan(values[name]) and values["loss"] == 0
    assert all(map(math.isnan, measured(metrics, outputs, targets, loss).values())), "nor with such a loss"


def test_a_value_that_is_not_finite_is_none() -> None:
    assert math.isnan(measured({"mine": lambda outputs, targets: math.inf}, SCORES, LABELS)["mine"])
    assert math.isnan(measured(["r2"], VALUES, torch.ones(200), "mse")["r2"])


def test_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of ranks, also if one rank has no samples."""
    chosen = parse_metrics(["f1", "top2", "perplexity"])
    cuts = (0, 70, 70, 200)
    parts = [
        evaluate(lambda index: SCORES[index], CLASSES, torch.arange(a, b), LABELS[a:b], metrics=chosen)
        for a, b in itertools.pairwise(cuts)
    ]
    sent = [EvaluationSums(*part) for part in parts]
    assert finalize_metrics(sent, chosen) == pytest.approx(
        measured(["f1", "top2", "perplexity"], SCORES, LABELS), rel=1e-6
    )


WRONG = [
    (["f1_macro"], r"metrics\[0\] = 'f1_macro': unknown; .*known: accuracy, .*f1"),
    ({"a": {"name": "topk", "n": 2}}, r"metrics\.a key = 'n'"),
    ({"a": {"k": 2}}, "a table with either: name or fn"),
    ({"a": {"fn": len, "better": "more"}}, r"metrics\.a\.better = 'more': unknown"),
    ({"a": {"fn": len, "k": 2}}, r"metrics\.a key = 'k'"),
    ({"a": 3}, "must be a function"),
    ({"a": dict}, "must be a function"),
    ({"loss": "f1"}, "is the loss itself"),
    (["f1", "f1"], "is there twice"),
    ({"a <= b": "f1"}, "without <, > and ="),
    ({"": "f1"}, "without <, > and ="),
    ("nowhere.py:f", "no such Python file"),
]


@pytest.mark.parametrize(("metrics", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_what_is_wrong_is_said(metrics: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_metrics(metrics)


X = torch.randn(40, 5, generator=random)
Y = X[:, :3].argmax(dim=1)


def run(**settings: Any) -> Simulation:
    parts = [range(10 * client, 10 * client + 10) for client in range(4)]
    options = {"periods": [1, 3], "rounds": 2, "test": (X, Y), "model": lambda: nn.Linear(5, 3), **settings}
    return simulate(options.pop("model"), (X, Y), parts, "2x2", "mtgc", **options)


def test_a_run_has_them_in_every_record() -> None:
    result = run(
        metrics={"f1": "f1", "by sklearn": lambda o, t: sklearn.f1_score(t, o.argmax(1), average="macro")}
    ).run()
    said = result.module(X).argmax(dim=1)
    last = result.history[-1].metrics
    assert last["f1"] == pytest.approx(sklearn.f1_score(Y, said, average="macro")) == last["by sklearn"]


def broken(outputs: Tensor, targets: Tensor) -> float:
    raise ZeroDivisionError("no such thing")


TRIED = [
    ({"mine": broken}, r"metrics\.mine = 'mine': failed: ZeroDivisionError: no such thing"),
    ({"mine": lambda outputs, targets: outputs}, r"metrics\.mine = 'Tensor': must give one number"),
    ({"mine": lambda outputs, targets: {"a": 1}}, r"metrics\.mine = 'dict': must give one number"),
    (["r2"], "outputs and targets must be of one shape"),
    (["top5"], "there are 3 classes, so no top 5"),
]


@pytest.mark.parametrize(("metrics", "message"), TRIED, ids=[str(case[1]) for case in TRIED])
def test_a_metric_is_tried_before_the_first_round(metrics: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(metrics=metrics)


@pytest.mark.parametrize("name", ["accuracy", "f1", "balanced_accuracy", "perplexity"])
def test_values_are_no_yes_and_no(name: str) -> None:
    for targets in (TRUE, torch.full_like(TRUE, math.nan), (YES - 100).long()):
        with pytest.raises(InvalidInput, match=f"{name} = .* yes or no, and targets that are not from 0 to 1"):
            measured([name], VALUES[:, None], targets, lambda outputs, targets: outputs.mean())


def test_no_test_data_no_metrics() -> None:
    with pytest.raises(InvalidInput, match="there is no test data to measure them on"):
        run(metrics=["f1"], test=None)


def test_too_large_outputs_are_refused_for_functions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratafl.engine.validation.WHOLE", 40 * 3 * 4 - 1)
    with pytest.raises(InvalidInput, match="more than 1 GiB"):
        run(metrics={"mine": lambda outputs, targets: 1.0})
    assert "f1" in run(metrics=["f1"]).run().history[-1].metrics
    assert measuring.WHOLE == 1 << 30


def test_a_config_names_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n\ndef gap(outputs, targets, times=1.0):\n    return times * (outputs.max() - outputs.min())\n"
        "class Count:\n    def reset(self):\n        self.n = 0\n\n    def update(self, outputs, targets):\n"
        "        self.n += len(targets)\n\n    def compute(self):\n        return torch.tensor(self.n)\n"
    )
    config = {
        "tree": {"shape": "2x2"},
        "data": {"source": "synthetic", "arguments": {"samples": 20, "features": 5, "classes": 3}},
        "model": {"name": "logistic"},
        "schedule": {"periods": [1, 2]},
        "rounds": 1,
        "evaluation": {
            "metrics": {
                "f1": "f1",
                "gap": {"name": f"{path}:gap", "better": "lower", "times": 2.0},
                "count": f"{path}:Count",
            }
        },
    }
    sim = build(Experiment.from_table(config))
    assert sim.objective.better == {
        "loss": "lower",
        "accuracy": "higher",
        "f1": "higher",
        "gap": "lower",
        "count": "higher",
    }
    last = sim.run().history[-1].metrics
    assert last["count"] == 16 and set(last) == {"loss", "accuracy", "f1", "gap", "count"}
    config["evaluation"] = {"metrics": ["f1", f"{path}:gap"]}
    again = build(Experiment.from_table(config)).run().history[-1].metrics
    assert last["gap"] == pytest.approx(2 * again["gap"]) and np.isfinite(again["f1"])


def test_a_metric_is_plain_data_and_functions() -> None:
    (one,) = parse_metrics("f1")
    assert isinstance(one, Metric) and one.is_additive and one.compute_all is None
