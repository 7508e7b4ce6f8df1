"""Runs on a Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stratafl.base.signals import Interrupted
from stratafl.experiment.experiment import Experiment
from stratafl.runs import list_runs
from stratafl.sweeps import RayExecutor, run_all
from stratafl.sweeps.sweep import Event
from tests.runs.conftest import contents
from tests.runs.stopped import CONFIG
from tests.sweeps.inline import Inline

STUDY = Experiment.from_table({**CONFIG, "rounds": 60})
SEEDS = {seed: STUDY.replace(seed=int(seed)) for seed in "12"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_a_cluster_trains_stops_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the package ray is not installed: pip install 'stratafl[ray]'")
    folder = tmp_path / "runs"
    executor = RayExecutor(cpus=0.5)

    def interrupt(event: Event) -> None:
        if event.kind == "round":
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(Interrupted):
            run_all(SEEDS, folder, watch=interrupt, executor=executor)
        assert {run.status for run in list_runs(folder)} <= {"interrupted"}
        experiments = {**SEEDS, "bad": STUDY.replace(method="nonesuch")}
        *good, bad = run_all(experiments, folder, executor=executor)
    finally:
        executor.close()
    assert (bad.status, "unknown" in bad.reason) == ("failed", True)
    undisturbed = run_all(SEEDS, tmp_path / "undisturbed", executor=Inline())
    for outcome, expected in zip(good, undisturbed, strict=True):
        assert outcome.status == "done", outcome
        assert outcome.path is not None and expected.path is not None
        assert contents(outcome.path) == contents(expected.path)
