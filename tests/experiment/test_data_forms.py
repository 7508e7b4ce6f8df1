"""Forms of data that users have: data frames, files of tables, images in bytes, loaders and
streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from stratafl import Client, Data, InvalidInput, simulate
from stratafl.base.topology import Topology
from stratafl.data.dataset import FederatedData
from stratafl.experiment.loading import load_data
from stratafl.simulation.simulation import Simulation
from tests.experiment.conftest import data_of

TREE = Topology.of("2")
INPUTS, LABELS = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
COLUMNS = {"targets": "sick"}


def frame(rows: slice = slice(None)) -> pd.DataFrame:
    table = {"age": [30, 40, 50, 60, 70, 80], "weight": [5.5, 6, 7, 8, 9, 9.5], "sick": list("nynyny")}
    return pd.DataFrame(table)[rows]


def loaded(source: object, tree: Topology = TREE, **options: Any) -> FederatedData:
    return load_data(Data(source, **options), tree, 0)


def rows_of(data: FederatedData) -> list[list[float]]:
    """Ages of each client."""
    assert data.clients is not None and isinstance(data.inputs, Tensor)
    return [data.inputs[numbers, 0].tolist() for numbers in data.clients]


# -- tables ----------------------------------------------------------------------------------------


def test_a_data_frame_is_data_with_named_classes() -> None:
    data = loaded(frame(), columns=COLUMNS, test=1 / 3)
    assert data.classes == ("n", "y") and data.shape == (2,) and len(data.samples.targets_N) == 4
    assert data.test is not None and len(data.test.samples.targets_N) == 2
    assert loaded(frame(), columns={"inputs": "age", "targets": "weight"}).classes == ()


def test_each_client_may_have_a_data_frame() -> None:
    parts = [frame(slice(0, 1)), frame(slice(1, 6))]
    data = loaded(parts, columns=COLUMNS, test=[frame(slice(0, 2))] * 2)
    assert rows_of(data) == [[30], [40, 50, 60, 70, 80]]
    assert data.samples.targets_N.tolist() == [0, 1, 0, 1, 0, 1], "classes are numbered alike at all clients"
    assert data.client_test is not None and data.client_test.client_sizes == [2, 2]
    own_test = loaded(parts, columns=COLUMNS, test=frame(slice(2, 3))).test
    assert own_test is not None and own_test.samples.targets_N.tolist() == [0]


def test_two_data_frames_may_be_inputs_and_targets() -> None:
    pair = [frame()[["age", "weight"]], pd.DataFrame({"height": [1.0, 2, 3, 4, 5, 6]})]
    assert loaded(pair).samples.targets_N.shape == (6, 1)


def test_paths_of_tables_are_one_client_each(folder: Path) -> None:
    frame(slice(0, 2)).to_csv(folder / "north.csv", index=False)
    frame(slice(2, 6)).to_parquet(folder / "south.parquet")
    paths = [folder / "north.csv", str(folder / "south.parquet")]
    assert rows_of(loaded(paths, columns=COLUMNS)) == [[30, 40], [50, 60, 70, 80]]
    text = 'source = ["north.csv", "south.parquet", "north.csv", "north.csv"]\ncolumns = { targets = "sick" }'
    assert data_of(folder, text).client_sizes == [2, 4, 2, 2], "from the folder of the config"


def test_a_function_may_return_data_frames(folder: Path) -> None:
    frame().to_csv(folder / "all.csv", index=False)
    code = "import pandas as pd\n\n\ndef load():\n    table = pd.read_csv('{}')\n    return table, table\n"
    (folder / "frames.py").write_text(code.format(folder / "all.csv"))
    data = data_of(folder, 'source = "frames.py:load"\ncolumns = { targets = "sick" }')
    assert data.classes == ("n", "y") and data.test is not None


def test_a_stored_run_of_data_frames_is_resumed(tmp_path: Path) -> None:
    def run(rows: slice) -> int:
        data = Data([frame(), frame(rows)], columns=COLUMNS)
        return len(simulate(nn.Linear(2, 2), data, "2", rounds=1, save=tmp_path / "run").run().history)

    assert run(slice(0, 4)) == run(slice(0, 4)) == 1
    with pytest.raises(InvalidInput, match=r"is no longer what this run began with: .*data"):
        run(slice(1, 5))


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        (frame(), {}, r"data\.source columns = .*say which are the targets"),
        (frame(slice(0, 0)), {"columns": COLUMNS}, r"data\.source = 'DataFrame': has no rows"),
        ([frame(), frame()[["age", "sick"]]], {"columns": COLUMNS}, r"data\.source\[1\] = .*has no column 'weight'"),
        ([frame(), frame()], {"columns": COLUMNS, "test": 0.5}, r"data\.test = 0\.5: a share is taken of a single"),
        (frame(), {"columns": COLUMNS, "test": (INPUTS, LABELS)}, r"data\.test = 'tuple': must be tables"),
        (frame(), {"columns": COLUMNS, "lazy": True}, r"data\.lazy = True: is not for tables"),
        ([frame(), frame()], {"columns": COLUMNS, "partition": ["iid"]}, "comes divided among the clients already"),
        (["a.npz", "b.npz"], {}, r"data\.source\[0\] = 'str': is no data: load it first; .*\.csv"),
        (["none.csv", "none.csv"], {}, r"data\.source\[0\] = 'none\.csv': cannot be read"),
    ],
)
def test_a_wrong_table_is_one_line(source: object, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as caught:
        loaded(source, **options)
    assert "\n" not in str(caught.value)


# -- loaders and streams ---------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(TensorDataset(INPUTS, LABELS))


def test_what_the_lines_on_loaders_and_streams_advise_works() -> None:
    loaders = [DataLoader(TensorDataset(INPUTS, LABELS), batch_size=2)] * 2
    with pytest.raises(InvalidInput, match=r"data\.source\[0\] = 'DataLoader': give loader\.dataset"):
        loaded(loaders)
    assert loaded([loader.dataset for loader in loaders]).client_sizes == [6, 6]
    with pytest.raises(InvalidInput, match=r"data\.source\[1\] = 'Stream': .*default_collate\(list\(dataset\)\)"):
        loaded([TensorDataset(INPUTS, LABELS), Stream()])
    assert loaded(default_collate(list(Stream()))).client_sizes == [3, 3]
    assert loaded([default_collate(list(Stream()))] * 2).client_sizes == [6, 6]


# -- images in bytes -------------------------------------------------------------------------------

PIXELS = torch.randint(0, 256, (6, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Pictures(Dataset):
    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return PIXELS[number], LABELS[number]


def scaled(source: object, scale: str, **options: Any) -> Tensor:
    inputs = loaded(source, scale=scale, **options).inputs
    assert isinstance(inputs, Tensor)
    return inputs


def test_bytes_are_scaled_when_asked_for() -> None:
    unit = PIXELS.float() / 255
    assert scaled((PIXELS, LABELS), "none").dtype == torch.uint8
    assert torch.equal(scaled((PIXELS, LABELS), "unit"), unit)
    mean, std = unit.mean(dim=(0, 2, 3), keepdim=True), unit.std(dim=(0, 2, 3), keepdim=True, correction=0)
    torch.testing.assert_close(scaled((PIXELS, LABELS), "standard"), (unit - mean) / std)
    last = PIXELS.movedim(1, -1)
    torch.testing.assert_close(scaled((last, LABELS), "standard"), ((unit - mean) / std).movedim(1, -1))
    torch.testing.assert_close(scaled((PIXELS[:, 0], LABELS), "standard").mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert not scaled((PIXELS * 0, LABELS), "standard").any(), "a constant channel has no deviation"


def test_test_images_are_scaled_by_the_training_data() -> None:
    data = loaded((PIXELS, LABELS), scale="standard", test=(PIXELS[:2], LABELS[:2]), test_partition="like_train")
    assert data.test is not None and data.client_test is not None
    assert torch.equal(data.test.inputs, data.inputs[:2])  # type: ignore[index,arg-type]
    assert data.client_test.samples is data.test.samples


def test_lazy_and_named_images_are_scaled() -> None:
    unit = scaled(Pictures(), "unit", lazy=True)
    assert torch.equal(unit, (PIXELS.float() / 255)[: len(unit)])
    named = loaded(({"image": PIXELS, "age": INPUTS}, LABELS), scale="unit").inputs.named  # type: ignore[union-attr]
    assert torch.equal(named["image"], PIXELS.float() / 255) and torch.equal(named["age"], INPUTS)


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ((INPUTS, LABELS), {"scale": "unit"}, r"data\.scale = 'unit': is for bytes \(uint8\), not float32"),
        ((PIXELS, LABELS), {"scale": "units"}, r"data\.scale = 'units': unknown; did you mean 'unit'"),
        (Pictures(), {"scale": "standard", "lazy": True}, r"data\.scale = 'standard': .*\"unit\" divides by 255"),
        ("digits", {"scale": "unit"}, r"data\.scale = 'unit': images of the library and in folders always are"),
        (
            (PIXELS, LABELS),
            {"scale": "unit", "test": (PIXELS.float(), LABELS)},
            r"data\.test inputs = 'float32': must be bytes",
        ),
    ],
)
def test_a_wrong_scale_is_one_line(source: object, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        loaded(source, **options)


# -- batches ---------------------------------------------------------------------------------------


def run_with(batch_size: int | str) -> Simulation:
    parts = [range(4), range(4, 6)]
    client = Client(batch_size=batch_size)
    return simulate(nn.Linear(2, 2), Data((INPUTS, LABELS), partition=parts), "2", rounds=1, client=client)


def test_a_batch_that_is_larger_than_the_data_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = "client.batch_size = 100: 2 of 2 clients have fewer samples (2 to 4), and use all of them in every step"
    simulation = run_with(100)
    assert told in simulation.notes
    simulation.run(progress=False)
    assert capsys.readouterr().err.count(told) == 1
    assert any("1 of 2 clients have fewer samples (2)" in note for note in run_with(3).notes)


@pytest.mark.parametrize("batch_size", [2, "full", 32])
def test_nothing_is_said_of_other_batches(batch_size: int | str) -> None:
    """Also not of the default, which was not asked for."""
    assert not any("batch_size" in note for note in run_with(batch_size).notes)
