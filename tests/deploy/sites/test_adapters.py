"""A base with adapters, deployed: every site has the base that `init` was given, and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.deploy.sites.assemble import Assembled
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.site import Site
from stratafl.deploy.sites.user_files import import_from

CONFIG = """
rounds = 2
[tree]
shape = "2x2"
[model]
name = "mlp"
hidden = [16]
{base}
lora = {{ rank = 2, alpha = 4, targets = ["*"] }}
[schedule]
periods = [2, 2]
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    import_from()


def sites(folder: Path, base: str = "") -> dict[str, Path]:
    (folder / "run.toml").write_text(CONFIG.format(base=base))
    (folder / "topology.toml").write_text('config = "run.toml"\n')
    return provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")


def test_a_site_has_the_base_and_is_told_of_adapters_alone(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = {"1.weight": (16, 64), "1.bias": (16,), "3.weight": (10, 16), "3.bias": (10,)}
    base = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    save_file(base, tmp_path / "base.safetensors")
    folders = sites(tmp_path, 'base = "base.safetensors"')
    (tmp_path / "base.safetensors").unlink()
    site = Site.load(folders["0/1"])
    assert site.parameters == 2 * (64 + 16) + 2 * (16 + 10)
    assert (folders["0/1"] / "code" / "base.safetensors").is_file()
    module = Assembled.of(folders["0/1"]).leaf().engine.training.flat.module
    values = [value for name, value in module.state_dict().items() if "base_layer" in name]
    assert all(torch.equal(mine, given) for mine, given in zip(values, base.values(), strict=True))


def test_another_base_is_refused_where_it_is(tmp_path: Path) -> None:
    folders = sites(tmp_path)
    Assembled.of(folders["0/0"]).leaf()
    folder = folders["0/1"]
    found = json.loads((folder / "site.json").read_text())
    (folder / "site.json").write_text(json.dumps({**found, "frozen": "0" * 64}))
    with pytest.raises(InvalidInput, match="frozen weights are others"):
        Assembled.of(folder).leaf()
