"""Fixtures: a search of a few small runs, done once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import parse_goal
from stratafl.network.specification import network
from stratafl.tuning.output import write
from stratafl.tuning.result import TuningResult, search_and_repeat
from stratafl.tuning.task import TuningTask, space_of

pytest.importorskip("optuna")

CONFIG = """
rounds = 10
[tree]
shape = "2x2"
[data]
source = "digits"
partition = [{ name = "dirichlet", alpha = 0.5 }, "iid"]
[model]
name = "logistic"
[method]
name = "hfedavg"
[schedule]
periods = [2, 3]
[client]
lr = 0.05
batch_size = 10
[evaluation]
drift = "none"
"""
TARGET = "accuracy=0.8"
NETWORKS = ("lan_wan", "mobile_edge")


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.toml"
    path.write_text(CONFIG)
    return path


TaskFactory = Callable[..., TuningTask]


@pytest.fixture(scope="session")
def make_task(file: Path) -> TaskFactory:
    """Function that creates tasks of the small config, with changes."""

    def make(plan: dict[str, Any] | None = None, networks: tuple[str, ...] = NETWORKS, **rest: Any) -> TuningTask:
        experiment = Experiment.from_toml(file)
        given = {
            "target": parse_goal("--target", rest.pop("target", TARGET)),
            "minimise": "seconds",
            "seeds": 2,
            "trials": 7,
        }
        return TuningTask.of(
            experiment, space_of(experiment, plan), [network(each) for each in networks], **{**given, **rest}
        )

    return make


def silently(
    task: TuningTask, folder: Path, show: Callable[[Any], None] = lambda event: None, **rest: Any
) -> TuningResult:
    return search_and_repeat(task, folder, say=lambda text: None, show=show, **rest)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="session")
def tuned(make_task: TaskFactory, folder: Path) -> TuningResult:
    plan = silently(make_task(), folder)
    write(plan, folder)
    return plan
