"""A stored run is current as long as its config, the user's files and their data are what it was
computed with; a sweep and a plan compute it again otherwise."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratafl import InvalidInput
from stratafl.experiment.experiment import Experiment
from stratafl.runs import StoredRun, list_runs, provenance, read_run
from stratafl.runs.format import RunLock
from stratafl.runs.provenance import Provenance, changes, changes_since, essence, identity
from stratafl.runs.session import RunSession
from stratafl.sweeps import run_all
from tests.commands import command
from tests.sweeps.inline import OPTION, Inline

RULE = """
from stratafl import average, register

{importing}

@register("homesick", summary="averaging")
def homesick():
    return average()
"""
CONFIG = """
rounds = 1
plugins = ["rule.py"]

[tree]
shape = "2x2"

[data]
source = "digits"

[model]
name = "logistic"

[method]
name = "homesick"

[schedule]
periods = [1, 1]
"""


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    """Modules of the tests' projects, which other tests have of the same name, are forgotten."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pulls", "kit")]:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "kit").mkdir(parents=True)
    (folder / "study.toml").write_text(CONFIG)
    (folder / "rule.py").write_text(RULE.format(importing=""))
    return folder


def study(folder: Path, *changes: str) -> Experiment:
    return Experiment.from_toml(folder / "study.toml", changes)


def done(folder: Path, name: str = "study") -> StoredRun:
    session = RunSession.start(study(folder), name, folder / "runs")
    return read_run(session.run().path)


def swept(folder: Path, *changes: str, keep_stale: bool = False) -> tuple[bool, list[str]]:
    """Whether the run was done before, and what was said of it."""
    said: list[str] = []
    experiments = {"a": study(folder, *changes)}
    (outcome,) = run_all(experiments, folder / "runs", say=said.append, keep_stale=keep_stale, executor=Inline())
    assert outcome.status == "done", outcome
    return outcome.was_done, said


# -- a sweep ---------------------------------------------------------------------------------------


def test_a_sweep_runs_again_what_was_edited_and_names_the_file(project: Path) -> None:
    assert swept(project) == (False, [])
    assert swept(project) == (True, [])
    with (project / "rule.py").open("a") as file:
        file.write("# other\n")
    assert swept(project, keep_stale=True) == (True, ["a: rule.py was changed since; kept all the same"])
    assert swept(project) == (False, ["a: rule.py was changed since; run again"])
    assert swept(project) == (True, []), "the new one counts"
    assert len(list_runs(project / "runs")) == 2


def test_a_moved_and_a_copied_project_know_their_runs(project: Path, tmp_path: Path) -> None:
    done(project, "a")
    copied = shutil.copytree(project, tmp_path / "copied")
    assert swept(copied) == (True, [])
    with (copied / "rule.py").open("a") as file:
        file.write("# only here\n")
    assert swept(copied)[0] is False
    assert swept(project) == (True, [])


def test_storage_and_engine_are_no_reason_to_run_again(project: Path) -> None:
    done(project, "a")
    assert swept(project, "storage.checkpoint_every=1", "storage.keep_state=true", "execution.engine=loop") == (
        True,
        [],
    )
    assert swept(project, "execution.precision=bf16") == (True, ["a: was computed in fp32, and is not again in bf16"])
    assert swept(project, "aggregation.update_factor=9")[0] is False


def test_a_failed_run_is_repeated_in_the_requested_precision(project: Path) -> None:
    session = RunSession.start(study(project, "execution.precision=bf16"), "a", project / "runs")
    session.set_status("failed", "out of memory")
    session.close()
    assert swept(project) == (False, ["a: failed on another device, engine or precision; run again"])
    assert [(run.status, run.precision) for run in list_runs(project / "runs")] == [
        ("failed", "bf16"),
        ("done", "fp32"),
    ]
    assert swept(project) == (True, [])


def test_two_sweeps_in_one_folder_are_one_too_many(project: Path) -> None:
    (project / "runs").mkdir()
    lock = RunLock(project / "runs")
    with pytest.raises(InvalidInput, match=r"process \d+ is at a sweep in it"):
        swept(project)
    lock.release()
    assert swept(project) == (False, [])


def test_the_command_says_what_it_runs_again(project: Path, monkeypatch, capsys) -> None:
    (project / "sweep.toml").write_text('config = "study.toml"\n[grid]\nseed = 1\n')
    arguments = ["sweep", project / "sweep.toml", "--runs", project / "runs", "--executor", OPTION, "-q"]
    assert command(monkeypatch, *arguments) == 0
    with (project / "rule.py").open("a") as file:
        file.write("# other\n")
    capsys.readouterr()
    assert command(monkeypatch, *arguments, "--keep-stale") == 0
    assert "1 of 1 runs were done before" in capsys.readouterr().out
    assert command(monkeypatch, *arguments) == 0
    output = capsys.readouterr()
    assert "rule.py was changed since; run again" in output.err + output.out and "done before" not in output.out


# -- what decides the results ----------------------------------------------------------------------


IMPORTS = [
    ("import pulls", "pulls.py"),
    ("def late():\n    import pulls", "pulls.py"),
    ("from kit import pulls", "kit/pulls.py"),
    ("from kit.pulls import strength", "kit/pulls.py"),
    ("import kit", "kit/pulls.py"),
]


