"""Sweeps from Python, in scripts as users write them, and with an executor of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stratafl
from stratafl import Experiment, InvalidInput
from stratafl.base.user_code import load_module
from stratafl.runs import list_runs
from stratafl.sweeps import run_all
from tests.docs.blocks import ROOT, read
from tests.runs.conftest import wait
from tests.runs.stopped import CONFIG
from tests.sweeps.inline import Inline

STUDY = Experiment.from_table({**CONFIG, "rounds": 2, "method": "mtgc"})


def test_a_grid_is_run_and_summarised(tmp_path: Path, capsys) -> None:
    grid = {"method": ["hfedavg", "mtgc"], "seed": range(2)}
    result = stratafl.sweep(STUDY, grid, save=tmp_path / "compare", executor=Inline(), target="loss <= 99")
    assert [run.name for run in result.runs] == ["hfedavg-seed=0", "hfedavg-seed=1", "mtgc-seed=0", "mtgc-seed=1"]
    assert [(row.group, row.done, row.rounds) for row in result.table] == [("hfedavg", 2, 1.0), ("mtgc", 2, 1.0)]
    lines = str(result).splitlines()
    assert lines[0].startswith("hfedavg: 2/2 done, final loss ")
    assert lines[1].endswith(", 1.0 ± 0.0 rounds to the target")
    assert capsys.readouterr().err.splitlines()[-1] == "mtgc-seed=1: done  (4/4)"
    again = stratafl.sweep(STUDY, {"method": ("mtgc", "hfedavg"), "seed": np.arange(2)}, save=tmp_path / "compare")
    assert [outcome.was_done for outcome in again.outcomes] == [True] * 4


def test_objects_of_a_program_are_trained_in_it(tmp_path: Path) -> None:
    data = torch.randn(40, 4), torch.arange(40) % 2
    experiment = Experiment(
        model=lambda: torch.nn.Linear(4, 2), data={"source": data, "test": data}, tree="2x2", rounds=2, client=0.1
    )
    rates = {"client.lr": [0.1, 0.2]}
    result = stratafl.sweep(experiment, rates, save=tmp_path / "own")
    assert [(run.name, run.round) for run in result.runs] == [("lr=0.1", 2), ("lr=0.2", 2)]
    assert [o.was_done for o in stratafl.sweep(experiment, rates, save=tmp_path / "own").outcomes] == [True, True]
    with pytest.raises(InvalidInput, match="other processes cannot have objects of this program"):
        stratafl.sweep(experiment, rates, save=tmp_path / "own", workers=2)


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        ("slrm", "did you mean 'slurm'"),
        ("nowhere.py:Mine", "no such Python file"),
        (object(), "must have `slots` and `submit"),
        ("pathlib:Path", "is a part of Python itself"),
    ],
)
def test_a_wrong_executor_is_one_line(executor: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=said):
        stratafl.sweep(STUDY, {"seed": 1}, save=tmp_path, executor=executor)


@pytest.mark.slow
def test_the_executor_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ssh is one that stays here."""
    (block,) = [block for block in read((ROOT / "docs/how-to/sweep.md").read_text()).blocks if block.title == "ssh.py"]
    (tmp_path / "ssh.py").write_text(block.text)
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift 2\nexec sh -c "exec $*"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executor = load_module("executor", tmp_path / "ssh.py").OverSSH()
    outcomes = run_all({name: STUDY.replace(seed=int(name)) for name in "12"}, tmp_path / "runs", executor=executor)
    assert [outcome.status for outcome in outcomes] == ["done", "done"]


SCRIPT = """
import stratafl
print("once", flush=True)
experiment = stratafl.Experiment(
    model="logistic", tree="2x2", rounds=1000000, data={"source": "synthetic", "arguments": {"samples": 20}})
print(stratafl.sweep(experiment, {"seed": 2}, save="runs", workers=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_without_a_guard_leaves_no_process(number: int, tmp_path: Path) -> None:
    """Its own code runs once; stopped or killed, its runs end in checkpoints."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    runs = tmp_path / "runs"
    wait(lambda: runs.is_dir() and sum(run.round > 2 for run in list_runs(runs)) == 2, every=0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert out.splitlines()[0] == "once" and "once" not in out[1:]
    assert process.returncode == (130 if number == signal.SIGINT else -9) and "Traceback" not in err
    wait(lambda: all(run.status == "interrupted" for run in list_runs(runs)), every=0.05)
    for run in list_runs(runs):
        assert (run.reason, [*(run.path / "checkpoints").iterdir()] != []) == ("it was stopped", True)
