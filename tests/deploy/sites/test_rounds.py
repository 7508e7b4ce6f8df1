"""The record has every round once, whenever the root dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("flwr")

from safetensors.torch import load_file

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.cli.main import main
from stratafl.deploy.flower import process
from stratafl.deploy.host import this_machine
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.sites import assemble
from stratafl.deploy.sites.assemble import Assembled, reference_simulation
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.rounds import RootRun, read_lines
from stratafl.deploy.sites.site import Site
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.records import RoundResult
from stratafl.reports.page_data import page_data
from stratafl.runs import checkpoint, format, read_run
from stratafl.runs.session import RunSession
from stratafl.simulation.callbacks import to_scalars
from stratafl.simulation.deployed import part_of, root_of
from tests.deploy.trees import MemoryLink

ROUNDS = 2
CONFIG = f"""
rounds = {ROUNDS}
[tree]
shape = "2"
[model]
name = "mlp"
hidden = [2]
[schedule]
periods = [1]
"""


class Deadly:
    """The system, as files are written with it: the process is killed at one of the calls."""

    CALLS = ("open", "fsync", "replace", "unlink", "fdopen")

    def __init__(self, at: int):
        self.left = at

    def __getattr__(self, name: str) -> Any:
        if name not in self.CALLS:
            return getattr(os, name)
        return lambda *given, **named: self.call(lambda: getattr(os, name)(*given, **named))

    def call(self, work: Callable[[], Any]) -> Any:
        self.step()
        made = work()
        return Torn(made, self) if hasattr(made, "write") else made

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file that is written in two parts."""

    def __init__(self, file: Any, system: Deadly):
        self.file, self.system = file, system

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *problem: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.system.step()
        self.file.write(data[half:])
        return len(data)


class Here(MemoryLink):
    """The leaves, in the root's own process."""

    contact: ClassVar[dict[str, float]] = {}


def lead(folders: dict[str, Path], system: Any = os) -> None:
    """The root's process, with its leaves, which nobody kills, in it."""
    leaves = {name: Assembled.of(folder) for name, folder in folders.items() if name != "root"}
    link = Here({name: each.leaf() for name, each in leaves.items()})
    here = Assembled.of(folders["root"])
    ask = link.ask

    def undisturbed(*given: Any) -> Any:
        vars(files)["os"] = os
        try:
            return ask(*given)
        finally:
            vars(files)["os"] = system

    link.ask = undisturbed  # type: ignore[method-assign]
    vars(files)["os"] = vars(checkpoint)["os"] = system
    process._lead(here, link)  # type: ignore[arg-type]


@pytest.mark.deploy
def test_a_root_killed_at_any_call_to_the_system_leaves_every_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text('config = "run.toml"\n')
    made = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    wanted = reference_simulation(Experiment.from_toml(tmp_path / "run.toml")).run().module.state_dict()
    experiment = Experiment.from_toml(tmp_path / "run.toml")
    root, parts = root_of(experiment), [part_of(experiment, leaf) for leaf in range(2)]
    # each process begins as a copy that has them
    monkeypatch.setattr(process, "root_of", lambda experiment: root)
    monkeypatch.setattr(assemble, "part_of", lambda experiment, leaf: parts[leaf])
    log, at, code = tmp_path / "log", 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        at += 1
        shutil.copytree(tmp_path / "sites", tmp_path / str(at))
        folders = {name: tmp_path / str(at) / folder.name for name, folder in made.items()}
        code = Forked(partial(lead, folders, Deadly(at)), log, tmp_path).wait()
        if code:
            assert code == -signal.SIGKILL
            assert Forked(partial(lead, folders), log, tmp_path).wait() == 0
        run = read_run(folders["root"])
        assert (run.status, run.round, run.total) == (format.DONE, ROUNDS, ROUNDS), at
        assert run.summary is not None and run.summary["absent"] == {} == run.summary["refused"]
        found = load_file(folders["root"] / "model.safetensors")
        assert max(float((found[name] - value).abs().max()) for name, value in wanted.items()) < 1e-6
    assert at > 15 * ROUNDS


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text('config = "run.toml"\n')
    return provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")


def told(round: int, **more: Any) -> str:
    values = {"round": round, "steps": round, "lr": 0.1, "metrics": {}, "nodes": {}, "refused": [], "seconds": 1.0}
    return json.dumps({**values, "bytes_per_client": 8.0, "drift": {}, "renewed": True, "absent": [], **more})


def opened(root: Path, last: str) -> RootRun:
    experiment = Experiment.from_toml(root / "config.toml")
    return RootRun(root, Site.load(root), experiment, root_of(experiment), last)


def rounds_of(root: Path) -> list[int]:
    return [json.loads(line)["round"] for line in read_lines(root)]


def test_a_line_that_was_cut_short_is_not_read_and_is_written_anew(folders: dict[str, Path]) -> None:
    root, lines = folders["root"], [told(number) for number in (1, 2, 3)]
    path = root / "rounds.jsonl"
    path.write_text("\n".join(lines)[:-4])
    assert read_lines(root) == lines[:2]
    run = opened(root, lines[2])
    run.add(told(4))
    run.close()
    assert rounds_of(root) == [1, 2, 3, 4]
    opened(root, lines[2]).close()
    assert rounds_of(root) == [1, 2, 3]
    opened(root, "").close()
    assert rounds_of(root) == []


