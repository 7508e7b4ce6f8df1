"""Run directories: what is in them, who may write them, and what happens where writing fails."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from stratafl import InvalidInput, RoundResult
from stratafl.experiment.experiment import Experiment
from stratafl.runs import list_runs, read_run
from stratafl.runs.checkpoint import RoundLog
from stratafl.runs.format import RunLock, is_locked
from stratafl.runs.session import RunSession
from tests.commands import command
from tests.runs.conftest import ROOT, Server
from tests.runs.stopped import CONFIG, names, stopped_after


def finished(folder: Path, name: str = "study", changes: dict[str, object] | None = None):
    experiment = Experiment.from_table({**CONFIG, "rounds": 2}).replace(changes)
    return RunSession.start(experiment, name, folder).run()


# -- what is in them -------------------------------------------------------------------------------


def test_runs_of_a_sweep_are_found_from_the_project(tmp_path: Path) -> None:
    sweep = tmp_path / "project" / "runs" / "study"
    path = finished(sweep, "deep").path
    for folder in (sweep, sweep.parent, sweep.parent.parent):
        assert [run.path.name for run in list_runs(folder)] == [path.name], folder
    assert list_runs(tmp_path) == []


def test_a_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(InvalidInput, match=r"system = .*: must be Linux or macOS.* on Windows use WSL"):
        RunLock(tmp_path)


def test_pandas_reads_the_rounds_in_one_line(tmp_path: Path) -> None:
    path = finished(tmp_path).path
    table = pandas.read_json(path / "rounds.jsonl", lines=True)
    assert table["round"].tolist() == [1, 2]
    assert table["metrics"].str["accuracy"].between(0, 1).all()
    frame = read_run(path).frame()
    assert frame["metrics.accuracy"].tolist() == table["metrics"].str["accuracy"].tolist()


def test_a_finished_run_keeps_its_state_unless_told_not_to(tmp_path: Path) -> None:
    assert names(finished(tmp_path, changes={"storage.keep_state": None}).path) == ["000002"]
    assert names(finished(tmp_path, changes={"storage.keep_state": False}).path) == []


def test_the_tree_says_who_holds_what(tmp_path: Path) -> None:
    levels = read_run(finished(tmp_path).path).tree["levels"]
    assert [level["names"] for level in levels] == [["root"], ["0", "1"], ["0/0", "0/1", "1/0", "1/1"]]
    assert levels[2]["parents"] == [0, 0, 1, 1]
    for above, below in itertools.pairwise(levels):
        for node, counts in enumerate(above["labels"]):
            child_counts = [below["labels"][i] for i, parent in enumerate(below["parents"]) if parent == node]
            assert [sum(column) for column in zip(*child_counts, strict=True)] == counts
            assert sum(counts) == above["samples"][node]


def test_runs_are_listed_and_filtered(tmp_path: Path, monkeypatch, capsys) -> None:
    runs = tmp_path / "runs"
    finished(runs, "first", {"seed": 3})
    finished(runs / "sweep", "second")
    stopped_after(2, runs)
    (runs / "notes").mkdir()
    broken = runs / "broken-1"
    broken.mkdir()
    (broken / "run.json").write_text("{}")
    assert [run.name for run in list_runs(runs)] == ["first", "second", "study"]

    def listed(*options: str) -> list[str]:
        assert command(monkeypatch, "runs", "list", runs, "--json", *options) == 0
        return [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert listed() == ["study", "second", "first"]
    assert listed("--sort", "name", "-n", "2") == ["first", "second"]
    assert listed("--status", "interrupted") == ["study"]
    assert listed("--where", "seed=3") == listed("--where", "seed >= 2", "--where", "seed!=4") == ["first"]
    assert listed("--where", "method = mtgc") == listed("--where", "method.name < 1") == []
    assert listed("--where", "model.name=logistic", "--status", "done") == ["second", "first"]
    assert listed("--where", "model.nothing.there=1") == []
    assert command(monkeypatch, "runs", "list", runs, "--where", "model.nme=mlp", "--where", "seed=4") == 0
    assert capsys.readouterr().out.endswith(": none has model.nme\n")
    monkeypatch.setenv("COLUMNS", "40")
    assert command(monkeypatch, "runs", "list", runs) == 0
    shown = capsys.readouterr().out
    assert "interrupted: it was stopped" in shown and "unreadable: " in shown
    assert all(len(line) <= 40 for line in shown.splitlines() if line[0] in "┏┃┡│└")
    assert command(monkeypatch, "runs", "list", runs, "--status", "finished") == 2
    assert command(monkeypatch, "runs", "list", runs, "--where", "seed") == 2
    assert command(monkeypatch, "runs", "list", runs, "--sort", "acuracy") == 2
    assert command(monkeypatch, "runs", "list", tmp_path / "nowhere") == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    ["resume nowhere", "resume c.toml", "run c.toml --name ../x",
     "run c.toml --runs c.toml/x", "run nowhere.toml", "sweep nowhere.toml", "sweep c.toml"],
)  # fmt: skip
def test_wrong_commands_are_one_line(arguments, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("[schedule]\nperiods = [1, 1]\n")
    assert command(monkeypatch, *arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and not shown.out
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


def test_a_run_that_is_done_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="this run is done"):
        RunSession.resume(finished(tmp_path).path)


def test_a_run_that_fails_says_why_and_can_go_on(tmp_path: Path) -> None:
    session = RunSession.start(Experiment.from_table(CONFIG), "study", tmp_path)

    def watch(record) -> None:
        if record.round == 3:
            raise ValueError("the sky fell\non two lines")

    with pytest.raises(ValueError, match="the sky fell"):
        session.run(watch)
    run = read_run(session.path)
    assert (run.status, run.reason, run.round) == ("failed", "ValueError: the sky fell", 3)
    RunSession.resume(run.path).run()
    assert read_run(run.path).status == "done"


def test_a_run_in_which_nothing_was_accepted_is_no_success(tmp_path: Path) -> None:
    values = {**CONFIG, "client": {"lr": 1e30}, "rounds": 2}
    session = RunSession.start(Experiment.from_table(values), "study", tmp_path)
    with pytest.raises(InvalidInput, match="in all of them every update was refused"):
        session.run()
    assert read_run(session.path).status == "failed"


def test_a_model_that_ends_the_process_fails_the_run(tmp_path: Path) -> None:
    session = RunSession.start(Experiment.from_table(CONFIG), "study", tmp_path)

    def leave(record) -> None:
        raise SystemExit(0)

    with pytest.raises(InvalidInput, match="ended the process"):
        session.run(leave)
    assert read_run(session.path).status == "failed"


# -- who may write them ----------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_whose_it_is(server: Server, tmp_path: Path) -> None:
    run = stopped_after(2, tmp_path)
    lock = RunLock(run)
    assert is_locked(run)
    code, said = server.run("resume", run)
    assert code == 2
    assert said == f"error: run folder = '{run}': process {os.getpid()} is writing it\n"
    lock.release()
    assert not is_locked(run)
    assert server.run("resume", run, "--quiet")[0] == 0


def test_a_dead_owner_s_lock_is_taken_over(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'rounds = 100000\n\n[tree]\nshape = "2"\n\n[schedule]\nperiods = [2]\n\n[model]\nname = "logistic"'
    )
    process = server.start("run", config, "--runs", tmp_path / "runs")
    while "round 2/" not in process.said():
        pass
    (run,) = list_runs(tmp_path / "runs")
    assert run.status == "running"
    assert (run.path / "lock").read_text() == f"{process.pid}\n"
    process.kill(signal.SIGKILL)
    process.ends()
    assert (run.path / "lock").read_text() == f"{process.pid}\n", "it had no time to clean up"
    left = read_run(run.path)
    assert (left.status, left.reason) == ("interrupted", "its process has ended")
    lock = RunLock(run.path)
    assert (run.path / "lock").read_text() == f"{os.getpid()}\n"
    lock.release()


# -- where writing fails ---------------------------------------------------------------------------


def mounted(tmp_path: Path, script: str) -> subprocess.CompletedProcess:
    """Run a script in a mount namespace of its own, where a small disk can be mounted."""
    if shutil.which("unshare") is None or subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode:  # fmt: skip
        pytest.skip("this machine does not let us mount a disk of our own")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "STRATAFL": f"{sys.executable} -m stratafl",
    }
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


LARGER = """
rounds = 8

