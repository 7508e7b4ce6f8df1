"""Trackers follow a run, and never end one."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import InvalidInput
from stratafl.base.errors import MissingExtra
from stratafl.base.signals import Interrupted
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment
from stratafl.runs.session import RunSession
from stratafl.runs.trackers import MLflow, TensorBoard, WeightsAndBiases, check_trackers, trackers_for
from stratafl.simulation.callbacks import to_scalars, tracking
from tests.commands import CONFIG
from tests.flat import simulate

INPUTS, TARGETS = torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 2


def made(rounds: int = 3, **more: Any):
    parts = [np.arange(k * 4, k * 4 + 4) for k in range(4)]
    data = INPUTS, TARGETS
    return simulate(lambda: nn.Linear(4, 2), data, parts, "2x2", periods=[1, 1], rounds=rounds, test=data, **more)


class Notes:
    """A tracker that remembers, and fails when asked to."""

    def __init__(self, fails: str = ""):
        self.fails, self.told = fails, []

    def _note(self, moment: str, value: Any) -> None:
        if moment == self.fails:
            raise OSError("the disk is full")
        self.told.append((moment, value))

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._note("begin", config)

    def on_round(self, record: Any) -> None:
        self._note("round", record.round)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._note("end", summary)


def test_a_callback_is_told_of_everything() -> None:
    notes = Notes()
    result = made().run(callbacks=[notes])
    (begin, config), *rounds, (end, summary) = notes.told
    assert (begin, config["method"], config["rounds"]) == ("begin", "mtgc", 3)
    assert rounds == [("round", 1), ("round", 2), ("round", 3)]
    assert end == "end"
    assert summary == {"status": "done", "reason": "", "rounds": 3, "final": result.history[-1].metrics}


def test_in_a_loop_of_ones_own() -> None:
    notes, simulation = Notes(), made()
    with tracking([notes], simulation.facts()) as follow:
        for record in simulation:
            follow(record)
    assert [moment for moment, _ in notes.told] == ["begin", "round", "round", "round", "end"]


@pytest.mark.parametrize("moment", ["begin", "round", "end"])
def test_one_that_fails_is_said_once_and_the_run_goes_on(moment: str, caplog) -> None:
    broken, sound = Notes(moment), Notes()
    result = made().run(callbacks=[broken, sound])
    assert len(result.history) == 3
    assert caplog.messages == ["stratafl: Notes failed, and the run goes on without it: OSError: the disk is full"]
    assert len(sound.told) == 5


def test_moments_that_a_callback_does_not_have_are_left_out() -> None:
    class Last:
        def on_end(self, summary: Mapping[str, Any]) -> None:
            self.summary = summary

    last = Last()
    made().run(callbacks=[last])  # type: ignore[list-item]
    assert last.summary["rounds"] == 3
    with pytest.raises(InvalidInput, match="on_begin, on_round, on_end"):
        made().run(callbacks=[print])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("problem", "status", "reason"),
    [
        (Interrupted(2, "enough"), "interrupted", "it was stopped"),
        (KeyboardInterrupt(), "interrupted", "it was stopped"),
        (ZeroDivisionError("no"), "failed", "ZeroDivisionError: no"),
    ],
)
def test_the_end_says_how_it_ended(problem: BaseException, status: str, reason: str) -> None:
    notes = Notes()
    with pytest.raises(type(problem)), tracking([notes], {}):
        raise problem
    assert notes.told[-1][1] == {"status": status, "reason": reason, "rounds": 0, "final": {}}


def test_names_and_packages_are_looked_at_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'wandb'"):
        check_trackers(["wand"])
    for name, module in {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtra, match="pip install"):
            check_trackers([name])
        with pytest.raises(MissingExtra):
            trackers_for([name], tmp_path, "a", "b")


# -- the real ones, offline ------------------------------------------------------------------------


def halves(tmp_path: Path, track) -> tuple[Path, list[float]]:
    """A run that is stopped after a round and goes on, followed by `track(folder, done)`; its
    folder and losses."""
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    experiment = Experiment.from_toml(path)
    session = RunSession.start(experiment, "small", tmp_path / "runs")
    folder = session.path

    def first_round() -> None:
        with tracking(track(folder, 0), experiment.to_table()) as follow:

            def stop(record) -> None:
                follow(record)
                if record.round == 1:
                    os.kill(os.getpid(), signal.SIGINT)  # which is asked for, and heard after the round

            session.run(stop)

    with pytest.raises(Interrupted):
        first_round()
    again = RunSession.resume(folder)
    done = len(again.simulation.history)
    with tracking(track(folder, done), experiment.to_table()) as follow:
        again.run(follow)
    return folder, [record.metrics["loss"] for record in again.simulation.history]


def test_tensorboard_goes_on_in_the_same_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, losses = halves(tmp_path, lambda folder, done: [TensorBoard(folder / "tensorboard", done)])
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("test/loss")] == pytest.approx(losses)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)


def records_of(path: Path) -> list[Any]:
    """Read an offline run of Weights & Biases: a log of LevelDB's format, in blocks of 32 kB."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts, result = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            result.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return result


