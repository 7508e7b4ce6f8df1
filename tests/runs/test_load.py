"""Stored runs in Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stratafl as fl
from stratafl.base.signals import Interrupted
from stratafl.runs.session import RunSession

EXPERIMENT = fl.Experiment("logistic", fl.Data("synthetic"), "2x2", schedule=[1, 1], rounds=2)


def test_a_loaded_run_has_the_records_and_the_model(tmp_path: Path) -> None:
    result = EXPERIMENT.run(save=tmp_path / "runs" / "first")
    run = fl.load_run(tmp_path / "runs" / "first")
    assert run.records == result.history and run.summary is not None and run.summary["rounds"] == 2
    assert run.frame()["metrics.loss"].tolist() == [record.metrics["loss"] for record in result.history]
    model = result.module
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert run.model_state().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in run.model_state().items())
    assert [stored.name for stored in fl.list_runs(tmp_path / "runs")] == ["first"]


def test_a_run_that_is_not_done_has_no_model(tmp_path: Path) -> None:
    session = RunSession.start(EXPERIMENT, "first", tmp_path)

    def stop(record: fl.RoundResult) -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(stop)
    with pytest.raises(fl.InvalidInput, match="path = 3: must be the path of a run's folder"):
        fl.load_run(3)  # type: ignore[arg-type]
    with pytest.raises(fl.InvalidInput, match="is interrupted: the root's model is stored when a run is done"):
        fl.load_run(session.path).model_state()
