"""Sweeps on this machine: what is skipped and continued, and what a failure and a Ctrl-C do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratafl.base.signals import Interrupted
from stratafl.cli.main import app
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import Goal
from stratafl.runs import list_runs, read_run
from stratafl.sweeps import LocalExecutor, note_target, noted_target, run_all
from stratafl.sweeps.sweep import Event
from tests.runs.conftest import Server, contents
from tests.runs.stopped import CONFIG
from tests.sweeps.inline import OPTION

BASE = {**CONFIG, "rounds": 3, "storage": {"keep_state": True}}
ENDLESS = {**CONFIG, "rounds": 10**6, "storage": {"checkpoint_every": 5}}


@pytest.fixture(scope="module")
def local() -> Iterator[LocalExecutor]:
    """Two processes at a time, forked from one server for all tests."""
    executor = LocalExecutor(2)
    yield executor
    executor.close()


def test_a_sweep_skips_finished_runs_and_resumes_others(local: LocalExecutor, tmp_path: Path) -> None:
    good = {f"seed{seed}": Experiment.from_table({**BASE, "seed": seed}) for seed in (1, 2)}
    plugin = tmp_path / "fatal.py"
    plugin.write_text("import os, sys\nprint('farewell', file=sys.stderr, flush=True)\nos._exit(7)\n")
    bad = {
        "refused": Experiment.from_table({**BASE, "method": {"name": "nonesuch"}}),
        "fatal": Experiment.from_table({**BASE, "plugins": [str(plugin)]}),
    }
    seen: list[tuple[str, str]] = []
    folder = tmp_path / "runs"
    outcomes = run_all({**bad, **good}, folder, 2, lambda event: seen.append((event.name, event.kind)), executor=local)
    output = {outcome.name: (outcome.status, outcome.reason) for outcome in outcomes}
    assert list(output) == ["refused", "fatal", "seed1", "seed2"]
    assert output["seed1"] == output["seed2"] == ("done", "")
    assert output["refused"][0] == "failed" and "unknown" in output["refused"][1]
    assert output["fatal"] == ("failed", "its process ended with exit code 7: farewell")
    assert seen.index(("seed1", "began")) < seen.index(("seed1", "round")) < seen.index(("seed1", "ended"))
    assert not list((folder / "jobs").glob("seed*")), "of these there is nothing to tell"
    assert (folder / "jobs" / "fatal.log").read_text() == "farewell\n"

    # one of the two is set back to where it was interrupted
    first = next(outcome.path for outcome in outcomes if outcome.name == "seed1")
    before = contents(first)
    status = json.loads((first / "status.json").read_text())
    (first / "status.json").write_text(json.dumps({**status, "status": "running"}))
    (first / "checkpoints" / "000003").rename(first / "checkpoints" / "000009")
    again = run_all(good, folder, 1, executor=local)
    assert [(o.name, o.status, o.was_done, o.path == first) for o in again] == [
        ("seed1", "done", False, True),
        ("seed2", "done", True, False),
    ]
    assert contents(first) == before
    assert len(list_runs(folder)) == 2
    # how a run is kept makes it no other run; what it computes does
    kept = {"seed2": good["seed2"].replace(storage={"checkpoint_every": 1})}
    other = {"seed2": good["seed2"].replace(rounds=4, storage={})}
    assert [o.was_done for o in run_all(kept, folder, executor=local)] == [True]
    assert [(o.was_done, o.status) for o in run_all(other, folder, executor=local)] == [(False, "done")]


def test_a_dead_process_frees_its_own_slot(tmp_path: Path) -> None:
    """Every slot has a GPU of its own, which would be idle, or be used twice."""
    plugin = tmp_path / "gpu.py"
    plugin.write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nos.kill(os.getpid(), 9)\n")
    dying = Experiment.from_table({**BASE, "plugins": [str(plugin)]})
    slow = tmp_path / "slow.py"
    slow.write_text("import time\nwhile not __import__('pathlib').Path('stop').exists(): time.sleep(0.01)\n")
    experiments = {"slow": Experiment.from_table({**BASE, "plugins": [str(slow)]})} | dict.fromkeys("abc", dying)
    ended = []

    def watch(event: Event) -> None:
        ended.extend([event.name] if event.kind == "ended" else [])
        if len(ended) == 3:
            Path("stop").touch()

    executor = LocalExecutor(2, gpus=["5", "7"])
    with contextlib.chdir(tmp_path):
        outcomes = run_all(experiments, tmp_path / "runs", watch=watch, executor=executor)
    executor.close()
    assert [(o.status, o.reason) for o in outcomes] == [("done", "")] + [
        ("failed", "its process ended with signal 9: 7")
    ] * 3


def test_the_server_of_processes_may_die(local: LocalExecutor, tmp_path: Path) -> None:
    """What it was at has failed, and the next run has another one."""
    plugin = tmp_path / "fatal.py"
    plugin.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    experiments = {"a": Experiment.from_table({**BASE, "plugins": [str(plugin)]})}
    (outcome,) = run_all(experiments, tmp_path / "runs", executor=local)
    assert (outcome.status, outcome.reason) == ("failed", "its process ended with signal 9")
    plugin.write_text("")
    assert [o.status for o in run_all(experiments, tmp_path / "runs", executor=local)] == ["done"]


def test_a_sweep_notes_its_target(tmp_path: Path) -> None:
    goal = Goal("loss", 0.5, "<=")
    note_target(tmp_path, goal)
    assert noted_target(tmp_path) == goal
    note_target(tmp_path, None)
    assert noted_target(tmp_path) is None
    for text in ("[]", '{"target": 3}', "{", '{"target": {"metric": "loss", "value": "low", "sign": ""}}'):
        (tmp_path / "sweep.json").write_text(text)
        assert noted_target(tmp_path) is None


def test_a_target_that_nothing_measures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty column would not say why it is empty."""
    config = 'rounds = 1\nmodel.name = "logistic"\nschedule.periods = [1, 1]\nstorage.keep_state = true\n'
    config += 'data = { source = "synthetic", arguments = { samples = 20, features = 3, classes = 2 } }\n'
    for name, text in {"base.toml": config, "study.toml": 'config = "base.toml"\ntarget = "f1 >= 0.5"\n'}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for words, field in (([], "target = 'f1 >= 0.5'"), (["--target", "f1=0.7"], "--target = 'f1=0.7'")):
        ran = CliRunner().invoke(app, ["sweep", "study.toml", "--executor", OPTION, "--quiet", *words])
        assert str(ran.exception) == f"{field}: these runs have accuracy, loss"
    ran = CliRunner().invoke(app, ["sweep", "study.toml", "--executor", OPTION, "--quiet", "--target", "loss=9"])
    assert ran.exit_code == 0 and "rounds to 9" in ran.output and len(list_runs(tmp_path / "runs")) == 1


