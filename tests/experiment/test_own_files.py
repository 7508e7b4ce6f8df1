"""Files of a user's own that are not what they look like: refused in one line, or read as meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stratafl import InvalidInput, UserCodeError
from stratafl.data.user_files import encode_labels
from tests.experiment.conftest import data_of

X, Y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2


def drawn(path: Path, count: int = 4, kind: type = np.uint8) -> None:
    """Images in a folder."""
    path.mkdir(parents=True)
    for number in range(count):
        pixels: np.ndarray = np.random.default_rng(number).integers(0, 255, (8, 8)).astype(kind)
        Image.fromarray(pixels).save(path / f"{number}.png")


def test_the_numbers_of_a_tables_rows_are_no_input(folder: Path) -> None:
    rows = "".join(f"{number},{number % 3},{number % 2}\n" for number in range(12))
    (folder / "table.csv").write_text(f",age,label\n{rows}")
    with pytest.raises(InvalidInput, match=r"'Unnamed: 0': has no name in the file"):
        data_of(folder, 'source = "table.csv"')
    named = data_of(folder, 'source = "table.csv"\ncolumns = { inputs = ["age"] }')
    assert named.shape == (1,)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "EmptyDataError"),
        (b"a,b,label\n1,2,0\n1,2,3,4\n", "Expected 3 fields in line 3, saw 4"),
        ("a,gr\u00f6\u00dfe,label\n1,2,0\n".encode("latin-1"), "UnicodeDecodeError"),
    ],
    ids=["empty", "ragged", "latin-1"],
)
def test_a_table_that_cannot_be_read_is_no_mistake_in_code(folder: Path, content: bytes, told: str) -> None:
    (folder / "table.csv").write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"cannot be read: .*{told}") as caught:
        data_of(folder, 'source = "table.csv"')
    assert not isinstance(caught.value, UserCodeError)


def test_a_suffix_may_be_in_capitals_and_another_file_is_named_as_such(folder: Path) -> None:
    (folder / "TABLE.CSV").write_text("age,label\n1,0\n2,1\n3,0\n4,1\n")
    assert data_of(folder, 'source = "TABLE.CSV"').classes == ("0", "1")
    np.save(folder / "plain.npy", X)
    with pytest.raises(InvalidInput, match=r"a function .*; this is none"):
        data_of(folder, 'source = "./plain.npy"')


KINDS = {
    "whole": ([0, 1, 1, 0], [1, 0]),
    "decimal": ([0.5, 1.5, 1.0, 0.0], [1.5, 2.0]),
    "texts": (["no", "yes", "yes", "no"], ["yes", "no"]),
    "truth": ([False, True, True, False], [True, False]),
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("trained", KINDS)
@pytest.mark.parametrize("tested", KINDS)
def test_the_training_file_says_what_targets_are(folder: Path, suffix: str, trained: str, tested: str) -> None:
    """Of two files joined first, one with decimals makes numbers of classes, and one with texts
    classes of numbers."""
    import pandas as pd

    for name, values in ("train", KINDS[trained][0]), ("test", KINDS[tested][1]):
        frame = pd.DataFrame({"age": np.arange(len(values)), "label": values})
        frame.to_csv(folder / f"{name}.csv", index=False)
        frame.to_parquet(folder / f"{name}.parquet")
    data = f'source = "train.{suffix}"\ntest = "test.{suffix}"'
    if tested != trained and (trained, tested) != ("decimal", "whole"):
        with pytest.raises(InvalidInput, match=r"data.test targets = .*: must be .*, as the targets to train on are"):
            data_of(folder, data)
        return
    made = data_of(folder, data)
    classes = {"whole": ("0", "1"), "decimal": (), "texts": ("no", "yes"), "truth": ("False", "True")}[trained]
    assert made.classes == classes and made.test is not None
    expected = KINDS[tested][1] if trained == "decimal" else [1, 0]
    assert made.test.samples.targets_N.flatten().tolist() == expected


def test_a_column_of_a_type_of_pandas_is_what_its_values_are(folder: Path) -> None:
    import pandas as pd

    columns = {
        "Int64": [1, 0, 10, 2],
        "Float64": [1.5, 0.5, 2.5, 3.5],
        "string": ["b", "a", "b", "a"],
        "category": ["b", "a", "b", "a"],
    }
    classes = {"Int64": ("0", "1", "2", "10"), "Float64": (), "string": ("a", "b"), "category": ("a", "b")}
    frame = pd.DataFrame({name: pd.Series(values, dtype=name) for name, values in columns.items()})
    frame.to_parquet(folder / "table.parquet")
    for name in columns:
        made = data_of(folder, f'source = "table.parquet"\ncolumns = {{ inputs = "Int64", targets = "{name}" }}')
        assert made.classes == classes[name], name
        assert made.inputs.flatten().tolist() == [1, 0, 10, 2]


def test_a_column_of_neither_numbers_nor_texts_is_refused(folder: Path) -> None:
    from decimal import Decimal

    import pandas as pd

    frame = pd.DataFrame({"age": range(4), "label": [Decimal("1.5"), Decimal("2"), Decimal("1.5"), Decimal("2")]})
    frame.to_parquet(folder / "table.parquet")
    with pytest.raises(InvalidInput, match=r"data.source column = 'label': .*Decimal"):
        data_of(folder, 'source = "table.parquet"')


def test_arrays_to_test_on_have_targets_of_the_kind_of_those_to_train_on(folder: Path) -> None:
    np.savez(folder / "both.npz", x_train=X, y_train=Y, x_test=X, y_test=Y.astype(np.float32))
    with pytest.raises(InvalidInput, match=r"data.test targets = 'float32': must be whole numbers"):
        data_of(folder, 'source = "both.npz"')


@pytest.mark.parametrize(
    "owner", [np.where(Y, np.nan, 1.0), ["a", 1] * 10, [None, "a"] * 10], ids=["nan", "texts and numbers", "none"]
)
def test_owners_are_of_one_kind_and_none_is_missing(owner: list) -> None:
    with pytest.raises(InvalidInput, match=r"owner = .*must be all numbers or all texts, and none missing"):
        encode_labels("owner", owner)


def test_owners_of_arrays_are_as_many_as_samples(folder: Path) -> None:
    np.savez(folder / "short.npz", x=X, y=Y, owner=np.arange(7))
    for share in ("", "\ntest = 0.2"):
        with pytest.raises(InvalidInput, match="must have as many of owner as of y"):
            data_of(folder, f'source = "short.npz"{share}')


def test_arrays_to_train_on_may_be_tested_on_a_share(folder: Path) -> None:
    np.savez(folder / "train.npz", x_train=X, y_train=Y.astype(np.int32), owner_train=Y)
    made = data_of(folder, 'source = "train.npz"\ntest = 0.2')
    assert made.test is not None and len(made.test.samples.targets_N) == 4
    np.savez(folder / "both.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    with pytest.raises(InvalidInput, match=r"both\.npz has an x_test of its own"):
        data_of(folder, 'source = "both.npz"\ntest = 0.2')


def test_parts_of_a_data_set_are_no_classes_of_images(folder: Path) -> None:
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            drawn(folder / "images" / part / label)
    for test in ("", "\ntest = 0.2"):
        with pytest.raises(InvalidInput, match=r"has a folder train: .*name both folders"):
            data_of(folder, f'source = "images/"{test}')
    made = data_of(folder, 'source = "images/train"\ntest = "images/val"')
    assert made.classes == ("cat", "dog") and made.test is not None and len(made.test.samples.targets_N) == 8


def test_hidden_files_and_folders_are_no_images(folder: Path) -> None:
    for label in ("cat", "dog", ".ipynb_checkpoints"):
        drawn(folder / "images" / label)
    (folder / "images" / "cat" / "._0.png").write_bytes(b"a file system's own")
    made = data_of(folder, 'source = "images/"\ntest = 0.25')
    assert made.classes == ("cat", "dog") and len(made.samples.targets_N) == 6


def test_images_of_more_than_8_bits_are_refused_and_not_made_white(folder: Path) -> None:
    drawn(folder / "images" / "cat", kind=np.uint16)
    with pytest.raises(InvalidInput, match=r"0\.png: expected 8 bits a channel, .*found I;16"):
        data_of(folder, 'source = "images/"\ntest = 0.25')
