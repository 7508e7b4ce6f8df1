"""The published data sets themselves, if they are available.

Put downloads into a folder and name it in STRATAFL_REAL_DATA (docs/data.md lists the file names),
or install the system packages. Missing data sets are skipped, and the end of the test run lists
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stratafl.data.catalog.prepare import ORIGINALS_VARIABLE, DatasetStatus, load, prepare, usual_places
from stratafl.data.catalog.shakespeare import ALPHABET, LENGTH
from stratafl.data.catalog.storage import StoredDataset

pytestmark = pytest.mark.real_data


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[DatasetStatus, StoredDataset]]:
    folder: Path = tmp_path_factory.mktemp("real")

    def get(name: str) -> tuple[DatasetStatus, StoredDataset]:
        if not any(usual_places(name, folder)):
            pytest.skip(f"{name} is not at hand: set {ORIGINALS_VARIABLE} to a folder that has it")
        return prepare(name, root=folder), load(name, root=folder, verify=True)

    return get


Real = Callable[[str], tuple[DatasetStatus, StoredDataset]]


def test_fashion_mnist(real: Real) -> None:
    about, dataset = real("fashion_mnist")
    assert (about.train, about.test, about.shape) == (60_000, 10_000, (28, 28))
    assert set(about.train_per_class) == {6_000}
    assert np.bincount(dataset.y_test).tolist() == [1_000] * 10
    np.testing.assert_allclose(about.mean + about.std, (0.28604, 0.35302), atol=1e-5)


def test_cifar10(real: Real) -> None:
    about, dataset = real("cifar10")
    assert (about.train, about.test, about.shape) == (50_000, 10_000, (32, 32, 3))
    assert set(about.train_per_class) == {5_000}
    assert np.bincount(dataset.y_test).tolist() == [1_000] * 10
    np.testing.assert_allclose(about.mean, (0.49139968, 0.48215841, 0.44653091), atol=1e-8)
    np.testing.assert_allclose(about.std, (0.24703223, 0.24348513, 0.26158784), atol=1e-8)


def test_cifar100(real: Real) -> None:
    about, dataset = real("cifar100")
    assert (about.train, about.test, about.shape) == (50_000, 10_000, (32, 32, 3))
    assert set(about.train_per_class) == {500} and len(about.classes) == 100
    assert np.bincount(dataset.y_test).tolist() == [100] * 100
    np.testing.assert_allclose(about.mean, (0.50707516, 0.48654887, 0.44091784), atol=1e-8)
    np.testing.assert_allclose(about.std, (0.26733429, 0.25643846, 0.27615047), atol=1e-8)
    # Whatever order the source has, the first thousand images show nearly every class.
    assert len(np.unique(dataset.y_train[:1_000])) > 95


def test_emnist_letters(real: Real) -> None:
    about, dataset = real("emnist_letters")
    sizes = (about.train, about.test)
    assert about.shape == (28, 28) and len(about.classes) == 26
    if about.form == "npz of a rebuilt split":
        assert sizes == (95_105, 10_400)
        assert max(about.train_per_class) == 4_800
        assert (min(about.train_per_class), about.train_per_class[23]) == (1_540, 1_540)
        assert np.bincount(dataset.y_test).tolist() == [400] * 26
        assert any("not the official" in note for note in about.notes)
    else:
        assert sizes in ((124_800, 20_800), (88_800, 14_800))
    # The letter I stands: it is taller than wide.
    stroke = dataset.x_train[dataset.y_train == 8].mean(0) > 64
    assert stroke.any(1).sum() > 1.5 * stroke.any(0).sum()


def test_cinic10(real: Real) -> None:
    about, _ = real("cinic10")
    assert (about.train, about.test, about.shape) == (90_000, 90_000, (32, 32, 3))
    assert set(about.train_per_class) == {9_000}
    np.testing.assert_allclose(about.mean, (0.47889522, 0.47227842, 0.43047404), atol=2e-3)


def test_shakespeare(real: Real) -> None:
    about, dataset = real("shakespeare")
    assert about.shape == (LENGTH,) and about.classes == tuple(ALPHABET)
    assert about.owners >= 100
    assert dataset.owner_train is not None and dataset.owner_test is not None
    assert set(np.bincount(dataset.owner_train)) == {1_500}
    assert np.bincount(dataset.owner_test, minlength=about.owners).min() >= 1
    for owner in range(0, about.owners, 7):
        x = np.asarray(dataset.x_train[dataset.owner_train == owner])
        y = np.asarray(dataset.y_train[dataset.owner_train == owner])
        later = np.asarray(dataset.x_test[dataset.owner_test == owner])
        assert (x[1:, :-1] == x[:-1, 1:]).all() and (x[1:, -1] == y[:-1]).all()
        assert (later[1:, :-1] == later[:-1, 1:]).all()
        seen = {row.tobytes() for row in x}
        assert not any(row.tobytes() in seen for row in later)
