"""Sweeps: what a file means, what is skipped and continued, what a failure and a Ctrl-C do, and the
table."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratafl import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.cli.main import app
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.sections import Method
from stratafl.metrics.objective import Goal
from stratafl.runs import StoredRun, list_runs, read_run
from stratafl.runs.sweep import Plan, PlannedRun, note_target, noted_target, pool, run_all, table
from stratafl.runs.sweep.pool import Worker
from tests.runs.conftest import Server, contents
from tests.runs.stopped import CONFIG

BASE = {**CONFIG, "rounds": 3, "storage": {"keep_state": True}}
ENDLESS = {**CONFIG, "rounds": 10**6, "storage": {"checkpoint_every": 5}}


# -- what a file means -----------------------------------------------------------------------------


def test_a_grid_is_every_combination_with_the_seeds_fastest() -> None:
    grid = {"seed": 2, "method": ["hfedavg", {"name": "fedprox", "mu": 0.5}], "client": {"lr": [0.1, 0.2]}}
    plan = Plan.of({"base": CONFIG, "grid": grid, "target": 0.8}, "study")
    assert [entry.name for entry in plan.entries][:3] == [
        "hfedavg-lr=0.1-seed=0",
        "hfedavg-lr=0.1-seed=1",
        "hfedavg-lr=0.2-seed=0",
    ]
    assert len(plan.entries) == 8
    assert plan.entries[-1].group == "fedprox mu=0.5 lr=0.2"
    experiment = plan.entries[-1].experiment
    assert experiment.method == Method(name="fedprox", params={"mu": 0.5})
    assert (experiment.client.lr, experiment.seed, experiment.model.name) == (0.2, 1, "logistic")


def test_forms_of_keys_and_names_of_variants() -> None:
    same = [{"client.lr": [0.1]}, {"client": {"lr": [0.1]}}]
    for grid in same:
        (entry,) = Plan.of({"base": CONFIG, "grid": grid}, "study").entries
        assert (entry.name, entry.group, entry.experiment.client.lr) == ("study", "study", 0.1)
    plan = Plan.of({"base": CONFIG, "grid": {"seed": [7, 8]}}, "study")
    assert [(e.name, e.group) for e in plan.entries] == [("study-seed=7", "study"), ("study-seed=8", "study")]


def test_variants_are_named_changes_and_a_method_in_one_is_whole(tmp_path: Path) -> None:
    variants = {"plain": {"method": {"name": "hfedavg"}}, "slow & steady": {"client.lr": 0.01, "rounds": 9}}
    base = {**CONFIG, "method": {"name": "fedprox", "mu": 0.5}}
    (tmp_path / "base.toml").write_text('rounds = 2\nseed = 5\n\n[model]\nname = "logistic"\n')
    plan = Plan.of({"config": "base.toml", "base": {"rounds": 4}, "variants": variants}, "study", tmp_path)
    assert [entry.group for entry in plan.entries] == ["plain", "slow & steady"]
    assert [entry.experiment.rounds for entry in plan.entries] == [4, 9]
    assert {entry.experiment.seed for entry in plan.entries} == {5}
    plain, slow = Plan.of({"base": base, "variants": variants}, "study").entries
    assert plain.experiment.method == Method(name="hfedavg")
    assert slow.experiment.method == Method(name="fedprox", params={"mu": 0.5})
    assert slow.name.startswith("slow-steady-") and slow.name != slow.group


def test_names_that_look_alike_stay_apart() -> None:
    entries = Plan.of({"base": CONFIG, "grid": {"model.name": ["a/b", "a:b", "x" * 200, "x" * 201]}}, "s").entries
    assert len({entry.name for entry in entries}) == 4
    assert all(len(entry.name) <= 100 for entry in entries)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gird": {}}, "did you mean 'grid'"),
        ({"grid": {"seed": 0}}, "grid.seed = 0"),
        ({"grid": {"client.lr": 0.1}}, "must be a list"),
        ({"grid": {"client.lr": []}}, "must be a list"),
        ({"grid": {"seeds": 2}}, "grid.seeds = 2: is grid.seed now"),
        ({"grid": {"methods": ["mtgc"]}}, "grid.methods = ['mtgc']: is grid.method now"),
        ({"grid": {"run.seed": [1]}}, "grid.run.seed = [1]: is grid.seed now"),
        ({"grid": {"client.lr": [0.1, 0.1]}}, "two runs would be the same"),
        ({"grid": {"seed": 200, "client.lr": list(range(1, 102))}}, "at most 10,000 runs"),
        ({"grid": {"client.lrr": [1]}}, "did you mean 'lr'"),
        ({"grid": {"leaf.lr": [1]}}, "leaf.lr = 1: is client.lr now"),
        ({"grid": {"client.optimizer": ["sgd", "adm"]}}, "did you mean 'adam'"),
        ({"grid": {"rounds": [2, 2.5]}}, "rounds = 2.5"),
        ({"grid": {"client.lr": [0.1, float("nan")]}}, "client.lr = nan"),
        ({"grid": {"schedule.wait": ["all", {"dedline": 3}]}}, "dedline"),
        ({"grid": {"evaluation.levels": [[1], [9]]}}, "evaluation.levels"),
        ({"variants": {"a": {}, "b": {"method": "nonesuch"}}}, "method = 'nonesuch': unknown"),
        ({"target": 2}, "target = 2"),
        ({"config": "nowhere.toml"}, "No such file"),
    ],
)
def test_what_does_not_fit_is_said(values: dict, said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        Plan.of({"base": CONFIG, **values}, "study")
    assert said in str(problem.value)


# -- running them ----------------------------------------------------------------------------------


def test_a_sweep_skips_finished_runs_and_resumes_others(tmp_path: Path) -> None:
    good = {f"seed{seed}": Experiment.from_table({**BASE, "seed": seed}) for seed in (1, 2)}
    plugin = tmp_path / "fatal.py"
    plugin.write_text("import os, sys\nprint('farewell', file=sys.stderr, flush=True)\nos._exit(7)\n")
    bad = {
        "refused": Experiment.from_table({**BASE, "method": {"name": "nonesuch"}}),
        "fatal": Experiment.from_table({**BASE, "plugins": [str(plugin)]}),
    }
    seen: list[tuple[str, str]] = []
    folder = tmp_path / "runs"
    outcomes = run_all({**bad, **good}, folder, 2, lambda event: seen.append((event.name, event.kind)))
    output = {outcome.name: (outcome.status, outcome.reason) for outcome in outcomes}
    assert list(output) == ["refused", "fatal", "seed1", "seed2"]
    assert output["seed1"] == output["seed2"] == ("done", "")
    assert output["refused"][0] == "failed" and "unknown" in output["refused"][1]
    assert output["fatal"] == ("failed", "its process ended with exit code 7: farewell")
    assert seen.count(("seed1", "round")) == 3

    # one of the two is set back to where it was interrupted
    first = next(outcome.path for outcome in outcomes if outcome.name == "seed1")
    before = contents(first)
    status = json.loads((first / "status.json").read_text())
    (first / "status.json").write_text(json.dumps({**status, "status": "running"}))
    (first / "checkpoints" / "000003").rename(first / "checkpoints" / "000009")
    again = run_all(good, folder, 1)
    assert [(o.name, o.status, o.was_done, o.path == first) for o in again] == [
        ("seed1", "done", False, True),
        ("seed2", "done", True, False),
    ]
    assert contents(first) == before
    assert len(list_runs(folder)) == 2
    # how a run is kept makes it no other run; what it computes does
    kept = {"seed2": good["seed2"].replace(storage={"checkpoint_every": 1})}
    other = {"seed2": good["seed2"].replace(rounds=4, storage={})}
    assert [o.was_done for o in run_all(kept, folder, 1)] == [True]
    assert [(o.was_done, o.status) for o in run_all(other, folder, 1)] == [(False, "done")]


class Alone(Worker):
    """A worker that dies at its first run where its number is 0, and otherwise waits."""

    @staticmethod
    def start(threads: int, number: int) -> Worker:
        command = ["sleep", "0" if number == 0 else "60"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        STARTED.append(number)
        if STARTED.count(0) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return Worker(process, number, process.stdin, process.stdout, tempfile.TemporaryFile())


STARTED: list[int] = []


def test_a_dead_workers_place_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", Alone)
    with pytest.raises(Interrupted):
        run_all({name: Experiment.from_table(ENDLESS) for name in "abcdefg"}, tmp_path, 3)
    assert STARTED == [0, 1, 2, 0, 0], "each number is a GPU, which would be idle"


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
        ran = CliRunner().invoke(app, ["sweep", "study.toml", "--workers", "1", "--quiet", *words])
        assert str(ran.exception) == f"{field}: these runs have accuracy, loss"
    ran = CliRunner().invoke(app, ["sweep", "study.toml", "--workers", "1", "--quiet", "--target", "loss=9"])
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
    workers = [path for path in processes if is_worker(path, process.pid)]
    assert len(workers) == 2
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


def is_worker(path: Path, parent: int) -> bool:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


# -- the table -------------------------------------------------------------------------------------


def stored(*accuracies: float) -> StoredRun:
    rounds = [{"round": i, "metrics": {"accuracy": value}} for i, value in enumerate(accuracies, 1)]
    return StoredRun(Path(), "n", "i", "done", "", len(rounds), len(rounds), "", "", {}, {}, rounds, {}, {})


def test_mean_and_deviation_over_seeds_and_targets_missed() -> None:
    experiment = Experiment.from_table(CONFIG)
    groups = {"both": [(0.5, 0.9), (0.7, 0.8)], "one": [(0.1, 0.2), (0.75, 0.8)], "none": [(0.1, 0.2), (0.1, 0.1)]}
    entries = [PlannedRun(f"{g}{i}", g, experiment) for g, runs in groups.items() for i in range(len(runs))]
    entries.append(PlannedRun("lone0", "lone", experiment))
    entries.append(PlannedRun("absent0", "absent", experiment))
    runs = {f"{g}{i}": stored(*values) for g, curves in groups.items() for i, values in enumerate(curves)}
    runs["lone0"] = stored(0.9)
    rows = {row.group: row for row in table(entries, runs, target=Goal("accuracy", 0.7))}
    assert rows["both"].final_text == "0.8500 ± 0.0707"
    assert math.isclose(rows["both"].final_deviation or 0, 0.005**0.5)
    assert rows["both"].rounds_text == "1.5 ± 0.7"
    assert rows["one"].rounds_text == ">1.5"
    assert rows["none"].rounds_text == ">2"
    assert (rows["lone"].final_text, rows["lone"].rounds_text) == ("0.9000", "1")
    assert (rows["absent"].done, rows["absent"].final_text, rows["absent"].rounds_text) == (0, "", "")
    assert table(entries, runs)[0].rounds_text == ""


def test_a_run_may_stop_at_its_target(tmp_path: Path) -> None:
    experiment = Experiment.from_table({**BASE, "rounds": 50, "evaluation": {"stop_when": "accuracy >= 0.3"}})
    (outcome,) = run_all({"early": experiment}, tmp_path, 1)
    run = read_run(outcome.path)
    assert run.round < 50 and run.rounds[-1]["metrics"]["accuracy"] >= 0.3
    assert all(record["metrics"]["accuracy"] < 0.3 for record in run.rounds[:-1])
