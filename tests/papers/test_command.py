"""`stratafl reproduce`: what it trains, what it finds there already, and what it writes."""

from __future__ import annotations

import csv
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from papers.harness import runs as training
from papers.harness.claims import OPEN
from papers.harness.cli import UNFINISHED
from papers.harness.estimate import Rate, Rates
from papers.harness.report import overview
from papers.harness.runs import StoredRuns
from papers.harness.series import Case, Options, run_name
from papers.mtgc import settings
from papers.mtgc.experiments import TABLE1
from papers.mtgc.paper import MTGC
from stratafl.runs import format, list_runs
from tests.commands import command
from tests.data.test_formats import _cinic
from tests.papers.histories import reaching, stored

ROOT = Path(__file__).parents[2]


def quick(name: str, *only: str, **options: object) -> list[Case]:
    return MTGC.find(name).cases(Options(scale="quick", **options), only)  # type: ignore[arg-type]


# -- what is there already -------------------------------------------------------------------------


def test_longer_run_serves_one_that_stops_early() -> None:
    (case,) = quick("table1", "both/E2H20/mtgc")
    unlimited = case.experiment.replace({"evaluation.stop_when": None})
    offered = StoredRuns([stored(unlimited, reaching(5, 30, 0.95))])
    assert offered.has(unlimited) and offered.has(case.experiment)
    curve = offered.curve(case.experiment)
    assert curve is not None and curve.rounds == (1, 2, 3, 4, 5) and curve.complete
    assert curve.seconds == (2, 4, 6, 8, 10)


def test_stopped_run_does_not_serve_a_longer_one() -> None:
    (case,) = quick("table1", "both/E2H20/mtgc")
    unlimited = case.experiment.replace({"evaluation.stop_when": None})
    offered = StoredRuns([stored(case.experiment, reaching(5, 30, 0.95))])
    assert offered.has(case.experiment) and not offered.has(unlimited)
    further = case.experiment.replace(rounds=500)
    assert offered.has(further), "it reached the target, so more rounds would change nothing"
    curve = offered.curve(unlimited)
    assert curve is not None and not curve.complete and curve.limit == 30


def test_reports_take_any_precision_training_its_own() -> None:
    (case,) = quick("fig7a", "mtgc")
    elsewhere = case.experiment.replace({"execution.device": "cuda", "execution.precision": "bf16"})
    offered = StoredRuns([stored(case.experiment, [0.5] * 3), stored(elsewhere, [0.6] * 12)])
    curve = offered.curve(case.experiment)
    assert curve is not None and curve.complete and curve.made_with[0]["precision"] == "bf16"
    assert offered.has(elsewhere) and not offered.has(case.experiment)


def test_newest_run_to_the_target_is_reported() -> None:
    (case,) = quick("table1", "both/E2H20/mtgc")
    older, newer = (stored(case.experiment, reaching(round, 30, 0.95)) for round in (7, 5))
    curve = StoredRuns([older, newer]).curve(case.experiment)
    assert curve is not None and curve.rounds[-1] == 5


def test_runs_that_differ_in_length_only_are_merged() -> None:
    (case,) = quick("table1", "both/E2H20/mtgc")
    short, long = (case.experiment.replace(rounds=rounds) for rounds in (3, 9))
    assert [longest.rounds for longest in training.longest_of_equal([short, long, short]).values()] == [9]
    unlimited = short.replace({"evaluation.stop_when": None})
    longest = training.longest_of_equal([unlimited, long])[run_name(unlimited)]
    assert longest.evaluation.stop_when is None


def test_run_continued_with_another_config_is_ignored() -> None:
    (case,) = quick("fig7a", "mtgc")
    other = {"after": 2, "time": "", "environment": {}, "changed": ["seed was 0 and is 1"]}
    sound = stored(case.experiment, [0.5] * 30)
    offered = StoredRuns([replace(sound, continued=[other])])
    assert not offered.has(case.experiment) and offered.curve(case.experiment) is None
    assert StoredRuns([sound]).has(case.experiment)


# -- training --------------------------------------------------------------------------------------


def accuracies(folder: Path, case: Case) -> tuple[float, ...]:
    curve = StoredRuns.of(folder).curve(case.experiment)
    assert curve is not None and curve.complete
    return curve.accuracy


@pytest.mark.slow
def test_interrupted_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    cases = quick("fig7a", "hfedavg", "mtgc", rounds=60)
    experiments = training.required_runs(cases, 1)
    first, second = training.train(experiments, tmp_path / "parts", workers=1, seconds=1e-3)
    assert (first.status, second.status) == (format.INTERRUPTED, format.INTERRUPTED)
    assert second.path is None and "no time" in second.reason
    (begun,) = list_runs(tmp_path / "parts")
    assert 1 <= begun.round < 60, "one round is always done"
    assert {o.status for o in training.train(experiments, tmp_path / "parts", workers=1)} == {format.DONE}
    assert training.train(experiments, tmp_path / "parts") == []
    training.train(experiments[:1], tmp_path / "whole", workers=1)
    assert accuracies(tmp_path / "parts", cases[0]) == accuracies(tmp_path / "whole", cases[0])


