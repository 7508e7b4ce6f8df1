"""Names, lists and places of data sets; other files beside this one test the formats."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.data.catalog import storage
from stratafl.data.catalog.prepare import CIFAR10, DIGITS_FILE, NAMES, catalogue, describe, load, prepare


def _letters(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 30), ("test", 10)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, 26, count)
    np.savez(path, **arrays)
    return path


def test_digits_need_no_preparing(root: Path) -> None:
    digits = load("digits")
    assert digits.x_train.shape == (1442, 8, 8) and digits.x_test.shape == (355, 8, 8)
    assert digits.x_train.dtype == np.uint8 and digits.x_train.max() == 16
    shares = np.bincount(digits.y_test) / (np.bincount(digits.y_test) + np.bincount(digits.y_train))
    assert (abs(shares - 0.2) < 0.006).all()
    shapes = "x_train uint8[1442, 8, 8], y_train int64[1442], x_test uint8[355, 8, 8], y_test int64[355]"
    assert repr(digits) == f"StoredDataset('digits', image, 10 classes: {shapes})"
    np.testing.assert_allclose(digits.mean, (digits.x_train / 255).mean())
    assert load("digits") is digits
    with pytest.raises(ValueError, match="read-only"):
        digits.x_train[0] = 0
    with pytest.raises(InvalidInput, match="needs no preparing"):
        prepare("digits")


def test_digits_are_those_of_scikit_learn_bit_for_bit() -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    with np.load(DIGITS_FILE) as stored:
        assert stored["images"].dtype == stored["labels"].dtype == np.uint8
        assert np.array_equal(stored["images"], bunch.images)
        assert np.array_equal(stored["labels"], bunch.target)


def test_digits_hold_every_image_once(root: Path) -> None:
    digits = load("digits")
    both = np.concatenate([digits.x_train, digits.x_test]).reshape(-1, 64)
    labels = np.concatenate([digits.y_train, digits.y_test])
    with np.load(DIGITS_FILE) as stored:
        expected = np.column_stack([stored["images"].reshape(-1, 64), stored["labels"]])
    assert sorted(np.column_stack([both, labels]).tolist()) == sorted(expected.tolist())


def test_digits_need_no_scikit_learn() -> None:
    code = (
        "import sys; from stratafl.data.catalog import prepare; prepare.load('digits'); print('sklearn' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout == "False\n"


def test_an_unknown_name_gets_the_nearest_one(root: Path) -> None:
    for call in (load, prepare, describe):
        with pytest.raises(InvalidInput, match=r"data set = 'cifar-10': .*did you mean 'cifar10'"):
            call("cifar-10")
    with pytest.raises(InvalidInput, match="unknown"):
        load("../cifar10")


def test_what_is_not_prepared_says_how_to(root: Path) -> None:
    with pytest.raises(InvalidInput, match=r"not prepared under .*stratafl data prepare cinic10"):
        load("cinic10")
    with pytest.raises(InvalidInput, match=r"generated for a tree"):
        load("synthetic")


def test_the_catalogue_lists_every_set_with_its_state(root: Path, tmp_path: Path) -> None:
    assert {d.name: d.state for d in catalogue()} == {
        name: {"digits": "embedded", "synthetic": "generated"}.get(name, "not prepared") for name in NAMES
    }
    prepare("emnist_letters", _letters(tmp_path / "emnist_letters.npz"), allow_partial=True)
    (entry,) = (d for d in catalogue() if d.state == "prepared")
    assert (entry.name, entry.train, entry.test, entry.shape) == (
        "emnist_letters",
        30,
        10,
        (28, 28),
    )
    assert entry.path == root / "emnist_letters" and len(entry.checksum) == 64
    assert sum(entry.train_per_class) == 30 and len(entry.train_per_class) == 26
    (root / "emnist_letters" / "x_test.npy").write_bytes(b"")
    damaged = describe("emnist_letters")
    assert damaged.state == "damaged" and "prepare emnist_letters again" in damaged.advice


def test_preparing_again_replaces(root: Path, tmp_path: Path) -> None:
    first = prepare("emnist_letters", _letters(tmp_path / "emnist_letters.npz"), allow_partial=True)
    path = _letters(tmp_path / "emnist_letters.npz", seed=1)
    second = prepare("emnist_letters", path, allow_partial=True)
    assert first.checksum != second.checksum
    assert [path.name for path in root.iterdir()] == ["emnist_letters"]


def test_originals_are_found_where_the_variable_says(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"no copy of emnist_letters .*STRATAFL_REAL_DATA.*NIST"):
        prepare("emnist_letters")
    (tmp_path / "a" / "emnist_letters").mkdir(parents=True)  # empty: passed over
    path = _letters(tmp_path / "b" / "emnist_letters.npz")
    monkeypatch.setenv("STRATAFL_REAL_DATA", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert prepare("emnist_letters", allow_partial=True).where == str(path)


def test_originals_beside_the_prepared_sets_are_found(root: Path) -> None:
    path = _letters(root / "originals" / "emnist_letters.npz")
    assert prepare("emnist_letters", allow_partial=True).where == str(path)


def test_a_place_without_the_set_says_what_it_holds(root: Path, tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"expected cifar10 as one of: .*1 files: holiday\.jpg"):
        prepare("cifar10", tmp_path)
    with pytest.raises(InvalidInput, match="no such file or folder"):
        prepare("cifar10", tmp_path / "nowhere")


def test_the_root_is_an_argument_a_variable_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STRATAFL_DATA", raising=False)
    assert storage.data_root() == tmp_path / ".cache" / "stratafl" / "data"
    monkeypatch.setenv("STRATAFL_DATA", "~/sets")
    assert storage.data_root() == tmp_path / "sets"
    assert storage.data_root(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("datasets", lambda path: prepare("cifar10", "hub")),
        ("PIL", lambda path: prepare("cinic10", path, allow_partial=True)),
    ],
)
def test_a_missing_package_says_what_to_install(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    call: Callable[[Path], object],
) -> None:
    for part in ("train", "test"):
        for label in CIFAR10:
            (tmp_path / "images" / part / label).mkdir(parents=True)
            (tmp_path / "images" / part / label / "1.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"needs the package .*pip install ('stratafl\[hub|pillow)"):
        call(tmp_path / "images")
