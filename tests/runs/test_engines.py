"""A run records the engine that trained it, and goes on with that one, to the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from stratafl import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment
from stratafl.reports.page_data import page_data
from stratafl.runs import read_run
from stratafl.runs.session import FinishedRun, RunSession

MODEL = """
from torch import nn


def convolutional(input_shape, classes):
    layers = [nn.Conv2d(input_shape[0], 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.LayerNorm(6 * 36)]
    return nn.Sequential(*layers, nn.Linear(6 * 36, classes))


def dropping(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, classes))


def mixing(input_shape, classes):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1) - x.flatten(1).mean(dim=0))

    return Centred(64, classes)


def deciding(input_shape, classes):
    class Deciding(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1) if x.sum() > 0 else -x.flatten(1))

    return Deciding(64, classes)


def hooking(input_shape, classes):
    class Hooking(nn.Linear):
        def forward(self, x):
            y = super().forward(x.flatten(1))
            if y.requires_grad:
                y.register_hook(lambda slope: 2 * slope)
            return y

    return Hooking(64, classes)
"""


def study(folder: Path, model: str, engine: str, precision: str = "fp32") -> Experiment:
    file = folder / "own_model.py"
    file.write_text(MODEL)
    return Experiment.from_table(
        {
            "tree": {"shape": "2x3"},
            "model": {"name": f"{file}:{model}"},
            "schedule": {"periods": [2, 2]},
            "client": {"batch_size": 16},
            "rounds": 4,
            "execution": {"engine": engine, "precision": precision},
            "storage": {"checkpoint_every": 1},
        }
    )


def finished(settings: Experiment, folder: Path) -> FinishedRun:
    return RunSession.start(settings, "whole", folder).run()


def interrupted(settings: Experiment, folder: Path) -> Path:
    session = RunSession.start(settings, "halves", folder)

    def stop(record) -> None:
        if record.round == 2:
            raise Interrupted(2, "enough")

    with pytest.raises(Interrupted):
        session.run(stop)
    return session.path


def described(path: Path) -> dict:
    return json.loads((path / "run.json").read_text())


@pytest.mark.parametrize(
    ("model", "asked", "ran"),
    [
        ("convolutional", "vmap", "vmap"),
        ("convolutional", "stacked", "stacked"),
        ("convolutional", "loop", "loop"),
        ("mixing", "stacked", "stacked"),
        ("hooking", "stacked", "vmap"),
        ("deciding", "stacked", "loop"),
        ("dropping", "stacked", "stacked"),
        ("dropping", "vmap", "loop"),
    ],
)
def test_what_ran_is_recorded_and_goes_on_to_the_same_bits(
    model: str, asked: str, ran: str, tmp_path: Path, capsys
) -> None:
    settings = study(tmp_path, model, asked)
    uninterrupted = finished(settings, tmp_path / "runs").path
    assert capsys.readouterr().err.count(f"engine {asked!r} was asked for, and {ran}") == (asked != ran)
    path = interrupted(settings, tmp_path / "runs")
    assert described(path)["engine"] == ran == described(path)["how"].partition(":")[0]
    assert described(path)["precision"] == "fp32"
    shown = page_data([read_run(path)])["shared"]
    assert (shown["execution.engine"], shown["execution.precision"]) == (ran, "fp32")
    noted = [note for note in described(path)["notes"] if "was asked for" in note]
    assert len(noted) == (asked != ran)
    assert list(read_run(path).notes) == described(path)["notes"]
    said: list[str] = []
    RunSession.resume(path, say=said.append).run()
    assert [line for line in said if "was asked for" in line] == noted, "also where it goes on, once"
    one, other = (load_file(folder / "model.safetensors") for folder in (uninterrupted, path))
    assert all((one[name] == other[name]).all() for name in one)


def test_runs_are_listed_with_the_engine_that_ran(tmp_path: Path, monkeypatch, capsys) -> None:
    for model in ("hooking", "deciding"):
        finished(study(tmp_path, model, "stacked"), tmp_path / "runs")
    capsys.readouterr()
    rows = json.loads(listed(tmp_path / "runs", "--json", monkeypatch=monkeypatch, capsys=capsys))["runs"]
    assert [(row["engine"], row["precision"]) for row in rows] == [("loop", "fp32"), ("vmap", "fp32")]
    assert rows[0]["how"].startswith("loop: what it does depends on values")
    assert [len(row["notes"]) for row in rows] == [1, 1]
    shown = listed(tmp_path / "runs", monkeypatch=monkeypatch, capsys=capsys)
    assert "vmap" in shown and "loop" in shown and "stacked" not in shown


def listed(*arguments: object, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["stratafl", "runs", "list", *map(str, arguments)])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out


def test_a_record_of_an_early_version_says_what_it_knows(tmp_path: Path) -> None:
    path = finished(study(tmp_path, "hooking", "stacked"), tmp_path / "runs").path
    early = {key: value for key, value in described(path).items() if key not in ("how", "precision")}
    (path / "run.json").write_text(json.dumps(early))
    run = read_run(path)
    assert (run.engine, run.how, run.precision) == ("vmap", "vmap", "")
    assert page_data([run])["shared"]["execution.engine"] == "vmap"


def test_a_precision_that_was_not_honoured_is_not_recorded(tmp_path: Path, capsys) -> None:
    path = finished(study(tmp_path, "dropping", "loop", "tf32"), tmp_path / "runs").path
    assert described(path)["precision"] == "fp32"
    assert "precision 'tf32' is not honoured" in capsys.readouterr().err


def test_a_precision_outlives_the_engine_that_was_asked_for(tmp_path: Path, capsys) -> None:
    settings = study(tmp_path, "dropping", "vmap", "bf16")
    uninterrupted = finished(settings, tmp_path / "runs").path
    assert "honoured" not in capsys.readouterr().err
    path = interrupted(settings, tmp_path / "runs")
    assert (described(path)["engine"], described(path)["precision"]) == ("loop", "bf16")
    RunSession.resume(path).run()
    one, other = (load_file(folder / "model.safetensors") for folder in (uninterrupted, path))
    assert all((one[name] == other[name]).all() for name in one)


def test_a_run_does_not_go_on_with_another_engine(tmp_path: Path) -> None:
    path = interrupted(study(tmp_path, "dropping", "loop"), tmp_path / "runs")
    values = described(path)
    (path / "run.json").write_text(json.dumps({**values, "engine": "vmap"}))
    with pytest.raises(InvalidInput, match="trained by vmap; here: loop: the module or loss draws random numbers"):
        RunSession.resume(path)


def test_a_record_and_checkpoints_of_other_engines_are_refused(tmp_path: Path) -> None:
    path = interrupted(study(tmp_path, "convolutional", "loop"), tmp_path / "runs")
    (path / "run.json").write_text(json.dumps({**described(path), "engine": "vmap"}))
    with pytest.raises(InvalidInput, match=r"its checkpoint is of engine 'loop', and its run\.json of 'vmap'"):
        RunSession.resume(path)
