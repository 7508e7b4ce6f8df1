"""Runs that are killed at any moment, real processes by real signals, end with the bits of one that
was not."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.runs.broken.killed import is_writing, only, start
from tests.runs.conftest import Server, contents, records, wait

ROUNDS = 60
CONFIG = f"""
rounds = {ROUNDS}

[tree]
shape = "2x3"
[data]
partition = [{{ name = "dirichlet", alpha = 1.0 }}, {{ name = "dirichlet", alpha = 0.5 }}]
[model]
name = "mlp"
hidden = [64]
[method]
rules = ["mtgc", "scaffold"]
[schedule]
periods = [2, 2]
participation = [1.0, 2]
[client]
batch_size = 10
optimizer = {{ name = "sgd", momentum = 0.5 }}
[evaluation]
levels = [1]
[storage]
checkpoint_every = 1
keep_state = true
"""


@pytest.fixture(scope="module")
def config(server: Server) -> Path:
    path = server.folder / "study.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def undisturbed(server: Server, config: Path) -> dict:
    code, said = server.run("run", config, "--quiet", "--runs", "whole")
    assert code == 0, said
    (run,) = (server.folder / "whole").iterdir()
    return contents(run)


@pytest.mark.slow
def test_killed_twenty_times(server: Server, config: Path, undisturbed: dict, tmp_path: Path) -> None:
    chance = random.Random(20)
    moments = ["first round"] * 3 + ["checkpoint", "anytime", "training"] * 6
    moments[3:] = chance.sample(moments[3:], len(moments) - 3)
    assert len(moments) > 20
    process, run = start(server, tmp_path / "runs", config)
    met: Counter[str] = Counter()
    for number, moment in enumerate(moments):
        if number:
            process = server.start("resume", run, "--quiet")
        before = records(run)
        if moment == "first round":
            wait(lambda: json.loads((run / "status.json").read_text())["pid"] == process.pid)
            time.sleep(chance.uniform(0, 0.002))
        elif moment == "checkpoint":
            wait(lambda: records(run) >= min(before, 1) and is_writing(run))
            time.sleep(chance.uniform(0, 0.004))
        elif moment == "training":
            wait(lambda: records(run) > max(before - 2, 0) and not is_writing(run))
        else:
            moment_to_kill = time.monotonic() + chance.uniform(0.0, 0.5)
            # on a fast machine the run must not be over by then
            wait(lambda: time.monotonic() > moment_to_kill or records(run) > before + 4)
        process.kill(signal.SIGKILL)
        assert process.ends() == -signal.SIGKILL, process.said()
        met["before the first record"] += records(run) == 0
        met["half a checkpoint"] += is_writing(run)
        met["between"] += records(run) > 0 and not is_writing(run)
        assert records(run) < ROUNDS, "the run must not be over before the last kill"
    assert met["before the first record"] >= 2 and met["half a checkpoint"] >= 2 and met["between"] >= 2, met
    code, said = server.run("resume", run)
    assert code == 0, said
    assert contents(run) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_again_and_again(
    server: Server, config: Path, undisturbed: dict, tmp_path: Path, number: signal.Signals
) -> None:
    chance = random.Random(int(number))
    process, run = start(server, tmp_path / "runs", config)
    done = 0
    for _ in range(3):
        # before its first round a process has nothing to save, and ends like any other
        wait(lambda: records(run) > done)
        time.sleep(chance.uniform(0.0, 0.05))
        process.kill(number)
        assert process.ends() == 128 + number, process.said()
        assert process.said().splitlines()[-1] == f"interrupted; go on with: stratafl resume {run}"
        status = json.loads((run / "status.json").read_text())
        assert (status["status"], status["reason"]) == ("interrupted", "it was stopped")
        assert f"{status['round']:06d}" in [path.name for path in (run / "checkpoints").iterdir()]
        assert not is_writing(run)
        done = records(run)
        assert done == status["round"] < ROUNDS
        process = server.start("resume", run, "--quiet")
    assert process.ends() == 0, process.said()
    assert contents(run) == undisturbed


def test_a_second_signal_stops_at_once(server: Server, config: Path, undisturbed: dict, tmp_path: Path) -> None:
    process, run = start(server, tmp_path / "runs", config)
    wait(lambda: records(run) >= 2)
    process.kill(signal.SIGINT)
    process.kill(signal.SIGTERM)
    assert process.ends() in (130, 143), process.said()
    assert "Traceback" not in process.said()
    assert not is_writing(run)
    code, said = server.run("resume", run, "--quiet")
    assert code == 0, said
    assert contents(run) == undisturbed


STOPPING = """
import os, pathlib, signal
from stratafl import Simulation

advance, left = Simulation.advance, [int(pathlib.Path(__file__).with_name("moment").read_text())]

def counted(self):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return advance(self)

Simulation.advance = counted
"""
"""A plugin that interrupts the run before a group round: in a file beside it is before which."""


def test_a_signal_waits_for_no_more_than_the_group_round(server: Server, tmp_path: Path) -> None:
    plugin, moment, config = tmp_path / "stopping.py", tmp_path / "moment", tmp_path / "study.toml"
    plugin.write_text(STOPPING)
    config.write_text(CONFIG)
    changes = {"plugins": json.dumps([str(plugin)]), "rounds": 2, "schedule.periods": "[7, 1]"}
    options = [text for key, value in changes.items() for text in ("--set", f"{key}={value}")]
    moment.write_text("0")
    assert server.run("run", config, "--quiet", "--runs", tmp_path / "whole", *options)[0] == 0
    moment.write_text("3")
    assert server.run("run", config, "--quiet", "--runs", tmp_path / "runs", *options)[0] == 130
    run = only(tmp_path / "runs")
    for place in ((0, 3), (0, 6), (1, 2), (1, 5)):
        status = json.loads((run / "status.json").read_text())
        assert (status["status"], status["round"], status["meetings"]) == ("interrupted", *place)
        assert max(path.name for path in (run / "checkpoints").iterdir()) == "{:06d}-{:06d}".format(*place)
        code, said = server.run("resume", run, "--quiet")
        assert f"goes on after round {place[0]} and {place[1]} meetings of the next" in said
    assert code == 0, said
    assert contents(run) == contents(only(tmp_path / "whole"))
