"""Data of a user's own from a config: functions, tables, arrays, folders of images, Hugging
Face's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratafl import InvalidInput
from stratafl.base.tree import Tree
from stratafl.config.data import LabelCounts, PreparedData, prepared, split
from stratafl.config.schema import Config
from stratafl.config.setup import experiment, part_of, root_of, study
from stratafl.deploy.sites.provision import provision
from stratafl.deploy.sites.site import Site, config_of
from stratafl.deploy.sites.topology import Topology
from stratafl.runs.launch import Launch
from stratafl.runs.read import read_run
from stratafl.runs.sweep.plan import Plan

LOADER = """
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset


def arrays(samples=40, width=3):
    x = torch.randn(samples, width)  # from the run's own seed
    return (x, (x[:, 0] > 0).long()), (x[:8], (x[:8, 0] > 0).long())


def each(clients):
    sets = [TensorDataset(torch.ones(3 + n, 2) * n, torch.arange(3 + n) % 2) for n in range(clients)]
    return {"train": sets, "test": (torch.ones(4, 2), torch.zeros(4).long()), "classes": ["no", "yes"]}


def owned(divided=False):
    x, y = np.arange(24.0).reshape(12, 2).astype("float32"), np.arange(12) % 3
    parts = {"partition": [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]} if divided else {"owner": y}
    return {"train": (x, y), **parts}


def real():
    x = torch.linspace(0, 1, 20)[:, None]
    return (x, 2 * x), (x, 2 * x)


class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, number):
        return torch.full((3,), number % 2) + 0.1 * torch.randn(3), number % 2


def noisy():
    return Noisy(), None


def named():
    codes = torch.arange(48).reshape(16, 3) % 5
    data = {"codes": codes, "scale": torch.ones(16, 1)}, codes[:, 0] % 2
    return data, data


def wrong():
    return 1, 2, 3


def misspelt():
    return {"trian": None}


def failing():
    raise OSError("the disk is gone")
