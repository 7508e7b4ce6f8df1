"""Trackers that log a run to TensorBoard, Weights & Biases and MLflow, besides its folder.

Each is a `Tracker` of `simulation.callbacks`. A missing package is reported when the tracker is
created, before the run.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from stratafl.base.errors import MissingExtra
from stratafl.base.validation import check_choice
from stratafl.metrics.records import RoundResult
from stratafl.runs.format import flat_config
from stratafl.simulation.callbacks import DONE, INTERRUPTED, Tracker, to_scalars

Name = Literal["tensorboard", "wandb", "mlflow"]
PACKAGES: dict[Name, tuple[str, str, str, str]] = {
    "tensorboard": ("torch.utils.tensorboard", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": ("wandb", "tracking with Weights & Biases", "wandb", "trackers"),
    "mlflow": ("mlflow", "tracking with MLflow", "mlflow-skinny", "trackers"),
}
"""Module of each tracker, what it is needed for, its package and our extra."""
FOLDER = "tensorboard"
"""Folder of TensorBoard's events in the run folder."""
PROJECT = "stratafl"
RUN_TAG = "stratafl.run"
"""Tag with the id of a run, by which MLflow finds a run that continues."""
MAX_PARAMETER_LENGTH = 500
BATCH_SIZE = 100
"""Number of parameters that MLflow takes in one call."""


def trackers_for(names: Sequence[str], folder: Path, name: str, id: str, done: int = 0) -> list[Tracker]:
    """Create trackers for the run in a folder. done: number of completed rounds."""
    for tracker in names:
        check_choice("--track", tracker, get_args(Name))
    factories: dict[str, Any] = {
        "tensorboard": lambda: TensorBoard(folder / FOLDER, done),
        "wandb": lambda: WeightsAndBiases(name=name, id=id, dir=str(folder)),
        "mlflow": lambda: MLflow(name=name, id=id),
    }
    return [factories[tracker]() for tracker in dict.fromkeys(names)]


def check_trackers(names: Sequence[str]) -> None:
    """Reject unknown names and missing packages, before the run."""
    for name in names:
        _import(check_choice("--track", name, get_args(Name)))


def _import(name: Name) -> Any:
    """Import the package of a tracker."""
    module, feature, package, extra = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(feature, package, extra) from None


class TensorBoard:
    """Tracker that writes TensorBoard events to a folder.

    done: number of completed rounds; events of later rounds, left by a process that died, are
    dropped.
    """

    def __init__(self, folder: Path | str, done: int = 0):
        self._folder, self._done, self._make = Path(folder), done, _import("tensorboard").SummaryWriter

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._writer = self._make(self._folder, purge_step=self._done + 1 if self._done else None)

    def on_round(self, record: RoundResult) -> None:
        for name, value in to_scalars(record).items():
            self._writer.add_scalar(name, value, global_step=record.round)
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Tracker for a run in a project of Weights & Biases.

    id: continues the run of that id. Other arguments are those of `wandb.init`; `wandb login` and
    `WANDB_MODE=offline` work as usual.
    """

    def __init__(self, project: str = PROJECT, name: str | None = None, id: str | None = None, **settings: Any):
        self._wandb = _import("wandb")
        self._settings = {
            "project": project,
            "name": name,
            "id": id,
            "resume": None if id is None else "allow",
            "reinit": "create_new",
            **settings,
        }

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(config=dict(config), **self._settings)

    def on_round(self, record: RoundResult) -> None:
        self._run.log(to_scalars(record), step=record.round)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({"status": summary["status"], "reason": summary["reason"]})
        self._run.finish(exit_code=0 if summary["status"] == DONE else 1)


class MLflow:
    """Tracker for a run in an experiment of MLflow.

    id: continues the run that was begun with it. uri: where it is stored; by default
    `MLFLOW_TRACKING_URI`.
    """

    def __init__(
        self, experiment: str = PROJECT, name: str | None = None, id: str | None = None, uri: str | None = None
    ):
        self._mlflow = _import("mlflow")
        self._experiment, self._name, self._id, self._uri = experiment, name, id, uri

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._client = client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        existing = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if existing is None else existing.experiment_id
        runs = [] if self._id is None else client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._id}'")
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {} if self._id is None else {RUN_TAG: self._id}
        self._run = client.create_run(experiment, tags=tags, run_name=self._name).info.run_id
        parameter = self._mlflow.entities.Param
        params = [
            parameter(_valid_name(key), str(value)[:MAX_PARAMETER_LENGTH])
            for key, value in flat_config(dict(config)).items()
        ]
        for first in range(0, len(params), BATCH_SIZE):
            client.log_batch(self._run, params=params[first : first + BATCH_SIZE])

    def on_round(self, record: RoundResult) -> None:
        time_ms, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [metric(_valid_name(key), value, time_ms, record.round) for key, value in to_scalars(record).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        status = {DONE: "FINISHED", INTERRUPTED: "KILLED"}.get(summary["status"], "FAILED")
        if summary["reason"]:
            self._client.set_tag(self._run, "stratafl.reason", summary["reason"])
        self._client.set_terminated(self._run, status)


def _valid_name(key: str) -> str:
    """Replace characters that MLflow does not accept in names."""
    return re.sub(r"[^\w\-. :/]", "_", key)
