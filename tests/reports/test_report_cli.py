"""`stratafl report` and `stratafl run --tensorboard` as a user types them."""

from __future__ import annotations

import sys
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from stratafl.base.errors import MissingExtra
from stratafl.reports.figures import MAX_DISTINCT_STYLES, figures
from stratafl.runs.groups import collect_runs, group_runs
from tests.commands import CONFIG, command
from tests.reports.conftest import METHODS
from tests.slow import slow

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_page_and_figures(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out, drawn = tmp_path / "all.html", tmp_path / "for" / "paper"
    assert command(monkeypatch, "report", runs, "-o", out, "--figures", drawn, "--target", "0.5") == 0
    shown = capsys.readouterr()
    assert "rounds to 50 %" in shown.out and f"report: {out}" in shown.out
    assert all(name in shown.out for name in METHODS)
    assert shown.err == ""
    assert out.read_text().startswith("<!doctype html>")
    names = {"accuracy", "loss", "drift_drift", "drift_correction", "drift_progress", "drift_clipped", "to_target"}
    names |= {"accuracy_by_traffic-1", "loss_by_traffic-1"}
    assert {path.stem for path in drawn.iterdir()} == names | {"summary"}
    for name in names:
        assert (drawn / f"{name}.png").read_bytes().startswith(PNG)
        assert (drawn / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
        texts = "".join(ElementTree.parse(drawn / f"{name}.svg").getroot().itertext())
        assert all(method in texts for method in METHODS)
    assert (drawn / "summary.csv").read_text().startswith('setting,runs,rounds,"accuracy, %"')
    assert "rounds to 50 \\%" in (drawn / "summary.tex").read_text()
    assert not list(tmp_path.glob(".*")) and not list(drawn.glob(".*"))


def test_every_axis_of_a_figure_has_its_unit_and_every_line_a_style(runs: Path, tmp_path: Path) -> None:
    compared = group_runs(collect_runs([runs])[0])
    drawn = {path.name: path for path in figures(tmp_path, compared, [0.5])}
    units = {
        "accuracy": "test accuracy (%)",
        "loss": "test loss",
        "drift_drift": "drift (norm of parameters)",
        "drift_clipped": "clipped steps (share)",
        "to_target": "bytes per client",
        "accuracy_by_traffic-1": "kB on the top link",
    }
    for name, unit in units.items():
        svg = drawn[f"{name}.svg"].read_text()
        assert unit in svg and ("global rounds" in svg) == ("_by_" not in name)
    # the second of two lines is dashed, in the chart and in the legend
    assert drawn["loss.svg"].read_text().count("stroke-dasharray") >= 2


def test_figures_and_page_are_drawn_against_chosen_axes(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    page, drawn = tmp_path / "r.html", tmp_path / "figures"
    arguments = ("report", runs, "-o", page, "--figures", drawn, "-n", "lan_wan", "--axis")
    assert command(monkeypatch, *arguments, "traffic.2", "--axis", "seconds on lan_wan") == 0
    curves = {path.stem for path in drawn.glob("*.svg")} - {"to_target"}
    assert {"loss_by_traffic-2", "drift_drift_by_seconds-on-lan_wan"} <= curves and all("_by_" in c for c in curves)
    assert '"axis":"traffic.2"' in page.read_text()
    capsys.readouterr()
    assert command(monkeypatch, *arguments, "trafic.2") == 2
    assert capsys.readouterr().err.startswith("error: --axis = 'trafic.2': unknown; did you mean 'traffic.2'?")


def test_another_metric_is_chosen_by_name(copied: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    page = tmp_path / "r.html"
    assert (
        command(monkeypatch, "report", copied, "-o", page, "--metric", "loss", "--target", "2.5", "--title", "<Mine>")
        == 0
    )
    shown = capsys.readouterr().out
    assert "rounds to 2.5" in shown and "accuracy" not in shown
    assert "<h1>&lt;Mine&gt;</h1>" in page.read_text()
    assert command(monkeypatch, "report", copied, "-o", tmp_path / "other.html", "--target", "90") == 2
    assert capsys.readouterr().err == "error: --target = 90.0: must be a finite number above 0 and at most 1\n"
    assert not (tmp_path / "other.html").exists()
    assert command(monkeypatch, "report", copied, "-o", page, "--metric", "f1") == 2
    assert capsys.readouterr().err == "error: --metric = 'f1': these runs have accuracy, loss\n"


@pytest.mark.parametrize("count", [slow(MAX_DISTINCT_STYLES), MAX_DISTINCT_STYLES + 1])
def test_any_number_of_settings_with_long_names_leaves_room_for_the_curves(
    runs: Path, tmp_path: Path, count: int
) -> None:
    one, *_ = group_runs(collect_runs([runs])[0])
    result = [replace(one, label=f"{number} " + 20 * "long name ") for number in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # axes that have no room left are one
        drawn = figures(tmp_path, result)
    text = "".join(ElementTree.parse(next(path for path in drawn if path.suffix == ".svg")).getroot().itertext())
    assert ("the report names them" in text) == (count > MAX_DISTINCT_STYLES) == ("11 long" not in text)


def test_figures_are_the_same_each_time(runs: Path, tmp_path: Path, monkeypatch) -> None:
    for folder in ("one", "two"):
        assert command(monkeypatch, "report", runs, "-o", tmp_path / "r.html", "--figures", tmp_path / folder) == 0
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal(runs: Path, tmp_path: Path, monkeypatch, capsys, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert command(monkeypatch, "report", runs, "-o", tmp_path / "r.html") == 0
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("report:")]
    assert max(map(len, table)) <= int(columns)
    assert any("HFedAvg" in line for line in table)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "error: folder = 'nowhere': no such folder"),
        (["empty", "-o", "page.pdf"], "error: --out = 'page.pdf': must be a file that ends in .html"),
        (["empty", "-o", "empty"], "error: --out = 'empty': must be a file that ends in .html"),
        (["empty", "-o", "none/page.html"], "cannot write in"),
        (["empty", "--target", "nan"], "error: --target = nan: must be a finite number"),
        (["nowhere", "--watch"], "error: folder = 'nowhere': no such folder"),
    ],
)
def test_wrong_inputs_are_one_line(tmp_path: Path, monkeypatch, capsys, arguments: list[str], complaint: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert command(monkeypatch, "report", *arguments) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err and shown.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("words", [["report"], ["cost", "-n", "plato"], ["runs", "list"], ["runs", "export", "a.tgz"]])
def test_nothing_to_show_is_a_sentence(tmp_path: Path, monkeypatch, capsys, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *words) == 0
    shown = capsys.readouterr()
    assert "no runs in runs yet" in shown.out and shown.err == "" and list(tmp_path.iterdir()) == []


def test_a_broken_run_is_named_and_left_out(copied: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    broken = sorted(copied.iterdir())[0]
    (broken / "tree.json").write_text("[]")
    assert command(monkeypatch, "report", copied, "-o", tmp_path / "r.html") == 0
    assert "left out: file = " in capsys.readouterr().err


def test_figures_where_a_file_stands(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "taken").write_text("")
    assert command(monkeypatch, "report", runs, "-o", tmp_path / "r.html", "--figures", tmp_path / "taken") == 2
    assert "--figures" in capsys.readouterr().err


def test_figures_need_matplotlib_and_the_page_does_not(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page, drawn = tmp_path / "r.html", tmp_path / "figures"
    assert command(monkeypatch, "report", runs, "-o", page) == 0
    capsys.readouterr()
    assert command(monkeypatch, "report", runs, "-o", page, "--figures", drawn) == 2
    assert capsys.readouterr().err == "error: a picture needs the package matplotlib: pip install matplotlib\n"
    assert not drawn.exists()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_tensorboard_events(config: Path, tmp_path: Path, monkeypatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert command(monkeypatch, "run", config, "--runs", tmp_path / "runs", "--tensorboard", "-q") == 0
    (run,) = (tmp_path / "runs").iterdir()
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/accuracy")] == [1, 2, 3]
    assert {"level 1/drift", "level 2/correction", "run/lr"} <= set(events.Tags()["scalars"])


def test_tensorboard_is_missed_before_the_work(config: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert command(monkeypatch, "run", config, "--runs", tmp_path / "runs", "--tensorboard") == 2
    assert "stratafl[tensorboard]" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_complaint_names_the_extra() -> None:
    assert "pip install 'stratafl[tables]'" in str(MissingExtra("a table of rounds", "pandas", "tables"))