@pytest.mark.slow
def test_another_precision_is_trained_beside_what_is_there(tmp_path: Path) -> None:
    (case,) = quick("fig7a", "mtgc", rounds=2)
    (halves,) = quick("fig7a", "mtgc", rounds=2, precision="bf16")
    for experiment in (case.experiment, halves.experiment):
        (outcome,) = training.train([experiment], tmp_path, workers=1)
        assert (outcome.status, outcome.was_done) == (format.DONE, False)
        assert training.missing_runs([experiment], tmp_path) == []
    assert sorted(run.precision for run in list_runs(tmp_path)) == ["bf16", "fp32"]
    assert training.train([case.experiment, halves.experiment], tmp_path) == []


def test_one_figure_from_start_to_end(tmp_path: Path, monkeypatch, capsys) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    arguments = ["reproduce", "fig7a", "--scale", "quick", "--rounds", 2, "--runs", runs, "--out", out, "--quiet"]
    assert command(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "held: MTGC sends one model more in a global round" in shown
    assert "Figure 7a, scaled down to embedded digits" in shown and "no evidence" in shown and "CIFAR" not in shown
    # what has fewer rounds than the figure does not pass for it
    name = "fig7a_2_rounds_quick"
    assert {path.name for path in out.iterdir()} == {
        *(f"{name}{suffix}" for suffix in (".png", ".svg", ".csv", ".md", ".json")), "README_quick.md"
    }  # fmt: skip
    page = (out / "README_quick.md").read_text()
    assert page.count(OPEN) == page.count("\n| ") - 1 and f"({name}.md)" in page
    report = json.loads((out / f"{name}.json").read_text())
    assert [row["line"] for row in report["rows"]] == ["hfedavg", "local_correction", "group_correction", "mtgc"]
    assert report["rows"][-1]["paper"] == "1" and report["rows"][-1]["ratio"] == 1.0
    with (out / f"{name}.csv").open() as file:
        assert len(list(csv.reader(file))) == 5
    # again, from the other figure: nothing is left to train, and nothing is asked of the data
    before = {path: path.stat().st_mtime_ns for path in runs.iterdir()}
    assert command(monkeypatch, "reproduce", "fig7b", *arguments[2:], "--json") == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == 0
    assert {path: path.stat().st_mtime_ns for path in runs.iterdir()} == before
    check_packed(runs, tmp_path, monkeypatch, capsys)


def check_packed(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Check that runs can be packed, and reported elsewhere."""
    home, packed = tmp_path / "home", tmp_path / "runs.tar.gz"
    assert command(monkeypatch, "runs", "export", packed, runs, "--status", "done") == 0
    with tarfile.open(packed) as archive:
        names = {Path(name).name for name in archive.getnames()}
        archive.extractall(home, filter="data")
    assert names == {"run.json", "status.json", "rounds.jsonl", "tree.json", "summary.json"}
    assert [run.status for run in list_runs(home)] == ["done"] * 4
    assert command(monkeypatch, "runs", "export", tmp_path / "again.tgz", home) == 0
    assert (tmp_path / "again.tgz").read_bytes() == packed.read_bytes()
    capsys.readouterr()
    arguments = ["--scale", "quick", "--rounds", 2, "--quiet", "--out", tmp_path / "other"]
    assert command(monkeypatch, "reproduce", "fig7a", *arguments, "--runs", home, "--report-only", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)["results"]
    lines = [row["line"] for row in report["rows"] if row["complete"]]
    assert lines == ["hfedavg", "local_correction", "group_correction", "mtgc"]
    assert command(monkeypatch, "runs", "export", tmp_path / "runs.zip", runs) == 2


@pytest.mark.slow
def test_repeated_short_commands_finish_all_runs(tmp_path: Path, monkeypatch) -> None:
    asked = ["reproduce", "fig7a", "--scale", "quick", "--rounds", 2, "--methods", "mtgc", "--max-seconds", 1e-6]
    asked += ["--runs", tmp_path / "runs", "--out", tmp_path / "out", "--quiet"]
    codes = [command(monkeypatch, *asked) for _ in range(2)]
    # each call does a round at least; how many more before it is stopped is a matter of luck
    assert codes[0] in (0, UNFINISHED) and codes[1] == 0


def test_a_report_of_nothing_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    out, none = tmp_path / "out", tmp_path / "none"
    none.mkdir()
    assert command(monkeypatch, "reproduce", "all", "--report-only", "--runs", none, "--out", out) == 0
    page = (out / "README.md").read_text()
    assert page.count(OPEN) == page.count("\n| ") - 1
    assert [path.name for path in out.iterdir()] == ["README.md"]
    shown = capsys.readouterr().out
    assert "not measured: 60 of 60 lines" in shown
    assert "not measured yet: MTGC needs the fewest global rounds" in " ".join(shown.split())


# -- what it says before ---------------------------------------------------------------------------


def test_list_shows_data_and_time_of_each_series(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("STRATAFL_DATA", str(tmp_path))
    assert command(monkeypatch, "reproduce", "table1", "search", "--list", "--scale", "quick", "--json") == 0
    table, search = json.loads(capsys.readouterr().out)["recipes"]
    assert (table["name"], table["runs"], table["data"]) == ("table1", 60, {"digits": "embedded"})
    assert table["client_steps_at_most"] == 12 * 24 * (40 + 60 + 80 + 80 + 120) * 30
    assert table["seconds"] > search["seconds"] >= 0
    assert table["rates"]["mlp"]["source"].startswith("measured here")
    monkeypatch.setattr(Rates, "seconds", lambda *arguments: 100.0)
    monkeypatch.setattr(Rates, "of", lambda *arguments: Rate(1.0, "here"))
    for columns, paper in (("80", True), ("60", False)):
        monkeypatch.setenv("COLUMNS", columns)
        assert command(monkeypatch, "reproduce", "--list") == 0
        shown = capsys.readouterr().out
        assert "cifar10 *" in shown and "*: not prepared" in shown and "three_level" in shown and "5.0 min" in shown
        assert ("Figure 11" in shown) == paper and "…" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "WHAT = None: give one or more of all, table1"),
        (["table2"], "did you mean 'table1'"),
        (["fig3", "--scale", "tiny"], "--scale = 'tiny'"),
        (["fig3", "--partition", "iid"], "known: dirichlet, release_dirichlet"),
        (["fig3", "--methods", "mtgc,fedavg"], "--methods = 'fedavg'"),
        (["fig3", "--seeds", "0"], "--seeds = 0"),
        (["fig3", "--rounds", "0"], "--rounds = 0"),
        (["fig3", "--max-seconds", "0"], "--max-seconds = 0"),
        (["fig3", "--only", "nothing"], "no case has this in its name"),
        (["fig3", "--device", "nowhere"], "nowhere"),
        (["fig3", "--precision", "int8"], "--precision = 'int8'"),
        (["fig3", "--workers", "0"], "--workers = 0"),
        (["cinic10"], "run: stratafl data prepare cinic10"),
        (["all"], "run: stratafl data prepare cifar10"),
        (["fig3", "--report-only", "--runs", "nowhere"], "--runs = 'nowhere': is not a folder"),
        (["fig3", "--report-only", "--out", "file/out"], "--out = 'file/out': cannot write in"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATAFL_DATA", str(tmp_path / "data"))
    (tmp_path / "file").write_text("")
    assert command(monkeypatch, "reproduce", *arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_committed_page_is_what_the_results_beside_it_say() -> None:
    folder = ROOT / "docs/results"
    assert (folder / "README.md").read_text() == overview(MTGC, folder, "paper")


def test_targets_are_the_paper_s() -> None:
    assert TABLE1.goal("paper") == 0.8 and MTGC.find("fig7b").goal("paper") == 0.75


# -- from start to end -----------------------------------------------------------------------------


@pytest.mark.slow
def test_cinic10_from_its_folder_to_its_figure(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("STRATAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(settings.GROUPS, "paper", (2, 2))
    monkeypatch.setitem(settings.PERIODS, "paper", (1, 1))
    _, source, _ = _cinic(tmp_path)
    assert command(monkeypatch, "data", "prepare", "cinic10", "--from", source, "--allow-partial") == 0
    out = tmp_path / "out"
    arguments = ["--seeds", 1, "--rounds", 1, "--methods", "hfedavg,mtgc", "--runs", tmp_path / "runs", "--out", out]
    assert command(monkeypatch, "reproduce", "cinic10", *arguments, "--quiet") == 0
    assert "CINIC-10" in capsys.readouterr().out
    assert (out / "cinic10_hfedavg_mtgc_1_rounds.png").read_bytes().startswith(b"\x89PNG")
    (run,) = [run for run in list_runs(tmp_path / "runs") if run.config["method"]["name"] == "mtgc"]
    assert run.config["model"]["name"] == "cnn" and run.status == "done"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["table1", "fig3", "three_level", "label_shift", "search"])
def test_quick_from_start_to_end(what: str, tmp_path: Path, monkeypatch, capsys) -> None:
    arguments = [
        "reproduce",
        what,
        "--scale",
        "quick",
        "--runs",
        tmp_path / "runs",
        "--out",
        tmp_path,
        "--quiet",
        "--json",
    ]
    assert command(monkeypatch, *arguments) == 0
    (report,) = json.loads(capsys.readouterr().out)["results"]
    assert all(row["complete"] == row["of"] == 1 for row in report["rows"])
    assert all(claim["status"] != OPEN or claim["id"] == "fig3_cifar100" for claim in report["claims"])
    if what == "search":
        assert set(report["best"]) == {"fedprox", "feddyn"}