def test_a_deployment_is_listed_and_reported_like_a_simulation(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lead(folders)
    root = folders["root"]
    run = read_run(root)
    experiment = Experiment.from_toml(root / "config.toml")
    simulated = reference_simulation(experiment)
    history = simulated.run().history
    assert (run.status, run.name, run.id) == ("done", "sites", Site.load(root).job)
    assert (run.engine, run.precision, run.config) == ("loop", "fp32", json.loads(json.dumps(experiment.to_table())))
    for mine, theirs in zip(run.rounds, history, strict=True):
        # a root does not count what is sent between other sites, round by round
        assert set(mine) == {*vars(theirs), "absent"} - {"traffic"}
        assert all(mine[key] == getattr(theirs, key) for key in ("round", "steps", "lr", "nodes", "renewed"))
        # how a meeting went is told with the next round, or with the farewell
        assert 0 < mine["bytes_per_client"] <= theirs.bytes_per_client
        assert mine["metrics"] == pytest.approx(theirs.metrics, abs=1e-5) and mine["absent"] == mine["refused"] == []
    assert run.summary is not None
    communication = simulated.result().communication
    assert run.summary["communication"] == [{"level": 1, **vars(communication.level(1))}]
    assert run.summary["bytes_per_client"] == communication.bytes_per_client
    samples = [len(part) for part in simulated.data.clients]
    assert run.tree["levels"][1]["samples"] == samples
    assert simulated.workload is not None
    assert run.workload == json.loads(json.dumps(simulated.workload.to_plain()))
    monkeypatch.setattr(sys, "argv", ["stratafl", "runs", "list", str(root.parent), "--json"])
    with pytest.raises(SystemExit):
        main()
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["path"], listed["status"], listed["absent"]) == (str(root), "done", {})
    shown = [column["cells"][0]["text"] for column in page_data([run])["summary"]["before"][:3]]
    assert shown == ["MTGC", "1", str(ROUNDS)]
    with pytest.raises(InvalidInput, match="is the root of a deployed run: `stratafl deploy up`"):
        RunSession.resume(root)


OWN_DATA = '[data]\n0 = "/srv/own.npz"\n'


@pytest.mark.parametrize(
    ("topology", "steps"),
    [("", [3 * 37, 6 * 37]), (OWN_DATA + "[samples]\n0 = 41\n", [3 * 20, 6 * 20]), (OWN_DATA, [3, 6])],
    ids=["by the config", "declared", "not declared"],
)
def test_passes_over_a_client_s_data_are_recorded_as_steps(topology: str, steps: list[int], tmp_path: Path) -> None:
    """As a simulation records them, unless a leaf's samples were not declared."""
    config = CONFIG.replace("periods = [1]", 'periods = [3]\nunit = "epochs"\n[client]\nbatch_size = 20')
    (tmp_path / "run.toml").write_text(config)
    (tmp_path / "topology.toml").write_text(f'config = "run.toml"\n{topology}')
    made = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    run = opened(made["root"], "")
    assert [run.steps(rounds) for rounds in (1, 2)] == steps
    run.close()
    if not topology:
        lead(made)
        history = reference_simulation(Experiment.from_toml(tmp_path / "run.toml")).run().history
        assert [record["steps"] for record in read_run(made["root"]).rounds] == [record.steps for record in history]


def test_who_was_absent_or_refused_is_shown(folders: dict[str, Path], monkeypatch, capsys) -> None:
    root = folders["root"]
    run = opened(root, "")
    apart = [{"absent": ["1"]}, {"absent": ["1", "1"], "refused": ["0"]}, {}, {"absent": ["1"]}]
    for number, more in enumerate(apart, 1):
        run.add(told(number, **more))
    stored = read_run(root)
    assert (stored.status, stored.round) == ("interrupted", 4), "nobody holds the site's lock"
    assert stored.left_out == {"refused": {"0": 1}, "too_large": {}, "absent": {"1": 4}}
    shown = page_data([stored])
    last = shown["summary"]["after"][-2:]
    assert [(column["title"], column["cells"][0]["text"]) for column in last] == [("refused", "1"), ("absent", "4")]
    lines = shown["settings"][0]["runs"][0]["notes"]
    assert {"refused: 0 in round 2", "absent: 1 in rounds 1-2, 4"} < set(lines)
    assert to_scalars(RoundResult.of(stored.rounds[1]))["run/absent"] == 2
    monkeypatch.setattr(sys, "argv", ["stratafl", "runs", "list", str(root.parent)])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "root: refused 1 times: 0\n" in out and "root: absent 4 times: 1\n" in out
    run.close()


def test_a_root_that_is_started_again_goes_on_in_its_folder(folders: dict[str, Path]) -> None:
    root = folders["root"]
    run = opened(root, "")
    run.add(told(1))
    run.close()
    opened(root, told(1)).close()
    described = files.read_json(root / "run.json")
    assert [each["after"] for each in described["continued"]] == [1]
    assert read_run(root).created == described["created"]


def test_labels_of_a_leaf_with_data_of_its_own_are_nobody_else_s(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "topology.toml").write_text('config = "run.toml"\n[data]\n0 = "/srv/own.npz"\n')
    root = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")["root"]
    opened(root, "").close()
    own, other = read_run(root).tree["levels"][1]["labels"]
    assert sum(own) == 0 and sum(other) > 0


def test_a_reset_sets_the_whole_run_aside(folders: dict[str, Path]) -> None:
    root = folders["root"]
    opened(root, "").close()
    (root / "state").mkdir()
    files.write_json(root / "state" / "status.json", {"doing": "damaged"})
    aside = this_machine.reset(["root"], root.parent)["root"]
    assert files.read_json(aside / "status.json") == {"doing": "damaged"}
    assert read_run(aside / "run").round == 0 and not (root / "run.json").exists()