@pytest.mark.slow
def test_a_signal_stops_all_and_the_same_call_goes_on(tmp_path: Path) -> None:
    experiments = {name: Experiment.from_table(ENDLESS) for name in ("a", "b", "c")}
    rounds: dict[str, int] = {}

    def watch(event) -> None:
        if event.kind == "round":
            rounds[event.name] = event.values["round"]
            if len(rounds) == 2 and min(rounds.values()) > 3:
                os.kill(os.getpid(), signal.SIGINT)
                rounds["asked"] = 0

    with pytest.raises(Interrupted) as stopped:
        run_all(experiments, tmp_path, 2, watch)
    assert stopped.value.exit_code == 130
    assert stopped.value.message.startswith("interrupted; 0 of 3 runs are done")
    runs = {run.name: run for run in list_runs(tmp_path)}
    assert set(runs) == {"a", "b"}
    for run in runs.values():
        assert (run.status, run.reason) == ("interrupted", "it was stopped")
        kept = [path.name for path in (run.path / "checkpoints").iterdir()]
        assert any(name.startswith(f"{run.round:06d}") for name in kept), "saved where it stopped"
    went_on: dict[str, int] = {}

    def stop_soon(event) -> None:
        if event.kind == "began":
            went_on[event.name] = event.values["done"]
        if event.kind == "round" and len(went_on) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run_all(experiments, tmp_path, 2, stop_soon)
    assert went_on == {name: run.round for name, run in runs.items()}


@pytest.mark.slow
def test_the_command_prints_a_table_and_ctrl_c_leaves_no_worker(server: Server, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        'tree.shape = "2x2"\nmodel.name = "logistic"\nschedule.periods = [2, 2]\nrounds = 100000\n'
        'data = { source = "synthetic", arguments = { samples = 50, features = 5, classes = 10 } }\n'
    )
    sweep = tmp_path / "study.toml"
    sweep.write_text('config = "base.toml"\ntarget = 0.99\n[grid]\nmodel = ["logistic", "nonesuch"]\nseed = 2\n')
    process = server.start("sweep", sweep, "--workers", 2, cwd=tmp_path)
    give_up = time.monotonic() + 300
    while not (tmp_path / "runs").exists() or not any(r.round for r in list_runs(tmp_path / "runs")):
        assert time.monotonic() < give_up, process.said()
        time.sleep(0.05)
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    (forking,) = [path for path in processes if is_child(path, process.pid)]
    workers = [forking, *(path for path in processes if is_child(path, int(forking.name)))]
    assert len(workers) >= 2
    process.kill(signal.SIGINT)
    assert process.ends() == 130, process.said()
    assert process.said().splitlines()[-1].startswith("interrupted; 0 of 4 runs are done")
    assert "Traceback" not in process.said()
    assert not any(worker.exists() for worker in workers)

    (tmp_path / "base.toml").write_text((tmp_path / "base.toml").read_text().replace("100000", "3"))
    code, said = server.run("sweep", sweep, "--workers", 1, "--quiet", cwd=tmp_path)
    assert code == 1, said
    assert ">3" in said and "model=nonesuch-seed=0: failed: model" in said
    code, said = server.run("sweep", sweep, "--workers", 1, "--quiet", "--json", "--target", "0.01", cwd=tmp_path)
    assert code == 1
    result = json.loads(said)
    assert [group["group"] for group in result["groups"]] == ["model=logistic", "model=nonesuch"]
    assert result["target"] == {"metric": "accuracy", "value": 0.01, "sign": ">="}
    assert result["groups"][0]["rounds"] == 1 and result["groups"][0]["reached"] == 2
    assert [run["was_done"] for run in result["runs"]] == [True, True, False, False]


def is_child(path: Path, parent: int) -> bool:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def test_a_run_may_stop_at_its_target(local: LocalExecutor, tmp_path: Path) -> None:
    experiment = Experiment.from_table({**BASE, "rounds": 50, "evaluation": {"stop_when": "accuracy >= 0.3"}})
    (outcome,) = run_all({"early": experiment}, tmp_path, executor=local)
    run = read_run(outcome.path)
    assert run.round < 50 and run.rounds[-1]["metrics"]["accuracy"] >= 0.3
    assert all(record["metrics"]["accuracy"] < 0.3 for record in run.rounds[:-1])


@pytest.mark.slow
def test_the_server_asks_no_gpu_before_it_forks() -> None:
    """A process that was forked after CUDA had begun could not use it."""
    code = """
import torch
def asked(*arguments): raise AssertionError
for name in ("device_count", "init", "is_available", "_lazy_init"): setattr(torch.cuda, name, asked)
import stratafl.sweeps.server
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[2])
