"""What a user is told is what happened: checked through the commands and `simulate` alone, as a
user would."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from stratafl.cli.main import main
from tests.flat import simulate
from tests.sweeps.inline import OPTION

CONFIG = """
rounds = 6

[tree]
shape = "2x2"

[data]
source = "synthetic"
arguments = {samples = 20, features = 5, classes = 3}

[model]
name = "net.py:Net"

[method]
name = "mtgc"

[schedule]
periods = [2, 2]

[execution]
engine = "loop"

[storage]
checkpoint_every = 1
keep_state = true
"""

NETS = """
import torch
from pathlib import Path
from torch import nn

calls = 0

class Net(nn.Linear):
    \"\"\"While a file says so, it is interrupted in the middle of its training.\"\"\"
    def __init__(self, input_shape, classes):
        super().__init__(input_shape[0], classes)

    def forward(self, x):
        global calls
        calls += self.training
        if calls > 60 and Path("stop").exists():
            raise KeyboardInterrupt
        return super().forward(x)

class Fragile(Net):
    \"\"\"Trains for ever, and has no scores any more once its weights are large.\"\"\"
    def forward(self, x):
        scores = super().forward(x)
        return scores if self.training else scores / (self.weight.norm() < 1.3)

class Masked(Net):
    \"\"\"Adds a mask to its scores that rules one of them out.\"\"\"
    def __init__(self, input_shape, classes):
        super().__init__(input_shape, classes + 1)
        self.register_buffer("mask", torch.tensor([0.0] * classes + [-torch.inf]))

    def forward(self, x):
        return super().forward(x) + self.mask

