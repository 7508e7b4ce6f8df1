"""Runs that diverge: what is measured of scores that are no numbers, and from which round on a run
is called dead."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.harness.report import describe
from papers.mtgc.figures import draw
from papers.mtgc.paper import MTGC
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.evaluation import evaluate, finalize_metrics
from stratafl.metrics.objective import Goal
from stratafl.metrics.records import diverged, measured
from stratafl.reports.figures import figures
from stratafl.reports.page_data import page_data
from stratafl.reports.summary import SummaryCell, columns
from stratafl.runs import read_run
from stratafl.runs.curves import curve_of, mean_curve
from stratafl.runs.groups import group_runs, select_metric
from stratafl.runs.session import RunSession
from stratafl.sweeps import SweepEntry, table
from tests.flat import simulate
from tests.metrics.evaluated import evaluated
from tests.papers.histories import results, stored

NAN, INF = math.nan, math.inf
TARGETS = torch.tensor([0, 1, 1, 0])


def scored(outputs: Tensor, chunk: int = 2048) -> dict[str, float]:
    return evaluated(lambda rows: outputs[rows], F.cross_entropy, torch.arange(len(outputs)), TARGETS, chunk)


@pytest.mark.parametrize("wrong", [NAN, INF])
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("chunk", [1, 3, 2048])
def test_one_score_that_is_no_number_leaves_no_accuracy(wrong: float, row: int, chunk: int) -> None:
    outputs = torch.eye(2)[TARGETS]
    assert scored(outputs, chunk)["accuracy"] == 1.0
    outputs[row, 0] = wrong
    assert all(map(math.isnan, scored(outputs, chunk).values()))


def test_a_score_of_minus_infinity_rules_a_class_out() -> None:
    outputs = torch.tensor([[1.0, -INF], [0.0, 1.0], [1.0, 0.0], [1.0, -INF]])
    metrics = scored(outputs)
    assert math.isfinite(metrics["loss"]) and metrics["accuracy"] == 0.75
    outputs[1, 1] = -INF  # the right one
    assert metrics["loss"] < INF == scored(outputs)["loss"]
    assert math.isnan(scored(outputs)["accuracy"])


def test_parts_with_one_that_is_no_number_add_up_to_none() -> None:
    good = evaluate(lambda rows: torch.eye(2)[TARGETS], F.cross_entropy, torch.arange(4), TARGETS)
    bad = evaluate(lambda rows: torch.full((4, 2), NAN), lambda outputs, targets: torch.tensor(1.0), TARGETS, TARGETS)
    for parts in ([good, bad], [bad, good]):
        sent = [type(good)(*json.loads(json.dumps(part))) for part in parts]  # as between ranks
        assert math.isnan(finalize_metrics(sent)["accuracy"]) and math.isfinite(finalize_metrics(sent)["loss"])


def records(*losses: float | None) -> list[dict]:
    return [
        {"round": number, "metrics": {} if loss is None else {"loss": loss, "accuracy": 0.3}}
        for number, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("losses", "died"),
    [
        ([], None), ([None], None), ([1.0, 0.5], None), ([NAN], 1), ([1.0, INF, NAN], 2), ([1.0, -INF], 2),
        ([1.0, NAN, 0.5], None), ([NAN, 1.0, NAN], 3), ([1.0, None, NAN, None, NAN, None], 3),
        ([1.0, NAN, None, 0.5, None], None), ([1.0, 10**400], 2),
    ],
)  # fmt: skip
def test_from_which_round_on_a_run_is_dead(losses: list[float | None], died: int | None) -> None:
    assert diverged(records(*losses)) == died


def test_a_record_without_a_finite_loss_has_no_accuracy_either() -> None:
    (record,) = records(NAN)
    assert all(map(math.isnan, measured(record).values())) and list(measured(record)) == ["loss", "accuracy"]
    for odd in (None, [], "text", {"loss": "text"}, {"loss": True}):
        assert measured({"round": 1, "metrics": odd}) == {}


class Fragile(nn.Linear):
    """Trains for ever, and has no scores any more once its weights are large: finite weights that
    overflow."""

    def __init__(self, features: int = 5, classes: int = 3) -> None:
        super().__init__(features, classes)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y / (self.weight.norm() < 1.0)


def fragile(rate: float, **more):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 5, generator=random)
    targets = inputs[:, :3].argmax(dim=1)
    parts = list(np.arange(40).reshape(4, 10))
    settings = {"periods": [1, 2], "rounds": 8, "leaf": rate, "test": (inputs, targets), "seed": 0, **more}
    return simulate(Fragile, (inputs, targets), parts, "2x2", "hfedavg", **settings)


def test_a_run_that_diverges_says_so_and_reaches_nothing() -> None:
    result = fragile(0.2).run()
    died = result.diverged
    assert died is not None and 1 < died < 8
    after = [record.metrics for record in result.history[died - 1 :]]
    assert all(math.isnan(metrics["accuracy"]) and not math.isfinite(metrics["loss"]) for metrics in after)
    best = max(record.metrics["accuracy"] for record in result.history[: died - 1])
    assert len(fragile(0.2, stop_when=min(best + 1e-6, 1.0)).run().history) == 8
    assert fragile(0.01).run().diverged is None
    rare = fragile(0.2, evaluate_every=3).run().diverged
    assert rare is not None and died <= rare <= died + 2 and (rare % 3 == 0 or rare == 8)


CONFIG = {
    "tree": {"shape": "2x2"},
    "data": {"source": "synthetic", "arguments": {"samples": 20, "features": 5, "classes": 3}},
    "model": {"name": "tests.metrics.test_divergence:Fragile", "features": 5},
    "method": {"name": "hfedavg"},
    "schedule": {"periods": [1, 5]},
    "rounds": 6,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diverged") / "runs"
    for name, rate in (("dead", 0.3), ("alive", 0.01)):
        RunSession.start(Experiment.from_table({**CONFIG, "client": {"lr": rate}}), name, folder).run()
    return folder


def of(runs: Path, name: str):
    return read_run(next(path for path in runs.iterdir() if path.name.startswith(name)))


def test_the_record_and_the_listing_say_when(runs: Path, monkeypatch, capsys) -> None:
    dead, alive = of(runs, "dead"), of(runs, "alive")
    assert dead.diverged is not None and alive.diverged is None
    for name in ("summary.json", "status.json"):
        assert json.loads((dead.path / name).read_text())["diverged"] == dead.diverged
        assert json.loads((alive.path / name).read_text())["diverged"] is None
    monkeypatch.setenv("COLUMNS", "200")
    for options in ((), ("--json",)):
        monkeypatch.setattr(sys, "argv", ["stratafl", "runs", "list", str(runs), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    table, _, listed = capsys.readouterr().out.rpartition("\n{")
    assert f"{dead.path.name}: diverged at round {dead.diverged}" in table
    rows = [next(row for row in table.splitlines() if run.path.name in row) for run in (dead, alive)]
    assert [row.count("diverged") for row in rows] == [1, 0]
    listed_runs = {run["name"]: run for run in json.loads("{" + listed)["runs"]}
    assert listed_runs["dead"]["diverged"] == dead.diverged and math.isnan(listed_runs["dead"]["final"]["accuracy"])
    assert listed_runs["alive"]["diverged"] is None and listed_runs["alive"]["final"]["accuracy"] > 0.3


def test_a_sweep_tells_how_many_diverged(runs: Path) -> None:
    config = Experiment.from_table(CONFIG)
    dead, alive = of(runs, "dead"), of(runs, "alive")
    entries = [SweepEntry("a", "one", config), SweepEntry("b", "one", config), SweepEntry("c", "two", config)]
    one, two = table(entries, {"a": dead, "b": alive, "c": dead}, target=Goal("accuracy", 0.9999))
    assert (one.done, one.diverged, two.diverged) == (2, 1, 1)
    assert one.final == alive.rounds[-1]["metrics"]["accuracy"] and one.final_text.endswith(", 1 diverged")
    assert two.final_text == "diverged" and two.rounds_text == ">6"


def test_the_report_marks_it_and_its_curve_ends(runs: Path, tmp_path: Path) -> None:
    dead, alive = of(runs, "dead"), of(runs, "alive")
    curve = curve_of(dead)
    assert curve.diverged == dead.diverged and curve.last("accuracy") is None and curve.last("loss") is None
    assert all(r < dead.diverged for name in ("accuracy", "loss") for r, _ in curve.points_of(name))
    shown = page_data([dead, alive])
    table = {column["title"]: [cell["text"] for cell in column["cells"]] for column in shown["summary"]["before"]}
    for name in ("accuracy, %", "loss"):
        assert table[name][0] == f"diverged at round {dead.diverged}" and "diverged" not in table[name][1]
    assert "diverged at round" in shown["settings"][0]["runs"][0]["notes"][0]
    assert [run["diverged"] for setting in shown["settings"] for run in setting["runs"]] == [dead.diverged, None]
    json.dumps(shown, allow_nan=False)
    pytest.importorskip("matplotlib")
    drawn = figures(tmp_path, group_runs([dead]))
    svg = next(path for path in drawn if path.name == "accuracy.svg").read_text()
    assert f"diverged at round {dead.diverged}" in svg


def test_a_mean_ends_where_its_first_run_died(runs: Path) -> None:
    dead, alive = of(runs, "dead"), of(runs, "alive")
    mean = mean_curve([curve_of(dead), curve_of(alive)])
    assert mean.diverged == dead.diverged and mean.last("accuracy") is None
    config = dead.config | {"seed": 1}
    groups = group_runs([dead, replace(dead, id="another", config=config)])
    accuracy = next(column for column in columns(groups, select_metric(groups)[0]) if column.title == "accuracy, %")
    assert accuracy.cells == [SummaryCell(f"2 of 2 diverged, the first at round {dead.diverged}")]


def test_an_old_record_s_accuracy_after_death_reaches_nothing() -> None:
    """Versions before this one took the first class for the best of scores that were NaN."""
    config = Experiment.from_table({"rounds": 4})
    run = stored(config, [0.5, 0.6, 0.9, 0.9])
    for record in run.rounds[2:]:
        record["metrics"]["loss"] = NAN
    (row,) = table([SweepEntry("a", "one", config)], {"a": run}, target=Goal("accuracy", 0.8))
    assert row.reached == 0 and row.final_text == "diverged"
    curve = curve_of(run)
    assert curve.points_of("accuracy") == [(1, 0.5), (2, 0.6)] and curve.diverged == 3


def test_reproduce_counts_a_dead_run_as_nothing(tmp_path: Path) -> None:
    def history(case) -> list[float]:
        last = {"mtgc": 0.9, "feddyn": 0.95}.get(case.line, 0.5)
        half = case.experiment.rounds // 2
        return [0.4] * half + [last] * (case.experiment.rounds - half)

    figure = results("fig3", history, scale="quick", seeds=2)
    panel = figure.panels[0]
    claims = {claim.id: claim for claim in MTGC.claims_of("fig3")}
    assert claims["fig3_best"].judge(figure, MTGC.label).status == "not held"
    measured_line = figure.measured[panel, "feddyn"]
    dead = [_died(curve, 3) for curve in measured_line.curves]
    for line in ("feddyn", "feddyn_released"):
        for subfigure in figure.panels:
            figure.measured[subfigure, line] = type(measured_line)(figure.measured[subfigure, line].case, tuple(dead))
    verdict = claims["fig3_best"].judge(figure, MTGC.label)
    assert verdict.status == "held"
    assert "diverged" in claims["fig3_feddyn"].judge(figure, MTGC.label).sentence
    line = figure.measured[panel, "feddyn"]
    assert line.accuracy(line.last).text() == "diverged" and line.reach(0.9).beyond
    assert line.round_to_round_change(line.last) is None and line.best(line.last).mean == 0.4
    assert line.at_cost(line.curves[0].sent[-1]) == 0.0
    rows = [row for row in describe(MTGC, figure, 2)["rows"] if row["line"] == "feddyn"]
    assert all((row["diverged"], row["accuracy_text"]) == ("3, 3", "diverged") for row in rows)
    assert b"diverged" in draw(figure, tmp_path / "fig3")[1].read_bytes()
    one = type(line)(line.case, (dead[0], measured_line.curves[1]))
    assert one.accuracy(one.last).text(2).endswith("(1 of 2 diverged)")


def _died(curve, round: int):
    values = tuple(NAN if r >= round else a for r, a in zip(curve.rounds, curve.accuracy, strict=True))
    return replace(curve, accuracy=values, diverged=round)