[tree]
shape = "2x2"

[model]
name = "mlp"
hidden = [400, 400]

[schedule]
periods = [1, 1]

[storage]
checkpoint_every = 1
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    """191,000 parameters: the checkpoints of two rounds and the parts of a third are more than 8
    MB."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "c.toml").write_text(LARGER)
    script = """
        mount -t tmpfs -o size=9m none disk || exit 99
        $STRATAFL run c.toml --quiet --runs disk/runs; echo "exit $?"
        $STRATAFL runs list disk/runs --json
        mount -o remount,size=60m disk
        $STRATAFL resume disk/runs/c-*; echo "exit $?"
    """
    done = mounted(tmp_path, script)
    first, *output = done.stderr.splitlines()
    assert first.startswith("error: file = ") and "No space left on device" in first, done.stderr
    assert "goes on after round" in output[0] and "round 0" not in output[0]
    assert not [line for line in output if "not used" in line or "Traceback" in line]
    lines = done.stdout.splitlines()
    assert lines[0] == "exit 2" and lines[-1] == "exit 0", done.stdout
    (run,) = json.loads(lines[1])["runs"]
    assert run["status"] in ("failed", "interrupted")


@pytest.mark.slow
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "c.toml").write_text(LARGER)
    run = stopped_after(2, tmp_path / "stopped")
    script = f"""
        mount -t tmpfs none disk && cp -r {run} disk/run && mount -o remount,ro disk || exit 99
        $STRATAFL run c.toml --quiet --runs disk/runs; echo "exit $?"
        $STRATAFL resume disk/run; echo "exit $?"
        $STRATAFL runs list disk > /dev/null; echo "exit $?"
    """
    done = mounted(tmp_path, script)
    assert done.stdout.split("\n")[:3] == ["exit 2", "exit 2", "exit 0"], done.stderr
    assert [line.split(" = ")[0] for line in done.stderr.splitlines()] == ["error: --runs", "error: file"]


def test_a_limit_on_file_size_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """A real failing write in this process; what is left is good."""
    session = RunSession.start(
        Experiment.from_table({**CONFIG, "model": {"name": "mlp", "hidden": [50]}}), "study", tmp_path
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def watch(record) -> None:
        if record.round == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    try:
        with pytest.raises(InvalidInput, match=os.strerror(errno.EFBIG)):
            session.run(watch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    run = read_run(session.path)
    assert (run.status, run.round) == ("failed", 3)
    assert "checkpoints/000003" in run.reason and "cannot be written" in run.reason
    assert names(run.path) == ["000001", "000002"]
    said: list[str] = []
    RunSession.resume(run.path, say=said.append).run()
    assert said == ["goes on after round 2"]


def test_a_run_that_goes_on_elsewhere_names_each_place(tmp_path: Path, monkeypatch) -> None:
    def at(commit: str) -> None:
        monkeypatch.setattr("stratafl.runs.writer.environment", lambda: {"commit": commit, "threads": 1})

    def commits(until: int | None = None) -> list[str]:
        return [environment["commit"] for environment in read_run(path).environments(until)]

    at("first")
    path = stopped_after(2, tmp_path)
    assert commits() == ["first"]
    for commit in ("second", "third"):
        at(commit)
        RunSession.resume(path).close()
    assert commits() == ["first"]
    RunSession.resume(path).run()
    assert [continuation["after"] for continuation in read_run(path).continued] == [2]
    assert commits() == ["first", "third"] and commits(until=2) == ["first"]

    # with no checkpoint left all rounds are made anew, and nothing of the first place is in the
    # records
    other = stopped_after(2, tmp_path / "other")
    path = other
    shutil.rmtree(other / "checkpoints" / "000002")
    shutil.rmtree(other / "checkpoints" / "000001")
    at("fourth")
    RunSession.resume(other).run()
    assert commits() == ["fourth"] and read_run(other).environment["commit"] == "third"


@pytest.mark.parametrize("wrong", [3, [3], [{"after": 1}], [{"after": "1", "time": "", "environment": {}}]])
def test_a_continuation_that_is_none_is_refused(tmp_path: Path, wrong: object) -> None:
    path = finished(tmp_path).path
    described = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**described, "continued": wrong}))
    with pytest.raises(InvalidInput, match=r"run\.json"):
        read_run(path)


def test_half_a_new_folder_is_never_seen(tmp_path: Path) -> None:
    """Check that nothing of a folder is left if its creation fails."""
    experiment = Experiment.from_table({**CONFIG, "rounds": 2})
    first = RunSession.start(experiment, "study", tmp_path / "runs", id="same").run().path
    with pytest.raises(InvalidInput, match="cannot be written"):
        RunSession.start(experiment, "study", tmp_path / "runs", id="same")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["study-same"]
    assert read_run(first).status == "done"


def test_records_of_earlier_versions_keep_their_bytes(tmp_path: Path) -> None:
    """A checkpoint has the digest of these lines, also after a run went on and was killed."""
    values = {"round": 1, "steps": 4, "lr": 0.1, "metrics": {"loss": 0.5}, "nodes": {}, "refused": [],
              "bytes_per_client": 8.0, "seconds": 0.1, "drift": {}, "too_large": [], "renewed": True,
              "over_nodes": {}}  # fmt: skip
    RoundLog(tmp_path, [RoundResult.of(values)]).close()
    assert (tmp_path / "rounds.jsonl").read_text() == json.dumps(values) + "\n"
