"""Every table a command prints, at the widths of a terminal, with names and numbers as long as they
get: each is on one line, whole."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratafl.base.statistics import MeanStd
from stratafl.cli import cost as cost_module
from stratafl.cli import demo
from stratafl.cli import runs as runs_module
from stratafl.cli import sweep as sweep_module
from stratafl.cli.main import app, main
from stratafl.costs.pricing import GroupCosts, Milestone
from stratafl.deploy.host import this_machine, view
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import Goal
from stratafl.rules import registry
from stratafl.sweeps.table import GroupSummary
from tests.papers.histories import stored
from tests.slow import slow_unless

WIDTHS = (40, 60, 80, 120)


@pytest.fixture(params=slow_unless(lambda width: width in (40, 80), WIDTHS))
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def check(text: str, width: int, *wanted: str) -> None:
    """All of these stand on a line, in one piece; a line is too long only for one of them."""
    lines = text.splitlines()
    assert [each for each in wanted if not any(each in line for line in lines)] == []
    assert "…" not in text
    longest = max(map(len, wanted))
    assert [line for line in lines if len(line) > max(width, longest + 4)] == []


def invoke(*words: object) -> str:
    ran = CliRunner().invoke(app, [str(word) for word in words])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_data_list(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAFL_DATA", str(tmp_path))
    commands = [f"stratafl data prepare {name} --from hub" for name in ("cifar10", "emnist_letters", "shakespeare")]
    check(invoke("list", "datasets"), width, *commands, "apt-get install dataset-fashion-mnist", "1,442 / 355")


def test_data_show(width: int, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('rounds = 1\n\n[tree]\nshape = "4x5"\n')
    shown = invoke("data", "show", tmp_path / "c.toml", "--out", tmp_path / "s.png")
    table = shown.partition("picture: ")[0]
    check(table, width, "360 - 360", "72 - 72", "total-variation")


def test_methods(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.register("a_method_with_a_rather_long_name", summary="unquestionably")(lambda pull="before_the_clip": None)
    check(
        invoke("list", "methods"), width,
        "a_method_with_a_rather_long_name", "unquestionably", "pull='before_the_clip'", "beta2=0.99", "synchronises",
    )  # fmt: skip


def test_models(width: int) -> None:
    check(
        invoke("list", "models"),
        width,
        "11,227,812",
        "resnet18_gn",
        "convolutions",
        "normalisation",
        "my_model.py:Class",
    )


def test_runs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["study-20261117-024449-4213c", "sweep/digits-5x4-local_correction-4-10-s0-3d311369-20261117-020505-984ba"]
    methods = [{"name": "mtgc"}, {"rules": ["mtgc", {"name": "local_correction"}]}]
    made = [
        replace(stored(Experiment.from_table({"method": method, "rounds": 12345}), [0.91234]), path=Path("some", name))
        for name, method in zip(names, methods, strict=True)
    ]
    monkeypatch.setattr(runs_module, "scan", lambda folder: made)
    check(invoke("runs", "list", "some"), width, *names, "mtgc / local_correction", "1/12345", "0.9123", "done")


def test_sweep(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    group = "method.name=local_correction,schedule.periods=[30,20],client.lr=0.025"
    row = GroupSummary(group, 12, 10, 1, "accuracy", 0.91234, 0.00123, 9, 123.45, 1.5)
    sweep_module._print("a sweep", [row], Goal("accuracy", 0.8), [], {})
    check(capsys.readouterr().out, width, group, "10/12", "0.9123 ± 0.0012, 1 diverged", ">123.5", "a sweep")


def test_deploy_status(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"state": "reconnecting", "missing": False, "age": 12_345.0, "round": 12_345, "bytes_in": 123_456_789_012,
            "arrays_in": 98_765_432_101, "bytes_out": 223_456_789_012, "arrays_out": 1, "out": ""}  # fmt: skip
    site = "a-hospital-in-a-town-with-a-long-name"
    monkeypatch.setattr(this_machine, "sites", lambda out: {})
    monkeypatch.setattr(view, "seen", lambda sites: {"sites": {site: seen, "root": {**seen, "age": None}}})
    monkeypatch.setattr(view, "remarks", lambda seen: [])
    numbers = ("123456789012", "98765432101", "223456789012", "12345 s ago", "reconnecting", "never")
    check(invoke("deploy", "status"), width, site, *numbers)


def test_demo(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    settings = demo.settings
    small = {"rounds": 1, "seed": 0, "schedule": {"periods": [1, 1]}}
    monkeypatch.setattr(demo, "settings", lambda *given: {**settings(*given), **small})
    monkeypatch.setattr(sys, "argv", ["stratafl", "demo", "-q", "--out", str(tmp_path / "d.png")])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out.partition("picture: ")[0]
    check(shown, width, "group correction", "local correction", ">1", "Handwritten")


def test_networks(width: int) -> None:
    check(invoke("list", "networks"), width, "halos_regions", "data_centre", "stratafl list networks NAME")


def test_network(width: int) -> None:
    check(
        invoke("list", "networks", "leo_relay"), width, "tier 1: between satellites", "pipe_down_mbit_s", "504 to 4536"
    )


def test_price(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("between regions", "inside")
    parts = {("compute", 2): 12_345.0, ("wait", 2): 3.0, ("up", 1): 250_000.0, ("merge", 1): 7_000.0}
    numbers = [MeanStd(1_234_567.0, 98_765.4)] * 4
    at_last = Milestone("all rounds", 3, 3, *numbers, (MeanStd(1.23e12, 4.5e9),) * 2, parts)
    first = Milestone("balanced_accuracy 75.5 %", 3, 1, None, None, None, None, (), {})
    setting = "MTGC, release_dirichlet 0.1, E = 30"
    found = GroupCosts(setting, "a_network", "what it is", "EUR", names, (first, at_last))
    cost_module._print([found, replace(found, setting="HFedAvg")])
    check(
        capsys.readouterr().out, width, "release_dirichlet", "1 of 3 runs", "14.3 ± 1.1", "1,230 ± 4",
        "1,234,567 ± 98,765", "balanced_accuracy 75.5 %", "92.8",
    )  # fmt: skip
