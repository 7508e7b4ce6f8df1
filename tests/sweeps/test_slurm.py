"""Runs as jobs of SLURM, whose commands are stand-ins that start processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratafl import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.experiment.experiment import Experiment
from stratafl.runs import read_run
from stratafl.sweeps import Outcome, SlurmExecutor, run_all
from stratafl.sweeps.sweep import Event
from tests.runs.conftest import contents
from tests.runs.stopped import CONFIG
from tests.sweeps.inline import Inline

STUB = Path(__file__).parent / "slurm_stub.py"
STUDY = Experiment.from_table({**CONFIG, "rounds": 60})
LONG = {seed: STUDY.replace(seed=int(seed)) for seed in "12"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the stand-in's jobs."""
    state, commands = tmp_path / "slurm", tmp_path / "bin"
    state.mkdir()
    commands.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scancel", "requeue"):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" {name} "$@"\n')
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STUB", str(state))
    return state


def undisturbed(folder: Path) -> dict[str, dict]:
    return {o.name: bits(o) for o in run_all(LONG, folder, executor=Inline())}


def bits(outcome: Outcome) -> dict:
    assert outcome.status == "done" and outcome.path is not None, outcome
    return contents(outcome.path)


def job(slurm: Path, name: str) -> str:
    """Id of the first job of a run."""
    return next(path.stem for path in sorted(slurm.glob("*.json")) if f'"--job-name": "{name}"' in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("accounting", [True, False])
def test_killed_and_timed_out_jobs_end_with_the_same_bits(accounting: bool, slurm: Path, tmp_path: Path) -> None:
    """One is killed and queued again by SLURM, one reaches its time limit; a third one fails."""
    disturbed = set()
    if not accounting:
        (slurm / "no_accounting").touch()

    def watch(event: Event) -> None:
        if event.kind == "round" and event.values["round"] >= 3 and event.name not in disturbed:
            disturbed.add(event.name)
            if event.name == "1":
                subprocess.run(["requeue", job(slurm, "1")], check=True)
            elif accounting:
                os.kill(int((slurm / f"{job(slurm, '2')}.pid").read_text()), signal.SIGTERM)

    experiments = {**LONG, "bad": STUDY.replace(method="nonesuch")}
    first, second, bad = run_all(experiments, tmp_path / "runs", watch=watch, executor=SlurmExecutor(poll_s=0.1))
    assert disturbed == {"1", "2"}
    assert (bad.status, "unknown" in bad.reason, bad.path) == ("failed", True, None)
    expected = undisturbed(tmp_path / "undisturbed")
    assert bits(first) == expected["1"] and bits(second) == expected["2"]
    assert len(read_run(first.path).continued) == 1 and len(read_run(second.path).continued) == accounting
    assert len(list(slurm.glob("*.json"))) == 3 + accounting


@pytest.mark.slow
def test_ctrl_c_ends_in_checkpoints_and_a_lost_terminal_loses_no_job(slurm: Path, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "runs"

    def interrupt(event: Event) -> None:
        if event.kind == "round":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_all({"1": LONG["1"]}, folder, watch=interrupt, executor=SlurmExecutor(poll_s=0.1))
    (path,) = folder.glob("1-*")
    stopped = read_run(path)
    assert stopped.status == "interrupted" and stopped.round < 60

    class LostError(Exception):
        pass

    def lose(event: Event) -> None:
        raise LostError

    executor = SlurmExecutor(poll_s=0.1)
    monkeypatch.setattr("stratafl.sweeps.executors.SlurmJob.stop", lambda job: None)  # there was no time for it
    with pytest.raises(LostError):
        run_all({"1": LONG["1"]}, folder, watch=lose, executor=executor)
    queued = len(list(slurm.glob("*.json")))
    # wherever locks are not seen from other machines, as here from the same one
    monkeypatch.setattr("stratafl.runs.reader.is_locked", lambda folder: False)
    (outcome,) = run_all({"1": LONG["1"]}, folder, executor=SlurmExecutor(poll_s=0.1))
    assert len(list(slurm.glob("*.json"))) == queued == 2
    assert bits(outcome) == undisturbed(tmp_path / "undisturbed")["1"]


def test_sbatch_that_fails_or_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match="needs a machine that has SLURM's command sbatch"):
        run_all({"1": STUDY}, tmp_path / "runs", executor="slurm")
    assert not (tmp_path / "runs" / "jobs").exists()
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(InvalidInput, match="sbatch failed: sbatch: error: invalid partition"):
        run_all({"1": STUDY}, tmp_path / "runs", executor="slurm")
