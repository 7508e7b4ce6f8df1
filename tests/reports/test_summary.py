"""The summary's numbers, worked out by hand, and as files for other programs."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from stratafl.reports.summary import SummaryCell, SummaryColumn, as_csv, as_latex, columns, default_targets
from stratafl.runs import StoredRun
from stratafl.runs.groups import group_runs, select_metric
from tests.reports.test_compare import stored


def table(runs: list[StoredRun], targets: list[float] = [], metric: str | None = None) -> dict[str, SummaryColumn]:  # noqa: B006
    result = group_runs(runs)
    metrics, judged = select_metric(result, metric)
    return {column.title: column for column in columns(result, metrics, judged, targets)}


def with_metric(name: str, values: list[float], seed: int = 0, **config: Any) -> StoredRun:
    run = stored([0.5] * len(values), seed, **config)
    for record, value in zip(run.rounds, values, strict=True):
        record["metrics"] = {name: value}
    return run


def texts(column: SummaryColumn) -> list[str]:
    return [cell.text for cell in column.cells]


def test_the_summary_by_hand() -> None:
    runs = [
        stored([0.5, 0.8, 0.7], 0),
        stored([0.6, 0.7, 0.9], 1, seconds=1.5),
        stored([0.7, 0.8, 0.8], 2, seconds=1.0),
    ]
    result = table(runs, [0.7, 0.8, 0.85])
    assert list(result) == ["setting", "runs", "rounds", "accuracy, %", "loss", "best accuracy, %", "rounds to 70 %",
                           "rounds to 80 %", "rounds to 85 %", "MB per client", "s per round", "refused"]  # fmt: skip
    assert texts(result["accuracy, %"]) == ["80.0 ± 10.0"] and texts(result["best accuracy, %"]) == ["83.3 ± 5.8"]
    cell = result["accuracy, %"].cells[0]
    assert (cell.mean, cell.deviation) == (pytest.approx(80), pytest.approx(10))
    assert [texts(result[f"rounds to {goal} %"])[0] for goal in (70, 80, 85)] == ["1.7 ± 0.6", "2.3 ± 0.6", ">3"]
    assert result["MB per client"].cells == [SummaryCell("0.00300", 0.003, 0.0)]
    assert texts(result["s per round"]) == ["1.00"] and texts(result["refused"]) == ["3"]


def test_one_run_has_no_deviation() -> None:
    result = table([stored([0.5, 0.9])], [0.9, 0.95])
    assert result["rounds to 90 %"].cells == [SummaryCell("2", 2.0)] and result["rounds to 95 %"].cells == [
        SummaryCell(">2")
    ]
    assert texts(result["accuracy, %"]) == ["90.0"]


def test_a_setting_with_an_unfinished_run_reached_no_target() -> None:
    assert texts(table([stored([0.5, 0.9], 0), stored([0.5], 1)], [0.9])["rounds to 90 %"]) == [">1"]


def test_a_target_of_a_metric_that_a_run_does_not_have_is_not_missed() -> None:
    runs = [with_metric("f1", [0.5, 0.9]), with_metric("mae", [0.5, 0.9], client={"lr": 0.5})]
    assert texts(table(runs, [0.9], "f1")["rounds to 0.9"]) == ["2", "—"]


def test_a_run_without_rounds() -> None:
    result = table([stored([])])
    assert list(result) == ["setting", "runs", "rounds", "MB per client", "s per round"]
    assert [column.cells[0].text for column in result.values()] == ["MTGC", "1", "0", "—", "—"]


@pytest.mark.parametrize(
    ("best", "targets"), [([0.9], [0.9]), ([0.93, 0.86], [0.9]), ([0.93, 0.86, 0.4], [0.85]), ([0.01], []), ([], [])]
)
def test_the_usual_target_is_one_that_half_of_them_reach(best: list[float], targets: list[float]) -> None:
    result = group_runs([stored([value], n={"n": n}) for n, value in enumerate(best)])
    assert default_targets(result, select_metric(result)[1]) == targets


@pytest.mark.parametrize(
    ("name", "values", "better", "target"),
    [
        ("f1", [0.512, 0.873], "higher", 0.87),
        ("rmse", [12.3, 4.56], "lower", 4.6),
        ("negative", [-4.0, -3.21], "higher", -3.3),
        ("perplexity", [2e9, 1.04e9], "lower", 1.1e9),
    ],
)
def test_rounds_to_a_target_of_any_metric(name: str, values: list[float], better: str, target: float) -> None:
    runs = [with_metric(name, values), with_metric(name, values[:1] * 2, method={"name": "hfedavg"})]
    result = group_runs(runs)
    _, judged = select_metric(result)
    assert judged is not None and (judged.name, judged.better) == (name, better)
    assert default_targets(result[:1], judged) == [target]
    column = next(each for title, each in table(runs, [target]).items() if title.startswith("rounds to"))
    assert column.cells == [SummaryCell("2", 2.0), SummaryCell(">2")] and column.best == {0}


def test_a_run_says_itself_which_way_its_metric_is_better() -> None:
    run = with_metric("regret", [3.0, 1.0])
    assert select_metric(group_runs([run]))[1].better == "higher"  # type: ignore[union-attr]
    run.better["regret"] = "lower"
    assert select_metric(group_runs([run]))[1].better == "lower"  # type: ignore[union-attr]


def test_a_run_without_accuracy_is_told_by_its_loss() -> None:
    result = table([with_metric("loss", [0.25])])
    assert list(result)[3:5] == ["loss", "best loss"] and texts(result["loss"]) == ["0.250"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.23e-7, "1.23e−7"), (0.01234, "0.0123"), (-2.5, "−2.500"), (123.45, "123.5"), (4.2e12, "4.20e12")],
)
def test_numbers_have_as_many_digits_as_can_be_read(value: float, text: str) -> None:
    assert texts(table([with_metric("own", [value])])["own"]) == [text]


@pytest.mark.parametrize(
    ("better", "cells", "best"),
    [
        ("higher", [SummaryCell("1", 1.0), SummaryCell("2", 2.0)], {1}),
        ("lower", [SummaryCell("1", 1.0), SummaryCell("2", 2.0), SummaryCell("—")], {0}),
        ("higher", [SummaryCell("2.0 ± 0.1", 2.01), SummaryCell("2.0 ± 0.3", 2.02), SummaryCell("1.0", 1.0)], {0, 1}),
        ("higher", [SummaryCell("2", 2.0), SummaryCell("2", 2.0)], set()),
        ("higher", [SummaryCell("2", 2.0)], set()),
        ("", [SummaryCell("1", 1.0), SummaryCell("2", 2.0)], set()),
        ("lower", [SummaryCell(">3"), SummaryCell(">3")], set()),
    ],
)
def test_the_best_of_a_column(better: Any, cells: list[SummaryCell], best: set[int]) -> None:
    assert SummaryColumn("x", cells, better).best == best


def test_csv_has_every_number_in_full() -> None:
    runs = [stored([0.1 + 0.2], 0), stored([0.5], 1), stored([0.9], method={"name": '=cmd, "quoted"'})]
    result = table(runs, [0.4])
    rows = list(csv.reader(io.StringIO(as_csv(list(result.values())))))
    first, second = (dict(zip(rows[0], row, strict=True)) for row in rows[1:])
    assert first["setting"] == "MTGC" and second["setting"] == '\'=cmd, "quoted"'
    assert first["accuracy, %"] == "40" and float(first["accuracy, %, std"]) == pytest.approx(14.1421356)
    assert first["rounds to 40 %"] == ">1" and second["rounds to 40 %"] == "1" and second["accuracy, %, std"] == ""


def test_latex_has_the_best_in_bold_and_nothing_that_is_a_command() -> None:
    runs = [stored([0.5], 0), stored([0.7], 1), stored([0.9], method={"name": r"a_b\c{50%} & $x$ #1 ~^"})]
    text = as_latex(list(table(runs, [0.7]).values()))
    assert text.startswith("% needs \\usepackage{booktabs}\n\\begin{tabular}{lrrrrrrrrr}\n\\toprule\n")
    assert "60.0 $\\pm$ 14.1" in text and "\\textbf{90.0}" in text and "$>$1" in text
    assert r"a\_b\textbackslash{}c\{50\%\} \& \$x\$ \#1 \textasciitilde{}\textasciicircum{}" in text
    assert all(line.endswith(r"\\") for line in text.splitlines() if "&" in line)
