"""Data sets of the Hugging Face hub, or local clones of its repositories, read by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.data.catalog.archive import FileTree
from stratafl.data.catalog.shakespeare import Role, from_pairs, split_roles
from stratafl.data.catalog.storage import DatasetArrays


def is_clone(files: FileTree) -> bool:
    """Whether a folder is a clone of a hub repository: parquet files named after their split."""
    return files.path.is_dir() and all(files.matching(rf"{part}(?:[-_.].*)?\.parquet") for part in ("train", "test"))


def is_shakespeare_clone(files: FileTree) -> bool:
    """Whether a folder is a clone of the hub's Shakespeare, a single table without splits."""
    return files.path.is_dir() and bool(files.matching(r"(?:train.*\.parquet|shakespeare\.csv)"))


def load(where: str | Path, split: str) -> Any:
    """Load one split of a hub repository, or of a local folder with the same layout."""
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtra("reading from the hub", "datasets", "hub") from None
    arguments: dict[str, Any] = {"path": str(where)}
    if isinstance(where, Path):
        tables = sorted(where.rglob(f"{split}*.parquet")) or sorted(where.rglob("*.csv"))
        arguments = {
            "path": tables[0].suffix[1:] if tables else "parquet",
            "data_files": {split: [str(path) for path in tables]},
        }
    try:
        return datasets.load_dataset(**arguments, split=split)
    except Exception as error:  # the package raises its own and its dependencies' errors alike
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInput("source", str(where), f"{split} cannot be loaded: {text}") from error


def read_images(
    where: str | Path, image: str, label: str, classes: tuple[str, ...], mode: str, letters: bool = False
) -> DatasetArrays:
    """Read images and labels of the train and test splits; other splits are ignored.

    image, label: names of the columns; mode: that of Pillow; letters: whether these are EMNIST's
        letters, some copies of which are transposed.
    """
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        rows = load(where, part)
        missing = {image, label} - set(rows.column_names)
        if missing:
            raise _broken(where, part, f"columns {image}, {label}", rows.column_names)
        named = getattr(rows.features[label], "names", None)
        if named is not None and [_plain(name) for name in named] != [_plain(c) for c in classes]:
            raise _broken(where, part, f"classes {', '.join(classes)}", ", ".join(named))
        arrays[f"x_{part}"] = _pixels(where, part, rows, image, mode)
        arrays[f"y_{part}"] = np.asarray(rows[label][:], np.int64)
    notes = (f"images {_stand_up(arrays)}",) if letters else ()
    return DatasetArrays(kind="image", classes=classes, notes=notes, **arrays)


def _plain(name: str) -> str:
    """Class name in lower case without spaces and punctuation, in which copies of a data set
    differ."""
    return "".join(character for character in name.lower() if character.isalnum())


def _pixels(where: str | Path, part: str, rows: Any, column: str, mode: str) -> np.ndarray:
    images: np.ndarray | None = None
    for row, image in enumerate(rows[column]):
        pixels = np.asarray(image.convert(mode))
        if images is None:
            images = np.empty((len(rows), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            raise _broken(where, part, f"images shaped {images.shape[1:]}", pixels.shape)
        images[row] = pixels
    if images is None:
        raise _broken(where, part, "images", "none")
    return images


def _stand_up(arrays: dict[str, Any]) -> str:
    """Transpose EMNIST's images if they are stored as in NIST's files, transposed; return a note.

    Copies of the data set differ.

    The letter I decides: upright, its pixels are spread further over rows than over columns.
    """
    stroke = arrays["x_train"][arrays["y_train"] == ord("I") - ord("A")].sum(0, dtype=np.float64)
    if _spread(stroke.sum(1)) >= _spread(stroke.sum(0)):
        return "taken as they are, upright"
    for part in ("x_train", "x_test"):
        arrays[part] = arrays[part].transpose(0, 2, 1)
    return "transposed to stand upright"


def _spread(profile: np.ndarray) -> float:
    """Variance of a distribution over positions."""
    position = np.arange(len(profile))
    share = profile / max(profile.sum(), 1.0)
    return float(share @ position**2 - (share @ position) ** 2)


def read_roles(where: str | Path) -> DatasetArrays:
    """Read a table of (character_id, x, y) rows, and split each speaking role in time."""
    rows = load(where, "train")
    expected = {"character_id", "x", "y"}
    if not expected <= set(rows.column_names):
        raise _broken(where, "train", f"columns {', '.join(sorted(expected))}", rows.column_names)
    return split_roles(_roles(rows))


def _roles(rows: Any) -> Iterator[Role]:
    """Group rows by role; a role may come back later in the table."""
    pairs: dict[str, tuple[list[str], list[str]]] = {}
    for batch in rows.iter(batch_size=10_000):
        for role, x, y in zip(batch["character_id"], batch["x"], batch["y"], strict=True):
            xs, ys = pairs.setdefault(role, ([], []))
            xs.append(x)
            ys.append(y)
    for role in sorted(pairs):
        yield from_pairs(role, *pairs[role])


def _broken(where: str | Path, part: str, expected: str, present: object) -> InvalidInput:
    return InvalidInput("source", str(where), f"{part}: expected {expected}, found {present}")
