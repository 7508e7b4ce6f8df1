"""A leaf that trains on data of its own: what is at its host, and not a part of the config's data
set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.deploy.protocol.messages import Begin, Bundle, Parcel
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.site import Site
from stratafl.experiment.experiment import Experiment
from stratafl.simulation.deployed import part_of

CONFIG = """
[tree]
shape = "2"
weights = "samples"
[model]
name = "mlp"
hidden = [4]
[schedule]
periods = [3]
[client]
batch_size = 20
"""


def sites(folder: Path, data: str) -> dict[str, Path]:
    (folder / "run.toml").write_text(CONFIG)
    (folder / "topology.toml").write_text(f'config = "run.toml"\n[data]\n0 = "{data}"\n')
    return provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")


def part(experiment: Experiment, leaf: int) -> tuple[np.ndarray, np.ndarray]:
    """What the simulation gives to a leaf."""
    (x, y), _ = part_of(experiment, leaf)
    return x.numpy(), y.numpy()


def trained(folder: Path) -> tuple[int, torch.Tensor]:
    """How many samples a leaf says it has, and its model after one round from zero."""
    here = Assembled.of(folder)
    try:
        leaf = here.leaf()
        zeros = torch.full((1, here.job.parameters), 0.01)
        parcel = Parcel(zeros, torch.zeros(1, here.job.buffers), {})
        reply = leaf.handle(Bundle(here.site.job, here.site.name, begin=Begin(0, None, parcel, None)))
        assert reply.report is not None
        return reply.samples, reply.report.message["model"]
    finally:
        here.durable.close()


def write_npz(path: Path, x: np.ndarray, y: np.ndarray) -> str:
    np.savez(path / "own.npz", x=x, y=y)
    return str(path / "own.npz")


def write_folder(path: Path, x: np.ndarray, y: np.ndarray) -> str:
    np.save(path / "x.npy", x)
    np.save(path / "y.npy", y)
    return str(path)


def write_loader(path: Path, x: np.ndarray, y: np.ndarray) -> str:
    write_folder(path, x, y)
    code = f"import numpy\ndef load():\n    return [numpy.load(f'{path}/{{name}}.npy') for name in 'xy']\n"
    (path / "loader.py").write_text(code)
    return str(path / "loader.py")


@pytest.mark.parametrize("write", [write_npz, write_folder, write_loader])
def test_its_own_copy_of_its_part_trains_as_its_part_does(tmp_path: Path, write: Any) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    experiment = Experiment.from_toml(tmp_path / "run.toml")
    own = tmp_path / "own"
    own.mkdir()
    x, y = part(experiment, 0)
    folders = sites(tmp_path, write(own, x, y))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "run.toml").write_text(CONFIG)
    (plain / "topology.toml").write_text('config = "run.toml"\n')
    simulated = provision(DeploymentTopology.load(plain / "topology.toml"), plain / "sites")
    found, wanted = trained(folders["0"]), trained(simulated["0"])
    assert found[0] == wanted[0] == len(y)
    assert torch.equal(found[1], wanted[1])


def test_it_says_how_many_samples_it_has(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    x, y = part(Experiment.from_toml(tmp_path / "run.toml"), 0)
    samples, _ = trained(sites(tmp_path, write_npz(tmp_path, x[:70], y[:70]))["0"])
    assert samples == 70


GOOD = {"x": np.zeros((5, 1, 8, 8), np.float32), "y": np.arange(5)}


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"x": GOOD["x"]}, "must be a .npz with x and y"),
        ({**GOOD, "x": np.zeros((5, 8, 8), np.float32)}, r"\(samples, 1, 8, 8\) of type float32"),
        ({**GOOD, "x": np.zeros((5, 1, 8, 8), np.uint8)}, "of type float32"),
        ({**GOOD, "x": np.full((5, 1, 8, 8), np.nan)}, "finite"),
        ({**GOOD, "y": np.arange(4)}, "for each of at least one sample"),
        ({**GOOD, "y": np.arange(6, 11)}, "0 to 9"),
        ({**GOOD, "y": np.zeros(5)}, "0 to 9"),
        ({**GOOD, "y": np.array([None] * 5, object)}, "must be a .npz with x and y"),
        ({"x": GOOD["x"][:0], "y": GOOD["y"][:0]}, "at least one sample"),
    ],
    ids=["no y", "shape", "type", "not finite", "too few", "no such class", "not whole", "pickled", "empty"],
)
def test_data_that_does_not_fit_is_refused_by_name(tmp_path: Path, arrays: dict[str, Any], named: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    here = Assembled.of(sites(tmp_path, str(tmp_path / "own.npz"))["0"])
    with pytest.raises(InvalidInput, match=named):
        here.leaf()
    here.durable.close()


def test_a_path_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    here = Assembled.of(sites(tmp_path, str(tmp_path / "nowhere.npz"))["0"])
    with pytest.raises(InvalidInput, match=r"nowhere\.npz"):
        here.leaf()
    here.durable.close()


def test_samples_are_those_that_were_declared(tmp_path: Path) -> None:
    """By the config's data set, or by the topology; a leaf that has others does not start, or is
    refused."""
    (tmp_path / "run.toml").write_text(CONFIG)
    x, y = part(Experiment.from_toml(tmp_path / "run.toml"), 0)
    data = write_npz(tmp_path, x, y)
    given = f'config = "run.toml"\n[data]\n0 = "{data}"\n'
    (tmp_path / "topology.toml").write_text(f"{given}[samples]\n0 = {len(y)}\n")
    folders = provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    others = len(part(Experiment.from_toml(tmp_path / "run.toml"), 1)[1])
    assert Site.load(folders["root"]).samples == [len(y), others]
    assert Site.load(folders["1"]).samples == [others]
    assert trained(folders["0"])[0] == len(y)
    write_npz(tmp_path, x[1:], y[1:])
    with pytest.raises(InvalidInput, match=f"{len(y) - 1} samples.*must be the {len(y)}"):
        trained(folders["0"])
    for wrong in ("0 = 0", "0 = 1.5", "0 = 10000000000", "1 = 5", "root = 5"):
        (tmp_path / "topology.toml").write_text(f"{given}[samples]\n{wrong}\n")
        with pytest.raises(InvalidInput, match=r"topology\.samples"):
            DeploymentTopology.load(tmp_path / "topology.toml")
