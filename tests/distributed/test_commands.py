"""Commands on several ranks, as real processes: exit codes, output, a killed rank, resuming on
another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stratafl.experiment.experiment import Experiment
from stratafl.runs.checkpoint import Checkpoints, Progress
from stratafl.runs.session import RunSession
from tests.distributed.conftest import ROOT
from tests.runs.conftest import records, wait

pytestmark = pytest.mark.slow
ROUNDS = 30
# a linear model: with ReLU, the last digits of float32 decide whether a unit is on, and the order
# of a sum would change the result
CONFIG = f"""
rounds = {ROUNDS}
plugins = ["slow.py"]

[tree]
shape = [5, 2, 1]

[data]
partition = [{{ name = "dirichlet", alpha = 1.0 }}, {{ name = "dirichlet", alpha = 0.5 }}]

[model]
name = "mlp"
hidden = []

[method]
rules = ["mtgc", "scaffold"]

[schedule]
periods = [2, 2]
participation = [1.0, 2]

[client]
batch_size = 10

[storage]
checkpoint_every = 1
keep_state = true
"""
SLOW = """
import time
from stratafl import Simulation

quick = Simulation.advance

def slow(self):
    time.sleep(0.1)
    return quick(self)

Simulation.advance = slow
"""
"""Plugin that slows a run down, so that there is time to kill a process before it ends."""
SECONDS = 120


class Commands:
    """Commands started in one folder, which end with the test that has started them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, *command: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *command: object) -> tuple[int, str, str]:
        return ended(self.start(*command))


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=SECONDS)
    return process.returncode, said, complained


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    (tmp_path / "study.toml").write_text(CONFIG)
    (tmp_path / "slow.py").write_text(SLOW)
    commands = Commands(tmp_path)
    yield commands
    for process in commands.started:
        if process.poll() is None:
            process.terminate()
            process.wait(SECONDS)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "study.toml").write_text(CONFIG)
    experiment = Experiment.from_toml(folder / "study.toml", ["plugins=[]"])
    return RunSession.start(experiment, "study", folder).run().path


def state(run: Path) -> dict:
    return Checkpoints(run, json.loads((run / "run.json").read_text())["id"]).read(Progress(ROUNDS))


def assert_alike(run: Path, other: Path, close: float) -> None:
    one, two = state(run), state(other)
    for a, b in zip(one["federation"]["levels"], two["federation"]["levels"], strict=True):
        for name in ("model", "broadcast"):
            torch.testing.assert_close(a[name], b[name], rtol=close, atol=close)
    for a, b in zip(one["history"], two["history"], strict=True):
        for name in ("round", "steps", "refused", "bytes_per_client", "traffic"):
            assert a[name] == b[name]
        assert a["metrics"]["loss"] == pytest.approx(b["metrics"]["loss"], rel=max(close, 1e-12))


