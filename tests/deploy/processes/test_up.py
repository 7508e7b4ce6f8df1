"""The whole way of somebody who tries it: up, Ctrl-C, status, up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr")

from stratafl.deploy.host import this_machine
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.experiment.experiment import Experiment
from stratafl.runs import read_run
from stratafl.runs.format import is_locked

pytestmark = pytest.mark.deploy
LIMIT = 300
CONFIG = """
rounds = 12
[tree]
shape = "2"
[model]
name = "mlp"
hidden = [8]
[schedule]
periods = [3]
"""


def stratafl(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stratafl", "deploy", *arguments, "--out", str(folder / "sites")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_stops_a_tree_and_up_goes_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {31000 + os.getpid() % 1000}\n')
    up = "up", str(tmp_path / "topology.toml"), "--local"
    first = stratafl(tmp_path, *up)
    assert first.stdout is not None
    assert first.stdout.readline().startswith("round 1 of 12")
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=LIMIT)
    assert first.returncode == 128 + signal.SIGINT and "go on with: stratafl deploy up" in said, said
    assert [is_locked(folder) for folder in this_machine.sites(tmp_path / "sites").values()] == [False] * 3

    stopped = read_run(tmp_path / "sites" / "root")
    assert stopped.status == "interrupted" and stopped.round >= 1

    again = stratafl(tmp_path, *up)
    shown, said = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, said
    assert "round 12 of 12" in shown and "the model:" in shown and "round 1 of 12" not in shown
    rounds = [json.loads(line)["round"] for line in (tmp_path / "sites/root/rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 13))
    run = read_run(tmp_path / "sites" / "root")
    assert (run.status, run.round, run.total) == ("done", 12, 12) and run.summary is not None
    assert [each["after"] for each in run.continued] == [stopped.round]
    wanted = reference_simulation(Experiment.from_toml(tmp_path / "run.toml")).run().module.state_dict()
    found = load_file(tmp_path / "sites" / "root" / "model.safetensors")
    assert max(float((found[name] - value).abs().max()) for name, value in wanted.items()) < 1e-6

    over: list[str] = []
    this_machine.run(tmp_path / "sites", over.append)
    assert over == [] and (tmp_path / "sites/root/rounds.jsonl").read_text().count("\n") == 12


def test_a_supervisor_that_is_killed_is_started_again_and_the_run_ends(tmp_path: Path) -> None:
    """The root's, and a leaf's whose state is then gone; no level has a deadline."""
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {32000 + os.getpid() % 1000}\n')
    running = stratafl(tmp_path, "up", str(tmp_path / "topology.toml"), "--local")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("round 1 of 12")
    for name in ("root", "0"):
        os.kill(int((tmp_path / "sites" / name / "lock").read_text()), signal.SIGKILL)
    state = tmp_path / "sites" / "0" / "state"
    while is_locked(state):  # its processes end with it
        time.sleep(0.01)
    (state / "state.safetensors").unlink()
    shown, said = running.communicate(timeout=LIMIT)
    assert running.returncode == 0, said
    rounds = [json.loads(line) for line in (tmp_path / "sites/root/rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds] == list(range(1, 13)) and not any(line["absent"] for line in rounds)
    assert "round 12 of 12" in shown
    assert "0 has lost its state" in (tmp_path / "sites/root/logs/node.log").read_text()
