"""Provenance of runs: changed configs and files are named and rejected, or recorded with
--allow-changes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stratafl import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment
from stratafl.runs import list_runs, read_run
from stratafl.runs.format import config_digest
from stratafl.runs.provenance import Provenance, changes_since, identity
from stratafl.runs.session import RunSession, extended
from tests.runs.stopped import CONFIG, stopped_after

NET = """
from torch import nn
from {helper} import width

class Net(nn.Sequential):
    def __init__(self, input_shape, classes, notes=None):
        super().__init__(nn.Linear(input_shape[0], width()), nn.Linear(width(), classes))
"""
HELPER = "def width():\n    return 4\n"
RULE = """
from stratafl import average, register

@register("mine", summary="averaging")
def mine():
    return average()
"""


def edit(run: Path, key: str, value: Any) -> None:
    described = json.loads((run / "run.json").read_text())
    *sections, last = key.split(".")
    table = described["config"]
    for section in sections:
        table = table[section]
    table[last] = value
    (run / "run.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_after(4, tmp_path_factory.mktemp("stopped"))


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / stopped.name))


EDITS = [
    ("client.lr", 0.2, "client.lr was 0.1 and is 0.2"),
    ("client.batch_size", 5, "client.batch_size was 32 and is 5"),
    ("client.optimizer", "adam", 'client.optimizer was "sgd" and is "adam"'),
    ("schedule.periods", [2, 3], "schedule.periods was [2, 2] and is [2, 3]"),
    ("schedule.participation", [1.0, 2], "schedule.participation was [1.0, 1] and is [1.0, 2]"),
    ("seed", 5, "seed was 0 and is 5"),
    ("method.rules", ["mtgc", "mtgc"], 'method.rules was ["mtgc", "scaffold"] and is ["mtgc", "mtgc"]'),
    ("tree.shape", "4", 'tree.shape was "2x2" and is "4"'),
]


@pytest.mark.parametrize(("key", "value", "said"), EDITS, ids=[key for key, _, _ in EDITS])
def test_a_config_that_was_edited_is_refused_with_what_changed(run: Path, key: str, value: Any, said: str) -> None:
    edit(run, key, value)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(InvalidInput) as problem:
        RunSession.resume(run)
    assert f"is no longer what this run began with: {said}; --allow-changes" in str(problem.value)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


def test_nothing_changed_is_no_change(run: Path) -> None:
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(described, sort_keys=True, indent=7))
    RunSession.resume(run).run()
    assert "changed" not in read_run(run).continued[0]


def test_force_goes_on_and_notes_it_once(run: Path) -> None:
    edit(run, "client.lr", 0.2)
    said: list[str] = []
    session = RunSession.resume(run, say=said.append, force=True)
    assert said[0] == "goes on all the same: client.lr was 0.1 and is 0.2"

    def watch(record) -> None:
        assert record.lr == (0.1 if record.round <= 4 else 0.2)
        if record.round == 6:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(watch)
    assert [(continuation["after"], continuation["changed"]) for continuation in read_run(run).continued] == [
        (4, ["client.lr was 0.1 and is 0.2"])
    ]
    # what was changed once is what the run now is
    said.clear()
    RunSession.resume(run, say=said.append).run()
    assert said == ["goes on after round 5"]
    assert [continuation.get("changed") for continuation in read_run(run).continued] == [
        ["client.lr was 0.1 and is 0.2"],
        None,
    ]


def test_going_back_before_a_change_notes_it_again(run: Path) -> None:
    edit(run, "client.lr", 0.2)
    session = RunSession.resume(run, force=True)

    def watch(record) -> None:
        if record.round == 6:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(watch)
    tensors = run / "checkpoints" / "000005" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    RunSession.resume(run).run()
    assert [(continuation["after"], continuation["changed"]) for continuation in read_run(run).continued] == [
        (4, ["client.lr was 0.1 and is 0.2"])
    ]


def test_before_the_first_checkpoint_a_change_is_noticed_too(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    RunSession.resume(run).close()
    edit(run, "client.lr", 0.2)
    with pytest.raises(InvalidInput, match="began with: the config was changed"):
        RunSession.resume(run)
    RunSession.resume(run, force=True).run()
    assert read_run(run).continued[0]["changed"] == ["the config was changed"]


def test_forced_changes_of_data_are_in_the_tree_file(run: Path) -> None:
    edit(run, "data.arguments", {"samples": 30, "features": 5, "classes": 3})
    session = RunSession.resume(run, force=True)
    session.run()
    result = read_run(run)
    assert result.continued[0]["changed"] == [
        "data.arguments.samples was 20 and is 30",
        "the data, or how it is split, was changed",
    ]
    assert sum(result.tree["levels"][0]["samples"]) > 4 * 20


OLD = {
    "tree": {"shape": "2x2", "weights": "uniform"},
    "data": {"name": "synthetic", "arguments": {}, "columns": {}, "test": None, "lazy": False, "partition": [],
             "rotation": None, "augment": "none", "synthetic": {"samples": 20, "features": 5, "classes": 3},
             "test_partition": None},
    "model": {"name": "logistic"},
    "method": {"rules": ["mtgc", "scaffold"]},
    "objective": {"loss": None, "metrics": None},
    "schedule": {"periods": [2, 2], "steps_per_sync": None, "participation": [1.0, 1]},
    "leaf": {"lr": 0.1, "batch": 32, "sampling": "epochs", "clip": None, "weight_decay": 0.0, "momentum": 0.0,
             "optimiser": None, "optimiser_state": "restart", "epochs": None, "schedule": "constant"},
    "run": {"rounds": 6, "seed": 0, "evaluate_every": 1, "evaluate_levels": [0], "stop_at": None, "stop_when": None,
            "checkpoint_every": 1, "keep_state": True, "device": "cpu", "engine": None, "precision": "fp32",
            "diagnose": "drift", "update_limit": None, "update_factor": None, "initial": None, "plugins": []},
}  # fmt: skip
"""Tables of `CONFIG` as the first version wrote them."""


def written_by_the_first_version(run: Path) -> None:
    """Put the old tables into run.json and the checkpoints of a run."""
    described = json.loads((run / "run.json").read_text())
    described |= {"config": OLD, "inputs": {**described["inputs"], "config": config_digest(OLD)}}
    (run / "run.json").write_text(json.dumps(described))
    for checkpoint in (run / "checkpoints").iterdir():
        state = json.loads((checkpoint / "state.json").read_text())
        state["inputs"]["config"] = OLD
        (checkpoint / "state.json").write_text(json.dumps(state))
        sign(checkpoint)


def sign(checkpoint: Path) -> None:
    names = ("state.json", "tensors.safetensors")
    sums = [f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_run_of_the_first_version_is_resumed(run: Path, has_checkpoints: bool, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    written_by_the_first_version(run)
    for folder in (run, other):
        if not has_checkpoints:
            shutil.rmtree(folder / "checkpoints")
    stored = read_run(run)
    assert not changes_since(stored, Experiment.from_table(CONFIG)) and identity(stored) == identity(read_run(other))
    said: list[str] = []
    RunSession.resume(run, say=said.append).run()
    RunSession.resume(other).run()
    assert said == [
        "goes on after round 4" if has_checkpoints else "begins again: there is no checkpoint to go on from"
    ]
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    result = read_run(run)
    assert (result.status, result.config["rounds"]) == ("done", 6) and "changed" not in result.continued[0]
    longer = extended(run, ["rounds=7"])
    RunSession.resume(run, longer).run()
    assert read_run(run).continued[-1]["extended"] == ["rounds was 6 and is 7"]


def test_an_edited_run_of_the_first_version_is_refused(run: Path) -> None:
    written_by_the_first_version(run)
    edit(run, "leaf.lr", 0.2)
    with pytest.raises(InvalidInput, match=r"began with: client\.lr was 0\.1 and is 0\.2; --allow-changes"):
        RunSession.resume(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InvalidInput, match="began with: the config was changed"):
        RunSession.resume(run)


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own modules, which nobody else has imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lab", "shapes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "net.py").write_text(NET.format(helper="shapes"))
    (tmp_path / "shapes.py").write_text(HELPER)
    (tmp_path / "rules.py").write_text(RULE)
    (tmp_path / "notes.txt").write_text("first")
    inner = tmp_path / "lab" / "nets"
    inner.mkdir(parents=True)
    (tmp_path / "lab" / "__init__.py").write_text("")
    (tmp_path / "lab" / "sizes.py").write_text(HELPER)
    (inner / "__init__.py").write_text("")
    (inner / "small.py").write_text(NET.format(helper="lab.sizes"))
    return tmp_path


def begun(folder: Path, model: str) -> Path:
    values = {
        **CONFIG,
        "model": {"name": model, "notes": "notes.txt"},
        "method": {"rules": ["mine", "average"]},
        "plugins": ["rules.py"],
    }
    session = RunSession.start(Experiment.from_table(values), "study", folder / "runs")

    def watch(record) -> None:
        if record.round == 3:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(watch)
    return session.path


FILES = [
    ("net.py:Net", "net.py", "net.py"),
    ("net.py:Net", "shapes.py", "shapes"),
    ("net.py:Net", "rules.py", "rules.py"),
    ("net.py:Net", "notes.txt", "notes.txt"),
    ("net:Net", "net.py", "net"),
    ("lab.nets.small:Net", "lab/nets/small.py", "lab.nets.small"),
    ("lab.nets.small:Net", "lab/sizes.py", "lab.sizes"),
]


@pytest.mark.parametrize(("model", "path", "name"), FILES, ids=[f"{m} {p}" for m, p, _ in FILES])
def test_a_file_that_was_changed_is_refused_and_named(project: Path, model: str, path: str, name: str) -> None:
    run = begun(project, model)
    RunSession.resume(run).close()
    with (project / path).open("a") as file:
        file.write("\n# other\n")
    with pytest.raises(InvalidInput, match=rf"began with: {name} was changed; --allow-changes"):
        RunSession.resume(run)
    RunSession.resume(run, force=True).run()
    assert read_run(run).continued[0]["changed"] == [f"{name} was changed"]


@pytest.mark.parametrize(("path", "name"), [("net.py", "net.py"), ("rules.py", "rules.py"), ("notes.txt", "notes.txt")])
def test_a_file_that_is_gone_is_one_line(project: Path, path: str, name: str, monkeypatch, capsys) -> None:
    run = begun(project, "net.py:Net")
    (project / path).unlink()
    for force in ((), ("--allow-changes",)):
        monkeypatch.setattr(sys, "argv", ["stratafl", "resume", str(run), "-q", *force])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err.splitlines()
        if not force:
            assert ended.value.code == 2 and len(said) == 1 and f"{name} is missing" in said[0]
        elif path != "notes.txt":  # the model of this test does not read it
            assert ended.value.code == 2 and said[-1].startswith("error: ") and "Traceback" not in "".join(said)


def test_a_file_that_changes_during_a_run_is_noticed(project: Path) -> None:
    run = begun(project, "net.py:Net")
    session = RunSession.resume(run)

    def watch(record) -> None:
        (project / "net.py").write_text(NET.format(helper="shapes") + "# edited\n")
        if record.round == 5:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(watch)
    with pytest.raises(InvalidInput, match=r"net\.py was changed"):
        RunSession.resume(run)


def test_installed_modules_are_known_by_their_own_file_only() -> None:
    files = Provenance.of({"model": {"name": "torch.nn:Linear"}}).files
    assert list(files) == ["torch.nn"] and len(files["torch.nn"]) == 64
    assert Provenance.of({"model": {"name": "builtins:exit"}, "tree": {"shape": "4x5"}}).files == {}


def test_the_command_says_it_in_one_line_and_goes_on_all_the_same(run: Path, monkeypatch, capsys) -> None:
    edit(run, "client.lr", 0.2)
    monkeypatch.setattr(sys, "argv", ["stratafl", "resume", str(run)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: RUN = ") and said.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["stratafl", "resume", str(run), "--allow-changes", "-q"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and list_runs(run.parent)[0].status == "done"


def test_runs_with_checkpoints_of_the_first_format_are_read(run: Path) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        state = json.loads((checkpoint / "state.json").read_text())
        old = {key: value for key, value in state.items() if key not in ("inputs", "records")} | {"format": 1}
        (checkpoint / "state.json").write_text(json.dumps(old))
        sign(checkpoint)
    described = json.loads((run / "run.json").read_text())
    del described["inputs"]
    (run / "run.json").write_text(json.dumps(described))
    assert read_run(run).round == 5
    said: list[str] = []
    RunSession.resume(run, say=said.append).run()
    assert "cannot be told" in said[0] and "format 1; this version reads 4" in said[1]
    assert said[-1].startswith("begins again")
