"""Prepared data sets on disk: a folder of .npy arrays, and meta.json with their checksums.

A folder gets its final name only when it is complete. Opening one checks shapes, types and sizes;
`verify` checks every byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base import files
from stratafl.base.errors import InvalidInput

FORMAT = 1
ROOT_VARIABLE = "STRATAFL_DATA"
STALE_SECONDS = 24 * 3600.0

Kind = Literal["image", "sequence", "vector"]
_DTYPES: dict[str, np.dtype[Any]] = {
    "image": np.dtype(np.uint8),
    "sequence": np.dtype(np.uint8),
    "vector": np.dtype(np.float32),
}
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_OWNERS = ("owner_train", "owner_test")


@dataclass(frozen=True, kw_only=True)
class DatasetArrays:
    """Inputs and labels as a reader returns them.

    Images are uint8 (N, H, W) or (N, H, W, C), sequences uint8 codes (N, T), vectors float32 (N,
    D); labels int64. In a naturally divided data set `owner_train` and `owner_test` are indices
    into `owners`.
    """

    kind: Kind
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    owner_train: np.ndarray | None = None
    owner_test: np.ndarray | None = None
    owners: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class DatasetTensors(NamedTuple):
    """The four arrays as tensors."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True, kw_only=True)
class StoredDataset(DatasetArrays):
    """A complete data set; its arrays may be memory-mapped and are then read-only.

    `mean` and `std` are per channel over the training images, of pixel / 255; empty for other data.
    """

    name: str
    form: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """Describe the data set in one line with the shapes of the arrays."""
        shapes = ", ".join(f"{name} {getattr(self, name).dtype}{list(getattr(self, name).shape)}" for name in _ARRAYS)
        return f"{type(self).__name__}({self.name!r}, {self.kind}, {len(self.classes)} classes: {shapes})"

    def tensors(self, device: str | torch.device = "cpu") -> DatasetTensors:
        """Copy the arrays to a device, each directly from its file."""
        return DatasetTensors(*(torch.from_numpy(np.array(getattr(self, field))).to(device) for field in _ARRAYS))


def data_root(root: str | Path | None = None) -> Path:
    """Folder of prepared data sets: the argument, else $STRATAFL_DATA, else the user's cache."""
    chosen = root or os.environ.get(ROOT_VARIABLE) or Path.home() / ".cache" / "stratafl" / "data"
    return Path(chosen).expanduser()


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and standard deviation per channel of pixel / 255, from value counts."""
    channels = images[..., None] if images.ndim == 3 else images
    value = np.arange(256) / 255.0
    means, stds = [], []
    for channel in range(channels.shape[-1]):
        share = np.bincount(channels[..., channel].ravel(), minlength=256) / channels[..., 0].size
        mean = float(share @ value)
        means.append(mean)
        stds.append(math.sqrt(float(share @ (value - mean) ** 2)))
    return tuple(means), tuple(stds)


def add_statistics(name: str, form: str, samples: DatasetArrays) -> StoredDataset:
    """Check a reader's arrays and add their statistics."""
    _check(name, samples)
    mean, std = channel_statistics(samples.x_train) if samples.kind == "image" else ((), ())
    return StoredDataset(name=name, form=form, mean=mean, std=std, **vars(samples))


def _check(name: str, samples: DatasetArrays) -> None:
    """Refuse arrays that do not belong together, whatever reader they came from."""

    def refuse(expected: str, present: object) -> InvalidInput:
        return InvalidInput("data set", name, f"expected {expected}, found {present}")

    dtype = _DTYPES[samples.kind]
    dims = (3, 4) if samples.kind == "image" else (2,)
    for part in ("train", "test"):
        x, y = getattr(samples, f"x_{part}"), getattr(samples, f"y_{part}")
        owner = getattr(samples, f"owner_{part}")
        if x.dtype != dtype or x.ndim not in dims or len(x) == 0:
            raise refuse(f"{part} inputs ({dtype}, some, of rank {dims})", f"{x.dtype} {x.shape}")
        if y.dtype != np.int64 or y.shape != x.shape[:1]:
            raise refuse(f"{len(x):,} {part} labels (int64)", f"{y.dtype} {y.shape}")
        if y.min() < 0 or y.max() >= len(samples.classes):
            raise refuse(f"{part} labels in 0..{len(samples.classes) - 1}", f"{y.min()}..{y.max()}")
        if (owner is not None) != bool(samples.owners):
            raise refuse("an owner per sample exactly where owners are named", f"{part} without")
        if owner is not None and (owner.shape != y.shape or owner.min() < 0 or owner.max() >= len(samples.owners)):
            raise refuse(f"{part} owners in 0..{len(samples.owners) - 1}", owner.shape)
    if samples.x_train.shape[1:] != samples.x_test.shape[1:]:
        raise refuse(f"test inputs shaped {samples.x_train.shape[1:]}", samples.x_test.shape[1:])