class Hopeless(Net):
    \"\"\"Its gradients are no numbers.\"\"\"
    def forward(self, x):
        return super().forward(x) * (torch.nan if self.training else 1.0)
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def stratafl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Said]:
    """The command in a folder with a config and modules; what nobody caught ends it with 1, as in a
    shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    Path("study.toml").write_text(CONFIG)
    Path("net.py").write_text(NETS)

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["stratafl", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except (Exception, KeyboardInterrupt):
            code = 1
            traceback.print_exc()
        return Said(code, *capsys.readouterr())

    return run


def only_run(name: str = "study") -> Path:
    (path,) = (path for path in Path("runs").iterdir() if path.name.startswith(f"{name}-"))
    return path


def edit(path: Path, *keys: str | int, to: Any) -> None:
    described = inside = json.loads(path.read_text())
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = to
    path.write_text(json.dumps(described))


def check_one_line(said: Said) -> None:
    assert said.code == 2, said.err[-400:]
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.err[:-1].isprintable()


# -- runs that diverge -----------------------------------------------------------------------------


@pytest.fixture
def dead_and_alive(stratafl) -> int:
    """Two runs, and the round in which the first of them died."""
    for name, lr in (("dead", 0.3), ("alive", 0.001)):
        changes = ("model.name=net.py:Fragile", f"client.lr={lr}")
        said = stratafl("run", "study.toml", "-q", "--name", name, *(f"--set={change}" for change in changes))
        assert said.code == 0, said.err
    died = next(each["round"] for each in rounds("dead") if not math.isfinite(each["metrics"]["loss"]))
    assert 1 < died < 6
    return died


def rounds(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (only_run(name) / "rounds.jsonl").read_text().splitlines()]


def test_scores_that_are_no_numbers_have_no_accuracy(dead_and_alive: int) -> None:
    assert all(math.isnan(each["metrics"]["accuracy"]) for each in rounds("dead")[dead_and_alive - 1 :])
    assert all(math.isfinite(each["metrics"]["accuracy"]) for each in rounds("alive"))


@pytest.mark.parametrize("file", ["summary.json", "status.json"])
def test_the_record_says_when_a_run_diverged(dead_and_alive: int, file: str) -> None:
    found = [json.loads((only_run(name) / file).read_text()).get("diverged", "unsaid") for name in ("dead", "alive")]
    assert found == [dead_and_alive, None]


def test_the_listing_says_when_a_run_diverged(stratafl, dead_and_alive: int) -> None:
    listed = json.loads(stratafl("runs", "list", "--json").out)["runs"]
    assert [run.get("diverged", "unsaid") for run in listed] == [None, dead_and_alive]


def test_the_listing_s_table_marks_a_run_that_diverged(stratafl, dead_and_alive: int) -> None:
    shown = stratafl("runs").out.splitlines()
    rows = [next(row for row in shown if only_run(name).name in row) for name in ("dead", "alive")]
    assert ["diverged" in row for row in rows] == [True, False]


def test_the_report_shows_no_number_for_a_run_that_diverged(stratafl, dead_and_alive: int) -> None:
    said = stratafl("report", "runs")
    assert said.code == 0, said.err
    assert f"diverged at round {dead_and_alive}" in said.out
    assert f"diverged at round {dead_and_alive}" in Path("report.html").read_text()


def test_a_sweep_shows_no_number_for_a_run_that_diverged(stratafl) -> None:
    Path("grid.toml").write_text(
        'config = "study.toml"\n[base]\nmodel.name = "net.py:Fragile"\n[grid]\n"client.lr" = [0.3, 0.001]\n'
    )
    said = stratafl("sweep", "grid.toml", "--executor", OPTION, "-q", "--json")
    assert said.code == 0, said.err
    dead, alive = json.loads(said.out)["groups"]
    assert (dead["final"], dead.get("final_text")) == (None, "diverged")
    assert alive["final_text"] == f"{alive['final']:.4f}"


# -- refusals --------------------------------------------------------------------------------------


def test_a_round_in_which_all_are_refused_costs_little_more_than_any_other() -> None:
    """Among ten thousand, it is ten times as much where each name is searched for among the
    others."""
    clients = 10_000
    labels, parts = torch.arange(clients) % 2, list(np.arange(clients)[:, None])
    settings: dict[str, Any] = {"periods": [1, 1], "rounds": 2, "engine": "stacked"}

    def cost(value: float, refused: int) -> float:
        began = time.process_time()
        data = torch.full((clients, 2), value), labels
        sim = simulate(nn.Linear(2, 2), data, parts, "100x100", "hfedavg", **settings)
        next(sim)
        assert len(sim.result().refused) == refused
        return time.process_time() - began

    healthy = min(cost(1.0, 0) for _ in range(2))
    assert min(cost(math.nan, clients) for _ in range(3)) < 4 * healthy


def test_a_mask_among_the_buffers_is_no_reason_to_refuse(stratafl) -> None:
    said = stratafl("run", "study.toml", "-q", "--json", "--set", "model.name=net.py:Masked")
    assert said.code == 0, said.err
    records = [json.loads(line) for line in (only_run() / "rounds.jsonl").read_text().splitlines()]
    assert all(each["refused"] == [] for each in records)
    assert records[-1]["metrics"]["loss"] < records[0]["metrics"]["loss"]


def test_a_run_in_which_nobody_trains_is_no_success(stratafl) -> None:
    said = stratafl("run", "study.toml", "-q", "--set", "model.name=net.py:Hopeless")
    assert said.code != 0
    assert "every update was refused" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize("method", ["hfedavg", "mtgc"])
@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_client_with_huge_data_is_refused_and_nobody_else(method: str, culprit: int) -> None:
    """Its first steps are finite, and would carry the others to where theirs are not."""
    random = torch.Generator().manual_seed(2)
    inputs, labels = torch.randn(24, 3, generator=random), torch.arange(24) % 2
    parts = list(np.arange(24).reshape(4, 6))
    inputs[parts[culprit]] = -1e38
    settings: dict[str, Any] = {"periods": [2, 1], "rounds": 4, "batch": 3, "seed": 1}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    result = simulate(model, (inputs, labels), parts, "2x2", method, **settings).run()
    assert set(result.refused) == {f"{culprit // 2}/{culprit % 2}"}
    assert result.models[0].abs().max() < 100


# -- going on --------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(stratafl) -> Path:
    Path("stop").touch()
    said = stratafl(
        "run", "study.toml", "-q", "--set", "client.batch_size=4", "--set", "schedule.participation=[1.0, 1.0]"
    )
    assert said.code != 0 and list((only_run() / "checkpoints").iterdir()), said
    Path("stop").unlink()
    return only_run()


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("client", "lr", 0.25, "client.lr was 0.1 and is 0.25"),
        ("client", "batch_size", 5, "client.batch_size was 4 and is 5"),
        ("schedule", "periods", [3, 2], "schedule.periods was [2, 2] and is [3, 2]"),
        ("schedule", "participation", [1.0, 0.5], "schedule.participation was [1.0, 1.0] and is [1.0, 0.5]"),
        (None, None, None, "net.py was changed"),
    ],
)
def test_a_run_whose_inputs_changed_goes_on_only_by_force(
    stratafl, interrupted: Path, section: str | None, key: str, value: Any, named: str
) -> None:
    if section is None:
        Path("net.py").write_text(NETS.replace("return super().forward(x)\n", "return 2 * super().forward(x)\n", 1))
    else:
        edit(interrupted / "run.json", "config", section, key, to=value)
    refused = stratafl("resume", interrupted, "-q")
    check_one_line(refused)
    assert named in refused.err
    forced = stratafl("resume", interrupted, "-q", "--allow-changes")
    assert forced.code == 0, forced.err
    (run,) = json.loads(stratafl("runs", "list", "--json").out)["runs"]
    assert run["status"] == "done"
    assert named in json.dumps([json.loads(path.read_text()) for path in interrupted.glob("*.json")])


def test_a_checkpoint_is_as_large_late_as_early(stratafl) -> None:
    sizes = []
    for rounds in (10, 40):
        stratafl("run", "study.toml", "-q", "--name", f"r{rounds}", "--set", f"rounds={rounds}")
        (checkpoint,) = (only_run(f"r{rounds}") / "checkpoints").iterdir()
        sizes.append(sum(path.stat().st_size for path in checkpoint.iterdir()))
    assert abs(sizes[1] - sizes[0]) < 300


# -- wrong input -----------------------------------------------------------------------------------

WRONG = {
    "alpha as text": 'data.arguments.alpha="much"',
    "alpha as a list": "data.arguments.alpha=[1.0, [2.0]]",
    "alpha as a table": "data.arguments.alpha={a=1}",
    "an integer of many digits": f"seed={'9' * 4_400}",
    "a tree of many levels": f'tree.shape="{"x".join(["1"] * 2_000)}"',
    "a device without numbers": 'execution.device="meta"',
    "a model that ends Python": 'model.name="builtins:exit"',
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_a_wrong_value_is_one_line(stratafl, change: str) -> None:
    check_one_line(stratafl("run", "study.toml", "-q", "--set", change))


@pytest.mark.parametrize(
    "change",
    ['data.partition=[{name=["iid"]}, {name="iid"}]', "data.rotation={start=1" + "0" * 30 + ", step=10, level=1}"],
    ids=["a partition named by a list", "a rotation by more than a number holds"],
)
def test_a_wrong_value_about_pictures_is_one_line(stratafl, change: str) -> None:
    Path("study.toml").write_text(CONFIG.replace('"synthetic"', '"digits"').replace("arguments = {", "# {"))
    check_one_line(stratafl("run", "study.toml", "-q", "--set", change))


def test_an_integer_of_many_digits_in_a_file_is_one_line(stratafl) -> None:
    Path("study.toml").write_text(CONFIG.replace("rounds = 6", f"rounds = {'9' * 4_400}"))
    check_one_line(stratafl("run", "study.toml", "-q"))


# -- one damaged run among others ------------------------------------------------------------------


@pytest.fixture
def two_runs(stratafl) -> Path:
    """A healthy run, and the folder of one that is about to be damaged."""
    assert stratafl("run", "study.toml", "-q", "--name", "healthy").code == 0
    hurt = only_run("healthy").with_name("hurt-1")
    shutil.copytree(only_run("healthy"), hurt)
    edit(hurt / "run.json", "name", to="hurt")
    return hurt


@pytest.mark.parametrize("seconds", ["text", None, [], {}], ids=str)
def test_a_damaged_number_takes_no_listing_down(stratafl, two_runs: Path, seconds: Any) -> None:
    lines = (two_runs / "rounds.jsonl").read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), "seconds": seconds})
    (two_runs / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    for options in ((), ("--json",)):
        said = stratafl("runs", "list", *options)
        assert said.code == 0, said.err[-400:]
        assert "healthy" in said.out


def test_a_label_count_that_is_infinite_takes_no_report_down(stratafl, two_runs: Path) -> None:
    edit(two_runs / "tree.json", "levels", 1, "labels", 0, 0, to=math.inf)
    said = stratafl("report", "runs")
    assert said.code == 0, said.err[-400:]
    assert "healthy" in Path("report.html").read_text()


def test_a_pipe_named_lock_keeps_nobody_waiting(stratafl, two_runs: Path) -> None:
    edit(two_runs / "status.json", "status", to="running")
    (two_runs / "lock").unlink(missing_ok=True)
    os.mkfifo(two_runs / "lock")
    command = [sys.executable, "-m", "stratafl", "runs"]
    package = Path(sys.modules["stratafl"].__path__[0]).parent
    environment = {**os.environ, "PYTHONPATH": str(package)}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    except subprocess.TimeoutExpired:
        ended = None
    assert ended is not None, "it waits for the other end of the pipe"
    assert ended.returncode == 0 and "healthy" in ended.stdout


def test_stored_texts_do_not_steer_the_terminal(stratafl, two_runs: Path) -> None:
    steering = "\x1b[2J\x1b]0;mine\x07\x9b31m"
    edit(two_runs / "run.json", "name", to=steering)
    edit(two_runs / "status.json", "reason", to=steering)
    edit(two_runs / "status.json", "status", to="failed")
    said = stratafl("runs")
    assert said.code == 0 and "healthy" in said.out
    assert not set("\x1b\x07\x9b") & set(said.out + said.err)