def only_run(folder: Path) -> Path | None:
    return next((path for path in folder.glob("runs/*") if not path.name.startswith(".")), None)


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def ranks_of(process: subprocess.Popen, run: Path) -> list[int]:
    """The processes of the ranks, the first one's first."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"study" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    first = status(run)["pid"]
    return sorted(ranks, key=lambda pid: (pid != first, pid))


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")


@needs_proc
def test_run_with_a_killed_rank_can_be_resumed(commands: Commands, undisturbed: Path) -> None:
    process = commands.start("stratafl", "run", "study.toml", "--nproc", 2, "--quiet")
    wait(lambda: records(only_run(commands.folder)) > 2, every=0.01)
    run = only_run(commands.folder)
    assert run is not None
    for victim, more in ((1, 4), (0, None)):
        ranks = ranks_of(process, run)
        os.kill(ranks[victim], signal.SIGKILL)
        began = time.monotonic()
        code, said, complained = ended(process)
        assert time.monotonic() - began < 20, "seconds, on a machine that may be busy"
        assert (code, said) == (3, "")
        hint = f"go on with: stratafl resume {Path('runs') / run.name}"
        lines = [line for line in complained.splitlines() if "goes on after" not in line]
        assert lines == [f"error: rank {victim} was ended by SIGKILL; {hint}"]
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        if victim == 1:
            assert (status(run)["status"], status(run)["reason"]) == ("failed", "another process of this run is gone")
        done = records(run)
        assert 2 < done < ROUNDS
        if more:
            process = commands.start("stratafl", "resume", Path("runs") / run.name, "--nproc", more, "--quiet")
            wait(lambda: records(run) > done, every=0.01)
    code, _, complained = commands.run("stratafl", "resume", run, "--quiet")
    assert code == 0, complained
    assert_alike(run, undisturbed, 1e-5)


@needs_proc
def test_sigterm_stops_and_saves_the_run(commands: Commands) -> None:
    process = commands.start("stratafl", "run", "study.toml", "--nproc", 2, "--quiet")
    wait(lambda: records(only_run(commands.folder)) > 1, every=0.01)
    run = only_run(commands.folder)
    assert run is not None
    process.send_signal(signal.SIGTERM)
    code, _, complained = ended(process)
    assert code == 143
    assert complained == f"interrupted; go on with: stratafl resume {Path('runs') / run.name}\n"
    assert status(run)["status"] == "interrupted"
    assert f"{status(run)['round']:06d}" in [path.name for path in (run / "checkpoints").iterdir()]


def test_torchrun_gives_the_results_of_one_rank(commands: Commands, undisturbed: Path) -> None:
    arguments = ("-m", "stratafl", "run", "study.toml", "--set", "plugins=[]", "--json")
    for count, close in ((1, 0.0), (2, 1e-5)):
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", count)
        code, said, complained = commands.run(*launcher, *arguments, "--name", f"on{count}")
        assert code == 0, complained
        summary = json.loads(said)
        assert complained.count(f"round {ROUNDS}/{ROUNDS}") == 1, "only one rank speaks"
        assert_alike(commands.folder / summary["path"], undisturbed, close)


@needs_proc
def test_run_with_a_killed_rank_under_torchrun(commands: Commands, undisturbed: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    process = commands.start(*launcher, "-m", "stratafl", "run", "study.toml", "--quiet")
    wait(lambda: records(only_run(commands.folder)) > 2, every=0.01)
    run = only_run(commands.folder)
    assert run is not None
    os.kill(ranks_of(process, run)[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, complained = ended(process)
    assert time.monotonic() - began < 20, "seconds, on a machine that may be busy"
    assert code != 0
    hint = f"go on with: stratafl resume {Path('runs') / run.name}"
    assert complained.count(f"error: another process of this run is gone; {hint}") == 1
    assert (status(run)["status"], status(run)["reason"]) == ("failed", "another process of this run is gone")
    code, _, complained = commands.run("stratafl", "resume", run, "--nproc", 2, "--quiet")
    assert code == 0, complained
    assert_alike(run, undisturbed, 1e-5)


BROKEN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        if {when}:
            raise ValueError("no more")
        return self.layer(x.flatten(1))
"""


@pytest.mark.parametrize("when", ["count() > 60", "count() > 60 and RANK == '1'"])
def test_error_in_user_code_shows_its_lines(commands: Commands, when: str) -> None:
    start = "import itertools, os\nRANK = os.environ['RANK']\nsteps = itertools.count()\ncount = lambda: next(steps)\n"
    (commands.folder / "net.py").write_text(start + BROKEN.format(when=when))
    text = CONFIG.replace('name = "mlp"\nhidden = []', 'name = "net.py:Net"').replace('plugins = ["slow.py"]', "")
    (commands.folder / "study.toml").write_text(text)
    code, _, complained = commands.run("stratafl", "run", "study.toml", "--nproc", 2, "--quiet")
    assert code == 4, complained
    line = "model 'Net': Net.forward raised ValueError: no more, in round"
    lines = complained.splitlines()
    (first,) = [number for number, text_line in enumerate(lines) if text_line.startswith(f"error: {line}")]
    assert lines[first + 1].endswith("net.py, line 15, in forward")
    assert lines[first + 2] == '    raise ValueError("no more")'
    run = only_run(commands.folder)
    assert run is not None
    assert status(run)["status"] == "failed" and status(run)["reason"].startswith(line)


def test_invalid_input_is_reported_once(commands: Commands) -> None:
    code, said, complained = commands.run("stratafl", "run", "study.toml", "--nproc", 3, "--set", "client.lr=-1")
    assert (code, said) == (2, "")
    assert complained.startswith("error: ") and complained.count("\n") == 1 and "lr" in complained
    small = ("--set", "tree.shape=[2, 1]", "--set", "plugins=[]")
    code, _, complained = commands.run("stratafl", "run", "study.toml", "--nproc", 4, *small)
    assert code == 2
    assert complained == "error: --nproc = 4: the tree has 3 clients; every process needs one at least\n"
    assert not (commands.folder / "runs").exists()