@pytest.mark.parametrize(("importing", "file"), IMPORTS, ids=[code.replace("\n", " ") for code, _ in IMPORTS])
def test_a_module_that_a_rule_imports_is_one_of_its_files(
    importing: str, file: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Include modules imported inside a function, or by an imported package."""
    (project / "kit" / "__init__.py").write_text("from . import pulls\n")
    for name in ("pulls.py", "kit/pulls.py"):
        (project / name).write_text("strength = 1\n")
    (project / "rule.py").write_text(RULE.format(importing=importing))
    monkeypatch.syspath_prepend(project)
    run = done(project)
    assert not changes_since(run, study(project))
    (project / file).write_text("strength = 2\n")
    assert changes_since(run, study(project)) == [f"{file[:-3].replace('/', '.')} was changed"]


def test_a_rule_that_says_itself_where_to_import_from_is_current(project: Path) -> None:
    """Import from a folder that only the rule knows."""
    (project / "pulls.py").write_text("strength = 1\n")
    importing = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport pulls\nsys.path.pop(0)"
    (project / "rule.py").write_text(RULE.format(importing=importing))
    run = done(project)
    del sys.modules["pulls"]
    assert not changes_since(run, study(project))
    (project / "pulls.py").write_text("strength = 2\n")
    assert changes_since(run, study(project)) == ["pulls was changed"]


def test_a_folder_of_data_is_one_of_the_files(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(b"12")
    config = {"data": {"source": str(images)}}
    before = Provenance.of(config)
    assert changes(before, config) == []
    (images / "a.png").write_bytes(b"21")
    assert changes(before, config) == ["images was changed"], "as many bytes"
    (images / "a.png").write_bytes(b"12")
    assert changes(before, config) == []
    (images / "b.png").write_bytes(b"3")
    assert changes(before, config) == ["images was changed"]


@pytest.mark.parametrize("largest", [0, 1 << 30])
def test_a_folder_may_be_known_by_names_and_sizes_alone(
    largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large one, and of the runs of earlier versions."""
    (tmp_path / "a.png").write_bytes(b"12")
    monkeypatch.setattr(provenance, "HASHED_FOLDER_SIZE", 0)
    config = {"data": {"source": str(tmp_path)}}
    before = Provenance.of(config)
    monkeypatch.setattr(provenance, "HASHED_FOLDER_SIZE", largest)
    assert changes(before, config) == []
    (tmp_path / "a.png").write_bytes(b"123")
    assert changes(before, config) == [f"{tmp_path.name} was changed"]


def test_recorded_files_do_not_depend_on_loaded_modules(project: Path, monkeypatch) -> None:
    (project / "pulls.py").write_text("strength = 1\n")
    monkeypatch.syspath_prepend(project)
    alone = Provenance.of(study(project).to_table())
    __import__("pulls")
    assert Provenance.of(study(project).to_table()) == alone
    assert list(alone.files) == [str(project / "rule.py")]


def test_defaults_that_are_new_change_no_identity() -> None:
    written = Experiment.from_table({"client": {"lr": 0.2}}).to_table()
    older = {key: value for key, value in written.items() if key != "aggregation"}
    assert essence(older) == essence(written)


def test_a_schedule_over_all_rounds_depends_on_their_number() -> None:
    def of(rounds: int, schedule: Any) -> dict[str, Any]:
        return essence(Experiment.from_table({"client": {"lr_schedule": schedule}, "rounds": rounds}), extent=False)

    assert of(3, "cosine") != of(6, "cosine")
    assert of(3, {"name": "cosine", "rounds": 6}) == of(6, "cosine")
    assert of(3, "constant") == of(6, "constant")


def test_files_of_one_name_in_two_folders_stay_two(tmp_path: Path) -> None:
    def of(*names: str) -> dict[str, Any]:
        return essence({"plugins": [str(tmp_path / name) for name in names]})

    assert of("a/rule.py", "b/rule.py") != of("b/rule.py", "a/rule.py")
    assert of("a/rule.py", "b/net.py") == of("b/rule.py", "a/net.py")


def test_an_archive_of_before_is_still_understood(project: Path, tmp_path: Path) -> None:
    """An older run.json without the place where it was written is accepted."""
    run = done(project)
    described = json.loads((run.path / "run.json").read_text())
    assert described.pop("folder") == str(run.path)
    (run.path / "run.json").write_text(json.dumps(described))
    old = read_run(shutil.copytree(run.path, tmp_path / "elsewhere"))
    assert old.files == run.files and identity(old) == identity(run) and not changes_since(old, study(project))


def test_a_run_resumed_by_force_is_not_its_config_s_run(project: Path) -> None:
    session = RunSession.start(study(project), "study", project / "runs")
    session.close()
    with (project / "rule.py").open("a") as file:
        file.write("# other\n")
    RunSession.resume(session.path, force=True).run()
    assert changes_since(read_run(session.path), study(project)) == ["on the way rule.py was changed"]


def test_a_run_goes_on_where_its_project_was_moved_to(project: Path, tmp_path: Path) -> None:
    session = RunSession.start(study(project), "study", project / "runs")
    session.close()
    copied = shutil.copytree(project, tmp_path / "copied")
    with (project / "rule.py").open("a") as file:
        file.write("# that of before\n")
    path = copied / "runs" / session.path.name
    RunSession.resume(path).run()
    run = read_run(path)
    assert run.status == "done" and run.config["plugins"] == [str(copied / "rule.py")]
    assert "changed" not in run.continued[0]
