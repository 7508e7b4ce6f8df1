"""Tables of the Hugging Face hub, as small parquet files with the same schema and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stratafl.base.errors import InvalidInput
from stratafl.data.catalog.prepare import CIFAR10, CIFAR100, DATASETS, LETTERS, load, prepare
from stratafl.data.catalog.shakespeare import ALPHABET, LENGTH, TRAIN_PER_ROLE

COARSE = [f"coarse {number}" for number in range(20)]
FASHION = [
    *("T - shirt / top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
]
SCHEMAS: dict[str, tuple[str, dict[str, list[str]], tuple[int, ...]]] = {
    "cifar10": ("img", {"label": list(CIFAR10)}, (32, 32, 3)),
    "cifar100": ("img", {"fine_label": list(CIFAR100), "coarse_label": COARSE}, (32, 32, 3)),
    "cinic10": ("image", {"label": list(CIFAR10)}, (32, 32, 3)),
    "fashion_mnist": ("image", {"label": FASHION}, (28, 28)),
    "emnist_letters": ("image", {"label": list(LETTERS)}, (28, 28)),
}


@pytest.fixture
def hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `datasets` with its cache in a temporary folder; tests skip without it."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def _pixels(name: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    _, labels, shape = SCHEMAS[name]
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (count, *shape), np.uint8)
    return x, rng.integers(0, len(next(iter(labels.values()))), count)


def _write(datasets: Any, name: str, folder: Path, parts: dict[str, tuple]) -> Path:
    image, labels, _ = SCHEMAS[name]
    (folder / "data").mkdir(parents=True)
    for part, (x, y) in parts.items():
        columns: dict[str, Any] = {image: [Image.fromarray(pixels) for pixels in x]}
        features: dict[str, Any] = {image: datasets.Image()}
        for column, names in labels.items():
            columns[column] = (y % len(names)).tolist()
            features[column] = datasets.ClassLabel(names=names)
        table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        table.to_parquet(folder / "data" / f"{part}-00000-of-00001.parquet")
    return folder


def _parts(name: str) -> dict[str, tuple]:
    parts = {"train": _pixels(name, 30, 0), "test": _pixels(name, 12, 1)}
    return parts | ({"validation": _pixels(name, 5, 2)} if name == "cinic10" else {})


def _assert_holds(name: str, parts: dict[str, tuple]) -> None:
    dataset = load(name, verify=True)
    for part in ("train", "test"):
        np.testing.assert_array_equal(getattr(dataset, f"x_{part}"), parts[part][0])
        np.testing.assert_array_equal(getattr(dataset, f"y_{part}"), parts[part][1])


def _redirect(datasets: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Redirect repositories to a local folder; the list records the requests."""
    asked: list[str] = []
    real = datasets.load_dataset

    def load_dataset(path: str, split: str) -> Any:
        asked.append(path)
        return real(str(folder), split=split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("name", SCHEMAS)
def test_images_of_the_hub(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parts = _parts(name)
    asked = _redirect(hub, monkeypatch, _write(hub, name, tmp_path / "repository", parts))
    prepared = prepare(name, "hub", allow_partial=True)
    repository = DATASETS[name].remote.repository
    assert set(asked) == {repository} and prepared.form == f"hub repository {repository}"
    _assert_holds(name, parts)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_local_copy_of_a_repository(hub: Any, tmp_path: Path, name: str) -> None:
    parts = _parts(name)
    prepared = prepare(name, _write(hub, name, tmp_path / "clone", parts), allow_partial=True)
    assert prepared.form == "tables of the hub"
    _assert_holds(name, parts)


def test_letters_that_lie_down_are_stood_up(hub: Any, tmp_path: Path) -> None:
    parts = _parts("emnist_letters")
    for x, y in parts.values():
        y[:3] = LETTERS.index("I")
        x[y == LETTERS.index("I")] = 0
        x[y == LETTERS.index("I"), 4:24, 13:15] = 255
    lying = {part: (x.transpose(0, 2, 1), y) for part, (x, y) in parts.items()}
    clone = _write(hub, "emnist_letters", tmp_path / "clone", lying)
    prepared = prepare("emnist_letters", clone, allow_partial=True)
    assert "images transposed to stand upright" in prepared.notes
    _assert_holds("emnist_letters", parts)


def test_a_short_table_is_refused(hub: Any, tmp_path: Path) -> None:
    clone = _write(hub, "cifar10", tmp_path / "clone", _parts("cifar10"))
    with pytest.raises(InvalidInput, match=r"expected 50,000 \+ 10,000 .* found 30 \+ 12"):
        prepare("cifar10", clone)


def test_another_schema_is_refused(hub: Any, tmp_path: Path) -> None:
    clone = _write(hub, "cinic10", tmp_path / "a", _parts("cinic10"))
    with pytest.raises(InvalidInput, match="train: expected columns img, label, found"):
        prepare("cifar10", clone)
    for table in clone.rglob("*.parquet"):
        table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(InvalidInput, match="train cannot be loaded: "):
        prepare("cinic10", clone)


def test_classes_in_another_order_are_refused(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts("cifar10")
    monkeypatch.setitem(SCHEMAS, "cifar10", ("img", {"label": [*CIFAR10[::-1]]}, (32, 32, 3)))
    clone = _write(hub, "cifar10", tmp_path / "clone", parts)
    with pytest.raises(InvalidInput, match=r"train: expected classes airplane, .* found truck"):
        prepare("cifar10", clone, allow_partial=True)


def test_a_hub_out_of_reach_is_one_line(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**arguments: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hub, "load_dataset", unreachable)
    complaint = "source = 'uoft-cs/cifar10': train cannot be loaded: ConnectionError: no route to"
    with pytest.raises(InvalidInput, match=complaint):
        prepare("cifar10", "hub")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_shakespeare_of_the_hub(hub: Any, tmp_path: Path, kind: str) -> None:
    characters = [c for c in ALPHABET if c not in '"\n']
    spoken = {
        name: "".join(np.random.default_rng(seed).choice(characters, TRAIN_PER_ROLE + 400))
        for seed, name in enumerate(("HAMLET_OPHELIA", "HAMLET_HAMLET"))
    }
    rows = [
        {"character_id": name, "x": text[i : i + LENGTH], "y": text[i + LENGTH]}
        for name, text in spoken.items()
        for i in range(len(text) - LENGTH)
    ]
    table = hub.Dataset.from_list(rows)
    (tmp_path / "clone").mkdir()
    if kind == "csv":
        table.to_csv(tmp_path / "clone" / "shakespeare.csv", index=False)
    else:
        table.to_parquet(tmp_path / "clone" / "train-00000-of-00001.parquet")
    prepared = prepare("shakespeare", tmp_path / "clone")
    assert (prepared.train, prepared.test) == (2 * TRAIN_PER_ROLE, 2 * 240)
    dataset = load("shakespeare")
    assert dataset.owners == ("HAMLET_HAMLET", "HAMLET_OPHELIA")
    first = "".join(ALPHABET[code] for code in dataset.x_train[0])
    assert first == spoken["HAMLET_HAMLET"][:LENGTH]
