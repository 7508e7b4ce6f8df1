"""Data of a user's own from a config: functions, tables, arrays, folders of images, Hugging
Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from stratafl import InvalidInput
from stratafl.base.topology import Topology
from stratafl.cli.main import app
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import LabelCounts, load_data, load_stored
from stratafl.simulation.build import build
from tests.experiment.conftest import ROUNDS, TREE, config, data_of

# -- functions -------------------------------------------------------------------------------------


def test_a_function_gives_the_data_and_its_arguments_are_a_table(folder: Path) -> None:
    text = 'source = "my_data.py:arrays"\narguments = { samples = 20, width = 2 }\n'
    text += 'partition = ["iid", { name = "classes", k = 1 }]'
    made = data_of(folder, text)
    assert made.shape == (2,) and len(made.samples.targets_N) == 20 and made.classes == ("0", "1")
    assert LabelCounts.of(made).fingerprint == LabelCounts.of(data_of(folder, text)).fingerprint
    assert LabelCounts.of(made).fingerprint != LabelCounts.of(data_of(folder, text, seed=1)).fingerprint
    result = build(config(folder, text, ROUNDS)).run()
    assert result.history[-1].metrics["accuracy"] > 0


def test_a_function_may_give_each_client_its_own(folder: Path) -> None:
    made = data_of(folder, 'source = "my_data.py:each"')
    assert made.clients.sizes.tolist() == [3, 4, 5, 6] and made.classes == ("no", "yes")
    assert LabelCounts.of(made).labels.tolist() == [[2, 1], [2, 2], [3, 2], [3, 3]]
    with pytest.raises(InvalidInput, match="comes divided"):
        data_of(folder, 'source = "my_data.py:each"\npartition = ["iid", "iid"]')
    divided = data_of(folder, 'source = "my_data.py:owned"\narguments = { divided = true }')
    assert [part.tolist() for part in divided.clients][3] == [9, 10, 11]


def test_owners_make_a_natural_partition(folder: Path) -> None:
    text = (
        '[tree]\nshape = "3"\n[schedule]\nperiods = [2]\n[data]\nsource = "my_data.py:owned"\npartition = ["natural"]\n'
    )
    (folder / "study.toml").write_text(text)
    made = load_data(Experiment.from_toml(folder / "study.toml").data, Topology.of("3"), 0)
    labels = made.samples.targets_N.numpy()
    assert all(len(set(labels[part])) == 1 for part in made.clients)


def test_targets_need_not_be_classes(folder: Path) -> None:
    made = data_of(folder, 'source = "my_data.py:real"')
    counts = LabelCounts.of(made)
    assert made.classes == () and made.outputs == 1
    assert counts.classes == ("samples",) and counts.labels.tolist() == [[5]] * 4
    with pytest.raises(InvalidInput, match=r"data\.partition\[1\] = 'dirichlet': the targets are no class numbers"):
        data_of(folder, 'source = "my_data.py:real"\npartition = ["iid", { name = "dirichlet", alpha = 1.0 }]')
    config(folder, 'source = "my_data.py:real"')
    shown = CliRunner().invoke(app, ["data", "show", str(folder / "study.toml")])
    assert "has no classes to show the split of" in str(shown.exception)


def test_inputs_with_names_reach_a_model_of_ones_own(folder: Path) -> None:
    model = 'rounds = 1\n\n[model]\nname = "net.py:Net"\n'
    made = build(config(folder, 'source = "my_data.py:named"', model))
    assert made.data.shape == {"codes": (3,), "scale": (1,)}
    assert made.run().history[-1].metrics["loss"] > 0
    with pytest.raises(InvalidInput, match="takes one input, and the data has codes, scale"):
        build(config(folder, 'source = "my_data.py:named"', ROUNDS))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('source = "my_data.py:lod"', r"data\.source = 'lod': unknown"),
        ('source = "my_data.py:arrays"\narguments = { sample = 2 }', "did you mean 'samples'"),
        ('source = "my_data.py:wrong"', r"must return \(train, test\)"),
        ('source = "my_data.py:misspelt"', "did you mean 'train'"),
        ('source = "my_data.py:failing"', "the disk is gone"),
        ('source = "my_data.py:SAMPLES"', "must be something to call, and is int"),
        ('source = "my_data.py:miscounted"', r"returned classes = 2: must be a list of their names"),
        ('source = "nothing.py:load"', "no such Python file"),
        ('source = "my_data.py:arrays"\nlazy = true', "item by item"),
        ('source = "my_data.py:arrays"\ntest = 0.5', "is not for a function"),
        ('source = "digits"\nlazy = true', r"data\.lazy = True: is for data of your own"),
        ('source = "digits"\ncolumns = { targets = "y" }', r"data\.columns .*is for data of your own"),
        ('source = "none.csv"', "there is none"),
        ('source = "my_data.py:arrays"\nrotation = { step = 10 }', "is for images"),
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
    text = f'source = "table.{suffix}"\ntest = "table.{suffix}"\ncolumns = {{ targets = "sick", owner = "hospital" }}\n'
    made = data_of(folder, text + 'partition = ["natural", "natural"]')
    assert made.shape == (2,) and made.classes == ("no", "yes") and len(made.samples.targets_N) == 8
    assert sorted(part.tolist() for part in made.clients) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    real = data_of(
        folder, f'source = "table.{suffix}"\ncolumns = {{ inputs = ["age"], targets = "weight" }}\ntest = 0.25'
    )
    assert real.classes == () and real.test is not None and len(real.test.samples.targets_N) == 2
    assert build(config(folder, text, ROUNDS)).run().history[-1].metrics["loss"] > 0


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
            data_of(folder, f'source = "table.csv"\n{data}')
    (folder / "table.csv").write_text(TABLE + ",1,west,no\n")
    with pytest.raises(InvalidInput, match="missing values"):
        data_of(folder, 'source = "table.csv"\ncolumns = { inputs = ["age"], targets = "sick" }')


def test_arrays_in_a_file(folder: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2
    np.savez(folder / "both.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5], owner_train=np.arange(20) % 4)
    np.savez(folder / "one.npz", x=x, y=y)
    both = data_of(folder, 'source = "both.npz"\npartition = ["natural", "natural"]')
    assert both.clients.sizes.tolist() == [5] * 4 and both.test is not None
    one = data_of(folder, 'source = "one.npz"\ntest = 0.2')
    assert len(one.samples.targets_N) == 16
    assert one.test is not None and len(one.test.samples.targets_N) == 4
    assert data_of(folder, 'source = "one.npz"').test is None
    np.savez(folder / "none.npz", a=x)
    with pytest.raises(InvalidInput, match="must have x and y; it has a"):
        data_of(folder, 'source = "none.npz"')


def test_a_folder_of_images(folder: Path) -> None:
    from PIL import Image

    drawn = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 2)):
        for label in ("cat", "dog"):
            (folder / "images" / part / label).mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / part / label / f"{number}.png")
    text = 'source = "images/"\naugment = "flip_and_crop"\nrotation = { step = 90 }\n'
    made = data_of(folder, text + 'partition = ["iid", { name = "classes", k = 1 }]')
    assert made.shape == (3, 8, 8) and made.classes == ("cat", "dog") and made.angles is not None
    assert made.test is not None and len(made.test.samples.targets_N) == 4
    alone = data_of(folder, 'source = "images/train"\ntest = 0.25')
    assert alone.test is not None and len(alone.test.samples.targets_N) == 3
    with pytest.raises(InvalidInput, match="say what to test on"):
        data_of(folder, 'source = "images/train"')
    whole, stored = load_stored(config(folder, 'source = "images/"').data, TREE, 0)
    assert stored is not None and whole.samples.targets_N.tolist() == [0] * 6 + [1] * 6


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
    text = 'source = "hf:saved"\ncolumns = { owner = "who" }\npartition = ["natural", "natural"]\n'
    found = data_of(folder, text)
    assert found.classes == ("bad", "good") and found.shape == {"codes": (3,), "scale": (1,)}
    assert found.clients.sizes.tolist() == [4] * 4
    assert found.test is not None and len(found.test.samples.targets_N) == 4
    model = 'rounds = 1\n\n[model]\nname = "net.py:Net"\n'
    wanted = build(config(folder, text, model)).run().module.state_dict()
    lazy = build(config(folder, text + "lazy = true\n", model)).run().module.state_dict()
    assert all(torch.equal(value, lazy[name]) for name, value in wanted.items())
    with pytest.raises(InvalidInput, match=r"is not in the cache .* to get it: python -c"):
        data_of(folder, 'source = "hf:nobody/nothing"')
