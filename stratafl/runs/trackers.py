"""A run's records in TensorBoard, Weights & Biases and MLflow, beside what its folder keeps anyway.

Each is a `Tracker` of `simulation.callbacks`. One that is not installed is missed when it is made,
before the work.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from stratafl.base.errors import MissingExtra
from stratafl.base.validation import check_choice
from stratafl.metrics.records import RoundResult
from stratafl.simulation.callbacks import DONE, INTERRUPTED, Tracker, to_scalars

Name = Literal["tensorboard", "wandb", "mlflow"]
FOLDER = "tensorboard"
"""TensorBoard's events, in the run's own folder."""
PROJECT = "stratafl"
RUN_TAG = "stratafl.run"
"""The tag under which MLflow keeps which run it is, so that one that goes on is found again."""
LONGEST_PARAMETER = 500
AT_ONCE = 100
"""Parameters that MLflow takes in one go."""


def trackers_for(
    names: Sequence[str], folder: Path, name: str, id: str, done: int = 0, field: str = "--track"
) -> list[Tracker]:
    """The trackers of these names, for the run in a folder; `done`: rounds that there are
    already."""
    for each in names:
        check_choice(field, each, get_args(Name))
    made: dict[str, Any] = {
        "tensorboard": lambda: TensorBoard(folder / FOLDER, done),
        "wandb": lambda: WeightsAndBiases(name=name, id=id, dir=str(folder)),
        "mlflow": lambda: MLflow(name=name, id=id),
    }
    return [made[each]() for each in dict.fromkeys(names)]


def check_trackers(names: Sequence[str], field: str = "--track") -> None:
    """Refuse names that nobody knows, and miss packages, before the work."""
    checks = {"tensorboard": _summary_writer, "wandb": _wandb, "mlflow": _mlflow}
    for each in names:
        checks[check_choice(field, each, get_args(Name))]()


def _imported(module: str, feature: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(feature, package, extra) from None


def _summary_writer() -> Any:
    return _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard", "tensorboard").SummaryWriter


def _wandb() -> Any:
    return _imported("wandb", "tracking with Weights & Biases", "wandb", "trackers")


def _mlflow() -> Any:
    return _imported("mlflow", "tracking with MLflow", "mlflow-skinny", "trackers")


class TensorBoard:
    """Events in a folder; `done`: rounds there are already, of which events of later ones, left by
    a process that died, are void."""

    def __init__(self, folder: Path | str, done: int = 0):
        self._folder, self._done, self._make = Path(folder), done, _summary_writer()

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._writer = self._make(self._folder, purge_step=self._done + 1 if self._done else None)

    def on_round(self, record: RoundResult) -> None:
        for name, value in to_scalars(record).items():
            self._writer.add_scalar(name, value, global_step=record.round)
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project there. With an `id`, the run of that id goes on. Other arguments are those
    of `wandb.init`; where and whether it is sent is set up as always: `wandb login`,
    `WANDB_MODE=offline`."""

    def __init__(self, project: str = PROJECT, name: str | None = None, id: str | None = None, **more: Any):
        resume = None if id is None else "allow"
        self._wandb = _wandb()
        self._settings = {"project": project, "name": name, "id": id, "resume": resume, "reinit": "create_new", **more}

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(config=dict(config), **self._settings)

    def on_round(self, record: RoundResult) -> None:
        self._run.log(to_scalars(record), step=record.round)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({"status": summary["status"], "reason": summary["reason"]})
        self._run.finish(exit_code=0 if summary["status"] == DONE else 1)


class MLflow:
    """A run of an experiment there. With an `id`, the run that was begun with it goes on. Where it
    is kept is set up as always, by `MLFLOW_TRACKING_URI`, unless a `uri` is given."""

    def __init__(
        self, experiment: str = PROJECT, name: str | None = None, id: str | None = None, uri: str | None = None
    ):
        self._mlflow = _mlflow()
        self._experiment, self._name, self._id, self._uri = experiment, name, id, uri

    def on_begin(self, config: Mapping[str, Any]) -> None:
        self._client = client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
        begun = [] if self._id is None else client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._id}'")
        if begun:
            self._run = begun[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {} if self._id is None else {RUN_TAG: self._id}
        self._run = client.create_run(experiment, tags=tags, run_name=self._name).info.run_id
        parameter = self._mlflow.entities.Param
        params = [parameter(_plain(key), str(value)[:LONGEST_PARAMETER]) for key, value in _flat(config)]
        for first in range(0, len(params), AT_ONCE):
            client.log_batch(self._run, params=params[first : first + AT_ONCE])

    def on_round(self, record: RoundResult) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [metric(_plain(key), value, now, record.round) for key, value in to_scalars(record).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        status = {DONE: "FINISHED", INTERRUPTED: "KILLED"}.get(summary["status"], "FAILED")
        if summary["reason"]:
            self._client.set_tag(self._run, "stratafl.reason", summary["reason"])
        self._client.set_terminated(self._run, status)


def _plain(key: str) -> str:
    """A name of letters, digits and what else MLflow takes in one."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as "section.key"."""
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, where)
        else:
            yield where, value