"""
NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        assert input_shape == {"codes": (3,), "scale": (1,)}
        self.table, self.out = torch.nn.Embedding(5, 4), torch.nn.Linear(4, classes)

    def forward(self, codes, scale):
        return self.out(self.table(codes).mean(dim=1) * scale)
"""
TREE = Tree.of("2x2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of the user's, in a folder that is not the current one."""
    made = tmp_path / "study"
    made.mkdir()
    (made / "my_data.py").write_text(LOADER)
    (made / "net.py").write_text(NET)
    return made


def config(folder: Path, data: str, more: str = "") -> Config:
    text = '[tree]\nshape = "2x2"\n[schedule]\nperiods = [1, 2]\n'
    (folder / "study.toml").write_text(f"{text}{more}\n[data]\n{data}\n")
    return Config.load(folder / "study.toml")


def data_of(folder: Path, data: str, seed: int = 0) -> PreparedData:
    return prepared(config(folder, data).data, TREE, seed)


ROUNDS = '[model]\nname = "logistic"\n[run]\nrounds = 2\n'


# -- functions -------------------------------------------------------------------------------------


def test_a_function_gives_the_data_and_its_arguments_are_a_table(folder: Path) -> None:
    text = 'name = "my_data.py:arrays"\narguments = { samples = 20, width = 2 }\n'
    text += 'partition = ["iid", { name = "classes", k = 1 }]'
    made = data_of(folder, text)
    assert made.shape == (2,) and len(made.train.supply.targets_N) == 20 and made.classes == ("0", "1")
    assert LabelCounts.of(made).fingerprint == LabelCounts.of(data_of(folder, text)).fingerprint
    assert LabelCounts.of(made).fingerprint != LabelCounts.of(data_of(folder, text, seed=1)).fingerprint
    result = experiment(config(folder, text, ROUNDS)).run()
    assert result.history[-1].metrics["accuracy"] > 0


def test_a_function_may_give_each_client_its_own(folder: Path) -> None:
    made = data_of(folder, 'name = "my_data.py:each"')
    assert made.partition.sizes.tolist() == [3, 4, 5, 6] and made.classes == ("no", "yes")
    assert LabelCounts.of(made).labels.tolist() == [[2, 1], [2, 2], [3, 2], [3, 3]]
    with pytest.raises(InvalidInput, match="comes divided"):
        data_of(folder, 'name = "my_data.py:each"\npartition = ["iid", "iid"]')
    divided = data_of(folder, 'name = "my_data.py:owned"\narguments = { divided = true }')
    assert [part.tolist() for part in divided.partition.leaves][3] == [9, 10, 11]


def test_owners_make_a_natural_partition(folder: Path) -> None:
    text = (
        '[tree]\nshape = "3"\n[schedule]\nperiods = [2]\n[data]\nname = "my_data.py:owned"\npartition = ["natural"]\n'
    )
    (folder / "study.toml").write_text(text)
    made = prepared(Config.load(folder / "study.toml").data, Tree.of("3"), 0)
    labels = made.train.supply.targets_N.numpy()
    assert all(len(set(labels[part])) == 1 for part in made.partition.leaves)


def test_targets_need_not_be_classes(folder: Path) -> None:
    made = data_of(folder, 'name = "my_data.py:real"')
    counts = LabelCounts.of(made)
    assert made.classes == () and made.outputs == 1
    assert counts.classes == ("samples",) and counts.labels.tolist() == [[5]] * 4
    with pytest.raises(InvalidInput, match=r"data\.partition\[1\] = 'dirichlet': the targets are no class numbers"):
        data_of(folder, 'name = "my_data.py:real"\npartition = ["iid", { name = "dirichlet", alpha = 1.0 }]')
    with pytest.raises(InvalidInput, match="no classes to show"):
        split(config(folder, 'name = "my_data.py:real"').data, TREE, 0)


def test_inputs_with_names_reach_a_model_of_ones_own(folder: Path) -> None:
    model = '[model]\nname = "net.py:Net"\n[run]\nrounds = 1\n'
    made = study(config(folder, 'name = "my_data.py:named"', model))
    assert made.data.shape == {"codes": (3,), "scale": (1,)}
    assert made.simulation.run().history[-1].metrics["loss"] > 0
    with pytest.raises(InvalidInput, match="takes one input, and the data has codes, scale"):
        study(config(folder, 'name = "my_data.py:named"', ROUNDS))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('name = "my_data.py:lod"', r"data\.name = 'lod': unknown"),
        ('name = "my_data.py:arrays"\narguments = { sample = 2 }', "did you mean 'samples'"),
        ('name = "my_data.py:wrong"', r"must return \(train, test\)"),
        ('name = "my_data.py:misspelt"', "did you mean 'train'"),
        ('name = "my_data.py:failing"', "the disk is gone"),
        ('name = "nothing.py:load"', "no such Python file"),
        ('name = "my_data.py:arrays"\nlazy = true', "item by item"),
        ('name = "my_data.py:arrays"\ntest = 0.5', "is not for a function"),
        ('name = "digits"\nlazy = true', r"data\.lazy = True: is for data of your own"),
        ('name = "digits"\ncolumns = { targets = "y" }', r"data\.columns .*is for data of your own"),
        ('name = "none.csv"', "there is none"),
        ('name = "my_data.py:arrays"\nrotation = { step = 10 }', "is for images"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, data: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as caught:
        data_of(folder, data)
    assert "\n" not in str(caught.value)


# -- files -----------------------------------------------------------------------------------------

TABLE = """age,weight,hospital,sick
1,2.5,north,no
2,3.5,north,yes
3,4.5,south,no
4,5.5,south,yes
5,6.5,east,no
6,7.5,east,yes
7,8.5,west,no
8,9.5,west,yes
"""


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_with_a_label_and_a_group_column(folder: Path, suffix: str) -> None:
    import pandas as pd

    (folder / "table.csv").write_text(TABLE)
    if suffix == "parquet":
        pd.read_csv(folder / "table.csv").to_parquet(folder / "table.parquet")
    text = f'name = "table.{suffix}"\ntest = "table.{suffix}"\ncolumns = {{ targets = "sick", owner = "hospital" }}\n'
    made = data_of(folder, text + 'partition = ["natural", "natural"]')
    assert made.shape == (2,) and made.classes == ("no", "yes") and len(made.train.supply.targets_N) == 8
    assert sorted(part.tolist() for part in made.partition.leaves) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    real = data_of(
        folder, f'name = "table.{suffix}"\ncolumns = {{ inputs = ["age"], targets = "weight" }}\ntest = 0.25'
    )
    assert real.classes == () and real.test is not None and len(real.test.supply.targets_N) == 2
    assert experiment(config(folder, text, ROUNDS)).run().history[-1].metrics["loss"] > 0


def test_a_table_that_cannot_be_used_is_one_line(folder: Path) -> None:
    (folder / "table.csv").write_text(TABLE)
    for data, told in (
        ("", "say which are the targets"),
        ('columns = { targets = "sik" }', "did you mean 'sick'"),
        ('columns = { targets = "sick" }', "'hospital': must hold numbers"),
        ('columns = { targets = "sick", owner = "who" }', "is none of"),
        ('columns = { inputs = ["age"], targets = "sick" }\ntest = 0.01', "nothing to train or to test"),
    ):
        with pytest.raises(InvalidInput, match=told):
            data_of(folder, f'name = "table.csv"\n{data}')
    (folder / "table.csv").write_text(TABLE + ",1,west,no\n")
    with pytest.raises(InvalidInput, match="missing values"):
        data_of(folder, 'name = "table.csv"\ncolumns = { inputs = ["age"], targets = "sick" }')


def test_arrays_in_a_file(folder: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2
    np.savez(folder / "both.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5], owner_train=np.arange(20) % 4)
    np.savez(folder / "one.npz", x=x, y=y)
    both = data_of(folder, 'name = "both.npz"\npartition = ["natural", "natural"]')
    assert both.partition.sizes.tolist() == [5] * 4 and both.test is not None
    one = data_of(folder, 'name = "one.npz"\ntest = 0.2')
    assert len(one.train.supply.targets_N) == 16
    assert one.test is not None and len(one.test.supply.targets_N) == 4
    assert data_of(folder, 'name = "one.npz"').test is None
    np.savez(folder / "none.npz", a=x)
    with pytest.raises(InvalidInput, match="must have x and y; it has a"):
        data_of(folder, 'name = "none.npz"')


def test_a_folder_of_images(folder: Path) -> None:
    from PIL import Image

    drawn = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 2)):
        for label in ("cat", "dog"):
            (folder / "images" / part / label).mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / part / label / f"{number}.png")
    text = 'name = "images/"\naugment = "flip_and_crop"\nrotation = { step = 90 }\n'
    made = data_of(folder, text + 'partition = ["iid", { name = "classes", k = 1 }]')
    assert made.shape == (3, 8, 8) and made.classes == ("cat", "dog") and made.partition.angles is not None
    assert made.test is not None and len(made.test.supply.targets_N) == 4
    alone = data_of(folder, 'name = "images/train"\ntest = 0.25')
    assert alone.test is not None and len(alone.test.supply.targets_N) == 3
    with pytest.raises(InvalidInput, match="say what to test on"):
        data_of(folder, 'name = "images/train"')
    labelled, _ = split(config(folder, 'name = "images/"').data, TREE, 0)
    assert labelled.stored is not None and labelled.y_train.tolist() == [0] * 6 + [1] * 6


def test_a_data_set_of_hugging_faces_from_a_folder(folder: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    kinds = {"codes": datasets.Value("int64"), "scale": datasets.Value("float32")}
    features = datasets.Features(
        {name: datasets.Sequence(kind, length) for (name, kind), length in zip(kinds.items(), (3, 1), strict=True)}
        | {"label": datasets.ClassLabel(names=["bad", "good"]), "who": datasets.Value("string")}
    )
    rows = [{"codes": [n % 5] * 3, "scale": [1.0], "label": n % 2, "who": f"w{n % 4}"} for n in range(16)]
    made = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict({"train": made, "validation": made.select(range(4))}).save_to_disk(str(folder / "saved"))
    text = 'name = "hf:saved"\ncolumns = { owner = "who" }\npartition = ["natural", "natural"]\n'
    found = data_of(folder, text)
    assert found.classes == ("bad", "good") and found.shape == {"codes": (3,), "scale": (1,)}
    assert found.partition.sizes.tolist() == [4] * 4
    assert found.test is not None and len(found.test.supply.targets_N) == 4
    model = '[model]\nname = "net.py:Net"\n[run]\nrounds = 1\n'
    wanted = study(config(folder, text, model)).simulation.run().module.state_dict()
    lazy = study(config(folder, text + "lazy = true\n", model)).simulation.run().module.state_dict()
    assert all(torch.equal(value, lazy[name]) for name, value in wanted.items())
    with pytest.raises(InvalidInput, match=r"is not in the cache .* to get it: python -c"):
        data_of(folder, 'name = "hf:nobody/nothing"')


# -- paths, warm start, resume ---------------------------------------------------------------------


def test_what_a_config_names_lies_beside_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_rule.py").write_text("import stratafl\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    more = '[model]\nname = "net.py:Net"\n[run]\nrounds = 2\nplugins = ["my_rule.py"]\n'
    made = config(folder, 'name = "my_data.py:named"', more)
    assert made.data.name == f"{folder}/my_data.py:named" and made.model["name"] == f"{folder}/net.py:Net"
    assert list(made.run.plugins) == [f"{folder}/my_rule.py"]
    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "sweep.toml").write_text('config = "../study.toml"\n[grid]\nseeds = 2\n')
    (entry, _) = Plan.load(folder / "sweeps" / "sweep.toml").entries
    assert entry.config == made
    done = Launch.new(made, "study", elsewhere / "runs").run()
    files = json.loads((done.path / "run.json").read_text())["inputs"]["files"]
    assert {f"{folder}/my_data.py", f"{folder}/net.py", f"{folder}/my_rule.py"} <= set(files)


def stopped(made: Config, runs: Path) -> Path:
    """A run that was interrupted after its first round."""
    launch = Launch.new(made, "study", runs)
    record = next(iter(launch.simulation))
    launch.folder.add(record)
    launch.folder.checkpoint(launch.place, launch.simulation.state(history=False))
    launch.folder.close()
    return launch.folder.path


LAZY = 'name = "my_data.py:noisy"\nlazy = true\n'


def test_a_lazy_run_goes_on_to_the_same_bits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(folder, LAZY, '[model]\nname = "logistic"\n[run]\nrounds = 3\n')
    whole = Launch.new(made, "whole", tmp_path / "runs").run().path
    path = stopped(made, tmp_path / "runs")
    torch.manual_seed(3)
    monkeypatch.chdir(tmp_path)
    Launch.resume(path).run()
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert read_run(path).status == "done"


def test_a_resume_notices_other_data(folder: Path, tmp_path: Path) -> None:
    x, y = np.ones((8, 2), np.float32), np.arange(8) % 2
    np.savez(folder / "own.npz", x=x, y=y)
    path = stopped(config(folder, 'name = "own.npz"\ntest = 0.25', ROUNDS), tmp_path / "runs")
    np.savez(folder / "own.npz", x=x * 2, y=y)
    with pytest.raises(InvalidInput, match=r"own\.npz was changed"):
        Launch.resume(path)
    path = stopped(config(folder, 'name = "my_data.py:arrays"\n', ROUNDS), tmp_path / "runs")
    described = json.loads((path / "run.json").read_text())
    described["data"] = LabelCounts.of(
        data_of(folder, 'name = "my_data.py:arrays"\narguments = { width = 2 }')
    ).fingerprint
    (path / "run.json").write_text(json.dumps(described))
    with pytest.raises(InvalidInput, match="is no longer what this run began with"):
        Launch.resume(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_run_starts_from_a_file(folder: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    values = {"1.weight": torch.full((2, 3), 0.5), "1.bias": torch.tensor([1.0, -1.0])}
    if suffix == "pt":
        torch.save(values, folder / "start.pt")
    else:
        save_file(values, folder / "start.safetensors")
    more = f'[model]\nname = "logistic"\n[run]\nrounds = 1\ninitial = "start.{suffix}"\n'
    simulation = experiment(config(folder, 'name = "my_data.py:arrays"', more))
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
            experiment(config(folder, 'name = "my_data.py:arrays"', f'{ROUNDS}initial = "{name}"\n'))


def test_a_deployed_root_starts_from_it_too(folder: Path) -> None:
    torch.save({"1.weight": torch.full((2, 3), 0.5), "1.bias": torch.tensor([1.0, -1.0])}, folder / "start.pt")
    more = '[model]\nname = "logistic"\n[run]\nrounds = 1\ninitial = "start.pt"\n'
    config(folder, 'name = "my_data.py:arrays"', more)
    (folder / "topology.toml").write_text('config = "study.toml"\n')
    sites = provision(Topology.load(folder / "topology.toml"), folder / "sites")
    site = Site.load(sites["root"])
    assert set(site.files) == {"my_data.py", "start.pt"}
    made = config_of(site, sites["root"])
    assert root_of(made).start.x_P.tolist() == [0.5] * 6 + [1.0, -1.0]
    whole = study(made).data
    (inputs, targets), outputs = part_of(made, 3)
    assert isinstance(inputs, torch.Tensor) and outputs == 2
    mine = torch.as_tensor(whole.partition.leaves[3])
    assert torch.equal(inputs, whole.train.supply.first(1)[mine]) and len(targets) == len(mine)
    config(folder, 'name = "my_data.py:named"', '[model]\nname = "net.py:Net"\n')
    with pytest.raises(InvalidInput, match="takes one, which has no name"):
        provision(Topology.load(folder / "topology.toml"), folder / "others")


@pytest.mark.parametrize(
    ("data", "told"),
    [('name = "table.csv"', "would have to be at every site"), (LAZY, "must be false")],
)
def test_what_a_deployed_tree_does_not_do_is_refused(folder: Path, data: str, told: str) -> None:
    config(folder, data)
    (folder / "topology.toml").write_text('config = "study.toml"\n')
    with pytest.raises(InvalidInput, match=told):
        Topology.load(folder / "topology.toml")