def complete_records(path: Path) -> list[Any]:
    """The same once all of it is there: another process writes it, also after a run is finished."""
    give_up = time.monotonic() + 300
    while not (result := records_of(path)) or not result[-1].HasField("exit"):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    return result


def test_weights_and_biases_offline(offline: None, tmp_path: Path) -> None:
    folder, losses = halves(tmp_path, lambda folder, done: trackers_for(["wandb"], folder, "small", folder.name, done))
    stored = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in stored} == {f"run-{folder.name}.wandb"}, "one run, however often it went on"
    result = [record for path in stored for record in complete_records(path)]
    runs = [record.run for record in result if record.HasField("run")]
    assert {(run.project, run.display_name, run.run_id) for run in runs} == {("stratafl", "small", folder.name)}
    settings = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert settings["tree"]["shape"] == "2x2"
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in result
        if record.HasField("history")
    ]
    by_step = {row["_step"]: row["test/loss"] for row in rows if "test/loss" in row}
    assert [by_step[step] for step in (1, 2, 3)] == pytest.approx(losses)
    codes = [record.exit.exit_code for record in result if record.HasField("exit")]
    assert codes == [1, 0], "interrupted, then done"


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    seen = []

    def track(folder: Path, done: int):
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name("stratafl")
        seen.extend(run.info.status for run in client.search_runs([experiment.experiment_id])) if experiment else None
        return trackers_for(["mlflow"], folder, "small", folder.name, done)

    _, losses = halves(tmp_path, track)
    assert seen == ["KILLED"]
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("stratafl").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "small")
    assert run.data.params["tree.shape"] == "2x2"
    metrics = sorted(client.get_metric_history(run.info.run_id, "test/loss"), key=lambda metric: metric.step)
    assert [metric.step for metric in metrics] == [1, 2, 3]
    assert [metric.value for metric in metrics] == pytest.approx(losses)


def test_mlflow_takes_any_name_and_a_run_without_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = f"file:{tmp_path}/mlruns"
    simulation = made(2, evaluate_levels=[0, 2])
    record = simulation.run(callbacks=[MLflow("mine", uri=place), MLflow("mine", uri=place)]).history[0]
    client = mlflow.MlflowClient(tracking_uri=place)
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert len(runs) == 2
    assert all(len(run.data.metrics) == len(to_scalars(record)) for run in runs)


def test_a_tracker_that_cannot_begin_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**settings: Any) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])")

    monkeypatch.setattr(wandb, "init", refuse)
    assert len(made().run(callbacks=[WeightsAndBiases()]).history) == 3
    (line,) = caplog.messages
    assert line.startswith("stratafl: WeightsAndBiases failed, and the run goes on without it: UsageError: api_key")


def test_the_command_line_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(CONFIG)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["stratafl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    assert call("run", "small.toml", "--track", "mlflow", "--track", "tensorboard", "--tensorboard", "-q") == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert len(list((run / "tensorboard").iterdir())) == 1, "asked for twice, written once"
    assert list((tmp_path / "mlruns").glob("*/*/metrics/test/loss"))
    assert call("run", "small.toml", "--track", "tensorbord") == 2
    assert "'tensorbord' is not one of 'tensorboard', 'wandb', 'mlflow'" in capsys.readouterr().err