def write(dataset: StoredDataset, where: str, root: Path) -> Path:
    """Store a data set atomically."""
    final = root / dataset.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root, dataset.name)
        with _partial(root, dataset.name) as folder:
            _fill(folder, dataset, where)
            _publish(folder, final)
    except OSError as error:
        raise InvalidInput("data root", str(root), f"{dataset.name} cannot be written there: {error}") from error
    return final


@contextlib.contextmanager
def _partial(root: Path, name: str) -> Iterator[Path]:
    folder = root / f".{name}.{secrets.token_hex(4)}{files.PARTIAL}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(root: Path, name: str) -> None:
    """Remove what killed processes left; a recent folder may belong to one that still runs."""
    for folder in root.glob(f".{name}.*{files.PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, dataset: StoredDataset, where: str) -> None:
    arrays: dict[str, dict[str, object]] = {}
    for field in (*_ARRAYS, *(_OWNERS if dataset.owners else ())):
        array = np.ascontiguousarray(getattr(dataset, field))
        path = folder / f"{field}.npy"
        with path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            files.sync_file(file)
        arrays[field] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "bytes": path.stat().st_size,
            "sha256": _digest(path),
        }
    meta = {
        "format": FORMAT,
        "name": dataset.name,
        "kind": dataset.kind,
        "counts": {"train": len(dataset.y_train), "test": len(dataset.y_test)},
        "classes": list(dataset.classes),
        "owners": list(dataset.owners),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "source": {"form": dataset.form, "where": where},
        "notes": list(dataset.notes),
        "arrays": arrays,
        "checksum": _combined({field: str(entry["sha256"]) for field, entry in arrays.items()}),
    }
    with (folder / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1, ensure_ascii=False)
        files.sync_file(file)


def _publish(folder: Path, final: Path) -> None:
    files.sync_folder(folder)
    if final.exists():
        # A folder cannot be renamed onto a full one; the old set steps aside first.
        with _partial(final.parent, final.name) as aside:
            final.rename(aside / "old")
            try:
                folder.rename(final)
            except BaseException:
                (aside / "old").rename(final)
                raise
    else:
        folder.rename(final)
    files.sync_folder(final.parent)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _combined(digests: dict[str, str]) -> str:
    """Checksum of the whole data set; `sha256sum *.npy | sha256sum` computes the same."""
    lines = "".join(f"{digests[field]}  {field}.npy\n" for field in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_meta(name: str, root: Path) -> dict[str, Any]:
    """Read meta.json, if it has this format."""
    path = root / name / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput("data set", name, f"not prepared under {root}") from None
    except (ValueError, OSError) as error:
        raise _damaged(path, "a readable meta.json", error) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("name") != name:
        present = f"format {meta.get('format')} of {meta.get('name')}" if isinstance(meta, dict) else meta
        raise _damaged(path, f"format {FORMAT} of {name}", present)
    return meta


def read(name: str, root: Path, verify: bool = False) -> StoredDataset:
    """Open a stored data set, memory-mapped; `verify` also compares it with its checksums."""
    meta = read_meta(name, root)
    try:
        arrays = {
            field: _array(root / name / f"{field}.npy", entry, verify)
            for field, entry in meta["arrays"].items()
            if field in (*_ARRAYS, *_OWNERS)
        }
        dataset = StoredDataset(
            name=name,
            kind=meta["kind"],
            form=meta["source"]["form"],
            classes=tuple(meta["classes"]),
            owners=tuple(meta["owners"]),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
            notes=tuple(meta["notes"]),
            **arrays,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(root / name / "meta.json", "all fields", repr(error)) from error
    _check(name, dataset)
    return dataset


def _array(path: Path, entry: dict[str, Any], verify: bool) -> np.ndarray:
    expected = f"{entry['bytes']:,} bytes of {entry['dtype']} {tuple(entry['shape'])}"
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise _damaged(path, expected, f"{size:,} bytes")
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        raise _damaged(path, expected, error) from error
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise _damaged(path, expected, f"{array.dtype.str} {array.shape}")
    if verify and (digest := _digest(path)) != entry["sha256"]:
        raise _damaged(path, f"SHA-256 {entry['sha256']}", digest)
    return array


def _damaged(path: Path, expected: str, present: object) -> InvalidInput:
    """Build the error about a damaged file of a prepared data set."""
    text, name = " ".join(str(present).split()), path.parent.name
    # A long path is cut short in the message, so the file is named again.
    return InvalidInput(
        "data set", str(path.parent), f"{path.name}: expected {expected}, found {text}; prepare {name} again"
    )
