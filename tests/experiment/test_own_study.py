"""A study of a user's own as a whole: its paths, its start, how it goes on, and as deployed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stratafl import InvalidInput
from stratafl.deploy.sites.provision import provision
from stratafl.deploy.sites.site import Site, experiment_of
from stratafl.deploy.sites.topology import DeploymentTopology
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import LabelCounts
from stratafl.runs.reader import read_run
from stratafl.runs.session import RunSession
from stratafl.simulation.build import build
from stratafl.simulation.deployed import part_of, root_of
from stratafl.sweeps.grid import Sweep
from tests.experiment.conftest import LAZY, ROUNDS, config, data_of


def test_what_a_config_names_lies_beside_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_rule.py").write_text("import stratafl\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    more = 'rounds = 2\nplugins = ["my_rule.py"]\n\n[model]\nname = "net.py:Net"\n'
    made = config(folder, 'source = "my_data.py:named"', more)
    assert made.data.source == f"{folder}/my_data.py:named" and made.model.name == f"{folder}/net.py:Net"
    assert made.plugins == (f"{folder}/my_rule.py",)
    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "sweep.toml").write_text('config = "../study.toml"\n[grid]\nseed = 2\n')
    (entry, _) = Sweep.load(folder / "sweeps" / "sweep.toml").entries
    assert entry.experiment == made
    done = RunSession.start(made, "study", elsewhere / "runs").run()
    files = json.loads((done.path / "run.json").read_text())["inputs"]["files"]
    assert {f"{folder}/my_data.py", f"{folder}/net.py", f"{folder}/my_rule.py"} <= set(files)


def stopped(made: Experiment, runs: Path) -> Path:
    """A run that was interrupted after its first round."""
    session = RunSession.start(made, "study", runs)
    record = next(iter(session.simulation))
    session.writer.append_round(record)
    session.writer.checkpoint(session.progress, session.simulation.state(history=False))
    session.close()
    return session.path


def test_a_lazy_run_goes_on_to_the_same_bits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(folder, LAZY, 'rounds = 3\n\n[model]\nname = "logistic"\n')
    whole = RunSession.start(made, "whole", tmp_path / "runs").run().path
    path = stopped(made, tmp_path / "runs")
    torch.manual_seed(3)
    monkeypatch.chdir(tmp_path)
    RunSession.resume(path).run()
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert read_run(path).status == "done"


def test_a_resume_notices_other_data(folder: Path, tmp_path: Path) -> None:
    x, y = np.ones((8, 2), np.float32), np.arange(8) % 2
    np.savez(folder / "own.npz", x=x, y=y)
    path = stopped(config(folder, 'source = "own.npz"\ntest = 0.25', ROUNDS), tmp_path / "runs")
    np.savez(folder / "own.npz", x=x * 2, y=y)
    with pytest.raises(InvalidInput, match=r"own\.npz was changed"):
        RunSession.resume(path)
    path = stopped(config(folder, 'source = "my_data.py:arrays"\n', ROUNDS), tmp_path / "runs")
    described = json.loads((path / "run.json").read_text())
    described["data"] = LabelCounts.of(
        data_of(folder, 'source = "my_data.py:arrays"\narguments = { width = 2 }')
    ).fingerprint
    (path / "run.json").write_text(json.dumps(described))
    with pytest.raises(InvalidInput, match="is no longer what this run began with"):
        RunSession.resume(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_run_starts_from_a_file(folder: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    values = {"1.weight": torch.full((2, 3), 0.5), "1.bias": torch.tensor([1.0, -1.0])}
    if suffix == "pt":
        torch.save(values, folder / "start.pt")
    else:
        save_file(values, folder / "start.safetensors")
    more = f'rounds = 1\n\n[model]\nname = "logistic"\ninitial = "start.{suffix}"\n'
    simulation = build(config(folder, 'source = "my_data.py:arrays"', more))
    started = simulation.result().module.state_dict()
    assert all(torch.equal(started[name], value) for name, value in values.items())


def test_a_start_that_cannot_be_read_is_one_line(folder: Path) -> None:
    (folder / "broken.pt").write_bytes(b"nothing")
    for name, told in (
        ("none.pt", "no such file"),
        ("broken.pt", "cannot be read"),
        ("net.py", "must be a .safetensors"),
    ):
        with pytest.raises(InvalidInput, match=told):
            build(config(folder, 'source = "my_data.py:arrays"', f'{ROUNDS}initial = "{name}"\n'))


def test_a_deployed_root_starts_from_it_too(folder: Path) -> None:
    torch.save({"1.weight": torch.full((2, 3), 0.5), "1.bias": torch.tensor([1.0, -1.0])}, folder / "start.pt")
    more = 'rounds = 1\n\n[model]\nname = "logistic"\ninitial = "start.pt"\n'
    config(folder, 'source = "my_data.py:arrays"', more)
    (folder / "topology.toml").write_text('config = "study.toml"\n')
    sites = provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
    site = Site.load(sites["root"])
    assert set(site.files) == {"my_data.py", "start.pt"}
    made = experiment_of(site, sites["root"])
    assert root_of(made).start.x_P.tolist() == [0.5] * 6 + [1.0, -1.0]
    whole = build(made).data
    (inputs, targets), outputs = part_of(made, 3)
    assert isinstance(inputs, torch.Tensor) and outputs == 2
    mine = torch.as_tensor(whole.clients[3])
    assert torch.equal(inputs, whole.samples.head(1)[mine]) and len(targets) == len(mine)
    config(folder, 'source = "my_data.py:named"', '[model]\nname = "net.py:Net"\n')
    with pytest.raises(InvalidInput, match="takes one, which has no name"):
        provision(DeploymentTopology.load(folder / "topology.toml"), folder / "others")


@pytest.mark.parametrize(
    ("data", "told"),
    [('source = "table.csv"', "would have to be at every site"), (LAZY, "must be false")],
)
def test_what_a_deployed_tree_does_not_do_is_refused(folder: Path, data: str, told: str) -> None:
    config(folder, data)
    (folder / "topology.toml").write_text('config = "study.toml"\n')
    with pytest.raises(InvalidInput, match=told):
        DeploymentTopology.load(folder / "topology.toml")
